"""The learner fed from the journal: in which order, whose groups, and how many at once."""

from __future__ import annotations

import hmac

import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node.learner_messages import (
    Open,
    Opened,
)
from nous_node.node.lessons import AUDITS, BACKLOG_UPDATES, VERIFY_BATCH
from nous_node.node.statistics import Drift
from nous_node.node.store import StoredGroup
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import refused

from .school import LATER, NOW, OTHER, UPDATE, VOLUNTEER, School


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
    assert school.learner.distrusted == [[], [VOLUNTEER.key], []]
    assert [one.key for one in school.journal.unused()] == [OTHER.key]


async def test_a_key_that_this_batch_puts_out_is_out_of_the_update_of_this_batch(
    school: School, autojump_clock: object
) -> None:
    """[REP-2]"""
    async with school.open():
        ids = school.send(UPDATE - 1)
        await wait_all_tasks_blocked()
        last = school.send(3)
        school.learner.doubted = {last[2]}
        await wait_all_tasks_blocked()
    assert not school.updates
    count = school.journal._database.number
    assert count("SELECT count(*) FROM groups WHERE state = 'dropped'") == len(ids) + 2


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
