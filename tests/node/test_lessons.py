"""The learner fed from the journal: by a coach that plays it, dies on demand, and is opened anew."""

from __future__ import annotations

import hmac
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node.blobs import BlobIndex
from nous_node.node.coach import LearnerError
from nous_node.node.config import Settings
from nous_node.node.events import Event, Note
from nous_node.node.following import Following
from nous_node.node.home import StorageError
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
from nous_node.node.lessons import AUDITS, BACKLOG_UPDATES, MAX_FAILURES, VERIFY_BATCH, Lessons
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
    held: list[bytes] = field(default_factory=list)
    version: int = 0

    async def open(self, message: Open) -> Opened:
        await trio.lowlevel.checkpoint()
        self.opens.append(message)
        self.says, self.held, self.version = [], [], message.version
        return Opened(self.greedy if message.evaluate else None, self.note)

    async def verify(self, groups: list[Candidate], distrusted: Sequence[bytes]) -> None:
        self.batches.append(groups)
        self.distrusted.append(list(distrusted))
        if self.deadly & {group.id for group in groups}:
            self.says = [ChildDied("The child process ended with signal 11.")]
            return
        self.says = [Verdicts([self._judged(group) for group in groups])]
        if not self.refusing:
            self.held += [group.id for group in groups]
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


@pytest.fixture
def school(make_folder: Callable[..., RunFolder], root: Identity) -> Any:
    school = School(make_folder(groups=UPDATE), root)
    yield school
    school.journal.__exit__()


# --- a learner that works ------------------------------------------------------------------------


async def test_groups_are_judged_journalled_and_made_into_versions(
    school: School, autojump_clock: object
) -> None:
    async with school.open():
        await wait_all_tasks_blocked()
        assert school.training.doing == "waiting for groups"
        ids = school.send(UPDATE + 1)
        await wait_all_tasks_blocked()
    assert [school.verdict(group) for group in ids] == ["accepted"] * (UPDATE + 1)
    assert [updated.used for updated in school.updates] == [ids[:UPDATE]]
    assert school.publisher.head.version == 1
    status = school.training.status(0)
    assert (status.accepted, status.tokens_verified, status.waiting) == (UPDATE + 1, 10 * (UPDATE + 1), 0)


async def test_a_learner_is_opened_at_the_newest_version_and_measures_only_the_first_time(
    school: School, autojump_clock: object
) -> None:
    school.publisher.renew()
    async with school.open():
        await wait_all_tasks_blocked()
        school.learner.deadly = set(school.send(1))
        await trio.sleep(LATER)
    first, second = school.learner.opens[:2]
    assert (first.version, first.checkpoint) == (1, str(school.folder.checkpoint(0)))
    assert first.folders == {0: first.checkpoint, 1: first.checkpoint}
    assert (first.evaluate, second.evaluate) == (True, False)
    assert school.training.greedy_base == 0.5


async def test_what_a_learner_says_of_its_opening_is_reported(school: School, autojump_clock: object) -> None:
    school.learner.note = "The optimizer begins afresh."
    async with school.open():
        await wait_all_tasks_blocked()
    assert school.notes() == ["The optimizer begins afresh."]


async def test_a_candidate_has_its_content_and_what_its_checkpoint_says(
    school: School, autojump_clock: object
) -> None:
    async with school.open():
        (group,) = school.send(1)
        await wait_all_tasks_blocked()
    ((candidate,),) = school.learner.batches
    head = school.publisher.head
    assert (candidate.id, candidate.body, candidate.key) == (group, b"group 1", VOLUNTEER.key)
    assert (candidate.version, candidate.checkpoint) == (0, head.hash)
    assert (candidate.beacon, candidate.levels) == (head.manifest.beacon, head.manifest.levels)
    assert not candidate.accepted


async def test_many_groups_are_fed_in_batches(school: School, autojump_clock: object) -> None:
    school.send(2 * VERIFY_BATCH + 1)
    async with school.open():
        await wait_all_tasks_blocked()
    assert school.learner.sizes() == [VERIFY_BATCH, VERIFY_BATCH, 1]


async def test_a_learner_is_fed_no_group_twice(school: School, autojump_clock: object) -> None:
    async with school.open():
        for _ in range(3):
            school.send(1)
            await wait_all_tasks_blocked()
    assert [batch[0].body for batch in school.learner.batches] == [b"group 1", b"group 2", b"group 3"]


async def test_refusals_are_journalled_and_counted(school: School, autojump_clock: object) -> None:
    school.learner.refusing = True
    async with school.open():
        (group,) = school.send(1)
        await wait_all_tasks_blocked()
    assert school.verdict(group) == Code.REWARD_MISMATCH
    assert school.training.status(0).refused == {"reward-mismatch": 1}


async def test_who_else_publishes_waits_for_the_end_of_a_lesson(
    school: School, autojump_clock: object
) -> None:
    school.learner.pause = trio.Event()
    async with school.open():
        school.send(1)
        await wait_all_tasks_blocked()
        assert school.lessons.turn.locked()
        school.learner.pause.set()
        await wait_all_tasks_blocked()
        assert not school.lessons.turn.locked()


async def test_a_beacon_that_was_renewed_while_a_learner_started_is_told_to_it(
    school: School, autojump_clock: object
) -> None:
    opening = school.learner.open

    async def slow(message: Open) -> Opened:
        school.publisher.renew()
        return await opening(message)

    school.learner.open = slow  # type: ignore[method-assign]
    async with school.open():
        await wait_all_tasks_blocked()
    assert school.learner.published_versions == [1]


# --- how keys stand ------------------------------------------------------------------------------


def activate(school: School) -> None:
    """The key of the volunteer has passed its probation."""
    with school.journal._database.transaction() as connection:
        connection.execute("UPDATE keys SET state = 'active'")


async def test_all_groups_of_a_key_on_probation_are_audited(school: School, autojump_clock: object) -> None:
    school.lessons._audit = 0.0
    async with school.open():
        school.send(3)
        await wait_all_tasks_blocked()
    assert [(one.state, one.audit) for one in school.learner.batches[0]] == [("probation", True)] * 3


async def test_of_an_active_key_a_share_is_audited_that_nobody_can_foresee(
    school: School, autojump_clock: object
) -> None:
    """[VER-13]"""
    activate(school)
    school.lessons._audit = 0.3
    ids = school.send(VERIFY_BATCH)
    async with school.open():
        await wait_all_tasks_blocked()
    (batch,) = school.learner.batches
    audited = {one.id for one in batch if one.audit}
    assert {one.state for one in batch} == {"active"}
    secret = school.journal.secret(AUDITS)
    first = [int.from_bytes(hmac.digest(secret, rollout, "sha256")[:8]) / 2**64 for rollout in ids]
    assert audited == {rollout for rollout, drawn in zip(ids, first, strict=True) if drawn < 0.3}


async def test_the_sums_of_a_key_go_to_the_learner_and_come_back(
    school: School, autojump_clock: object
) -> None:
    async with school.open():
        for _ in range(2):
            school.send(1)
            await wait_all_tasks_blocked()
    assert [batch[0].drift for batch in school.learner.batches] == [Drift(), Drift(logprob=1.0)]


async def test_a_key_that_is_doubted_goes_into_quarantine_and_the_learner_is_told(
    school: School, autojump_clock: object
) -> None:
    async with school.open():
        ids = school.send(2)
        await wait_all_tasks_blocked()
        later = school.send(2)
        school.learner.doubted = {later[0]}
        await wait_all_tasks_blocked()
        assert VOLUNTEER.key in school.following.view.quarantined
        head = school.publisher.head
        data = seal(OTHER, Kind.ROLLOUT, school.folder.run, b"other", seq=1, ts=NOW)
        school.journal.hear(OTHER.key, "other", NOW, -1)
        place = (unseal(data).id, OTHER.key, head.hash, head.version, 0)
        school.journal.add(StoredGroup(*place, bytes(32), NOW, data))
        school.lessons.work.set()
        await wait_all_tasks_blocked()
    assert [school.verdict(group) for group in ids + later] == ["accepted", "accepted", "drift", "accepted"]
    assert school.learner.distrusted == [[], [], [VOLUNTEER.key]]
    assert [one.key for one in school.journal.unused()] == [OTHER.key]


async def test_what_was_dropped_is_not_given_to_the_next_learner(
    school: School, autojump_clock: object
) -> None:
    async with school.open():
        school.send(2)
        await wait_all_tasks_blocked()
        school.learner.doubted = set(school.send(1))
        await wait_all_tasks_blocked()
    batches = len(school.learner.batches)
    async with school.open():
        await wait_all_tasks_blocked()
    assert len(school.learner.batches) == batches


async def test_groups_that_are_answered_meanwhile_count_once(school: School, autojump_clock: object) -> None:
    """Their key lost its standing while the learner was at work on them."""
    school.learner.pause = trio.Event()
    async with school.open():
        (group,) = school.send(1)
        await wait_all_tasks_blocked()
        (lost,) = school.send(1)
        error = RemoteError(Code.WRONG_CHECKPOINT, "no")
        school.journal.decide([refused(lost, VOLUNTEER.key, error)], NOW)
        school.learner.pause.set()
        await wait_all_tasks_blocked()
    assert school.verdict(group) == "quarantined"
    assert school.training.status(0).accepted == 0


# --- room ----------------------------------------------------------------------------------------


async def test_whoever_brings_groups_waits_while_the_learner_has_enough(
    school: School, autojump_clock: object
) -> None:
    """All of them: each shard has a reader of its own."""
    school.learner.pause = trio.Event()
    through: list[int] = []

    async def bring(number: int) -> None:
        await school.lessons.room()
        through.append(number)

    school.send(BACKLOG_UPDATES * UPDATE)
    await school.lessons.room()
    school.send(1)
    async with school.open(), trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(bring, number)
        await wait_all_tasks_blocked()
        assert through == []
        school.learner.pause.set()
    assert sorted(through) == [0, 1, 2]


async def test_groups_that_wait_for_an_update_count_as_well(school: School, autojump_clock: object) -> None:
    async with school.open():
        school.send(UPDATE - 1)
        await wait_all_tasks_blocked()
        school.learner.pause = trio.Event()
        school.send(BACKLOG_UPDATES * UPDATE - UPDATE + 2)
        with trio.move_on_after(1) as scope:
            await school.lessons.room()
        assert scope.cancelled_caught
        school.learner.pause.set()
        await school.lessons.room()


# --- a learner that dies -------------------------------------------------------------------------


async def test_after_a_death_every_unused_group_is_given_to_the_next_learner_and_counted_once(
    school: School, autojump_clock: object
) -> None:
    async with school.open():
        ids = school.send(UPDATE - 1)
        await wait_all_tasks_blocked()
        (deadly,) = school.send(1)
        school.learner.deadly = {deadly}
        await trio.sleep(LATER)
        school.send(1)
        await wait_all_tasks_blocked()
    assert [school.verdict(group) for group in ids] == ["accepted"] * len(ids)
    (updated,) = school.updates
    assert updated.used[: UPDATE - 1] == ids
    assert deadly not in updated.used
    fed_again = school.learner.batches[2]
    assert [candidate.accepted for candidate in fed_again] == [True] * (UPDATE - 1)
    assert school.training.status(0).accepted == UPDATE


async def test_groups_over_which_a_learner_died_are_tried_one_by_one_and_the_deadly_one_refused(
    school: School, autojump_clock: object
) -> None:
    ids = school.send(UPDATE + 2)
    school.learner.deadly = {ids[2]}
    async with school.open():
        await trio.sleep(LATER)
        later = school.send(3)
        await trio.sleep(LATER)
    verdicts = [school.verdict(group) for group in ids]
    assert verdicts == ["accepted", "accepted", "environment-failed", *["accepted"] * 3]
    assert [school.verdict(group) for group in later] == ["accepted"] * 3
    assert school.training.status(0).refused == {"environment-failed": 1}
    batches = [[candidate.id for candidate in batch] for batch in school.learner.batches]
    assert batches[0] == ids
    assert batches[1:4] == [[ids[0]], [ids[1]], [ids[2]]]
    assert all(ids[2] not in batch for batch in batches[4:])
    assert batches[-1] == later


async def test_a_group_that_came_alone_is_tried_a_second_time(school: School, autojump_clock: object) -> None:
    """The first death may have had another reason."""
    async with school.open():
        await wait_all_tasks_blocked()
        (group,) = school.send(1)
        school.learner.deadly = {group}
        await trio.sleep(0.5)  # the second learner is not started yet
        school.learner.deadly = set()
        await trio.sleep(LATER)
    assert school.verdict(group) == "accepted"
    assert len(school.learner.opens) == 2


async def test_two_deadly_groups_are_both_found(school: School, autojump_clock: object) -> None:
    ids = school.send(6)
    school.learner.deadly = {ids[1], ids[4]}
    async with school.open():
        await trio.sleep(LATER)
    assert [school.verdict(group) == "accepted" for group in ids] == [True, False, True, True, False, True]


async def test_each_death_is_told_with_the_version_it_goes_on_from(
    school: School, autojump_clock: object
) -> None:
    school.learner.deadly = set(school.send(1))
    async with school.open():
        await trio.sleep(LATER)
    assert school.notes() == ["The child process ended with signal 11. It is started again at version 0."] * 2


async def test_a_learner_that_only_dies_is_given_up_with_where_to_look(
    school: School, autojump_clock: object
) -> None:
    async def dying(message: Open) -> Opened:
        school.learner.opens.append(message)
        raise ChildDied("The child process ended with exit code 1.")

    school.learner.open = dying  # type: ignore[method-assign]
    with pytest.raises(LearnerError) as error:
        await school.lessons.loop()
    assert f"died {MAX_FAILURES} times in a row" in str(error.value)
    assert str(school.folder.path / "learner.log") in str(error.value)
    assert len(school.learner.opens) == MAX_FAILURES


@pytest.mark.parametrize("error", [LearnerError("It cannot work."), StorageError("The disk is full.")])
async def test_a_learner_that_says_it_cannot_go_on_ends_the_trainer_in_its_words(
    school: School, error: Exception, autojump_clock: object
) -> None:
    async def broken() -> FromLearner:
        raise error

    school.learner.receive = broken  # type: ignore[method-assign]
    school.send(1)
    with pytest.raises(type(error), match=str(error)):
        await school.lessons.loop()
    assert len(school.learner.opens) == 1


async def test_a_word_that_was_not_asked_for_is_an_error(school: School, autojump_clock: object) -> None:
    async def confused() -> FromLearner:
        return Opened(None)

    school.learner.receive = confused  # type: ignore[method-assign]
    school.send(1)
    with pytest.raises(LearnerError, match="Opened, which was not asked"):
        await school.lessons.loop()
