"""Held-out accuracy of the embedded default, as the demo begins with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from nous_node.envs.environment import EnvironmentInfo, PolicySettings, Task
from nous_node.envs.registry import make_entry
from nous_node.envs.session import Session
from nous_node.node.evaluation import Accuracy, held_out_accuracy, held_out_tasks, play
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.rollouts import Role, Trajectory
from nous_node.trainer.policy import Policy

TASKS = 256


@pytest.fixture(scope="module")
def environment(base_run: RunFolder) -> Any:
    return make_entry(base_run.manifest.environments[0])


@pytest.fixture
def rules(base_run: RunFolder, base_policy: Policy) -> PolicySettings:
    return PolicySettings.of(base_run.manifest, base_policy.tokenizer)


def test_the_embedded_default_can_sort_sometimes(rules, base_policy, environment) -> None:
    greedy = held_out_accuracy(base_policy, [environment], rules, TASKS)
    assert greedy is not None
    assert greedy.asked == TASKS
    assert 0.3 < greedy.share < 0.6


def test_sampling_at_temperature_1_is_worse_than_the_most_probable_answer(
    rules, base_policy, environment
) -> None:
    greedy = held_out_accuracy(base_policy, [environment], rules, TASKS)
    sampled = held_out_accuracy(base_policy, [environment], rules, TASKS, temperature=1.0)
    assert sampled is not None
    assert greedy is not None
    assert 0 < sampled.share < greedy.share


def test_it_is_measured_the_same_twice(rules, base_policy, environment) -> None:
    once, again = (held_out_accuracy(base_policy, [environment], rules, 32, 1.0) for _ in range(2))
    assert once == again


class Adding:
    """The first of its tasks is worth all, the last one fails; it names no held-out tasks itself."""

    info: ClassVar[EnvironmentInfo] = EnvironmentInfo("adding", "1", "exact", "pure", False, 1, 1)
    levels = 0

    def __init__(self) -> None:
        self.seeds: list[bytes] = []

    def task(self, seed: bytes, level: int) -> Task:
        self.seeds.append(seed)
        return Task(seed, level, None)

    async def collect_trajectories(self, task: Task, policy: Any) -> list[Trajectory]:
        session = Session(policy, 0)
        session.append(policy.tokenizer.encode("sort 5283="), Role.RAW)
        await session.sample()
        if task.seed == self.seeds[-1]:
            raise ZeroDivisionError("a bug in the scorer")
        return [session.finish(1.0 if task.seed == self.seeds[0] else 0.5)]


class Duel(Adding):
    info: ClassVar[EnvironmentInfo] = EnvironmentInfo("duel", "1", "exact", "pure", False, 1, 2)


def test_any_environment_has_held_out_tasks_that_are_its_own(rules, base_policy) -> None:
    adding = Adding()
    played = play(base_policy, adding, rules, 4)
    assert (played.right, played.asked, played.rewards) == (1, 4, [1.0, 0.5, 0.5])
    assert played.failed == ["The environment adding failed: ZeroDivisionError: a bug in the scorer"]
    assert len(set(adding.seeds)) == 4
    seeds = [task.seed for task in held_out_tasks(Duel(), 4)]
    assert set(seeds).isdisjoint(adding.seeds)


def test_without_an_environment_that_is_played_alone_there_is_no_figure(rules, base_policy) -> None:
    assert held_out_accuracy(base_policy, [], rules, 4) is None
    assert held_out_accuracy(base_policy, [Duel()], rules, 4) is None


def test_games_against_itself_do_not_count(rules, base_policy, environment) -> None:
    assert held_out_accuracy(base_policy, [Duel(), environment], rules, 32) == held_out_accuracy(
        base_policy, [environment], rules, 32
    )


def test_a_group_without_trajectories_is_not_right(rules, base_policy) -> None:
    class Silent(Adding):
        async def collect_trajectories(self, task: Task, policy: object) -> list[Trajectory]:
            return []

    assert held_out_accuracy(base_policy, [Silent()], rules, 2) == Accuracy(0, 2)


def test_an_answer_without_an_end_scores_nothing(rules, base_policy, environment) -> None:
    """Four digits and the end need five tokens."""
    short = replace(rules, max_tokens=4)
    assert held_out_accuracy(base_policy, [environment], short, 32) == Accuracy(0, 32)


def test_a_policy_whose_weights_are_broken_has_nothing_right(rules, base_run, environment) -> None:
    policy = Policy.load(base_run.checkpoint(0), "float32")
    policy.load_tensors({name: tensor * float("nan") for name, tensor in policy.tensors().items()})
    assert held_out_accuracy(policy, [environment], rules, 32) == Accuracy(0, 32)
