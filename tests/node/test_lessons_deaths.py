"""A learner that dies or says what it should not: what becomes of the groups that it had."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node.coach import LearnerError
from nous_node.node.home import StorageError
from nous_node.node.learner_messages import (
    FromLearner,
    Open,
    Opened,
)
from nous_node.node.lessons import MAX_FAILURES
from nous_node.node.pipe import ChildDied

from .school import LATER, UPDATE, School


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


async def test_a_learner_that_dies_between_its_verdicts_and_an_update_loses_nothing(
    school: School, autojump_clock: object
) -> None:
    school.learner.absent = True
    async with school.open():
        ids = school.send(UPDATE)
        await trio.sleep(0.5)  # the second learner is not started yet
        school.learner.absent = False
        await trio.sleep(LATER)
    assert [school.verdict(group) for group in ids] == ["accepted"] * UPDATE
    (updated,) = school.updates
    assert updated.used == ids
    assert [one.accepted for one in school.learner.batches[1]] == [True] * UPDATE
    assert school.training.status(0).accepted == UPDATE


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
