"""The embedded default environment."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter

import pytest

from nous_node.envs.environment import HeldOut, Policy, PolicySettings
from nous_node.envs.errors import BadConfig, EnvironmentFailed
from nous_node.envs.sort_digits import LEVELS, SortDigits
from nous_node.protocol.errors import LocalError
from nous_node.protocol.rollouts import Role, unpack_tokens
from nous_node.protocol.runs import Setting

SEED = bytes(range(32))


def seeds(count: int) -> list[bytes]:
    return [hashlib.sha256(index.to_bytes(4, "little")).digest() for index in range(count)]


def test_a_task_follows_from_its_seed_as_the_docstring_says() -> None:
    stream = hashlib.shake_256(b"nous/sort-digits/1\x00" + SEED).digest(16)
    length = 4 + stream[0] * 3 // 256
    digits = "".join(str(byte * 10 // 256) for byte in stream[1 : 1 + length])
    task = SortDigits({}).task(SEED, 2)
    assert task.payload == digits
    assert SortDigits({}).prompt(task) == f"sort {digits}="


def test_level_zero_has_the_base_length() -> None:
    tasks = [SortDigits({"length": 5}).task(seed, 0) for seed in seeds(50)]
    assert {len(str(task.payload)) for task in tasks} == {5}


def test_a_level_mixes_lengths_evenly() -> None:
    lengths = Counter(len(str(SortDigits({}).task(seed, 3).payload)) for seed in seeds(4000))
    assert sorted(lengths) == [4, 5, 6, 7]
    assert all(900 < count < 1100 for count in lengths.values())


def test_a_level_beyond_the_last_counts_as_the_last() -> None:
    environment = SortDigits({})
    assert environment.task(SEED, 1000) == environment.task(SEED, LEVELS)


def test_digits_are_spread_evenly() -> None:
    counts = Counter("".join(str(SortDigits({}).task(seed, 0).payload) for seed in seeds(2500)))
    assert sorted(counts) == list("0123456789")
    assert all(850 < count < 1150 for count in counts.values())


def test_held_out_tasks_are_fixed_and_distinct() -> None:
    environment = SortDigits({})
    tasks = environment.held_out(256)
    assert tasks == environment.held_out(256)
    assert len({task.seed for task in tasks}) == 256
    assert isinstance(environment, HeldOut)


@pytest.mark.parametrize(
    ("answer", "ended", "reward", "correct"),
    [
        ("2358", True, 1.0, 1.0),
        ("2358", False, 0.0, 0.0),
        ("2385", True, 0.5, 0.0),
        ("23580", True, 0.8, 0.0),
        ("235", True, 0.75, 0.0),
        ("", True, 0.0, 0.0),
        (" 2358", True, 0.0, 0.0),
        ("２３５８", True, 0.0, 0.0),
    ],
)
def test_the_reward_is_the_share_of_right_positions(
    answer: str, ended: bool, reward: float, correct: float
) -> None:
    environment = SortDigits({})
    task = environment.task(SEED, 0)
    task = type(task)(task.seed, task.level, "5283")
    score = environment.score(task, answer, ended)
    assert score.reward == pytest.approx(reward)
    assert score.components == {"correct": correct}


def test_a_group_has_one_raw_prompt_and_one_answer_a_sample(policy: Policy, settings: PolicySettings) -> None:
    environment = SortDigits({})
    task = environment.task(SEED, 0)
    trajectories = asyncio.run(environment.collect_trajectories(task, policy))
    prompt = policy.tokenizer.encode(environment.prompt(task))
    assert len(trajectories) == settings.group
    for trajectory in trajectories:
        tokens = unpack_tokens(trajectory.tokens)
        assert tokens[: len(prompt)] == prompt
        assert [segment.role for segment in trajectory.segments] == [Role.RAW, Role.ASSISTANT]
        answer = policy.tokenizer.decode(tokens[len(prompt) : -1])
        score = environment.score(task, answer, trajectory.finish == "stop")
        assert (trajectory.reward, trajectory.components) == score


@pytest.mark.parametrize(
    "config", [{"lenght": 4}, {"length": 0}, {"length": 65}, {"length": True}, {"length": "4"}]
)
def test_a_bad_config_is_told_with_what_is_allowed(config: dict[str, Setting]) -> None:
    with pytest.raises(BadConfig, match="length"):
        SortDigits(config)


@pytest.mark.parametrize(("seed", "level"), [(b"short", 0), (SEED, -1)])
def test_a_seed_of_another_size_or_a_negative_level_is_refused(seed: bytes, level: int) -> None:
    with pytest.raises(LocalError):
        SortDigits({}).task(seed, level)


def test_a_task_of_another_environment_is_refused() -> None:
    environment = SortDigits({})
    task = environment.task(SEED, 0)
    with pytest.raises(EnvironmentFailed):
        environment.prompt(type(task)(SEED, 0, 17))
