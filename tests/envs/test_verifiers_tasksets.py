"""A taskset of verifiers (v1), unmodified, in an interpreter that has the library, through a host process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nous_node.envs.environment import Environment, PolicySettings
from nous_node.envs.errors import BadConfig, BrokenEnvironment
from nous_node.envs.remote import remote
from nous_node.envs.verifiers_v1 import VerifiersV1
from nous_node.protocol.runs import Setting

from .package_plays import chat_settings, collected, launch, one_of, text

VALUE = "nous_node.envs.verifiers_v1:VerifiersV1"

Make = Callable[..., Environment]

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def make(ecosystem_python: Callable[[str], Path]) -> Make:
    place = launch(ecosystem_python("verifiers"), "v1-recipes")

    def made(config: Mapping[str, Setting] | None = None, name: str = "v1-recipes") -> Environment:
        return remote(place, VerifiersV1.facts(name), VALUE, name, config or {})

    return made


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> PolicySettings:
    return chat_settings(tmp_path_factory.mktemp("models"), "qwen3", max_tokens=512)


def call(item: str) -> str:
    return f'<tool_call>\n{{"name": "shelf_amount", "arguments": {{"item": "{item}"}}}}\n</tool_call>'


def cooks(so_far: str, trajectory: int) -> str:
    """Asks the shelf, then multiplies; the even trajectories are one off."""
    item, people = re.findall(r"How much (\w+) do (\d+) people", so_far)[-1]
    found = re.findall(r"<tool_response>\n(\d+) g", so_far)
    if not found:
        return call(item)
    return f"That makes {int(found[-1]) * int(people) + (trajectory + 1) % 2}."


def test_hooks_tools_rewards_and_metrics_are_the_tasksets(make: Make, settings: PolicySettings) -> None:
    made = collected(make(), settings, cooks)
    assert [one.reward for one in made] == [0.5, 2.5, 0.5, 2.5]
    assert [one.components["right"] for one in made] == [0.0, 2.0, 0.0, 2.0]
    assert {one.components["note"] for one in made} == {1.0}
    assert len({one.components["luck"] for one in made}) == 1
    assert text(made[0], settings).startswith("<|im_start|>system\nYou cook.")


def test_the_hash_of_the_tasks_data_is_told(make: Make, settings: PolicySettings) -> None:
    tasks = [
        collected(make(config), settings, cooks)[0].components["task"]
        for config in ({}, {"task.bonus": 1.0}, {"seed": 1})
    ]
    assert tasks[0] == tasks[1] != tasks[2]
    assert tasks[0] < 1 << 48


def test_other_answers_replay_alike(make: Make, settings: PolicySettings) -> None:
    says = one_of(
        call("eggs"), call("nuts"), "12", '<tool_call>\n{"name": "no", "arguments": {}}\n</tool_call>'
    )
    for number in range(3):
        collected(make(), settings, says, bytes([number]) * 32)


def test_a_stop_of_the_task_ends_a_sample(make: Make, settings: PolicySettings) -> None:
    made = collected(make(), settings, lambda so_far, _: call("milk"))
    assert [sum(segment.trained for segment in one.segments) for one in made] == [3] * 4


def test_turns_are_bounded_where_the_run_says_so(make: Make, settings: PolicySettings) -> None:
    made = collected(make({"nous.max_turns": 1}), settings, cooks)
    assert [sum(segment.trained for segment in one.segments) for one in made] == [1] * 4


@pytest.mark.parametrize(("max_tokens", "context"), [(20, 4096), (512, 620)])
def test_limits_of_the_run_end_a_sample(
    make: Make, settings: PolicySettings, max_tokens: int, context: int
) -> None:
    smaller = dataclasses.replace(settings, max_tokens=max_tokens, context=context)
    made = collected(make(), smaller, lambda so_far, _: call("milk"))
    assert {one.finish for one in made} == {"length"}


@pytest.mark.parametrize(
    ("name", "config", "error", "told"),
    [
        ("v1-recipes", {"bonus": 1}, BadConfig, "bonus: Extra inputs"),
        ("v1-recipes", {"task.bonus": "much"}, BadConfig, "task.bonus: Input should be a valid number"),
        ("v1-recipes", {"count": 0}, BadConfig, "no tasks"),
        ("v1-nothing", {}, BrokenEnvironment, "env install verifiers --with v1-nothing"),
        ("json", {}, BrokenEnvironment, "no taskset that can be used"),
    ],
)
def test_what_cannot_be_used_is_told(
    make: Make, name: str, config: dict[str, Setting], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        make(config, name)
