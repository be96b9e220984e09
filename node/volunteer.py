"""The volunteer: follows a run, makes assigned rollout groups, publishes them, shows what became of them.

    connect -> run manifest -> hello -> checkpoint -> (assigned tasks -> worker -> outbox -> gossip)*

Each `_loop` below is one task of the nursery. They meet in `Following` (new heads), in the outbox (groups
and receipts) and in `Sending` (groups to publish). Cancelling the nursery loses nothing: a group is in the
outbox before it is published, and stays there until a receipt names it or it is too old.
"""

from __future__ import annotations

import time
from importlib import metadata

import trio

from nous_node.protocol.envelope import Kind, Signed
from nous_node.protocol.errors import Code, LocalError
from nous_node.protocol.gossip import Verdict, judge_checkpoint, judge_receipts
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Hello, Receipts
from nous_node.protocol.rollouts import Engine as EngineFacts
from nous_node.protocol.runs import Invite

from .assignments import Assignments
from .config import Settings
from .contribution import Contribution
from .engine import Engine, LoadError, WorkerError
from .events import Note, Report, Summary
from .following import INBOX, Following, Head, drain, now_ms
from .hellos import Greeting
from .holdings import Holdings
from .home import Home, StorageError
from .http_server import chunks_by_http
from .joined import JoinedFolder, connecting, enter, entered, playable, refuse_too_large
from .journal_counters import ALLOWED_HOLES
from .losses import Losses
from .network import Network, NetworkConfig, open_network
from .outbox import Outbox
from .pacing import Pacing
from .pauses import Pauses
from .restraint import Restraint
from .sending import Sending
from .swarm import serve_run
from .worker_messages import ENGINE, FIRST_GROUPS, Checked, FirstGroups, Group, Load, Order, Prepare

STATUS_SECONDS = 1.0

BATCH_SECONDS = 0.2
"""Aimed length of one batch: a new checkpoint waits for it, and what is in it gets older; the fixed cost
of a call is below a hundredth of it."""

MAX_BATCH = 64
"""Groups of one batch."""

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
        if following.heard:  # somebody answered: this invite is worth remembering
            home.remember_run(invite.to_text())
        refuse_too_large(following.manifest, settings.memory, settings.disk)
        with Outbox.open(folder.outbox) as outbox:
            node = _Volunteer(settings, identity, folder, network, following, outbox, report)
            async with chunks_by_http(settings, network, node.holdings.swarm):
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
        self.holdings = Holdings(
            network, following, folder, settings.disk, report, settings.keep, settings.neighbours
        )
        self.engine_facts = EngineFacts(ENGINE, metadata.version("nous-node"), "", settings.device)
        self.contribution = Contribution(following, outbox)
        self.restraint = Restraint(identity.key, outbox, report)
        self.contribution.standing = self.restraint.standing
        self.sending = Sending(identity, network, following, outbox, self.contribution, self.restraint)
        self.holdings.index.elsewhere = self.sending.chunk
        environments = playable(self.manifest, settings.env, report, settings.access)
        self.pauses = Pauses(environments, outbox, time.time, report)
        self.assignments = Assignments(following.run, identity.key, self.manifest, self.pauses, outbox)
        self.greeting = Greeting(identity.key, following, outbox, self._say_hello)
        self.pacing = Pacing(self.manifest.staleness)
        self.ending = False
        self.crowded = False
        """Whether the next checkpoint cannot be read while groups are made."""
        self.unloadable: Head | None = None
        """The last checkpoint that the worker refused."""
        self._hand_on, self._made_groups = trio.open_memory_channel[tuple[Head, list[Group]]](1)
        self.engine = Engine(
            memory=settings.memory, nice=settings.nice, threads=settings.threads, log=folder.worker_log
        )

    async def run(self, stop: trio.Event, rollouts: int | None, minutes: float | None) -> None:
        topics = self.following.topics
        enough = None if rollouts is None else self.contribution.reached(rollouts)
        serve_run(self.network, self.following, self.holdings.swarm)
        await self.engine.start()
        try:
            async with trio.open_nursery() as nursery:
                for topic, judge in (
                    (topics.checkpoints, self._judge_checkpoint),
                    (topics.receipts, self._judge_receipts),
                ):
                    nursery.start_soon(drain, self.network.subscribe(topic, judge, INBOX))
                for loop in (
                    self.greeting.loop,
                    self._prepare_loop,
                    self._finish_loop,
                    self.holdings.run,
                    self.sending.publish_loop,
                    self.sending.resend_loop,
                    self.restraint.watch,
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
                    await self.restraint.told_of(self.outbox.totals().accepted)
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
            self._note_receipts(judgement.body, judgement.envelope.head, data)
        return judgement.verdict

    def _note_receipts(self, body: Receipts, head: Signed, data: bytes) -> None:
        """What a trainer says of us in the envelope `data`. [RCP-3] [RCP-6] [RCP-7] [HEL-2]"""
        self.greeting.note_known(head.sender, body.known)
        mine = [item for item in body.items if item.peer == self.identity.key]
        for item in self.outbox.acknowledge(mine, data):
            self.contribution.note(item)
            self.pauses.answered(item)
            self.pacing.receipt(self.sending.settled(item.rollout), item.code == Code.STALE)
            if item.code == Code.KEY_TOO_NEW:
                self.greeting.note_too_new(head.sender, item)
        for item in mine:
            self.restraint.note_receipt(item, head.ts)
        for standing in body.standings:
            if standing.peer == self.identity.key:
                self.restraint.note_standing(standing, head.ts, data)
                self.contribution.standing = self.restraint.standing

    # --- what goes out ---------------------------------------------------------------------------

    async def _say_hello(self) -> None:
        hello = Hello(f"nous-node/{self.engine_facts.version}", self.engine_facts)
        await self.network.publish(self.sending.topic, self.sending.sealed(Kind.HELLO, hello.to_bytes()))

    async def _generate_loop(self, scope: trio.CancelScope) -> None:
        loaded: Head | None = None
        batch, failures = 1, 0
        while not self.ending:
            if self.restraint.holds:
                self.contribution.doing = self.restraint.doing()
                await self.restraint.lifted()
                continue
            room = await self._room(batch)  # first: versions come and go while receipts are waited for
            head = await self._usable_head(loaded)
            try:
                if loaded is not head:
                    self.contribution.doing = f"loading version {head.version}"
                    loaded = await self._load(head, loaded)
                batch = await self._batch(loaded, room)
                failures = 0
            except WorkerError as error:
                loaded, failures = None, failures + 1
                self.report(Note(str(error), "warning"))
                if failures >= MAX_FAILURES:
                    raise LocalError(
                        f"The worker failed {failures} times in a row; the last time: {error}"
                    ) from error
                await trio.sleep(min(30.0, 0.5 * 2**failures))

    async def _prepare_loop(self) -> None:
        """Has the worker read each new checkpoint while it makes groups with the one before."""
        while True:
            await self.holdings.changed()
            head = self.holdings.newest
            if head is not None and self.contribution.loaded and self.greeting.counts(head.version):
                folder = str(self.holdings.folder(head))
                await self.engine.prepare(Prepare(folder, head.hash, head.manifest.tensors))

    async def _usable_head(self, loaded: Head | None) -> Head:
        """The newest checkpoint on disk that counts for our key; `loaded` for as long as it may be used where
        the worker refused that."""
        while True:
            head = self.holdings.newest
            if head is not None and head is self.unloadable and loaded is not None:
                if self.following.version - loaded.version > self.manifest.staleness:
                    self.contribution.doing = "waiting for a version that can be loaded"
                    await self.holdings.changed()
                    continue
                head = loaded
            barren = head is not None and self.assignments.has_none(head)
            if head is not None and self.greeting.known_from is None:
                self.contribution.doing = "waiting for the trainer to answer"
                await self.greeting.answered()
                continue
            if head is not None and self.greeting.counts(head.version) and not barren:
                return head
            waits = "waiting for a version" + " with tasks for this node" * barren
            self.contribution.doing = "fetching a checkpoint" if head is None else waits
            with trio.move_on_after(STATUS_SECONDS):
                await self.holdings.changed()

    async def _room(self, batch: int) -> int:
        """How many of `batch` groups may be made now; waits for receipts, or until one is given up."""
        while True:
            waiting = self.outbox.waiting() + self.contribution.in_hand
            size = self.contribution.wanted(self.pacing.batch(batch, waiting))
            if size:
                return size
            lost = self.assignments.given_up
            held_up = f"; behind {lost} tasks that were given up there may be none before newer versions"
            self.contribution.doing = "waiting for receipts" + held_up * (lost > ALLOWED_HOLES)
            with self.contribution.spending("waiting"):
                await self.contribution.changed()

    async def _load(self, head: Head, before: Head | None) -> Head:
        """Gives the worker a checkpoint; the one that it generates with now, which is still the one `before`
        where this one is damaged. Raises WorkerError where there is none."""
        self.holdings.in_use = head
        load = Load(
            folder=str(self.holdings.folder(head)),
            checkpoint=head.hash,
            device=self.settings.device,
            threads=self.settings.threads,
            manifest=self.manifest.to_bytes(),
            memory=self.settings.memory,
            first=FirstGroups(FIRST_GROUPS, self.following.run, self.identity.key, head.manifest.beacon),
            tensors=head.manifest.tensors,
            access=self.settings.access,
        )
        try:
            with self.contribution.spending("loading"):
                loaded = await self.engine.load(load)
        except LoadError as error:
            if before is None:
                raise
            self.report(Note(f"Version {head.version} is left out: {error}", "warning"))
            self.unloadable, self.holdings.in_use = head, before
            self.holdings.doubt(head)
            return before
        if loaded.crowded and not self.crowded:
            self.crowded = True
            self.report(
                Note(
                    "Two copies of the model do not fit into the memory allowed: each new version is loaded "
                    "between batches, and generation waits for it. Raise --memory to have both at once."
                )
            )
        self.contribution.generates_with(head)
        facts = EngineFacts(loaded.engine_name, loaded.engine_version, loaded.dtype, loaded.device)
        if facts != self.engine_facts:
            self.engine_facts = facts
            self.outbox.note_engine(facts)
        return head

    async def _batch(self, head: Head, size: int) -> int:
        """Makes `size` groups; how many the next batch should have."""
        orders = self.assignments.take(head, size)
        if not orders:
            return size
        self.contribution.doing = f"generating {len(orders)} groups"
        started = time.monotonic()
        groups = await self._made(head, orders)
        took = time.monotonic() - started
        self.contribution.in_hand += len(groups)
        with self.contribution.spending("sending"):
            await self._hand_on.send((head, groups))
        if took < BATCH_SECONDS / 2:
            return min(MAX_BATCH, size * 2)
        return max(1, int(size * min(1.0, BATCH_SECONDS / took)))

    async def _finish_loop(self) -> None:
        """Seals, stores and sends what was made, while the worker makes the next."""
        async for head, groups in self._made_groups:
            for group in groups:
                item = self._finished(head, group)
                self.contribution.in_hand -= 1
                if item is not None:
                    await self.sending.send(item)

    async def _made(self, head: Head, orders: list[Order]) -> list[Group]:
        """Raises WorkerError; the orders are given out again then."""
        try:
            with self.contribution.working():
                told = self.contribution
                return await self.engine.generate(orders, told.sampled, self._checked, told.made_in)
        except WorkerError:
            guilty = self.assignments.lost(orders)
            if guilty is not None:
                self._gave_up(
                    head, guilty.counter, f"Task {guilty.counter} is left: the worker died over it twice."
                )
            raise

    def _checked(self, checked: Checked) -> None:
        self.report(Note(checked.text, "info" if checked.good else "warning"))

    def _finished(self, head: Head, group: Group) -> tuple[bytes, bytes] | None:
        """Id and envelope of the stored group; None where there is none, and a sentence says why."""
        if group.failure:
            self._gave_up(head, group.counter, group.failure)
            self.pauses.failed(group.environment, group.failure)
            return None
        self.pauses.made(group.environment)
        try:
            item = self.sending.store(head, group.counter, group.body)
            self.pauses.sent(item[0], group.environment)
        except StorageError:
            raise
        except LocalError as error:
            self._gave_up(head, group.counter, f"{error} The group is given up: this run has no room for it.")
            return None
        self.contribution.sent(group)
        return item

    def _gave_up(self, head: Head, counter: int, why: str) -> None:
        self.assignments.gave_up(head.hash, counter)
        self.contribution.give_up(1)
        self.report(Note(why, "warning"))

    async def _status_loop(self) -> None:
        losses = Losses(self.report)
        while True:
            status = self.contribution.status(len(self.network.peers()), self.network.stats.losses())
            losses.report(status)
            if status.generating_share:
                self.outbox.note_share(status.generating_share)
            await trio.sleep(STATUS_SECONDS)
