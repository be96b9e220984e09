"""Which environments are installed, and which version of each: the entry-point group `nous.envs`.

    [project.entry-points."nous.envs"]
    sort-digits = "nous_node.envs.sort_digits:SortDigits"        an environment: its id is its name
    textarena = "nous_node.envs.textarena:TextArena"             a family: ids are NAME/MEMBER

What ships with us and needs nothing else runs in this process. Everything else runs in a host process, in the
interpreter where its library is; a third party's module is never imported here. Spec: chapter 13.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, cast

from nous_node.protocol.encoding import encode
from nous_node.protocol.runs import EnvironmentEntry, Setting

from . import distributions, sandbox
from .access import NONE, Access
from .environment import Environment, EnvironmentClass, EnvironmentInfo, Family
from .errors import BadConfig, BrokenEnvironment, EnvError, UnknownEnvironment
from .host_messages import Described
from .interpreters import interpreter, releases
from .recipes import RECIPES
from .remote import describe, remote
from .sandbox import Launch

GROUP: Final = "nous.envs"
OURS: Final = "nous_node.envs."
"""Modules that may be imported here: of this package, which the node trusts like itself."""
HOST: Final = "nous_node.envs.host"
DOMAIN_ENVIRONMENT: Final = b"nous/env/1\x00"
SERVER: Final = "server"
"""Key of the config under which an environment finds the URL of its server. No run may set it."""

_DIGITS: Final = 16
"""Hexadecimal digits of the hash in a version: 64 bits tell all installations of a run apart."""


@dataclass(frozen=True, slots=True)
class _Found:
    """An environment that is offered here."""

    name: str
    member: str
    """Empty: it is no member of a family."""
    point: EntryPoint
    ours: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """What an entry point offers, for those who list environments."""

    name: str
    members: tuple[str, ...] | None
    """None: it is an environment by itself; empty: a family in which any name may be a member."""
    recipe: str
    """What has to be installed for it; empty: nothing."""
    ours: bool
    """Whether it ships with us."""
    distribution: str
    """Name and release of the package that brings it."""


@dataclass(frozen=True, slots=True)
class Place:
    """How an environment is started, for those who start processes of it themselves."""

    info: EnvironmentInfo
    value: str
    """Its entry point."""
    member: str
    """Of a family; empty: it is an environment by itself."""
    launch: Launch
    here: bool
    """Whether nodes run it in their own process instead."""


def entries() -> list[str]:
    """Names of all environments and families, sorted; nothing is imported."""
    return sorted(_installed())


def names(access: Access = NONE) -> list[str]:
    """Ids of all environments, sorted. A family in which any name may be a member counts as `NAME/*`; one
    that cannot be looked into is left out."""
    found: list[str] = []
    for name in entries():
        try:
            found += ids(name, access)
        except EnvError:
            continue
    return sorted(found)


def ids(name: str, access: Access = NONE) -> list[str]:
    """Ids behind one entry point: its name, or those of a family's members. Raises BrokenEnvironment, and
    UnknownEnvironment where it must not be looked into."""
    found = _find(name)
    if found.ours:
        loaded = _imported(found.point)
        if isinstance(getattr(loaded, "info", None), EnvironmentInfo):
            return [name]
        members = list(cast(Family, loaded).members())
    else:
        said = _described(_foreign_launch(found, access, network=False), found.point.value, "")
        if said.info is not None:
            return [name]
        members = said.members
    return [f"{name}/{member}" for member in members] or [f"{name}/*"]


def facts(name: str, access: Access = NONE) -> EnvironmentInfo:
    """What is known of an environment without making it. Raises UnknownEnvironment, BrokenEnvironment."""
    found = _find(name)
    if found.ours:
        loaded = _imported(found.point)
        info = getattr(loaded, "info", None)
        if info is None and found.member:
            info = cast(Family, loaded).facts(found.member)
    else:
        info = _described(_foreign_launch(found, access, network=False), found.point.value, found.member).info
    if found.member and (info is None or info.id == found.point.name):
        raise _unknown(name)
    if info is None or info.id != name:
        calls = "a family" if info is None else repr(info.id)
        raise BrokenEnvironment(f"{found.point.value} calls itself {calls}, its package {name!r}.")
    return cast(EnvironmentInfo, info)


def pinned(name: str, access: Access = NONE) -> dict[str, str]:
    """Releases of the distributions that decide what an environment does: those of its facts, and the one
    that brings it where that is not ours. [EVM-2]"""
    found, info = _find(name), facts(name, access)
    wanted = tuple(distributions.normal(one) for one in info.distributions)
    have = releases(_python(found, access), wanted)
    missing = [one for one in wanted if one not in have]
    if missing:
        raise BrokenEnvironment(f"{name} needs {', '.join(missing)}, which is not installed beside it.")
    if not found.ours and found.point.dist is not None:
        have[distributions.normal(found.point.dist.name)] = found.point.dist.version
    return have


def version(name: str, config: Mapping[str, Setting], access: Access = NONE) -> str:
    """The version that a run names: the same one gives the same tasks, texts and rewards. [EVM-2]"""
    return version_of(facts(name, access), config, pinned(name, access))


def version_of(info: EnvironmentInfo, config: Mapping[str, Setting], releases: Mapping[str, str]) -> str:
    """The adapter's version alone, or with a hash where distributions decide as well. [EVM-2]"""
    if not releases:
        return info.version
    digest = hashlib.sha256(DOMAIN_ENVIRONMENT + material(info, config, releases)).hexdigest()
    return f"{info.version}-{digest[:_DIGITS]}"


def material(info: EnvironmentInfo, config: Mapping[str, Setting], releases: Mapping[str, str]) -> bytes:
    """What the hash in a version is of, behind its domain. [EVM-2]"""
    facts = {"config": dict(config), "distributions": dict(releases), "id": info.id, "version": info.version}
    return encode(facts)


def make(name: str, config: Mapping[str, Setting], access: Access = NONE) -> Environment:
    """An environment with its config.

    Raises UnknownEnvironment, BrokenEnvironment, BadConfig, and CannotStart where there is no process for it.
    """
    found, info = _find(name), facts(name, access)
    config = served(name, config, access)
    if found.ours and not found.member:
        return _made_here(name, _imported(found.point), config)
    return remote(_launch(found, info, access), info, found.point.value, found.member, config)


def served(name: str, config: Mapping[str, Setting], access: Access) -> dict[str, Setting]:
    """The config with the server that this machine's owner named. Raises BadConfig where a run names one."""
    if SERVER in config:
        raise BadConfig(
            f"The key {SERVER!r} of {name} is set by --env-server on each machine, never by a run."
        )
    server = {SERVER: access.servers[name]} if name in access.servers else {}
    return {**config, **server}


def offer(name: str, access: Access = NONE) -> Offer:
    """What stands behind one of `entries`. Raises BrokenEnvironment, UnknownEnvironment, CannotStart."""
    found = _find(name)
    brought = found.point.dist
    recipe: str = (getattr(_imported(found.point), "recipe", "") or "") if found.ours else ""
    members: tuple[str, ...] | None = tuple(one.partition("/")[2] for one in ids(name, access))
    if members == ("",):
        members = None
    elif members == ("*",):
        members = ()
    distribution = "" if brought is None else f"{brought.name} {brought.version}"
    return Offer(name, members, recipe, found.ours, distribution)


def place(name: str, access: Access = NONE) -> Place:
    """Where an environment runs. Raises UnknownEnvironment, BrokenEnvironment, CannotStart."""
    found, info = _find(name), facts(name, access)
    here = found.ours and not found.member
    if here:
        sandboxed = sandbox.unavailable() is None and not access.trusts(name)
        launch = _of(found, Path(sys.executable), access, sandboxed=sandboxed, network=False)
    else:
        launch = _launch(found, info, access)
    return Place(info, found.point.value, found.member, launch, here)


def check_entry(entry: EnvironmentEntry, access: Access = NONE) -> None:
    """Raises UnknownEnvironment, BrokenEnvironment where this machine cannot run a run's environment in the
    very version that the run names. Nothing is made."""
    found, info = _find(entry.id), facts(entry.id, access)
    if found.member or not found.ours:
        _launch(found, info, access)
    have = pinned(entry.id, access)
    installed = version_of(info, entry.config, have)
    if installed != entry.version:
        beside = ", ".join(f"{name} {release}" for name, release in sorted(have.items()))
        raise UnknownEnvironment(
            f"The run uses {entry.id} {entry.version}; version {installed} is installed here"
            f"{f' ({beside})' if beside else ''}. Install the run's version, since another one gives other "
            "tasks or rewards."
        )


def make_entry(entry: EnvironmentEntry, access: Access = NONE) -> Environment:
    """The environment of a run manifest's entry, in the very version that the run names."""
    check_entry(entry, access)
    return make(entry.id, entry.config, access)


def split(name: str) -> tuple[str, str]:
    """Family and member of an id; an environment by itself has no member. [EVM-1]"""
    head, _, member = name.partition("/")
    return head, member


# --- finding -----------------------------------------------------------------------------------------


def _find(name: str) -> _Found:
    """Raises UnknownEnvironment, BrokenEnvironment; imports nothing of a third party."""
    head, member = split(name)
    points = _installed().get(name)
    if points is not None:
        member = ""
    else:
        points = _installed().get(head) if member else None
    if points is None:
        raise _unknown(name)
    if head != name and name in _installed():
        points = (*points, *_installed().get(head, ()))  # else it would take the place of a family's member
    if len(points) > 1:
        places = " and ".join(sorted(point.value for point in points))
        raise BrokenEnvironment(f"Two packages offer an environment {name!r}: {places}. Remove one of them.")
    return _Found(name, member, points[0], points[0].value.startswith(OURS))


def _unknown(name: str) -> UnknownEnvironment:
    known = ", ".join(entries()) or "none"
    return UnknownEnvironment(
        f"There is no environment {name!r} here. Installed: {known}. Install the package that brings it, or "
        "take another run."
    )


@functools.cache
def _installed() -> dict[str, tuple[EntryPoint, ...]]:
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        others = found.get(point.name, ())
        if all(point.value != other.value for other in others):
            found[point.name] = (*others, point)
    return found


@functools.cache
def _imported(point: EntryPoint) -> Any:
    """A class of this package: an environment's or a family's."""
    module, _, name = point.value.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise BrokenEnvironment(
            f"The environment {point.name!r} ({point.value}) cannot be imported: {_told(error)}. Install "
            "nous-node again."
        ) from error
    family = all(callable(getattr(loaded, one, None)) for one in ("members", "facts", "make"))
    if not family and not isinstance(getattr(loaded, "info", None), EnvironmentInfo):
        raise BrokenEnvironment(f"{point.value} is no environment: it has no `info`. Remove its package.")
    return loaded


def _made_here(name: str, maker: EnvironmentClass, config: Mapping[str, Setting]) -> Environment:
    try:
        return maker(config)
    except EnvError:
        raise
    except Exception as error:
        raise BrokenEnvironment(f"The environment {name!r} cannot be made: {_told(error)}.") from error


# --- where it runs -----------------------------------------------------------------------------------


def _python(found: _Found, access: Access) -> Path:
    """The interpreter of an environment. Raises UnknownEnvironment where it is not installed."""
    recipe = getattr(_imported(found.point), "recipe", None) if found.ours else None
    if recipe is None:
        return Path(sys.executable)
    python = interpreter(RECIPES[recipe], access)
    if python is None:
        raise UnknownEnvironment(
            f"The environment {found.name!r} needs {', '.join(RECIPES[recipe].requirements)}: install it "
            f"with `nous-node env install {recipe}`."
        )
    return python


def _launch(found: _Found, info: EnvironmentInfo, access: Access) -> Launch:
    """How the process of an environment is started. Raises UnknownEnvironment where it must not be."""
    network = info.network
    if network and found.name not in access.servers and not access.trusts(found.name):
        raise UnknownEnvironment(
            f"The environment {found.name!r} talks to a server: name it with --env-server {found.name}=URL, "
            f"or let it use the network as it likes with --trust-env {found.name}."
        )
    if not found.ours:
        return _foreign_launch(found, access, network=network)
    sandboxed = not access.trusts(found.name)
    if sandboxed and (why := sandbox.unavailable()) is not None:
        if info.scorer != "pure":
            raise UnknownEnvironment(_unsafe(found.name, "executes what the policy wrote", why))
        sandboxed = False  # our own adapter of a library that only computes
    return _of(found, _python(found, access), access, sandboxed=sandboxed, network=network)


def _foreign_launch(found: _Found, access: Access, *, network: bool) -> Launch:
    """Of a third party's package: in our interpreter, where it is installed."""
    sandboxed = not access.trusts(found.name)
    if sandboxed and (why := sandbox.unavailable()) is not None:
        raise UnknownEnvironment(_unsafe(found.name, "is somebody else's code", why))
    places = () if found.point.dist is None else distributions.places(found.point.dist)
    python = Path(sys.executable)
    return _of(found, python, access, sandboxed=sandboxed, network=network, places=places)


def _of(
    found: _Found,
    python: Path,
    access: Access,
    *,
    sandboxed: bool,
    network: bool,
    places: tuple[Path, ...] = (),
) -> Launch:
    hidden = tuple(Path(one) for one in access.hidden)
    launch = Launch(python, HOST, places, places, sandboxed, network, access.memory, hidden)
    return replace(launch, seconds=access.seconds, whose=_whose(found))


def _whose(found: _Found) -> str:
    """Who answers for its code: one of our families, a package that is a member of one, or a third party's
    distribution."""
    if found.ours and found.member:
        package = re.split(r"[.:]", found.member)[0]
        return found.point.name if _imported(found.point).members() else f"{found.point.name}/{package}"
    if found.ours or found.point.dist is None:
        return found.point.name
    return f"{distributions.normal(found.point.dist.name)} {found.point.dist.version}"


def _unsafe(name: str, what: str, why: str) -> str:
    return (
        f"The environment {name!r} {what}, and there is no sandbox here: {why} Install bubblewrap, or run it "
        f"without one with --trust-env {name}."
    )


@functools.cache
def _described(launch: Launch, value: str, member: str) -> Described:
    return describe(launch, value, member)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")
