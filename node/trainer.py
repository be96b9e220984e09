"""The trainer: takes rollout groups in, has them verified and learnt from, publishes checkpoints, receipts.

    gossip -> judge -> journal -> learner -> verdicts -> receipts
                                         -> a new checkpoint -> journal -> gossip

Each `_loop` below is one task of the nursery. A group counts from the moment it is journalled: whatever
dies after that, it is verified, and it goes into exactly one version. The network never waits for the
learner; when too many groups are pending it stops reading, and the volunteers' publishes wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import trio

from nous_node.protocol.constants import MAX_ADDRESSES
from nous_node.protocol.envelope import Envelope, Kind
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.gossip import Judgement, Verdict, judge_rollout
from nous_node.protocol.receipts import Hello, Receipt, Receipts, refused
from nous_node.protocol.references import MAX_REFERENCE, read_reference
from nous_node.protocol.rollouts import Reference, RolloutGroup
from nous_node.protocol.runs import Invite

from .blobs import BlobIndex
from .bodies import Bodies
from .config import Settings
from .discovery import nearby
from .events import Note, Report, RunReady, Summary
from .following import Following, now_ms
from .hellos import Answers
from .home import Home
from .http_server import chunks_by_http
from .learning import Learning, read_learning
from .lessons import Lessons
from .losses import Losses
from .neighbours import Neighbours
from .network import Network, NetworkConfig, open_network
from .network_errors import NoSubscribersError
from .own_heads import GRACE_SECONDS, OwnHeads
from .publishing import Publisher, damage
from .releases import Releases
from .renewals import Renewals
from .runfolder import RunFolder
from .standings import Standings
from .store import Journal, RunRules, StoredGroup
from .swarm import Swarm, serve_run
from .training import Training

INBOX = 32
"""Accepted messages between the network and the journal: one transaction's worth."""

MAX_REPEATED = 1024
"""Receipts of groups that are not in the journal, kept until they are sent."""

RECEIPT_BATCH = 1024
"""Receipts of one message: 100 KB."""

RECEIPT_SECONDS = 0.1
"""Between batches of receipts: volunteers pace themselves by them."""

PARTING_SECONDS = 3.0
"""For the last receipts when the trainer is asked to stop."""

STATUS_SECONDS = 1.0


async def trainer(
    settings: Settings,
    home: Home,
    folder: RunFolder,
    report: Report,
    stop: trio.Event,
    *,
    entropy: Callable[[int], bytes],
    renewals: Renewals | None = None,
    rollback: bool = False,
    grace: float = GRACE_SECONDS,
) -> Summary:
    """Trains the run in `folder` until `stop`. `entropy(32)` draws beacons, `renewals` says when. `rollback`:
    whether the folder's newest version takes the place of those that only peers know. `grace`: seconds in
    which peers may say what they know before anything is published.

    Raises NousError where it cannot begin or go on; the sentence says what to do.
    """
    identity = home.identity()
    if identity.key not in folder.manifest.trainers:
        raise LocalError(
            f"This node's identity may not train {folder.manifest.name!r}: the run names other trainers. "
            "Import the identity that made it with `nous-node identity import FILE`."
        )
    config = NetworkConfig(listen=settings.listen, announce=settings.announce, upload_limit=settings.upload)
    following = Following.of(folder.run, folder.envelope)
    learning = read_learning(folder.learning)

    index = BlobIndex(lambda file: report(Note(damage(file), "error")))
    with Journal.open(folder.journal, RunRules.of(folder.run, folder.manifest)) as journal:
        publisher = Publisher(
            identity,
            folder,
            journal,
            following,
            index,
            entropy,
            mirrors=settings.mirror,
            full_every=learning.full_every,
        )
        problem = await trio.to_thread.run_sync(lambda: publisher.resume(mend=False))
        if problem:
            report(Note(problem, "warning"))
        async with open_network(identity.seed, config, journal.offenders()) as network:
            overtake = publisher.overtake if rollback else None
            own = OwnHeads(network, following, identity.key, folder.path.name, overtake, report, grace=grace)
            node = _Trainer(
                settings,
                folder,
                learning,
                journal,
                publisher,
                following,
                network,
                own,
                report,
                renewals or Renewals(),
            )
            index.damaged = node.damaged
            async with chunks_by_http(settings, network, node.swarm):
                serve_run(network, following, node.swarm)
                async with nearby(folder.run, network.addresses if settings.mdns else ()):
                    await node.run(stop)
            return node.training.summary()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What the journal needs of an accepted message; the decoded content is not kept."""

    id: bytes
    key: bytes
    agent: str | None
    """Of a hello."""
    group: StoredGroup | None
    """Of a rollout or reference whose checkpoint is still held."""
    reference: Reference | None = None
    """Of a group whose content is to be fetched."""


class _Trainer:
    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        learning: Learning,
        journal: Journal,
        publisher: Publisher,
        following: Following,
        network: Network,
        own: OwnHeads,
        report: Report,
        renewals: Renewals,
    ) -> None:
        self.settings, self.folder, self.journal = settings, folder, journal
        self.publisher, self.following, self.network, self.report = publisher, following, network, report
        self.swarm = Swarm(network, folder.run, publisher.index, introductions=Neighbours(network, wanted=0))
        self.manifest = folder.manifest
        self.judged: dict[bytes, _Arrival] = {}
        """By message: what the gossip path found out about those that are on their way to the journal."""
        self.receipts: deque[Receipt] = deque(maxlen=MAX_REPEATED)
        """For groups that did not come into the journal, which keeps those of its own."""
        self.training = Training(following, journal)
        self.standings = Standings(journal, following.view)
        self.answers = Answers()
        self.releases = Releases(
            publisher,
            following,
            network,
            self.swarm,
            own,
            renewals,
            journal,
            self.training,
            report,
            keep=learning.keep_checkpoints if settings.keep is None else settings.keep,
            room=settings.disk,
        )
        self.lessons = Lessons(
            settings,
            folder,
            learning,
            journal,
            publisher,
            self.training,
            self.standings,
            lambda updated: self.releases.updated(updated, self.lessons),
            report,
        )
        self.own = own
        self.bodies = Bodies(network, journal, self._take, self._absent, self.lessons.room, now_ms)

    def damaged(self, file: Path) -> None:
        """A published file is no longer what it was."""
        self.publisher.damaged(file)
        self.releases.hold()
        self.report(Note(damage(file), "error"))

    async def run(self, stop: trio.Event) -> None:
        try:
            async with trio.open_nursery() as nursery:
                for shard in range(self.manifest.shards):
                    topic = self.following.topics.rollouts(shard)
                    inbox = self.network.subscribe(topic, self._judge(shard), INBOX, self._lost)
                    nursery.start_soon(self._intake_loop, inbox)
                for loop in (
                    self.own.run,
                    self.swarm.run,
                    self.bodies.run,
                    self._receipt_loop,
                    self._status_loop,
                ):
                    nursery.start_soon(loop)
                nursery.start_soon(self.releases.run, self.lessons)
                addresses = list(self.network.addresses)[:MAX_ADDRESSES]
                invite = Invite(self.following.run, addresses).to_text()
                self.report(RunReady(self.following.run.hex(), self.manifest.name, invite, addresses))
                await stop.wait()
                self.training.doing = "finishing"
                with trio.move_on_after(PARTING_SECONDS):  # somebody may not be reading
                    await self._send_receipts(parting=True)
                nursery.cancel_scope.cancel()
        finally:
            self._keep_offenders()
            await self.lessons.coach.close()

    # --- groups come in --------------------------------------------------------------------------

    def _judge(self, shard: int) -> Callable[[bytes, str], Verdict]:
        def judge(data: bytes, forwarder: str) -> Verdict:
            judgement = judge_rollout(self.following.view, shard, data, now_ms())
            if judgement.verdict is Verdict.ACCEPT:
                self.judged[data] = self._arrival(judgement, data)
            else:
                self._turned_away(judgement, forwarder)
            return judgement.verdict

        return judge

    def _arrival(self, judgement: Judgement, data: bytes) -> _Arrival:
        envelope, body = judgement.envelope, judgement.body
        assert envelope is not None
        if isinstance(body, Hello):
            return _Arrival(envelope.id, envelope.head.sender, body.agent, None)
        assert isinstance(body, RolloutGroup | Reference)
        head = self.publisher.heads.get(body.checkpoint)
        group = None if head is None else _stored(envelope, body, head.version, data)
        reference = body if isinstance(body, Reference) else None
        return _Arrival(envelope.id, envelope.head.sender, None, group, reference)

    def _lost(self, data: bytes) -> None:
        """The inbox stayed full: the message may come again."""
        arrival = self.judged.pop(data, None)
        if arrival is not None:
            self.following.view.memory.remove(arrival.id)

    def _turned_away(self, judgement: Judgement, forwarder: str) -> None:
        """What the gossip path did not accept: counted, and answered where its sender is genuine."""
        assert judgement.error is not None
        self.training.turned_away(judgement.error.code)
        envelope, group = judgement.envelope, judgement.body
        if judgement.error.code in (Code.QUARANTINED, Code.BANNED):
            group = self._of_distrusted(envelope)
        if envelope is None or not isinstance(group, RolloutGroup | Reference):
            return
        # Stale, or of a checkpoint that is not known; it may have been in time when it first came. [GOS-12]
        stored = _stored(envelope, group, self.following.version, b"")
        if not self.journal.repeated(stored) and not self.bodies.repeated(stored, forwarder):
            self.receipts.append(refused(envelope.id, envelope.head.sender, judgement.error))

    def _of_distrusted(self, envelope: Envelope | None) -> RolloutGroup | Reference | None:
        """A group of a key that is not taken, where it is to be answered: not often. [RCP-7]"""
        if envelope is None or envelope.head.kind == Kind.HELLO:
            return None
        if not self.standings.answers(envelope.head.sender, now_ms()):
            return None
        with suppress(RemoteError):
            if envelope.head.kind == Kind.REFERENCE:
                return read_reference(envelope.content(MAX_REFERENCE), self.manifest.referenced_limit)
            return RolloutGroup.from_bytes(envelope.content(self.manifest.rollout_body_limit))
        return None

    async def _intake_loop(self, inbox: trio.MemoryReceiveChannel[tuple[bytes, str]]) -> None:
        """Journals what the gossip path accepted, as many at once as have come."""
        async for first in inbox:
            batch = [first]
            while len(batch) < INBOX:
                try:
                    batch.append(inbox.receive_nowait())
                except (trio.WouldBlock, trio.EndOfChannel):
                    break
            judged = [(self.judged.pop(data), peer) for data, peer in batch if data in self.judged]
            self._journal([arrival for arrival, _ in judged if arrival.reference is None])
            for arrival, forwarder in judged:
                self._refer(arrival, forwarder)
            await self.lessons.room()

    def _refer(self, arrival: _Arrival, forwarder: str) -> None:
        """Has the content of a group by reference fetched, where it is one."""
        if arrival.group is None or arrival.reference is None:
            return
        error = self.bodies.offer(arrival.group, arrival.reference, forwarder)
        if error is not None and error.code == Code.BUSY:
            self.following.view.memory.remove(arrival.id)
        elif error is not None and error.code != Code.DUPLICATE:
            self.training.refused(error.code)
            self.standings.sync(now_ms())

    def _absent(self, groups: list[StoredGroup], error: RemoteError) -> None:
        """Nothing came of a group by reference; the journal has the receipt of its first envelope."""
        self.training.refused(error.code)
        self.receipts.extend(refused(group.id, group.key, error) for group in groups[1:])
        self.lessons.work.set()  # what waited for it may have its turn [ROL-17]
        self.standings.sync(now_ms())

    def _journal(self, batch: list[_Arrival]) -> None:
        greetings = {arrival.key: arrival.agent for arrival in batch if arrival.agent is not None}
        if greetings:
            self.answers.heard(self.journal.hear_many(greetings, now_ms(), self.following.version))
        for key in greetings:
            self.training.heard(key)
        self._take([arrival.group for arrival in batch if arrival.group is not None])

    def _take(self, groups: list[StoredGroup]) -> None:
        for group in groups:
            self.training.received(group.key, len(group.envelope))
        for error in self.journal.add_many(groups):
            if error is None:
                self.lessons.work.set()
            elif error.code != Code.DUPLICATE:
                self.training.refused(error.code)
        self.standings.sync(now_ms())

    # --- receipts go out -------------------------------------------------------------------------

    async def _receipt_loop(self) -> None:
        while True:
            await trio.sleep(RECEIPT_SECONDS)
            await self._send_receipts()

    async def _send_receipts(self, *, parting: bool = False) -> None:
        """A lost receipt costs little: the group is sent again, and its duplicate is answered. With `parting`
        each volunteer is told how it stands at the end."""
        while True:
            stored = self.journal.unsent_receipts(RECEIPT_BATCH)
            batch = stored + [self.receipts.popleft() for _ in range(len(self.receipts))]
            now = now_ms()
            self.standings.note(batch, now)
            standings, known = self.standings.due(now, parting=parting), self.answers.due()
            if not batch and not standings and not known:
                return
            data = self.publisher.seal(Kind.RECEIPTS, Receipts(batch, standings, known).to_bytes())
            try:
                await self.network.publish(self.following.topics.receipts, data)
            except NoSubscribersError:
                return  # the journal's wait for a subscriber
            self.journal.receipts_sent(stored)
            self.standings.told(standings, now)
            self.answers.told(known)

    async def _status_loop(self) -> None:
        losses = Losses(self.report)
        while True:
            self.standings.pass_time(now_ms())
            self._keep_offenders()
            losses.report(self.training.status(len(self.network.peers()), self.network.stats.losses()))
            await trio.sleep(STATUS_SECONDS)

    def _keep_offenders(self) -> None:
        """What peers did to the transport, over restarts. [REP-3] [REP-4]"""
        offenders = self.network.offenders()
        if offenders:
            self.journal.offended(offenders, now_ms())


def _stored(envelope: Envelope, group: RolloutGroup | Reference, version: int, data: bytes) -> StoredGroup:
    """A group as the journal knows it."""
    digest = group.hash if isinstance(group, Reference) else sha256(envelope.content()).digest()
    place = (envelope.id, envelope.head.sender, group.checkpoint, version, group.counter)
    return StoredGroup(*place, digest, now_ms(), data)
