"""Which environments are installed: the entry-point group `nous.envs`.

    [project.entry-points."nous.envs"]
    sort-digits = "nous_node.envs.sort_digits:SortDigits"

Names are known without importing anything, facts without making anything. A plug-in that cannot be imported
is an error with its name in it and harms no other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final, cast

from nous_node.protocol.runs import EnvironmentEntry, Setting

from .environment import Environment, EnvironmentClass, EnvironmentInfo
from .errors import BrokenEnvironment, EnvError, UnknownEnvironment

GROUP: Final = "nous.envs"


def names() -> list[str]:
    """All installed environments, sorted."""
    return sorted(_installed())


def find(name: str) -> EnvironmentClass:
    """The class of an environment. Raises UnknownEnvironment or BrokenEnvironment."""
    points = _installed().get(name)
    if points is None:
        known = ", ".join(names()) or "none"
        raise UnknownEnvironment(
            f"There is no environment {name!r} here. Installed: {known}. Install the package that brings it, "
            "or take another run."
        )
    return _loaded(name, points)


def facts(name: str) -> EnvironmentInfo:
    """What is known of an environment without making it."""
    return find(name).info


def make(name: str, config: Mapping[str, Setting]) -> Environment:
    """An environment with its config. Raises what `find` raises, and BadConfig."""
    maker = find(name)
    try:
        return maker(config)
    except EnvError:
        raise
    except Exception as error:  # somebody else's code
        raise BrokenEnvironment(f"The environment {name!r} cannot be made: {_told(error)}.") from error


def make_entry(entry: EnvironmentEntry) -> Environment:
    """The environment of a run manifest's entry, in the very version that the run names."""
    installed = facts(entry.id).version
    if installed != entry.version:
        raise UnknownEnvironment(
            f"The run uses {entry.id} {entry.version}; version {installed} is installed here. Install the "
            "run's version, since another one gives other tasks or rewards."
        )
    return make(entry.id, entry.config)


@functools.cache
def _installed() -> dict[str, tuple[EntryPoint, ...]]:
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        others = found.get(point.name, ())
        if all(point.value != other.value for other in others):
            found[point.name] = (*others, point)
    return found


@functools.cache
def _loaded(name: str, points: tuple[EntryPoint, ...]) -> EnvironmentClass:
    if len(points) > 1:
        places = " and ".join(sorted(point.value for point in points))
        raise BrokenEnvironment(f"Two packages offer an environment {name!r}: {places}. Remove one of them.")
    try:
        loaded = points[0].load()
    except (Exception, SystemExit) as error:  # somebody else's code
        raise BrokenEnvironment(
            f"The environment {name!r} ({points[0].value}) cannot be imported: {_told(error)}. Install or "
            "remove its package."
        ) from error
    if not isinstance(getattr(loaded, "info", None), EnvironmentInfo) or not callable(loaded):
        raise BrokenEnvironment(f"{points[0].value} is no environment: it has no `info`. Remove its package.")
    if loaded.info.id != name:
        raise BrokenEnvironment(f"{points[0].value} calls itself {loaded.info.id!r}, its package {name!r}.")
    return cast(EnvironmentClass, loaded)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")
