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

import trio

from nous_node.protocol.constants import MAX_ADDRESSES, MAX_ENVELOPE
from nous_node.protocol.envelope import Envelope, Kind
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.gossip import Judgement, Verdict, judge_rollout
from nous_node.protocol.receipts import Hello, Receipt, Receipts, refused
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.runs import Invite

from .blobs import BlobIndex
from .canary import rollback_sentence
from .config import Settings
from .discovery import nearby
from .events import Note, Report, RunReady, Summary
from .following import Following, Head, now_ms
from .hellos import Answers
from .home import Home
from .http_server import chunks_by_http
from .learner_messages import Updated
from .learning import read_learning
from .lessons import Lessons
from .losses import Losses
from .network import Network, NetworkConfig, open_network
from .network_errors import NoSubscribersError
from .pipe import ChildDied
from .publishing import Publisher, damage
from .renewals import Renewals, wanted
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
) -> Summary:
    """Trains the run in `folder` until `stop`. `entropy(32)` draws beacons, `renewals` says when.

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
    index = BlobIndex(lambda file: report(Note(damage(file), "error")))
    with Journal.open(folder.journal, RunRules.of(folder.run, folder.manifest)) as journal:
        publisher = Publisher(identity, folder, journal, following, index, entropy)
        problem = await trio.to_thread.run_sync(publisher.resume)
        if problem:
            report(Note(problem, "warning"))
        async with open_network(identity.seed, config, journal.offenders()) as network:
            node = _Trainer(
                settings, folder, journal, publisher, following, network, report, renewals or Renewals()
            )
            serve_run(network, following, node.swarm)
            found = nearby(folder.run, network.addresses if settings.mdns else ())
            async with found, chunks_by_http(settings, network, node.swarm):
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
    """Of a rollout whose checkpoint is still held."""


class _Trainer:
    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        journal: Journal,
        publisher: Publisher,
        following: Following,
        network: Network,
        report: Report,
        renewals: Renewals,
    ) -> None:
        self.settings, self.folder, self.journal = settings, folder, journal
        self.publisher, self.following, self.network, self.report = publisher, following, network, report
        self.swarm = Swarm(network, folder.run, publisher.index)
        self.manifest = folder.manifest
        learning = read_learning(folder.learning)
        self.keep = learning.keep_checkpoints
        self.judged: dict[bytes, _Arrival] = {}
        """By message: what the gossip path found out about those that are on their way to the journal."""
        self.receipts: deque[Receipt] = deque(maxlen=MAX_REPEATED)
        """For groups that did not come into the journal, which keeps those of its own."""
        self.renewals = renewals
        self.training = Training(following, journal)
        self.standings = Standings(journal, following.view)
        self.answers = Answers()
        self.lessons = Lessons(
            settings,
            folder,
            learning,
            journal,
            publisher,
            self.training,
            self.standings,
            self._updated,
            report,
        )

    async def run(self, stop: trio.Event) -> None:
        try:
            async with trio.open_nursery() as nursery:
                for shard in range(self.manifest.shards):
                    topic = self.following.topics.rollouts(shard)
                    inbox = self.network.subscribe(topic, self._judge(shard), INBOX, self._lost)
                    nursery.start_soon(self._intake_loop, inbox)
                for loop in (
                    self.swarm.run,
                    self.lessons.loop,
                    self._receipt_loop,
                    self._beacon_loop,
                    self._status_loop,
                ):
                    nursery.start_soon(loop)
                self._hold()
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
                self._turned_away(judgement)
            return judgement.verdict

        return judge

    def _arrival(self, judgement: Judgement, data: bytes) -> _Arrival:
        envelope, body = judgement.envelope, judgement.body
        assert envelope is not None
        if isinstance(body, Hello):
            return _Arrival(envelope.id, envelope.head.sender, body.agent, None)
        assert isinstance(body, RolloutGroup)
        head = self.publisher.heads.get(body.checkpoint)
        group = None if head is None else _stored(envelope, body, head.version, data)
        return _Arrival(envelope.id, envelope.head.sender, None, group)

    def _lost(self, data: bytes) -> None:
        """The inbox stayed full: the message may come again."""
        arrival = self.judged.pop(data, None)
        if arrival is not None:
            self.following.view.memory.remove(arrival.id)

    def _turned_away(self, judgement: Judgement) -> None:
        """What the gossip path did not accept: counted, and answered where its sender is genuine."""
        assert judgement.error is not None
        self.training.turned_away(judgement.error.code)
        envelope, group = judgement.envelope, judgement.body
        if judgement.error.code in (Code.QUARANTINED, Code.BANNED):
            group = self._of_distrusted(envelope)
        if envelope is None or not isinstance(group, RolloutGroup):
            return
        # Stale, or of a checkpoint that is not known; it may have been in time when it first came. [GOS-12]
        if not self.journal.repeated(_stored(envelope, group, self.following.version, b"")):
            self.receipts.append(refused(envelope.id, envelope.head.sender, judgement.error))

    def _of_distrusted(self, envelope: Envelope | None) -> RolloutGroup | None:
        """A group of a key that is not taken, where it is to be answered: not often. [RCP-7]"""
        if envelope is None or envelope.head.kind != Kind.ROLLOUT:
            return None
        if not self.standings.answers(envelope.head.sender, now_ms()):
            return None
        with suppress(RemoteError):
            return RolloutGroup.from_bytes(envelope.content(self.manifest.rollout_body_limit))
        return None

    async def _intake_loop(self, inbox: trio.MemoryReceiveChannel[tuple[bytes, str]]) -> None:
        """Journals what the gossip path accepted, as many at once as have come."""
        async for first, _ in inbox:
            batch = [first]
            while len(batch) < INBOX:
                try:
                    batch.append(inbox.receive_nowait()[0])
                except (trio.WouldBlock, trio.EndOfChannel):
                    break
            self._journal([self.judged.pop(data) for data in batch if data in self.judged])
            await self.lessons.room()

    def _journal(self, batch: list[_Arrival]) -> None:
        greetings = {arrival.key: arrival.agent for arrival in batch if arrival.agent is not None}
        if greetings:
            self.answers.heard(self.journal.hear_many(greetings, now_ms(), self.following.version))
        groups = [arrival.group for arrival in batch if arrival.group is not None]
        for key in greetings:
            self.training.heard(key)
        for group in groups:
            self.training.received(group.key, len(group.envelope))
        for error in self.journal.add_many(groups):
            if error is None:
                self.lessons.work.set()
            elif error.code != Code.DUPLICATE:
                self.training.refused(error.code)
        self.standings.sync(now_ms())

    # --- checkpoints and receipts go out ---------------------------------------------------------

    async def _updated(self, updated: Updated) -> None:
        """A new version from the learner: journalled with its groups in one transaction, then gossiped."""
        head = self.publisher.update(updated)
        self.renewals.updated(trio.current_time())
        self.report(self.training.published(head, updated))
        if updated.rolled_back is not None:
            self.report(Note(rollback_sentence(updated), "warning"))
        await self._announce(head)
        await self.lessons.coach.published(head.version)
        self.publisher.prune(self.keep, updated.good)

    async def _beacon_loop(self) -> None:
        """Draws a new beacon for keys that wait for one, when no update is near. [TSK-6]"""
        while True:
            await trio.sleep(self.renewals.idle)
            if self.lessons.turn.locked() or not self.renewals.due(trio.current_time()):
                continue
            if not wanted(self.journal, self.following.version, now_ms()):
                continue
            async with self.lessons.turn:
                head = self.publisher.renew()
                self.renewals.renewed(trio.current_time())
                with suppress(ChildDied):  # the next learner is opened at this version
                    await self.lessons.coach.published(head.version)
            await self._announce(head)

    async def _announce(self, head: Head) -> None:
        """Gossips the head; whoever misses it, or it is too large for gossip, asks for it within seconds."""
        self._hold()
        if len(head.envelope) > MAX_ENVELOPE:
            return
        try:
            await self.network.publish(self.following.topics.checkpoints, head.envelope)
        except NoSubscribersError:
            return

    def _hold(self) -> None:
        """What others may be told that is here."""
        for head in self.publisher.heads.values():
            if head.version in self.publisher.folders:
                self.swarm.hold(head.hash, head.manifest, files=True, deltas=False)
        self.swarm.retain(self.publisher.heads)

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


def _stored(envelope: Envelope, group: RolloutGroup, version: int, data: bytes) -> StoredGroup:
    """A group as the journal knows it."""
    digest = sha256(envelope.content()).digest()
    place = (envelope.id, envelope.head.sender, group.checkpoint, version, group.counter)
    return StoredGroup(*place, digest, now_ms(), data)
