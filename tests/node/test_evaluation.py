"""Held-out accuracy of the embedded default, as the demo begins with it."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest

from nous_node.envs.registry import make_entry
from nous_node.node.evaluation import Accuracy, held_out_accuracy
from nous_node.node.runfolder import RunFolder
from nous_node.trainer.policy import Policy

TASKS = 256


@pytest.fixture(scope="module")
def environment(base_run: RunFolder) -> Any:
    return make_entry(base_run.manifest.environments[0])


def test_the_embedded_default_can_sort_sometimes(base_run, base_policy, environment) -> None:
    greedy = held_out_accuracy(base_policy, [environment], base_run.manifest.sampling, TASKS)
    assert greedy is not None
    assert greedy.asked == TASKS
    assert 0.3 < greedy.share < 0.6


def test_sampling_at_temperature_1_is_worse_than_the_most_probable_answer(
    base_run, base_policy, environment
) -> None:
    rules = base_run.manifest.sampling
    greedy = held_out_accuracy(base_policy, [environment], rules, TASKS)
    sampled = held_out_accuracy(base_policy, [environment], rules, TASKS, temperature=1.0)
    assert sampled is not None
    assert greedy is not None
    assert 0 < sampled.share < greedy.share


def test_it_is_measured_the_same_twice(base_run, base_policy, environment) -> None:
    rules = base_run.manifest.sampling
    once, again = (held_out_accuracy(base_policy, [environment], rules, 32, 1.0) for _ in range(2))
    assert once == again


class NoHeldOut:
    """An environment that cannot be evaluated with one answer a task."""

    info: ClassVar[Any] = None
    levels = 0


def test_without_held_out_tasks_there_is_no_figure(base_run, base_policy) -> None:
    rules = base_run.manifest.sampling
    environment: Any = NoHeldOut()
    assert held_out_accuracy(base_policy, [], rules, 4) is None
    assert held_out_accuracy(base_policy, [environment], rules, 4) is None


def test_environments_without_held_out_tasks_do_not_count(base_run, base_policy, environment) -> None:
    rules = base_run.manifest.sampling
    other: Any = NoHeldOut()
    assert held_out_accuracy(base_policy, [other, environment], rules, 32) == held_out_accuracy(
        base_policy, [environment], rules, 32
    )


def test_an_answer_without_an_end_scores_nothing(base_run, base_policy, environment) -> None:
    """Four digits and the end need five tokens."""
    short = msgspec.structs.replace(base_run.manifest.sampling, max_tokens=4)
    assert held_out_accuracy(base_policy, [environment], short, 32) == Accuracy(0, 32)


def test_a_policy_whose_weights_are_broken_has_nothing_right(base_run, environment) -> None:
    policy = Policy.load(base_run.checkpoint(0), "float32")
    policy.load_tensors({name: tensor * float("nan") for name, tensor in policy.tensors().items()})
    rules = base_run.manifest.sampling
    assert held_out_accuracy(policy, [environment], rules, 32) == Accuracy(0, 32)
