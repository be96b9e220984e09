"""A trainer's lessons with real journal, publisher and figures, and a learner that is played."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from nous_node.node.blobs import BlobIndex
from nous_node.node.config import Settings
from nous_node.node.events import Event, Note
from nous_node.node.following import Following
from nous_node.node.learner_messages import (
    Candidate,
    FromLearner,
    Judged,
    Open,
    Opened,
    Rested,
    Updated,
    Verdicts,
)
from nous_node.node.learning import read_learning
from nous_node.node.lessons import Lessons
from nous_node.node.pipe import ChildDied
from nous_node.node.publishing import Publisher
from nous_node.node.runfolder import RunFolder
from nous_node.node.standings import Standings
from nous_node.node.statistics import Drift
from nous_node.node.store import Journal, StoredGroup
from nous_node.node.training import Training
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import accepted, refused

UPDATE = 4
NOW = 1_800_000_000_000
VOLUNTEER, OTHER = Identity.from_seed(b"v" * 32), Identity.from_seed(b"o" * 32)
LATER = 1000.0
"""Virtual seconds: longer than all pauses together."""


@dataclass
class PlayedLearner:
    """A coach whose learner accepts all groups, makes a version of every UPDATE, and dies as it is told."""

    deadly: set[bytes] = field(default_factory=set)
    """Groups over which it dies."""
    greedy: float | None = 0.5
    note: str = ""
    opens: list[Open] = field(default_factory=list)
    batches: list[list[Candidate]] = field(default_factory=list)
    distrusted: list[list[bytes]] = field(default_factory=list)
    published_versions: list[int] = field(default_factory=list)
    refusing: bool = False
    doubted: set[bytes] = field(default_factory=set)
    """Groups with which the drift of their key is too large."""
    pause: trio.Event | None = None
    """Where set: it says nothing until then."""
    says: list[FromLearner | Exception] = field(default_factory=list)
    judged: list[Candidate] = field(default_factory=list)
    """Of the last batch those that it accepted."""
    keys: dict[bytes, bytes] = field(default_factory=dict)
    """Group -> its sender."""
    absent: bool = False
    """Whether it dies once it has told its verdicts."""
    held: list[bytes] = field(default_factory=list)
    version: int = 0

    async def open(self, message: Open) -> Opened:
        await trio.lowlevel.checkpoint()
        self.opens.append(message)
        self.says, self.held, self.version = [], [], message.version
        return Opened(self.greedy if message.evaluate else None, self.note)

    async def verify(self, groups: list[Candidate]) -> None:
        self.batches.append(groups)
        if self.deadly & {group.id for group in groups}:
            self.says = [ChildDied("The child process ended with signal 11.")]
            return
        self.says = [Verdicts([self._judged(group) for group in groups])]
        self.judged = [group for group in groups if not self.refusing and group.id not in self.doubted]

    async def proceed(self, distrusted: Sequence[bytes]) -> None:
        self.distrusted.append(list(distrusted))
        self.held += [group.id for group in self.judged]
        self.keys |= {group.id: group.key for group in self.judged}
        self.held = [group for group in self.held if self.keys[group] not in distrusted]
        if self.absent:
            self.says = [ChildDied("The child process ended with signal 9.")]
            return
        while len(self.held) >= UPDATE:
            used, self.held = self.held[:UPDATE], self.held[UPDATE:]
            self.version += 1
            self.says.append(Updated(self.version, "", used, 0, [], {}, {}, {}, {}))
        self.says.append(Rested(len(self.held)))

    def _judged(self, group: Candidate) -> Judged:
        if group.id in self.doubted:
            error = RemoteError(Code.DRIFT, "no", measured=21.0, threshold=20.0)
            return Judged(refused(group.id, group.key, error), str(error), drift=Drift())
        if self.refusing:
            error = RemoteError(Code.REWARD_MISMATCH, "no")
            return Judged(refused(group.id, group.key, error), str(error))
        drift = Drift(group.drift.logprob + 1) if group.audit else None
        return Judged(accepted(group.id, group.key, 10), reward=0.5, drift=drift)

    async def receive(self) -> FromLearner:
        if self.pause is not None:
            await self.pause.wait()
        await trio.lowlevel.checkpoint()
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    async def published(self, version: int) -> None:
        self.published_versions.append(version)

    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


class School:
    """Lessons of a run of which journal, publisher and figures are real."""

    def __init__(self, folder: RunFolder, root: Identity) -> None:
        self.folder = folder
        self.journal = Journal.open(folder.journal)
        self.journal.hear(VOLUNTEER.key, "test", NOW, -1)
        self.following = Following.of(folder.run, folder.envelope)
        index = BlobIndex(lambda file: None)
        entropy = random.Random(0).randbytes
        self.publisher = Publisher(root, folder, self.journal, self.following, index, entropy)
        self.publisher.resume()
        self.training = Training(self.following, self.journal)
        self.standings = Standings(self.journal, self.following.view)
        self.events: list[Event] = []
        self.updates: list[Updated] = []
        self.learner = PlayedLearner()
        self.sent = 0
        self.lessons = Lessons(
            Settings(threads=1, memory=1 << 30),
            folder,
            read_learning(folder.learning),
            self.journal,
            self.publisher,
            self.training,
            self.standings,
            self._updated,
            self.events.append,
        )
        coach: Any = self.learner
        self.lessons.coach = coach

    async def _updated(self, updated: Updated) -> None:
        """The version is the base's weights again."""
        self.updates.append(updated)
        updated.folder = str(self.folder.checkpoint(0))
        updated.files = self.publisher.head.manifest.files
        updated.tensors = self.publisher.head.manifest.tensors
        self.training.published(self.publisher.update(updated), updated)

    def send(self, count: int) -> list[bytes]:
        """Journals groups of the newest checkpoint, and says so."""
        head, ids = self.publisher.head, []
        for _ in range(count):
            self.sent += 1
            body = b"group %d" % self.sent
            data = seal(VOLUNTEER, Kind.ROLLOUT, self.folder.run, body, seq=self.sent, ts=NOW)
            place = (unseal(data).id, VOLUNTEER.key, head.hash, head.version, self.sent)
            self.journal.add(StoredGroup(*place, self.sent.to_bytes(32), NOW, data))
            ids.append(unseal(data).id)
        self.lessons.work.set()
        return ids

    def verdict(self, group: bytes) -> str:
        receipt = self.journal.receipt(group)
        assert receipt is not None
        return receipt.code or receipt.verdict

    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.lessons.loop)
            yield
            nursery.cancel_scope.cancel()
