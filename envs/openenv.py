"""OpenEnv: any server of its WebSocket interface. Spec: `specs/envs/openenv.md`.

    reset(seed) -> the first observation: a message to the policy
    answer -> action of one field, or a JSON object -> step(action) -> the next observation
    reward = the sum of the steps' rewards, or the last of them

The server is named on each machine (`--env-server openenv/NAME=URL`), never by a run. What it gives for a
seed is its own matter: a run that is to be verified needs servers that honour it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from nous_node.protocol.runs import Setting

from .environment import Environment, EnvironmentInfo
from .errors import BadConfig, UnknownEnvironment

NAME: Final = "openenv"

VERSION: Final = "1"
"""Raised whenever the adapter gives other prompts or rewards for the same answers of a server."""

MEMBER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

MAX_TURNS: Final = 256
"""Steps of an episode: a context holds no more of any use."""

MAX_TEXT: Final = 16_384
"""Characters of a message or template in a config."""

OBSERVATION: Final = "{observation}"
"""Where a template has the first observation."""

RESET: Final = "reset."
"""Of settings that go to the server's `reset`."""

SERVER: Final = "server"
"""The key under which a node says where the server is; no run may set it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """[OPE-2]"""

    server: str
    """URL."""
    format: str = ""
    """`chat`, `plain`, or empty: chat where the run's model has a conversation format."""
    system: str = ""
    """A system message before the first observation."""
    template: str = OBSERVATION
    """The first message, with `{observation}` in it."""
    action: str = ""
    """Field that takes the answer; empty: the only one there is, or the only required one."""
    answer: str = "whole"
    """Where the answer stands in the reply: `whole`, `tags`, `last-line`."""
    observation: tuple[str, ...] = ()
    """Fields that are shown; empty: all."""
    reward: str = "sum"
    """`sum` or `last`."""
    max_turns: int = 16
    reset: dict[str, Setting] = field(default_factory=dict)
    """Further arguments of the server's `reset`."""


class OpenEnv:
    """Family `openenv/NAME`; NAME is whatever the machines of a run call the server."""

    recipe: ClassVar[str] = NAME

    @classmethod
    def members(cls) -> Sequence[str]:
        """Any server may be one."""
        return ()

    @classmethod
    def facts(cls, member: str) -> EnvironmentInfo:
        if MEMBER.fullmatch(member) is None:
            raise UnknownEnvironment(
                f"{member[:100]!r} is no name of a server: take letters, digits, dots, dashes."
            )
        return EnvironmentInfo(
            id=f"{NAME}/{member}",
            version=VERSION,
            reproducible="seeded",
            scorer="pure",
            network=True,
            max_turns=MAX_TURNS,
            agents=1,
            distributions=("openenv",),
            description=f"The OpenEnv server that this machine knows as {member}.",
        )

    @classmethod
    def make(cls, member: str, config: Mapping[str, Setting]) -> Environment:
        info, settings = cls.facts(member), read_settings(config)
        from .openenv_play import Served

        return Served(info, settings)


def read_settings(config: Mapping[str, Setting]) -> Settings:
    """Raises BadConfig."""
    known = set(Settings.__dataclass_fields__) - {"reset"}
    reset = {key.removeprefix(RESET): value for key, value in config.items() if key.startswith(RESET)}
    given = {key: value for key, value in config.items() if not key.startswith(RESET)}
    for key in given:
        if key not in known:
            told = ", ".join(f"`{one}`" for one in sorted(known - {SERVER}))
            raise BadConfig(f"openenv has no setting {key!r}; it has {told} and `{RESET}NAME`.")
    settings = Settings(
        _url(given.get(SERVER)),
        _one_of(given, "format", ("", "chat", "plain"), ""),
        _text(given, "system", ""),
        _text(given, "template", OBSERVATION),
        _text(given, "action", ""),
        _one_of(given, "answer", ("whole", "tags", "last-line"), "whole"),
        _names(given.get("observation", "")),
        _one_of(given, "reward", ("sum", "last"), "sum"),
        _turns(given.get("max_turns", 16)),
        reset,
    )
    if settings.template.count(OBSERVATION) != 1:
        raise BadConfig(f"`template` has {OBSERVATION} in it exactly once, where the observation goes.")
    if "seed" in reset:
        raise BadConfig("`reset.seed` is the task's own seed: leave it out.")
    return settings


def _url(value: Setting | None) -> str:
    if not isinstance(value, str) or not re.match(r"(https?|wss?)://[^/]", value):
        raise BadConfig(
            "No server is named here: give --env-server openenv/NAME=URL, with http, https, ws or wss."
        )
    return value.rstrip("/")


def _one_of(given: Mapping[str, Setting], key: str, known: tuple[str, ...], default: str) -> str:
    value = given.get(key, default)
    if not isinstance(value, str) or value not in known:
        raise BadConfig(f"`{key}` is one of {', '.join(repr(one) for one in known)}, not {value!r}.")
    return value


def _text(given: Mapping[str, Setting], key: str, default: str) -> str:
    value = given.get(key, default)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise BadConfig(f"`{key}` is a text of {MAX_TEXT:,} characters at most.")
    return value


def _names(value: Setting) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise BadConfig("`observation` is a field's name, or a list of them.")
    return tuple(str(one) for one in names if one)


def _turns(value: Setting) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TURNS:
        raise BadConfig(f"`max_turns` is a whole number from 1 to {MAX_TURNS}, not {value!r}.")
    return value
