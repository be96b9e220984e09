"""A policy that collapses is noticed and taken back to its best version: the embedded default. [VER-15]"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nous_node.node.canary import WINDOW, Canary, Measure
from nous_node.node.evaluation import Accuracy
from nous_node.node.learner import Learner
from nous_node.node.learner_messages import Candidate, Open, Proceed, Published, Updated, Verify
from nous_node.node.runfolder import RunFolder
from nous_node.trainer.checkpoint import tensor_hash, tensor_hashes
from nous_node.trainer.errors import CheckpointError
from nous_node.trainer.policy import Policy

UPDATE = 4


@pytest.fixture(scope="module")
def honest(base_run: RunFolder, volunteers: Any) -> list[Candidate]:
    """Groups of version 0."""
    groups: list[Candidate] = volunteers.candidates(base_run, 4 * UPDATE)
    return groups


def opening(folder: RunFolder, version: int = 0, **changes: Any) -> Open:
    place = str(folder.checkpoint(version))
    message = Open(str(folder.path), version, place, {version: place}, {}, "cpu", 1)
    return msgspec.structs.replace(message, **changes)


def ids(candidates: list[Candidate]) -> list[bytes]:
    return [candidate.id for candidate in candidates]


def accepted_before(candidates: list[Candidate]) -> list[Candidate]:
    return [msgspec.structs.replace(candidate, accepted=True) for candidate in candidates]


def lessons(learner: Learner, candidates: list[Candidate]) -> Updated:
    """A batch that makes exactly one version, which is published."""
    assert {one.receipt.verdict for one in learner.verify(candidates)} == {"accepted"}
    updated = learner.step()
    assert updated is not None
    learner.published(Published(updated.version))
    return updated


BASE = "model.safetensors"


@pytest.fixture
def fragile(make_folder: Any) -> RunFolder:
    """A run that learns five hundred times too fast and looks at what it did after each update."""
    run: RunFolder = make_folder(groups=UPDATE, evaluate_every=1, evaluate_tasks=64, rate=0.5, warmup=0)
    return run


def renamed(candidates: list[Candidate], version: int) -> list[Candidate]:
    """The same groups as of a later version with the same weights."""
    return [
        msgspec.structs.replace(one, version=version, id=bytes([version]) + one.id[1:]) for one in candidates
    ]


def weights(learner: Learner) -> dict[str, bytes]:
    return {name: tensor_hash(tensor) for name, tensor in learner.policy.tensors().items()}


def test_a_policy_that_collapses_is_published_with_the_weights_of_the_best_version(
    fragile, honest, taught
) -> None:
    said = taught(opening(fragile, evaluate=True), Verify(honest[: UPDATE + 2]), Proceed())
    opened, (updated,) = said[0], [one for one in said if isinstance(one, Updated)]
    assert opened.greedy > 0.3
    assert (updated.version, updated.rolled_back, updated.good) == (1, 0, 0)
    assert updated.eval == {"greedy": opened.greedy}
    assert updated.stats["rolled_back"] == 0
    assert updated.stats["best"] == opened.greedy
    assert updated.stats["collapsed"] < 0.1
    assert updated.stats["rate"] == 0.5
    base = tensor_hashes(fragile.checkpoint(0) / BASE)
    assert updated.tensors == tensor_hashes(fragile.checkpoint(1) / BASE)
    kept = Policy.load(fragile.checkpoint(0)).tensors()
    assert updated.tensors == {name: tensor_hash(tensor) for name, tensor in kept.items()}
    assert set(base) == set(updated.tensors)
    assert updated.used == ids(honest[: UPDATE + 2])  # those that waited, too
    assert updated.aged == 2
    assert said[-1].held == 0


def test_a_rate_that_is_too_high_is_halved_until_the_policy_stays_well(make_folder, honest) -> None:
    """It ends: what the run loses are some updates."""
    fast = make_folder(groups=UPDATE, evaluate_every=1, evaluate_tasks=64, rate=0.05, warmup=0)
    learner = Learner.open(opening(fast))
    learner.opened(opening(fast, evaluate=True))
    groups, rolled = honest[:UPDATE], []
    while len(rolled) < 12:
        updated = lessons(learner, groups)
        if updated.rolled_back is None:
            break
        assert updated.rolled_back == 0
        rolled.append(learner.optimizer.config.rate)
        groups = renamed(honest[:UPDATE], updated.version)
    assert rolled == [0.05 / 2**number for number in range(1, len(rolled) + 1)]
    assert 2 <= len(rolled) < 10


def test_groups_that_the_collapsed_weights_made_are_accepted_and_not_learnt_from(fragile, honest) -> None:
    learner = Learner.open(opening(fragile))
    learner.opened(opening(fragile, evaluate=True))
    lessons(learner, honest[:UPDATE])
    late = learner.verify(honest[UPDATE : 2 * UPDATE])
    assert {one.receipt.verdict for one in late} == {"accepted"}
    assert learner.step() is None
    assert learner.aged == ids(honest[UPDATE : 2 * UPDATE])


def scripted(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """What the next measurements say."""
    figures = iter(shares)
    monkeypatch.setattr(Learner, "evaluate", lambda self: Accuracy(round(next(figures) * 100), 100))


def test_policy_optimizer_levels_and_baseline_are_those_of_the_best_version(
    make_folder, honest, monkeypatch
) -> None:
    folder = make_folder(groups=UPDATE, evaluate_every=1)
    learner = Learner.open(opening(folder))
    scripted(monkeypatch, 0.8, 0.7, 0.1)
    lessons(learner, honest[:UPDATE])
    best, baseline = weights(learner), learner.baselines
    state = {name: tensor.clone() for name, tensor in learner.optimizer.state().items()}
    lessons(learner, honest[UPDATE : 2 * UPDATE])
    assert weights(learner) != best
    learner.curriculum.levels = {"sort-digits": 0}
    updated = lessons(learner, honest[2 * UPDATE : 3 * UPDATE])
    assert (updated.version, updated.rolled_back, updated.good, updated.levels) == (3, 1, 1, {})
    assert updated.tensors == weights(learner) == best
    assert (learner.optimizer.steps, learner.baselines) == (1, baseline)
    assert all((tensor == state[name]).all() for name, tensor in learner.optimizer.state().items())


def test_a_rollback_is_remembered_after_a_restart(make_folder, honest, monkeypatch) -> None:
    folder = make_folder(groups=UPDATE, evaluate_every=1)
    learner = Learner.open(opening(folder))
    scripted(monkeypatch, 0.8, 0.1, 0.1, 0.9)
    lessons(learner, honest[:UPDATE])
    lessons(learner, honest[UPDATE : 2 * UPDATE])
    folders = {version: str(folder.checkpoint(version)) for version in range(3)}
    again = Learner.open(opening(folder, 2, folders=folders))
    assert again.canary == learner.canary
    assert again.optimizer.config.rate == again.learning.rate / 2
    assert again.optimizer.steps == 1
    again.verify(accepted_before(honest[2 * UPDATE : 3 * UPDATE]))
    assert again.step() is None  # of version 0, which is before the rollback
    fresh = renamed(honest[:UPDATE], 2)
    again.verify(accepted_before(fresh))
    updated = again.step()
    assert updated is not None
    assert (updated.version, updated.rolled_back) == (3, 1)
    assert again.optimizer.config.rate == again.learning.rate / 4
    again.verify(accepted_before(renamed(honest[:UPDATE], 3)))
    updated = again.step()
    assert updated is not None
    assert (updated.rolled_back, updated.good) == (None, 4)
    assert again.optimizer.config.rate == again.learning.rate / 2


def test_a_best_version_that_was_lost_stops_the_trainer_with_what_to_do(
    make_folder, honest, monkeypatch
) -> None:
    folder = make_folder(groups=UPDATE, evaluate_every=1)
    learner = Learner.open(opening(folder))
    scripted(monkeypatch, 0.8, 0.1)
    lessons(learner, honest[:UPDATE])
    (folder.checkpoint(1) / BASE).write_bytes(b"damaged")
    learner.verify(honest[UPDATE : 2 * UPDATE])
    with pytest.raises(CheckpointError, match="collapsed, and version 1 cannot be taken up again"):
        learner.step()


def test_without_held_out_tasks_the_mean_reward_is_watched(make_folder, honest) -> None:
    learner = Learner.open(opening(make_folder(groups=UPDATE, evaluate_every=1)))
    learner.environments = []
    learner.canary = Canary(levels=dict(learner.curriculum.levels))
    learner.canary.passed(0, Measure(0.9, 0.01), learner.curriculum.levels, {})
    learner.canary.rewards = [0.2, 0.1] * (WINDOW // 2)
    updated = lessons(learner, honest[:UPDATE])
    assert (updated.rolled_back, updated.eval) == (0, {})
    assert updated.stats["collapsed"] < 0.3
    assert updated.tensors == weights(Learner.open(opening(learner.folder)))
