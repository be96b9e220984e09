"""What of packages of verifiers is known without the library: names, facts, settings."""

from __future__ import annotations

import sys

import pytest

from nous_node.envs.errors import BadConfig, UnknownEnvironment
from nous_node.envs.verifiers_v0 import VerifiersV0
from nous_node.envs.verifiers_v0_config import Choices, read_choices
from nous_node.envs.verifiers_v1 import Choices as TasksetChoices
from nous_node.envs.verifiers_v1 import VerifiersV1, read_config
from nous_node.protocol.runs import Setting


def test_any_package_may_be_a_member() -> None:
    assert list(VerifiersV0.members()) == []
    info = VerifiersV0.facts("vf-sums")
    assert (info.id, info.reproducible, info.scorer, info.network) == (
        "verifiers-v0/vf-sums",
        "seeded",
        "sandbox",
        False,
    )
    assert "vf-sums" in info.distributions
    assert "verifiers" not in sys.modules


@pytest.mark.parametrize("name", ["", "-v", "../x", "a b", "a.b", "x" * 101, "a;b", "git+https://x"])
def test_what_is_no_name_of_a_package_is_unknown(name: str) -> None:
    with pytest.raises(UnknownEnvironment, match="no name of a package"):
        VerifiersV0.facts(name)


def test_our_settings_are_told_from_the_arguments_of_the_package() -> None:
    config: dict[str, Setting] = {"nous.format": "plain", "digits": 3, "nous.credit": "step"}
    assert read_choices(config) == (Choices("plain", "", "step"), {"digits": 3})
    assert read_choices({}) == (Choices(), {})


@pytest.mark.parametrize(
    "config", [{"nous.formt": "chat"}, {"nous.format": "html"}, {"nous.split": 1}, {"nous.credit": True}]
)
def test_settings_that_are_not_ours_are_refused(config: dict[str, Setting]) -> None:
    with pytest.raises(BadConfig, match=r"nous\."):
        read_choices(config)


def test_settings_of_a_taskset_are_nested_by_dots() -> None:
    config: dict[str, Setting] = {
        "count": 3,
        "task.bonus": 0.5,
        "task.shelf.unit": "kg",
        "nous.max_turns": 4,
    }
    assert read_config(config) == (
        TasksetChoices(max_turns=4),
        {"count": 3, "task": {"bonus": 0.5, "shelf": {"unit": "kg"}}},
    )


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"nous.format": "chat"}, "ours are"),
        ({"nous.tasks": 0}, "whole number"),
        ({"nous.max_turns": True}, "whole number"),
        ({"nous.max_turns": "4"}, "whole number"),
        ({"id": "other"}, "leave it out"),
        ({"task": 1, "task.bonus": 2}, "value of its own"),
        ({"task.bonus": 2, "task": 1}, "set twice"),
        ({"task..bonus": 2}, "no setting"),
    ],
)
def test_settings_of_a_taskset_that_are_wrong_are_told(config: dict[str, Setting], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        read_config(config)


def test_any_package_may_be_a_taskset() -> None:
    info = VerifiersV1.facts("v1-recipes")
    assert (info.id, info.distributions[-1]) == ("verifiers/v1-recipes", "v1-recipes")
    with pytest.raises(UnknownEnvironment, match="no name of a package"):
        VerifiersV1.facts("a.b")
