"""A worker's check of its own first groups: passed, failed, or left out for a reason that is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nous_node.node import selfcheck, worker
from nous_node.node.runfolder import RunFolder
from nous_node.node.worker_messages import (
    Checked,
    Checking,
    FirstGroups,
    Generate,
    Load,
    Loaded,
    Made,
    Order,
    Progress,
    Unfit,
)
from nous_node.protocol.runs import Bound
from nous_node.protocol.tasks import task_seed
from nous_node.trainer.generate import generate
from nous_node.trainer.policy import Policy

CHECKPOINT, KEY, BEACON = b"c" * 32, b"k" * 32, b"b" * 32


def load(
    run: RunFolder, groups: int = 4, memory: int = 0, place: Path | None = None, **thresholds: Any
) -> Load:
    limits = msgspec.structs.replace(run.manifest.thresholds, **thresholds)
    manifest = msgspec.structs.replace(run.manifest, thresholds=limits)
    first = FirstGroups(groups, run.run, KEY, BEACON)
    folder = str(place or run.checkpoint(0))
    return Load(folder, CHECKPOINT, "cpu", 1, manifest.to_bytes(), memory, first)


def orders(run: RunFolder, *counters: int) -> Generate:
    return Generate([Order(n, task_seed(run.run, CHECKPOINT, BEACON, KEY, n), {}) for n in counters])


def told(messages: list[Any]) -> list[Any]:
    return [message for message in messages if not isinstance(message, Progress | Loaded)]


def test_the_first_groups_are_checked_and_handed_out(base_run: RunFolder, worked: Callable[..., Any]) -> None:
    answers = told(worked(load(base_run), orders(base_run, 0), orders(base_run, 1, 2, 3, 4)))
    assert [type(answer) for answer in answers] == [Checking, Made, Checking, Checked, Made]
    checked = answers[3]
    assert checked.good
    assert "The first 4 groups, made in float32 on cpu, would be accepted" in checked.text


def test_what_was_checked_once_is_not_checked_again(base_run: RunFolder, worked: Callable[..., Any]) -> None:
    answers = told(worked(load(base_run, 1), orders(base_run, 0), load(base_run, 1), orders(base_run, 1)))
    assert [type(answer) for answer in answers] == [Checking, Checked, Made, Made]


def test_groups_of_a_second_checkpoint_are_checked_against_that(
    base_run: RunFolder, other_weights: Path, worked: Callable[..., Any]
) -> None:
    for verifier in ("float32", "bfloat16"):
        loose = Bound(1e-2, 1e-2, 1.0)
        first, second = (
            load(
                base_run, 2, place=place, verifier=verifier, logprobs=loose, distances=loose, distance_max=9.0
            )
            for place in (None, other_weights)
        )
        answers = told(worked(first, orders(base_run, 0), second, orders(base_run, 1)))
        assert [type(answer) for answer in answers] == [Checking, Made, Checking, Checked, Made]


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"logprobs": Bound(1e-15, 1e-15, 1e-15)}, "logprob-mismatch"),
        ({"distances": Bound(1e-25, 1e-25, 1e-25), "distance_max": 1e-25}, "sampling-mismatch"),
    ],
)
def test_groups_that_would_be_refused_are_not_handed_out(
    limits: dict[str, Any], code: str, base_run: RunFolder, worked: Callable[..., Any]
) -> None:
    if code == "sampling-mismatch":  # float32 at both ends draws the same tokens nearly always
        limits = {**limits, "verifier": "bfloat16", "logprobs": Bound(1.0, 1.0, 9.0)}
    *_, last = worked(load(base_run, **limits), orders(base_run, 0, 1, 2, 3))
    assert isinstance(last, Unfit)
    assert f"nothing was published: {code}: measured " in last.text
    assert "made in float32 on cpu, recomputed on the CPU in" in last.text
    assert "nous-node doctor" in last.text


def greedy(policy: Policy, wanted: Any, temperature: float, *rest: Any) -> Any:
    """An engine that takes the likeliest token, nearly always, with the log-probs of that."""
    return generate(policy, wanted, 0.01, *rest)


def other_key(policy: Policy, wanted: Any, *rest: Any) -> Any:
    """An engine with randomness of its own, and true log-probs."""
    return generate(policy, [replace(one, key=b"x" * 32) for one in wanted], *rest)


@pytest.mark.parametrize(("engine", "code"), [(greedy, "logprob-mismatch"), (other_key, "sampling-mismatch")])
def test_an_engine_whose_sampling_is_wrong_is_found_before_anything_leaves(
    engine: Any,
    code: str,
    base_run: RunFolder,
    worked: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "generate", engine)
    answers = told(worked(load(base_run), orders(base_run, 0)))
    assert [type(answer) for answer in answers] == [Checking, Unfit]
    assert code in answers[-1].text


def test_an_environment_that_does_not_repeat_itself_loses_its_groups_until_it_does(
    base_run: RunFolder, worked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is checked first has to repeat, however many fail before that."""
    from nous_node.envs.sort_digits import SortDigits

    collect = SortDigits.collect_trajectories
    rewards = iter((0.25, 0.75, 0.5, 0.5, 0.5, 0.25))

    async def moody(self: Any, task: Any, policy: Any) -> Any:
        reward = next(rewards)
        made = await collect(self, task, policy)
        return [msgspec.structs.replace(one, reward=reward) for one in made]

    monkeypatch.setattr(SortDigits, "collect_trajectories", moody)
    answers = worked(load(base_run, 1), *[orders(base_run, number) for number in range(3)])
    first, *others = [group for answer in answers if isinstance(answer, Made) for group in answer.groups]
    assert first.body == b""
    assert first.environment == "sort-digits"
    assert "does not say the same twice" in first.failure
    assert "reward-mismatch: " in first.failure
    assert all(one.body and not one.failure for one in others)


def test_a_copy_that_does_not_fit_the_memory_is_left_out_and_told(
    base_run: RunFolder, worked: Callable[..., Any]
) -> None:
    answers = told(worked(load(base_run, memory=1 << 20, verifier="bfloat16"), orders(base_run, 0)))
    assert [type(answer) for answer in answers] == [Checking, Checked, Made]
    assert not answers[1].good
    assert "published unchecked: a copy of the model in bfloat16 needs" in answers[1].text


def test_an_engine_that_only_just_passes_is_told_to_expect_a_drift(
    base_run: RunFolder, worked: Callable[..., Any]
) -> None:
    close = Bound(1e-9, 1e-9, 1.0)
    *_, checked, _ = told(worked(load(base_run, logprobs=close), orders(base_run, 0, 1, 2, 3)))
    assert not checked.good
    assert "would be accepted" in checked.text
    assert "deviations above honest ones, where 2 are allowed in the long run" in checked.text


def test_a_check_that_takes_too_long_ends_after_one_trajectory(
    base_run: RunFolder, worked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "CHECK_SECONDS", 0.0)
    answers = told(worked(load(base_run), orders(base_run, 0), orders(base_run, 1)))
    assert [type(answer) for answer in answers] == [Checking, Checked, Made, Made]
    assert "The first group, made in" in answers[1].text
