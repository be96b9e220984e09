"""What `nous-node env list` and `env info` say: which environments are here, and all that is known of one.

Names and sentences may be a third party's: they are escaped for the terminal.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from nous_node.envs import registry, sandbox
from nous_node.envs.access import Access
from nous_node.envs.environment import EnvironmentInfo, HeldOut
from nous_node.envs.errors import BadConfig, CannotStart, EnvError, UnknownEnvironment
from nous_node.envs.interpreters import interpreter
from nous_node.envs.reasoning_gym_facts import REFUSED as REFUSED_DATASETS
from nous_node.envs.recipes import RECIPES
from nous_node.envs.registry import Offer
from nous_node.envs.textarena_facts import REFUSED as REFUSED_GAMES
from nous_node.protocol.runs import Setting

from .wording import plural, printable, size

REFUSED: Final[Mapping[str, Mapping[str, str]]] = {
    "reasoning-gym": REFUSED_DATASETS,
    "textarena": REFUSED_GAMES,
}
"""Members that a family knows and does not offer, with the reason."""

ANY: Final = "NAME"
"""Stands for the member of a family in which any name may be one."""

UNKNOWN_KEY: Final = "no-such-setting"
"""An environment that checks its config says what it takes when it is given this."""

MAX_LINE: Final = 400
"""Characters of a sentence in a table."""


class Listed(msgspec.Struct, frozen=True, omit_defaults=True):
    """An environment or a family. With `--json` these are the keys."""

    id: str
    version: str = ""
    """The adapter's own; that of a run also says which distributions it was made with."""
    reproducible: str = ""
    """Those of a family's members, joined by commas, where they differ; so in the next three."""
    scorer: str = ""
    turns: str = ""
    agents: str = ""
    runs: str = ""
    """Where it runs here, or what has to be done first."""
    description: str = ""
    members: int | None = None
    """None: it is no family; 0: any name may be a member."""
    problem: str = ""
    """Why it cannot be used."""


def listed(family: str, access: Access) -> list[Listed]:
    """All environments, or the members of one family. Raises UnknownEnvironment where there is none."""
    if family:
        return _members(family, access)
    return [_offered(name, access) for name in registry.entries()]


def _offered(name: str, access: Access) -> Listed:
    try:
        offer = registry.offer(name, access)
        if offer.members is None:
            return _one(name, registry.facts(name, access), _runs(offer, access))
        facts = [registry.facts(f"{name}/{member}", access) for member in offer.members]
    except EnvError as error:
        return Listed(name, problem=str(error))
    return _family(offer, facts, _runs(offer, access))


def _one(name: str, info: EnvironmentInfo, runs: str) -> Listed:
    return Listed(
        name,
        info.version,
        info.reproducible,
        info.scorer,
        str(info.max_turns),
        str(info.agents),
        runs,
        info.description,
    )


def _family(offer: Offer, facts: Sequence[EnvironmentInfo], runs: str) -> Listed:
    note = RECIPES[offer.recipe].note if offer.recipe else f"A family of {offer.distribution}."
    return Listed(
        f"{offer.name}/...",
        _joined(one.version for one in facts),
        _joined(one.reproducible for one in facts),
        _joined(one.scorer for one in facts),
        _range([one.max_turns for one in facts]),
        _range([one.agents for one in facts]),
        runs,
        note,
        len(facts),
    )


def _members(family: str, access: Access) -> list[Listed]:
    if family not in registry.entries():
        registry.facts(family, access)  # says what is installed
    offer = registry.offer(family, access)
    if offer.members is None:
        return [_offered(family, access)]
    runs = _runs(offer, access)
    rows = [_member(f"{family}/{member}", runs, access) for member in offer.members]
    refused = REFUSED.get(family, {})
    rows += [Listed(f"{family}/{member}", problem=reason) for member, reason in sorted(refused.items())]
    return rows or [_family(offer, [], runs)]


def _member(name: str, runs: str, access: Access) -> Listed:
    try:
        return _one(name, registry.facts(name, access), runs)
    except EnvError as error:
        return Listed(name, problem=str(error))


def _runs(offer: Offer, access: Access) -> str:
    """Where an environment runs on this machine, in words."""
    if offer.ours and offer.members is None:
        return "this process"
    python = None if not offer.recipe else interpreter(RECIPES[offer.recipe], access)
    if offer.recipe and python is None:
        return f"not installed: nous-node env install {offer.recipe}"
    where = "" if python is None or RECIPES[offer.recipe].is_here else ", own interpreter"
    if access.trusts(offer.name):
        return f"trusted, no sandbox{where}"
    return f"sandboxed{where}" if sandbox.unavailable() is None else f"no sandbox here{where}"


def _joined(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _range(values: Sequence[int]) -> str:
    if not values:
        return ""
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least}-{most}"


_TITLES: Final = ("environment", "version", "reproducible", "scorer", "turns", "agents", "runs")


def list_lines(rows: Sequence[Listed], *, described: bool) -> list[str]:
    """A table for a person; `described`: with a line below each row that says what it is."""
    cells = [_cells(row) for row in rows]
    widths = [max(len(title), *(len(row[i]) for row in cells)) for i, title in enumerate(_TITLES)]
    told = [_line(_TITLES, widths)]
    for row, cell in zip(rows, cells, strict=True):
        if row.problem:
            told.append(f"{cell[0]:{widths[0]}}  {printable(row.problem, MAX_LINE)}")
            continue
        told.append(_line(cell, widths))
        if described and row.description:
            told.append(f"    {printable(row.description, MAX_LINE)}")
    return told


def _cells(row: Listed) -> tuple[str, ...]:
    name = printable(row.id)
    if row.members is not None:
        name += f" ({plural(row.members, 'member')})" if row.members else " (any member)"
    cells = (row.version, row.reproducible, row.scorer, row.turns, row.agents, row.runs)
    return (name, *(printable(cell) or "-" for cell in cells))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


class Known(msgspec.Struct, frozen=True):
    """All that is known of one environment. With `--json` these are the keys."""

    id: str
    version: str
    """What a run's manifest says with this config."""
    adapter: str
    distributions: dict[str, str]
    """Releases that are part of the version."""
    reproducible: str
    scorer: str
    network: bool
    verifiable: bool
    """Whether `init` takes it: a trainer can compute its prompts and rewards again."""
    turns: int
    agents: int
    levels: int
    held_out: bool
    """Whether it names held-out tasks itself."""
    settings: str
    """What it says of the keys of its config."""
    runs: str
    memory: int
    """Bytes of address space of its process."""
    description: str


def known(name: str, config: Mapping[str, Setting], access: Access) -> Known:
    """Looks at an environment, which is made once. Raises an EnvError with what to do."""
    if name in registry.entries() and registry.offer(name, access).members is not None:
        raise _is_family(name, access)
    info, pinned = registry.facts(name, access), registry.pinned(name, access)
    place, environment = registry.place(name, access), registry.make(name, config, access)
    return Known(
        info.id,
        registry.version(name, config, access),
        info.version,
        pinned,
        info.reproducible,
        info.scorer,
        info.network,
        info.verifiable,
        info.max_turns,
        info.agents,
        environment.levels,
        isinstance(environment, HeldOut),
        _settings(name, access),
        _runs(registry.offer(registry.split(name)[0], access), access),
        0 if place.here else access.memory,
        info.description,
    )


def _is_family(name: str, access: Access) -> UnknownEnvironment:
    members = registry.offer(name, access).members
    example = f"{name}/{members[0] if members else ANY}"
    return UnknownEnvironment(
        f"{name} is a family of environments: name one of them, such as {example}. "
        f"`nous-node env list {name}` shows all."
    )


def _settings(name: str, access: Access) -> str:
    """What the environment answers to a key that it cannot know."""
    try:
        registry.make(name, {UNKNOWN_KEY: True}, access)
    except BadConfig as error:
        return str(error)
    except CannotStart:
        raise
    except EnvError as error:
        return f"It does not say which: {error}"
    return "It takes any key, or looks at none."


def info_lines(facts: Known, hint: str) -> list[str]:
    """For a person. `hint`: see `cli_commands.home_hint`."""
    beside = ", ".join(f"{name} {release}" for name, release in sorted(facts.distributions.items()))
    memory = size(facts.memory) if facts.memory else "the node's own"
    told = [
        f"{printable(facts.id)}: {printable(facts.description or 'no description')}",
        "",
        f"version       {printable(facts.version)} (adapter {printable(facts.adapter)}"
        f"{', made with ' + printable(beside, MAX_LINE) if beside else ''})",
        f"reproducible  {facts.reproducible}; {_verifiable(facts)}",
        f"scorer        {facts.scorer}",
        f"network       {'needed' if facts.network else 'none'}",
        f"shape         {plural(facts.turns, 'turn')} at most, {plural(facts.agents, 'agent')}, "
        f"levels 0 to {facts.levels}",
        f"held-out      {'names its own tasks' if facts.held_out else 'tasks of seeds that no run assigns'}",
        f"runs          {printable(facts.runs)}; memory: {memory}",
        f"settings      {printable(facts.settings, 4 * MAX_LINE)}",
        "",
        f"Try it:       nous-node env try {shlex.quote(facts.id)}{hint}",
        f"In a run:     nous-node init NAME --env {shlex.quote(facts.id)}{hint}",
        "With settings, in a file for `init --config FILE.toml`:",
        f"              [environments.{json.dumps(facts.id)}]",
        "              config = { KEY = VALUE }",
    ]
    return [line.rstrip() for line in told]


def _verifiable(facts: Known) -> str:
    if facts.verifiable:
        return "a trainer can compute its prompts and rewards again"
    return "no trainer can check it, so `init` refuses it"
