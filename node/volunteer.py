"""The volunteer: follows a run, makes assigned rollout groups, publishes them, shows what became of them.

    connect -> run manifest -> hello -> checkpoint -> (assigned tasks -> worker -> outbox -> gossip)*

Each `_loop` below is one task of the nursery. They meet in `Following` (new heads), in the outbox (groups
and receipts) and in a bounded channel (groups to publish). Cancelling the nursery loses nothing: a group is
in the outbox before it is published, and stays there until a receipt names it or it is too old.
"""

from __future__ import annotations

import time
from importlib import metadata

import trio

from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.errors import Code, LocalError
from nous_node.protocol.gossip import Verdict, judge_checkpoint, judge_receipts
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Hello, Receipts
from nous_node.protocol.rollouts import Engine as EngineFacts
from nous_node.protocol.runs import Invite, shard_of

from .assignments import Assignments
from .blobs import serve_run
from .config import Settings
from .contribution import Contribution
from .engine import Engine, WorkerError
from .events import Note, Report, Summary
from .following import INBOX, Following, Head, drain, now_ms
from .holdings import Holdings
from .home import Home
from .joined import JoinedFolder, connecting, enter, entered, playable, refuse_too_large
from .losses import Losses
from .network import Network, NetworkConfig, open_network
from .network_errors import NoSubscribersError
from .outbox import Outbox
from .pacing import OwnRate, Pacing
from .worker_messages import ENGINE, Group, Load, Loaded

HELLO_SECONDS = 10.0
"""Between greetings while no checkpoint counts for our key yet."""

RESEND_SECONDS = 10.0
"""A group without a receipt for this long is sent again, sealed anew; then after twice as long, and so on: a
trainer that is slow gets few repeats, a message that was lost is missed for seconds."""

STATUS_SECONDS = 1.0

BATCH_SECONDS = 0.2
"""Aimed length of one batch: a new checkpoint waits for it, and what is in it gets older; the fixed cost
of a call is below a hundredth of it."""

MAX_BATCH = 64
"""Groups of one batch."""

UNSENT = 16
"""Finished groups that may wait for the network before generation waits too: a trainer that stops reading
has enough, and more would be stale when it reads again."""

NOBODY_SECONDS = 0.5
"""After a message that nobody could be given."""

MAX_FAILURES = 5
"""Workers that die one after the other, without a group between, before the volunteer gives up."""

PARTING_SECONDS = 5.0
"""For the batch in work and the last receipts when the volunteer is asked to stop."""


async def volunteer(
    settings: Settings,
    home: Home,
    invite: Invite,
    report: Report,
    stop: trio.Event,
    *,
    rollouts: int | None = None,
    minutes: float | None = None,
) -> Summary:
    """Takes part in the run of `invite` until `stop`, or until `rollouts` groups are acknowledged, or for
    `minutes`. Raises NousError where taking part is impossible; the sentence says what to do."""
    identity = home.identity()
    folder = JoinedFolder.of(home, invite.run)
    config = NetworkConfig(listen=settings.listen, upload_limit=settings.upload)
    async with open_network(identity.seed, config) as network, trio.open_nursery() as nursery:
        nursery.start_soon(network.stay_connected, list(invite.addresses))
        report(connecting(invite))
        following = await enter(network, invite, folder, report)
        report(entered(following))
        if following.head is not None:  # somebody answered: this invite is worth remembering
            home.remember_run(invite.to_text())
        refuse_too_large(following.manifest, settings.memory, settings.disk)
        with Outbox.open(folder.outbox) as outbox:
            node = _Volunteer(settings, identity, folder, network, following, outbox, report)
            await node.run(stop, rollouts, minutes)
            summary = node.contribution.summary()
        nursery.cancel_scope.cancel()
    return summary


class _Volunteer:
    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        folder: JoinedFolder,
        network: Network,
        following: Following,
        outbox: Outbox,
        report: Report,
    ) -> None:
        self.settings, self.identity, self.folder = settings, identity, folder
        self.network, self.following, self.outbox, self.report = network, following, outbox, report
        self.manifest = following.manifest
        self.topic = following.topics.rollouts(shard_of(identity.key, self.manifest.shards))
        self.holdings = Holdings(network, following, folder, settings.disk, report)
        self.engine_facts = EngineFacts(ENGINE, metadata.version("nous-node"), "", settings.device)
        self.contribution = Contribution(following, outbox)
        self.contribution.known_from = outbox.known_from
        environments = playable(self.manifest, settings.env, report)
        self.assignments = Assignments(following.run, identity.key, self.manifest, environments, outbox)
        self.pacing = Pacing(self.manifest.staleness)
        self.rate = OwnRate(self.manifest.limits.groups_per_second, now_ms())
        self.versions: dict[bytes, int] = {}
        """Id in the outbox -> version, of groups without a receipt."""
        self.ending = False
        self.unpublished: set[bytes] = set()
        """Ids of groups that wait to be published for the first time."""
        self.unsent, self.to_send = trio.open_memory_channel[tuple[bytes, bytes]](UNSENT)
        self.engine = Engine(
            memory=settings.memory,
            nice=settings.nice,
            threads=settings.threads,
            log=folder.worker_log,
        )

    async def run(self, stop: trio.Event, rollouts: int | None, minutes: float | None) -> None:
        topics = self.following.topics
        enough = None if rollouts is None else self.contribution.reached(rollouts)
        serve_run(self.network, self.following, self.holdings.index)
        await self.engine.start()
        try:
            async with trio.open_nursery() as nursery:
                for topic, judge in (
                    (topics.checkpoints, self._judge_checkpoint),
                    (topics.receipts, self._judge_receipts),
                ):
                    nursery.start_soon(drain, self.network.subscribe(topic, judge, INBOX))
                for loop in (
                    self._hello_loop,
                    self.holdings.head_loop,
                    self.holdings.fetch_loop,
                    self._publish_loop,
                    self._resend_loop,
                    self._status_loop,
                    self.engine.watch_memory,
                ):
                    nursery.start_soon(loop)
                nursery.start_soon(self._generate_loop, nursery.cancel_scope)
                await self._until_done(stop, enough, minutes)
                self.ending = True
                self.contribution.doing = "finishing"
                with trio.move_on_after(PARTING_SECONDS):
                    await self.contribution.all_acknowledged()
                nursery.cancel_scope.cancel()
        finally:
            await self.engine.close()

    async def _until_done(self, stop: trio.Event, enough: trio.Event | None, minutes: float | None) -> None:
        with trio.move_on_after(minutes * 60 if minutes is not None else float("inf")):
            async with trio.open_nursery() as nursery:

                async def first(wait: trio.Event) -> None:
                    await wait.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(first, stop)
                if enough is not None:
                    nursery.start_soon(first, enough)

    # --- what comes in ---------------------------------------------------------------------------

    def _judge_checkpoint(self, data: bytes, forwarder: str) -> Verdict:
        judgement = judge_checkpoint(self.following.view, data, now_ms())
        if judgement.verdict is Verdict.ACCEPT and judgement.envelope is not None:
            self.following.offer(data)
        return judgement.verdict

    def _judge_receipts(self, data: bytes, forwarder: str) -> Verdict:
        judgement = judge_receipts(self.following.view, data, now_ms())
        if isinstance(judgement.body, Receipts) and judgement.envelope is not None:
            mine = [item for item in judgement.body.items if item.peer == self.identity.key]
            for item in self.outbox.acknowledge(mine, data):
                self.contribution.note(item)
                lag = self.following.version - self.versions.pop(item.rollout, self.following.version)
                self.pacing.receipt(lag, item.code == Code.STALE)
                if item.code == Code.KEY_TOO_NEW:
                    heard = self.following.version if item.threshold is None else int(item.threshold) - 1
                    self._note_known(heard)
        return judgement.verdict

    # --- what goes out ---------------------------------------------------------------------------

    async def _hello_loop(self) -> None:
        """Makes the key known, until a checkpoint counts for it. [TSK-6]"""
        while True:
            if self._unknown():
                hello = Hello(f"nous-node/{self.engine_facts.version}", self.engine_facts)
                version = self.following.version
                try:
                    await self.network.publish(self.topic, self._sealed(Kind.HELLO, hello.to_bytes()))
                    if not 0 <= self.contribution.known_from <= version:  # or of a journal that was lost
                        self._note_known(version)
                except NoSubscribersError:
                    await trio.sleep(0.2)
                    continue
            await trio.sleep(HELLO_SECONDS)

    def _note_known(self, version: int) -> None:
        """Later versions count for our key; remembered, because a trainer draws no new beacon for a key that
        comes back."""
        self.contribution.known_from = version
        self.outbox.note_known(version)

    def _unknown(self) -> bool:
        """Whether no checkpoint counts for our key yet."""
        return self.contribution.known_from < 0 or self.following.version <= self.contribution.known_from

    async def _generate_loop(self, scope: trio.CancelScope) -> None:
        loaded: Head | None = None
        batch, failures = 1, 0
        while not self.ending:
            room = await self._room(batch)  # first: versions come and go while receipts are waited for
            head = await self._usable_head()
            try:
                if loaded is not head:
                    self.contribution.doing = f"loading version {head.version}"
                    await self._load(head)
                    loaded = head
                    self.contribution.generates_with(head)
                batch = await self._batch(head, room)
                failures = 0
            except WorkerError as error:
                loaded, failures = None, failures + 1
                self.report(Note(str(error), "warning"))
                if failures >= MAX_FAILURES:
                    raise LocalError(
                        f"The worker failed {failures} times in a row; the last time: {error}"
                    ) from error
                await trio.sleep(min(30.0, 0.5 * 2**failures))

    async def _usable_head(self) -> Head:
        """The newest checkpoint on disk that counts for our key."""
        while True:
            head = self.holdings.newest
            barren = head is not None and self.assignments.has_none(head)
            if head is not None and head.version > self.contribution.known_from >= 0 and not barren:
                return head
            waits = "waiting for a version" + " with tasks for this node" * barren
            self.contribution.doing = "fetching a checkpoint" if head is None else waits
            with trio.move_on_after(STATUS_SECONDS):
                await self.holdings.changed()

    async def _room(self, batch: int) -> int:
        """How many of `batch` groups may be made now; waits until receipts leave room for some, or a group
        that counted towards `--rollouts` is given up."""
        while True:
            size = self.contribution.wanted(self.pacing.batch(batch, self.outbox.waiting()))
            if size:
                return size
            self.contribution.doing = "waiting for receipts"
            await self.contribution.changed()

    async def _load(self, head: Head) -> Loaded:
        self.holdings.in_use = head
        return await self.engine.load(
            Load(
                folder=str(self.holdings.folder(head)),
                checkpoint=head.hash,
                device=self.settings.device,
                threads=self.settings.threads,
                manifest=self.manifest.to_bytes(),
            )
        )

    async def _batch(self, head: Head, size: int) -> int:
        """Makes `size` groups; how many the next batch should have."""
        orders = self.assignments.take(head, size)
        if not orders:
            return size
        self.contribution.doing = f"generating {len(orders)} groups"
        started = time.monotonic()
        with self.contribution.working():
            groups = await self.engine.generate(orders, self.contribution.sampled)
        took = time.monotonic() - started
        finished = [item for group in groups if (item := self._finished(head, group)) is not None]
        for item in finished:
            await self.unsent.send(item)
        if took < BATCH_SECONDS / 2:
            return min(MAX_BATCH, size * 2)
        return max(1, int(size * min(1.0, BATCH_SECONDS / took)))

    def _finished(self, head: Head, group: Group) -> tuple[bytes, bytes] | None:
        """Id and envelope of the sealed group, which from here on survives whatever happens to this process;
        None where there is nothing to publish, and a sentence says why."""
        if group.failure:
            self._gave_up(group.failure)
            return None
        try:
            data = self._sealed(Kind.ROLLOUT, group.body)
        except LocalError as error:
            self._gave_up(f"{error} The group is given up: this run has no room for it.")
            return None
        rollout = self.outbox.put(data, checkpoint=head.hash, version=head.version, counter=group.counter)
        self.versions[rollout] = head.version
        self.unpublished.add(rollout)
        self.contribution.sent(group)
        return rollout, data

    def _gave_up(self, why: str) -> None:
        self.contribution.give_up(1)
        self.report(Note(why, "warning"))

    async def _publish_loop(self) -> None:
        async for rollout, data in self.to_send:
            await self.network.wait_subscriber(self.topic)
            while rollout in self.versions:  # otherwise it became too old while nobody listened
                try:
                    await self._publish(data)
                    break
                except NoSubscribersError:
                    await trio.sleep(NOBODY_SECONDS)
                    await self.network.wait_subscriber(self.topic)
            self.unpublished.discard(rollout)

    async def _publish(self, data: bytes) -> None:
        """Raises NoSubscribersError; nothing was sent then."""
        await trio.sleep(self.rate.delay(now_ms()))
        await self.network.publish(self.topic, data)

    async def _resend_loop(self) -> None:
        while True:
            silence = RESEND_SECONDS
            with trio.move_on_after(RESEND_SECONDS / 2):
                await self._heard_again()
                silence = 0.0  # what was on its way when the line broke may be lost
            horizon = self.following.version - self.manifest.staleness
            self.contribution.give_up(self.outbox.drop_stale(now_ms(), horizon))
            self.versions = {
                rollout: version for rollout, version in self.versions.items() if version >= horizon
            }
            for rollout in self.outbox.due(now_ms(), int(silence * 1000)):
                body = self.outbox.content(rollout)
                if body is None or rollout in self.unpublished:  # a receipt came meanwhile; or its turn comes
                    continue
                data = self._sealed(Kind.ROLLOUT, body)
                self.outbox.repeat(rollout, data)
                try:
                    await self._publish(data)
                except NoSubscribersError:
                    break
                self.outbox.was_repeated(rollout, now_ms())

    async def _heard_again(self) -> None:
        """Until somebody reads our topic, after nobody did."""
        for peer in self.network.subscribers(self.topic):
            await self.network.wait_lost(peer)
        await self.network.wait_subscriber(self.topic)

    def _sealed(self, kind: Kind, body: bytes) -> bytes:
        return seal(
            self.identity,
            kind,
            self.following.run,
            body,
            seq=self.outbox.next_seq(),
            ts=now_ms(),
            limit=self.manifest.rollout_envelope_limit,
            body_limit=self.manifest.rollout_body_limit,
        )

    async def _status_loop(self) -> None:
        losses = Losses(self.report)
        while True:
            losses.report(self.contribution.status(len(self.network.peers()), self.network.stats.losses()))
            await trio.sleep(STATUS_SECONDS)
