"""The learner with the embedded default and honest groups: verdicts, versions, and what it holds between."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nous_node.node.create import folder_entries
from nous_node.node.learner import Learner
from nous_node.node.learner_messages import (
    Broken,
    Candidate,
    Judged,
    Open,
    Opened,
    Proceed,
    Published,
    Rested,
    Updated,
    Verdicts,
    Verify,
)
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.errors import Code, LocalError
from nous_node.protocol.rollouts import RolloutGroup, Trajectory, pack_floats, trained_tokens
from nous_node.trainer.advantage import Baseline
from nous_node.trainer.checkpoint import tensor_hash

UPDATE = 4


@pytest.fixture
def folder(make_folder: Any) -> RunFolder:
    run: RunFolder = make_folder(groups=UPDATE)
    return run


@pytest.fixture(scope="module")
def honest(base_run: RunFolder, volunteers: Any) -> list[Candidate]:
    """Groups of version 0."""
    groups: list[Candidate] = volunteers.candidates(base_run, 4 * UPDATE)
    return groups


def opening(folder: RunFolder, version: int = 0, place: Path | None = None, **changes: Any) -> Open:
    place = place or folder.checkpoint(version)
    message = Open(str(folder.path), version, str(place), {version: str(place)}, {}, "cpu", 1)
    return msgspec.structs.replace(message, **changes)


def edited(candidate: Candidate, **changes: Any) -> Candidate:
    group = RolloutGroup.from_bytes(candidate.body)
    one, *others = group.trajectories
    body = msgspec.structs.replace(group, trajectories=[msgspec.structs.replace(one, **changes), *others])
    return msgspec.structs.replace(candidate, body=body.to_bytes())


def accepted_before(candidates: list[Candidate]) -> list[Candidate]:
    return [msgspec.structs.replace(candidate, accepted=True) for candidate in candidates]


def verdicts(judged: list[Judged]) -> list[str]:
    return [one.receipt.code or one.receipt.verdict for one in judged]


def lessons(learner: Learner, candidates: list[Candidate]) -> Updated:
    """A batch that makes exactly one version, which is published."""
    assert set(verdicts(learner.verify(candidates))) == {"accepted"}
    updated = learner.step()
    assert updated is not None
    assert learner.step() is None
    learner.published(Published(updated.version))
    return updated


# --- verdicts ------------------------------------------------------------------------------------


def test_honest_groups_are_accepted_with_the_credit_of_their_tokens(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    for candidate, one in zip(honest, learner.verify(honest), strict=True):
        group = RolloutGroup.from_bytes(candidate.body)
        receipt = one.receipt
        assert (receipt.rollout, receipt.peer, receipt.verdict) == (candidate.id, candidate.key, "accepted")
        assert receipt.credit == sum(map(trained_tokens, group.trajectories))
        assert one.reward == pytest.approx(sum(t.reward for t in group.trajectories) / 4)
    assert len(learner.held) == len(honest)


def test_verdicts_come_in_the_order_of_the_candidates(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    false = edited(honest[1], reward=0.125)
    forged = edited(honest[3], logprobs=pack_floats([-0.01] * trained_tokens(first(honest[3]))))
    garbage = msgspec.structs.replace(honest[4], body=b"\xc1")
    judged = learner.verify([honest[0], false, honest[2], forged, garbage])
    assert verdicts(judged) == [
        "accepted",
        Code.REWARD_MISMATCH,
        "accepted",
        Code.LOGPROB_MISMATCH,
        Code.MALFORMED,
    ]
    assert [one.receipt.rollout for one in judged] == [one.id for one in honest[:5]]
    assert [bool(one.text) for one in judged] == [False, True, False, True, True]
    assert [group.candidate.id for group in learner.held] == [honest[0].id, honest[2].id]


def trajectories(candidate: Candidate) -> list[Trajectory]:
    return RolloutGroup.from_bytes(candidate.body).trajectories


def first(candidate: Candidate) -> Trajectory:
    return trajectories(candidate)[0]


def test_a_group_of_a_version_that_is_not_held_is_stale(folder, honest) -> None:
    learner = Learner.open(opening(folder, 7, folder.checkpoint(0)))
    (one,) = learner.verify([honest[0]])
    assert (one.receipt.code, one.receipt.measured, one.receipt.threshold) == (Code.STALE, 7.0, 4.0)
    assert not learner.held


def test_groups_that_were_accepted_before_a_restart_are_not_verified_again(folder, honest) -> None:
    """Their log-probs are not looked at: the verdict stands, and the checkpoint may be gone by now."""
    candidate = accepted_before(
        [edited(honest[0], logprobs=pack_floats([-0.5] * trained_tokens(first(honest[0]))))]
    )
    learner = Learner.open(opening(folder))
    assert verdicts(learner.verify(candidate)) == ["accepted"]
    assert len(learner.held) == 1


def test_groups_accepted_before_that_are_too_old_now_are_reported_as_done(folder, honest) -> None:
    learner = Learner.open(opening(folder, 7, folder.checkpoint(0)))
    (old,) = accepted_before([honest[0]])
    (one,) = learner.verify([old])
    assert (one.receipt.verdict, one.receipt.credit) == ("accepted", 0)
    assert learner.aged == [old.id]
    assert not learner.held


# --- versions ------------------------------------------------------------------------------------


def test_there_is_no_version_before_there_are_enough_groups(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    learner.verify(honest[: UPDATE - 1])
    assert learner.step() is None
    assert len(learner.held) == UPDATE - 1
    assert not folder.checkpoint(1).exists()


def test_a_version_is_made_of_the_groups_that_came_first_and_stands_in_its_folder(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    before = {name: tensor.clone() for name, tensor in learner.policy.tensors().items()}
    learner.verify(honest[: UPDATE + 1])
    updated = learner.step()
    assert updated is not None
    assert (updated.version, updated.folder) == (1, str(folder.checkpoint(1)))
    assert updated.used == [candidate.id for candidate in honest[:UPDATE]]
    assert (updated.aged, len(learner.held)) == (0, 1)
    assert updated.files == folder_entries(folder.checkpoint(1))
    assert {entry.path for entry in updated.files} == {path.name for path in folder.checkpoint(0).iterdir()}
    now = learner.policy.tensors()
    assert updated.tensors == {name: tensor_hash(tensor) for name, tensor in now.items()}
    assert any((now[name] != before[name]).any() for name in now)
    assert updated.stats["groups"] == UPDATE
    assert updated.stats["staleness"] == 0
    assert 0 <= updated.stats["correct"] <= updated.stats["reward"] <= 1
    assert updated.eval == {}
    assert folder.optimizer(1).is_dir()


def test_groups_without_signal_are_counted(folder, honest) -> None:
    """The embedded default makes hardly any by itself."""
    learner = Learner.open(opening(folder))
    learner.verify(honest[:UPDATE])
    learner.held[1] = dataclasses.replace(learner.held[1], rewards=[0.5] * 4)
    updated = learner.step()
    assert updated is not None
    assert updated.stats["zero_variance"] == 1
    assert honest[1].id in updated.used


def test_rollouts_are_verified_against_the_version_that_made_them(folder, honest, volunteers) -> None:
    learner = Learner.open(opening(folder))
    lessons(learner, honest[:UPDATE])
    fresh = volunteers.candidates(folder, 2, version=1)
    late = honest[UPDATE : UPDATE + 2]
    assert verdicts(learner.verify([fresh[0], late[0], fresh[1], late[1]])) == ["accepted"] * 4
    swapped = msgspec.structs.replace(late[0], version=1)
    assert verdicts(learner.verify([swapped])) == [Code.LOGPROB_MISMATCH]


def test_the_age_of_groups_is_told(folder, honest, volunteers) -> None:
    learner = Learner.open(opening(folder))
    lessons(learner, honest[:UPDATE])
    fresh = volunteers.candidates(folder, UPDATE // 2, version=1)
    assert lessons(learner, [*fresh, *honest[UPDATE : UPDATE + UPDATE // 2]]).stats["staleness"] == 0.5


def test_groups_that_became_too_old_are_dropped_and_reported_as_done(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    learner.verify(honest[:2])
    learner.published(Published(folder.manifest.staleness + 1))
    assert learner.step() is None
    assert not learner.held
    assert set(learner.baselines) == {"sort-digits"}
    fresh = [
        msgspec.structs.replace(one, version=folder.manifest.staleness + 1)
        for one in honest[2 : 2 + UPDATE]  # the same weights under another number
    ]
    updated = lessons(learner, fresh)
    assert updated.aged == 2
    assert updated.used == [one.id for one in [*fresh, *honest[:2]]]
    more = [msgspec.structs.replace(one, version=fresh[0].version) for one in honest[6 : 6 + UPDATE]]
    assert lessons(learner, accepted_before(more)).aged == 0


def test_groups_just_young_enough_are_learnt_from(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    learner.verify(honest[:UPDATE])
    learner.published(Published(folder.manifest.staleness))
    updated = learner.step()
    assert updated is not None
    assert (updated.aged, updated.stats["staleness"]) == (0, folder.manifest.staleness)


def test_a_renewed_beacon_is_the_same_weights_under_another_number(folder, honest, volunteers) -> None:
    learner = Learner.open(opening(folder))
    learner.published(Published(1))
    learner.published(Published(1))  # a version's own publication is no news
    renewed = volunteers.candidates(folder, UPDATE, version=1, weights=folder.checkpoint(0))
    updated = lessons(learner, renewed)
    assert (updated.version, updated.stats["staleness"]) == (2, 0)


def test_levels_rise_and_the_rate_with_them(folder, honest) -> None:
    learner = Learner.open(opening(folder, levels={"sort-digits": 1}))
    learner.curriculum.raise_at = 0.0
    learner.optimizer.steps = 1000
    for _ in range(256):
        learner.curriculum.note("sort-digits", 1, 1.0)
    updated = lessons(learner, honest[:UPDATE])
    assert updated.levels == {"sort-digits": 2}
    assert learner.optimizer.steps == learner.learning.hold


def test_accuracy_is_measured_every_so_many_versions(make_folder, honest) -> None:
    learner = Learner.open(opening(make_folder(groups=2, evaluate_every=2, evaluate_tasks=8)))
    measured = [lessons(learner, honest[start : start + 2]).eval for start in (0, 2, 4, 6)]
    assert [set(one) for one in measured] == [set(), {"greedy"}, set(), {"greedy"}]


# --- after a stop --------------------------------------------------------------------------------


def test_a_learner_begun_anew_makes_the_very_step_that_the_old_one_would_have_made(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    lessons(learner, honest[:UPDATE])
    second = lessons(learner, honest[UPDATE : 2 * UPDATE])
    shutil.rmtree(second.folder)
    folders = {version: str(folder.checkpoint(version)) for version in (0, 1)}
    again = Learner.open(opening(folder, 1, folders=folders))
    assert again.note == ""
    repeated = lessons(again, honest[UPDATE : 2 * UPDATE])
    assert repeated.tensors == second.tensors
    assert repeated.files == second.files


def test_the_optimizers_state_is_found_after_a_renewed_beacon(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    lessons(learner, honest[:UPDATE])
    again = Learner.open(opening(folder, 2, folder.checkpoint(1)))
    assert (again.version, again.note) == (2, "")
    assert again.optimizer.steps == learner.optimizer.steps > 0


def test_an_optimizers_state_that_is_damaged_is_told_and_begins_afresh(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    lessons(learner, honest[:UPDATE])
    for file in folder.optimizer(1).iterdir():
        file.write_bytes(b"damaged")
    again = Learner.open(opening(folder, 1))
    assert "begins afresh" in again.note
    assert again.optimizer.steps == 0
    again.verify(accepted_before([msgspec.structs.replace(one, version=1) for one in honest[:UPDATE]]))
    assert again.step() is not None


def test_a_baseline_is_taken_up(folder) -> None:
    assert Learner.open(opening(folder, baselines={"x": 0.25})).baselines == {"x": Baseline(0.25)}


def test_settings_that_are_wrong_are_told(folder) -> None:
    folder.learning.write_text("groups = 0\n")
    with pytest.raises(LocalError, match="groups"):
        Learner.open(opening(folder))


# --- the conversation ----------------------------------------------------------------------------


def test_a_batch_is_answered_with_verdicts_then_versions_then_rest(folder, honest, taught) -> None:
    said = taught(opening(folder), Verify(honest[: 2 * UPDATE + 1]), Proceed(), Verify([]), Proceed())
    assert [type(one) for one in said] == [Opened, Verdicts, Updated, Updated, Rested, Verdicts, Rested]
    opened, judged, one, two, rested, nothing, still = said
    assert (opened.greedy, opened.note) == (None, "")
    assert len(judged.groups) == 2 * UPDATE + 1
    assert [one.version, two.version] == [1, 2]
    assert (rested.held, nothing.groups, still.held) == (1, [], 1)


def test_accuracy_is_measured_first_where_it_is_asked_for(folder, taught) -> None:
    (opened,) = taught(opening(folder, evaluate=True))
    assert 0 <= opened.greedy <= 1


def test_work_before_a_checkpoint_is_refused_in_words(taught) -> None:
    said = taught(Verify([]), Proceed(), Published(1))
    assert [type(one) for one in said] == [Broken] * 3
    assert "before a checkpoint" in said[0].text
