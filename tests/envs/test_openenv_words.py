"""What of OpenEnv is known without a server: settings, answers as actions, observations as text."""

from __future__ import annotations

import sys

import pytest

from nous_node.envs.errors import BadConfig, BrokenEnvironment, EnvironmentFailed, UnknownEnvironment
from nous_node.envs.openenv import OpenEnv, Settings, read_settings
from nous_node.envs.openenv_words import MAX_WORDS, Field, action_field, action_of, words
from nous_node.protocol.runs import Setting

SERVER = "http://127.0.0.1:8000"


def test_any_name_may_be_a_server_and_the_library_is_not_imported_for_it() -> None:
    assert list(OpenEnv.members()) == []
    info = OpenEnv.facts("echo-2.b")
    assert (info.id, info.reproducible, info.network) == ("openenv/echo-2.b", "seeded", True)
    assert "openenv" not in sys.modules


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b", "http://x", "x" * 101])
def test_what_is_no_name_of_a_server_is_unknown(name: str) -> None:
    with pytest.raises(UnknownEnvironment, match="no name of a server"):
        OpenEnv.facts(name)


def test_settings_are_read() -> None:
    config: dict[str, Setting] = {
        "server": "wss://host/env/",
        "observation": ["text", "left"],
        "reset.level": 3,
        "max_turns": 4,
    }
    assert read_settings(config) == Settings(
        "wss://host/env", observation=("text", "left"), max_turns=4, reset={"level": 3}
    )
    assert read_settings({"server": SERVER, "observation": "text"}).observation == ("text",)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "--env-server"),
        ({"server": "file:///etc/passwd"}, "--env-server"),
        ({"server": "127.0.0.1:80"}, "--env-server"),
        ({"server": SERVER, "reword": "sum"}, "no setting 'reword'"),
        ({"server": SERVER, "reward": "mean"}, "`reward` is one of"),
        ({"server": SERVER, "format": "xml"}, "`format` is one of"),
        ({"server": SERVER, "template": "Go."}, "exactly once"),
        ({"server": SERVER, "template": "x" * 20_000}, "characters at most"),
        ({"server": SERVER, "max_turns": 0}, "whole number"),
        ({"server": SERVER, "max_turns": True}, "whole number"),
        ({"server": SERVER, "observation": [1]}, "a list of them"),
        ({"server": SERVER, "reset.seed": 1}, "own seed"),
    ],
)
def test_settings_that_are_wrong_are_told(config: dict[str, Setting], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        read_settings(config)


def test_a_field_that_is_not_there_is_told_with_those_that_are() -> None:
    schema = {"properties": {"message": {"type": "string"}, "metadata": {}}}
    with pytest.raises(BrokenEnvironment, match="they have message"):
        action_field(schema, "text")


@pytest.mark.parametrize("schema", [{"properties": 3}, {"properties": {"x": 3}}, {"required": ["y"]}])
def test_schemas_that_are_none_are_borne(schema: dict[str, object]) -> None:
    assert action_field(schema, "").kinds == frozenset()


@pytest.mark.parametrize("answer", ["[" * 100_000, "nan", "{", ""])
def test_an_answer_that_is_no_json_is_no_action(answer: str) -> None:
    assert action_of(answer, Field("", frozenset())) is None


@pytest.mark.parametrize(
    ("observation", "told"),
    [
        ("text", "without an observation"),
        (None, "without an observation"),
        ({"text": "x" * (MAX_WORDS + 1)}, "characters"),
    ],
)
def test_observations_that_cannot_be_shown_are_failures(observation: object, told: str) -> None:
    with pytest.raises(EnvironmentFailed, match=told):
        words(observation, ())


def test_a_field_of_an_observation_that_is_missing_is_told() -> None:
    with pytest.raises(EnvironmentFailed, match="it has text, metadata"):
        words({"text": "x", "metadata": {}}, ("board",))
