"""verifiers, the v1 interface: any taskset of one agent. Spec: `specs/envs/verifiers.md`.

    task = the taskset's task u64le(seed[0:8]) mod their number
    samples = `policy.group` rollouts of the library, with its chat loop in this process
    reward = the trace's: the sum of the task's weighted rewards

The taskset runs as it is: its tasks' hooks, tools, stops, metrics and rewards. Nothing of the library is
imported before an environment is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from nous_node.protocol.runs import Setting

from .environment import Environment, EnvironmentInfo
from .errors import BadConfig, UnknownEnvironment
from .verifiers_v0 import PACKAGE, UNBOUNDED
from .verifiers_v0_config import PREFIX

NAME: Final = "verifiers"

VERSION: Final = "1"
"""Raised whenever the adapter gives other prompts or rewards for the same seed and tokens."""

DISTRIBUTIONS: Final = ("verifiers", "math-verify")
"""Whose releases decide texts and scores, beside the package itself."""

ENDLESS: Final = 1024
"""Tasks that are taken from a taskset without an end, where the config names no number."""

MAX_TASKS: Final = 1 << 20
MAX_TURNS: Final = 1024

_RANGES: Final[Mapping[str, int]] = {"max_turns": MAX_TURNS, "tasks": MAX_TASKS}


@dataclass(frozen=True, slots=True)
class Choices:
    """The adapter's own settings. [VFR-6]"""

    max_turns: int = 0
    """Answers of one sample; 0: as many as there is room for."""
    tasks: int = 0
    """How many tasks are read, from the first; 0: all, or ENDLESS."""


class VerifiersV1:
    """Family `verifiers/PACKAGE`. Config: the taskset's own, `task.NAME` for what stands in its `task`, and
    `nous.max_turns`, `nous.tasks`."""

    recipe: ClassVar[str] = NAME

    @classmethod
    def members(cls) -> Sequence[str]:
        """Any installed package may be one."""
        return ()

    @classmethod
    def facts(cls, member: str) -> EnvironmentInfo:
        if PACKAGE.fullmatch(member) is None:
            raise UnknownEnvironment(
                f"{member[:100]!r} is no name of a package: {NAME}/NAME takes what `pip install` takes."
            )
        return EnvironmentInfo(
            id=f"{NAME}/{member}",
            version=VERSION,
            reproducible="seeded",
            scorer="sandbox",
            network=False,
            max_turns=UNBOUNDED,
            agents=1,
            distributions=(*DISTRIBUTIONS, member),
            description=f"The verifiers taskset {member}.",
        )

    @classmethod
    def make(cls, member: str, config: Mapping[str, Setting]) -> Environment:
        info = cls.facts(member)
        choices, settings = read_config(config)
        from .verifiers_v1_play import Rolled

        return Rolled(info, member, choices, settings)


def read_config(config: Mapping[str, Setting]) -> tuple[Choices, dict[str, Any]]:
    """Our settings, and the taskset's with dots made nests. Raises BadConfig."""
    chosen: dict[str, int] = {}
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX)
            chosen[name] = _number(key, value, _RANGES.get(name))
            continue
        *path, last = key.split(".")
        place = settings
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise BadConfig(f"{key!r} stands in {part!r}, which has a value of its own.")
        if last in place or not all([*path, last]):
            raise BadConfig(f"{key!r} is no setting, or is set twice.")
        place[last] = value
    if "id" in settings:
        raise BadConfig("`id` is the name of the taskset: leave it out.")
    return Choices(**chosen), settings


def _number(key: str, value: Setting, highest: int | None) -> int:
    if highest is None:
        told = ", ".join(f"`{PREFIX}{one}`" for one in _RANGES)
        raise BadConfig(f"There is no setting {key!r}; ours are {told}.")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= highest:
        raise BadConfig(f"`{key}` is a whole number from 1 to {highest}, not {value!r}.")
    return value
