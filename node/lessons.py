"""The learner at work: it is fed from the journal, its verdicts are journalled, its versions handed on.

A learner that dies is followed by another at the last published version, which is given every group that no
version has used. Groups over which one died are tried again one by one, and one over which it dies alone is
refused: somebody's text may bring down the code that scores it.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec
import trio

from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import refused

from .coach import Coach, LearnerError
from .config import Settings
from .events import Note, Report
from .following import now_ms
from .learner_messages import BASELINE, Candidate, Judged, Open, Rested, Updated, Verdicts
from .learning import Learning
from .pipe import ChildDied
from .publishing import Publisher
from .runfolder import RunFolder
from .standings import Standings
from .statistics import Drift
from .store import Journal, StoredGroup
from .stored_groups import body_of
from .training import Training

BACKLOG_UPDATES = 2
"""Updates' worth of groups that may wait for the learner before the trainer stops reading and volunteers
wait: more would only be older when its turn comes."""

VERIFY_BATCH = 64
"""Groups of one verification: one prefill for each of their versions."""

BATCH_BYTES = 32 << 20
"""Of their bodies: on the wire a body may be a hundred times smaller."""

LARGE_BYTES = 4 << 20
"""Of a batch as it is stored: what has more is unpacked in a thread, so that the network does not wait."""

AUDITS: Final = "audits"
"""The journal's secret by which it is drawn which groups are audited."""

MAX_FAILURES = 5
"""Learners that die one after the other, without a verdict between, before the trainer gives up."""


class Lessons:
    """Keeps one learner at work. `updated` is awaited with each new version that it makes."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        learning: Learning,
        journal: Journal,
        publisher: Publisher,
        training: Training,
        standings: Standings,
        updated: Callable[[Updated], Awaitable[None]],
        report: Report,
    ) -> None:
        self.turn = trio.Lock()
        """Held from a batch to the last version that it led to: who else publishes waits for it."""
        self.coach = Coach(threads=settings.threads, log=folder.path / "learner.log")
        self.work = trio.Event()
        """Set when there are groups that the learner has not seen."""
        self._settings, self._folder, self._journal = settings, folder, journal
        self._publisher, self._training, self._updated, self._report = publisher, training, updated, report
        self._standings = standings
        self._audit, self._secret = learning.audit, journal.secret(AUDITS)
        self._backlog = BACKLOG_UPDATES * learning.groups
        self._room = trio.Event()
        self._held = 0
        self._fed = 0
        self._in_work: dict[bytes, bytes] = {}
        """Groups that the learner has and that have no verdict, with their keys."""
        self._unaudited: set[bytes] = set()
        self._suspects: set[bytes] = set()

    async def room(self) -> None:
        """Waits while the learner has more before it than it can use while it is fresh."""
        while self._journal.count_pending() + self._held > self._backlog:
            await self._room.wait()

    async def loop(self) -> None:
        """Keeps a learner at work; one that dies is followed by another at the last published version."""
        failures = 0
        while True:
            try:
                await self._open_learner()
                async for _ in self._lessons():
                    failures = 0
            except ChildDied as error:
                failures = 0 if self._blame() else failures + 1
                again = f"{error} It is started again at version {self._publisher.head.version}."
                self._report(Note(again, "warning"))
                if failures >= MAX_FAILURES:
                    log = self._folder.path / "learner.log"
                    raise LearnerError(
                        f"The learner died {failures} times in a row; its log is {log}."
                    ) from error
                await trio.sleep(0.5 * 2**failures)

    async def _open_learner(self) -> None:
        head = self._publisher.head
        self._training.doing = "starting the learner"
        first = self._training.greedy_base is None
        opened = await self.coach.open(
            Open(
                folder=str(self._folder.path),
                version=head.version,
                checkpoint=str(self._publisher.folders[head.version]),
                folders={version: str(folder) for version, folder in self._publisher.folders.items()},
                levels=dict(head.manifest.levels),
                device=self._settings.device,
                threads=self._settings.threads,
                baselines={
                    name.removeprefix(BASELINE): value
                    for name, value in head.manifest.stats.items()
                    if name.startswith(BASELINE)
                },
                evaluate=first,
                access=self._settings.access,
            )
        )
        if first:
            self._training.opened(opened.greedy)
        if opened.note:
            self._report(Note(opened.note, "warning"))
        if self._publisher.head.version != head.version:  # a beacon was renewed meanwhile
            await self.coach.published(self._publisher.head.version)
        self._fed = self._held = 0

    async def _lessons(self) -> AsyncIterator[None]:
        """Feeds the learner one batch after the other and takes what it says; yields after each batch."""
        while True:
            batch = self._next_batch()
            if not batch:
                self._training.doing = "waiting for groups"
                self.work = trio.Event()
                await self.work.wait()
                continue
            self._training.doing = "verifying and learning"
            async with self.turn:
                await self._lesson(batch)
            self._room.set()  # every shard's reader looks again
            self._room = trio.Event()
            yield

    async def _lesson(self, batch: list[StoredGroup]) -> None:
        """One batch: verdicts, then the versions that it completes. In between the learner is told whose
        groups are out by these very verdicts; if it dies before, the next one is not given them."""
        if sum(len(group.envelope) for group in batch) > LARGE_BYTES:
            candidates = await trio.to_thread.run_sync(self._candidates, batch)
        else:
            candidates = self._candidates(batch)
        batch = batch[: len(candidates)]
        self._fed = batch[-1].arrival
        self._in_work = {group.id: group.key for group in batch}
        self._unaudited = {one.id for one in candidates if not one.audit}
        await self.coach.verify(candidates)
        while not isinstance(message := await self.coach.receive(), Rested):
            match message:
                case Verdicts(groups):
                    self._decide(batch, groups)
                    distrusted, self._standings.distrusted = self._standings.distrusted, set()
                    await self.coach.proceed(sorted(distrusted))
                case Updated() as updated:
                    await self._updated(updated)
                case other:
                    raise LearnerError(f"The learner said {type(other).__name__}, which was not asked.")
        self._held = message.held

    def _next_batch(self) -> list[StoredGroup]:
        """What the learner gets next; alone, where it may be what killed the last one."""
        batch = self._journal.unused(VERIFY_BATCH, self._fed)
        for count, group in enumerate(batch):
            if group.id in self._suspects:
                return batch[: max(1, count)]
        return batch

    def _blame(self) -> bool:
        """After a learner died over a batch: its groups are tried again one by one, and a group over which
        it dies alone is refused. Somebody's text may bring down the code that scores it.

        Whether a group was refused, so that the learner's death is explained."""
        batch, self._in_work = self._in_work, {}
        if len(batch) != 1:
            self._suspects.update(batch)
            return False
        error = RemoteError(Code.ENVIRONMENT_FAILED, "The verifier died over this group, twice.")
        ((rollout, key),) = batch.items()
        proven = rollout in self._suspects
        if proven and self._journal.decide([refused(rollout, key, error)], now_ms()):
            self._training.refused(error.code)
        self._suspects.symmetric_difference_update(batch)
        return proven

    def _candidates(self, batch: list[StoredGroup]) -> list[Candidate]:
        """The first groups of `batch`, as many as BATCH_BYTES hold and one at least."""
        candidates: list[Candidate] = []
        size = 0
        for group in batch:
            candidates.append(self._candidate(group))
            size += len(candidates[-1].body)
            if size >= BATCH_BYTES:
                break
        return candidates

    def _candidate(self, group: StoredGroup) -> Candidate:
        record = self._journal.key(group.key)
        state = "probation" if record is None else record.reputation.state
        drift = record.drift if record is not None else b""
        head = self._publisher.heads.get(group.checkpoint)
        return Candidate(
            id=group.id,
            body=body_of(group.envelope, self._folder.manifest),
            key=group.key,
            version=group.version,
            checkpoint=group.checkpoint,
            beacon=bytes(32) if head is None else head.manifest.beacon,
            levels={} if head is None else dict(head.manifest.levels),
            accepted=group.state == "accepted",
            state=state,
            drift=msgspec.msgpack.decode(drift, type=Drift) if drift else Drift(),
            audit=state != "active" or _drawn(self._secret, group.id) < self._audit,
        )

    def _decide(self, batch: list[StoredGroup], judged: list[Judged]) -> None:
        """Those that a learner before had accepted are in the journal and counted."""
        self._in_work = {}
        news = [one for group, one in zip(batch, judged, strict=True) if group.state == "pending"]
        now = now_ms()
        drifts = {one.receipt.peer: one.drift for one in news if one.drift is not None}
        decided = self._journal.decide(
            [one.receipt for one in news],
            now,
            unaudited=self._unaudited,
            drifts={key: msgspec.msgpack.encode(drift) for key, drift in drifts.items()},
        )
        self._standings.sync(now)
        first = {receipt.rollout for receipt in decided}
        self._training.decided([one for one in news if one.receipt.rollout in first])


def _drawn(secret: bytes, group: bytes) -> float:
    """A number in [0, 1) that is the same whenever it is asked for, and that nobody else knows. [VER-13]"""
    return int.from_bytes(hmac.digest(secret, group, "sha256")[:8]) / 2**64
