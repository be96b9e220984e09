"""What of packages of verifiers is known without the library: names, facts, settings."""

from __future__ import annotations

import sys

import pytest

from nous_node.envs.errors import BadConfig, UnknownEnvironment
from nous_node.envs.verifiers_v0 import VerifiersV0
from nous_node.envs.verifiers_v0_config import Choices, read_choices
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
