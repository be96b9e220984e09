"""Settings of a node: defaults < TOML file < environment < flags.

One name everywhere: `threads = 2` in the file, `NOUS_NODE_THREADS=2`, `--threads 2`. The file is the one that
`--config` names, else `settings.toml` in the home. Defaults leave a laptop usable while it helps.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from nous_node.envs.access import DEFAULT_MEMORY, DEFAULT_SECONDS, NONE, Access
from nous_node.protocol.errors import LocalError

from .home import HOME_VARIABLE, Home, disk_errors

PREFIX: Final = "NOUS_NODE_"
MAX_FILE: Final = 65_536
"""Bytes of a settings file; nobody writes a thousandth of it by hand."""

MAX_THREADS: Final = 1_024
DEFAULT_NICE: Final = 10
"""The worker steps back for everything else on the machine."""
DEFAULT_DISK: Final = 20_000_000_000
"""Two checkpoints of a model of 2 billion parameters in bf16, and what is being fetched."""

MAX_ENV_SECONDS: Final = 100
"""A worker of which nothing is heard for two minutes is ended."""

DEFAULT_NEIGHBOURS: Final = 8
MAX_NEIGHBOURS: Final = 32
"""No more connections are begun by a node that has 32."""

DEFAULT_PORT: Final = 4001
"""libp2p's usual one."""
FIXED_PORT: Final = (f"/ip4/0.0.0.0/tcp/{DEFAULT_PORT}",)
"""Trainers and relays listen there unless told otherwise: an invite outlives a restart."""
ANY_PORT: Final = ("/ip4/0.0.0.0/tcp/0",)

NOT_SETTINGS: Final = frozenset({HOME_VARIABLE, "NOUS_NODE_WORKER_NICE"})
"""Variables with our prefix that mean something else: the home, and what a node tells its worker."""

Flags = Mapping[str, object]
"""Flags by the name of their setting; None where one was not given."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?))?b?(/s)?", re.IGNORECASE)
_PLACE: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[A-Za-z0-9.:_-]{1,253}/tcp/\d{1,5}")
_SERVER: Final = re.compile(r"[!-<>-~]{1,256}=(https?|wss?)://[!-~]{1,2048}")
_DEVICE: Final = re.compile(r"cpu|mps|cuda(:\d{1,3})?")


class Settings(msgspec.Struct, frozen=True):
    """What a person may set for this machine."""

    threads: int
    """Threads of torch. Default: half of the cores."""
    memory: int
    """Bytes that the worker may use. Default: half of the machine's memory."""
    device: str = "cpu"
    """`cpu`, `mps`, `cuda` or `cuda:N`."""
    nice: int = DEFAULT_NICE
    """How far the worker steps back, 0 to 19."""
    upload: int | None = None
    """Bytes sent a second; None is no limit."""
    disk: int = DEFAULT_DISK
    """Bytes that checkpoints may take."""
    env: tuple[str, ...] = ()
    """Only these environments; empty: all of the run."""
    listen: tuple[str, ...] = ANY_PORT
    """Multiaddrs to listen on; port 0: any free one. Which is the default depends on the role."""
    announce: tuple[str, ...] = ()
    """More multiaddrs under which this node can be reached, such as a router's that forwards a port."""
    keep: int | None = None
    """Checkpoints to keep at least while there is room; None: what the role needs."""
    http: int | None = None
    """TCP port at which chunks are also served over plain HTTP; None: not."""
    mirror: tuple[str, ...] = ()
    """Base URLs of mirrors that a trainer names in its checkpoints."""
    neighbours: int = DEFAULT_NEIGHBOURS
    """Peers that volunteers and relays look for beside those of the invite; 0: none, and nobody is told where
    this node can be dialled."""
    mdns: bool = True
    """Whether trainers and relays tell the local network of their run."""
    trust_env: tuple[str, ...] = ()
    """Environments, or whole families, that run without the sandbox, as this user."""
    env_server: tuple[str, ...] = ()
    """`NAME=URL`: servers that environments may talk to."""
    env_memory: int = DEFAULT_MEMORY
    """Bytes that one process of environments may take. No flag: few need another."""
    env_seconds: int = DEFAULT_SECONDS
    """That an environment may take for one call before it is ended. No flag either."""
    access: Access = NONE
    """What the four come to in this home; no setting of its own."""


class _Kind(NamedTuple):
    """How a setting is read. `read` raises ValueError for what is not `allowed`."""

    allowed: str
    read: Callable[[object], object]


def load_settings(
    home: Home,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Flags,
    *,
    listen: tuple[str, ...] = ANY_PORT,
) -> Settings:
    """All sources put together; `listen` is where none of them says so.

    Raises LocalError, which names the source, the key and what is allowed.
    """
    values: dict[str, object] = {
        "threads": default_threads(),
        "memory": default_memory(),
        "listen": listen,
    }
    values |= _from_file(home, file)
    values |= _from_environment(environ)
    for name, raw in flags.items():
        if raw is not None:
            values[name] = _value(f"The flag --{name.replace('_', '-')}", name, raw)
    settings = msgspec.convert(values, Settings)
    servers = dict(one.split("=", 1) for one in settings.env_server)
    access = Access.of(home.path, settings.trust_env, servers, settings.env_memory, settings.env_seconds)
    return msgspec.structs.replace(settings, access=access)


def default_threads() -> int:
    """Half of the cores that this process may use, at least one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count // 2)


def default_memory(control_group: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Half of the machine's memory, or of what its container may use, in bytes."""
    import psutil  # 20 ms

    total = int(psutil.virtual_memory().total)
    try:
        limit = control_group.read_text().strip()
    except OSError:
        limit = "max"
    return min(total, int(limit) if limit.isdigit() else total) // 2


def parse_size(raw: object) -> int:
    """Bytes in 123, "2GiB" (powers of 1024), "500MB" or "500M" (powers of 1000). Raises ValueError."""
    if isinstance(raw, int) and not isinstance(raw, bool) and raw > 0:
        return raw
    match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None or match[4]:
        raise ValueError
    scale = (1024 if match[3] else 1000) ** (" kmgt".index((match[2] or " ").lower()))
    size = float(match[1]) * scale
    if not (math.isfinite(size) and size >= 1):
        raise ValueError
    return int(size)


def parse_rate(raw: object) -> int | None:
    """Bytes a second, as a size with or without "/s"; "none" is no limit. Raises ValueError."""
    if isinstance(raw, str):
        text = raw.strip().lower()
        return None if text == "none" else parse_size(text.removesuffix("/s"))
    return parse_size(raw)


def _whole(low: int, high: int) -> _Kind:
    def read(raw: object) -> int:
        if isinstance(raw, str) and raw.strip().isascii():
            raw = int(raw)
        if not isinstance(raw, int) or isinstance(raw, bool) or not low <= raw <= high:
            raise ValueError
        return raw

    return _Kind(f"a whole number from {low} to {high}", read)


def _device(raw: object) -> str:
    if not isinstance(raw, str) or not _DEVICE.fullmatch(raw):
        raise ValueError
    return raw


def parse_device(raw: str) -> str:
    """A device by its name. Raises LocalError."""
    return str(_value("The flag --device", "device", raw))


def _yes_or_no(raw: object) -> bool:
    text = str(raw).strip().lower()
    if not isinstance(raw, bool | str) or text not in ("true", "false", "1", "0"):
        raise ValueError
    return text in ("true", "1")


def _places(raw: object) -> tuple[str, ...]:
    """Multiaddrs that others can dial."""
    found = _list_of("/")(raw)
    if not all(_PLACE.fullmatch(place) for place in found):
        raise ValueError
    return found


def _servers(raw: object) -> tuple[str, ...]:
    """NAME=URL, each NAME once."""
    found = _list_of("")(raw)
    if not all(_SERVER.fullmatch(one) for one in found) or len({one.split("=")[0] for one in found}) < len(
        found
    ):
        raise ValueError
    return found


def _list_of(start: str) -> Callable[[object], tuple[str, ...]]:
    """Texts that begin with `start`: a list, or one text with commas between."""

    def read(raw: object) -> tuple[str, ...]:
        parts = [part.strip() for part in raw.split(",")] if isinstance(raw, str) else raw
        if not isinstance(parts, list | tuple):
            raise ValueError
        for part in parts:
            if not isinstance(part, str) or not part or not part.startswith(start):
                raise ValueError
        return tuple(parts)

    return read


_KINDS: Final[dict[str, _Kind]] = {
    "threads": _whole(1, MAX_THREADS),
    "memory": _Kind("a size such as 4GiB or 500MB", parse_size),
    "device": _Kind("cpu, mps, cuda or cuda:N", _device),
    "nice": _whole(0, 19),
    "upload": _Kind("a rate such as 500KB/s, or none", parse_rate),
    "disk": _Kind("a size such as 20GB", parse_size),
    "env": _Kind("names of environments", _list_of("")),
    "listen": _Kind("multiaddrs such as /ip4/0.0.0.0/tcp/4001", _list_of("/")),
    "announce": _Kind("multiaddrs such as /dns4/node.example.org/tcp/4001", _places),
    "keep": _whole(1, 100_000),
    "http": _whole(1_024, 65_535),
    "mirror": _Kind("http or https URLs", _list_of("http")),
    "neighbours": _whole(0, MAX_NEIGHBOURS),
    "mdns": _Kind("true or false", _yes_or_no),
    "trust_env": _Kind("names of environments or families", _list_of("")),
    "env_server": _Kind("NAME=URL, once for each environment", _servers),
    "env_memory": _Kind("a size such as 2GiB", parse_size),
    "env_seconds": _whole(1, MAX_ENV_SECONDS),
}


def _from_file(home: Home, file: Path | None) -> dict[str, object]:
    path = file if file is not None else home.path / "settings.toml"
    if file is None and not path.exists():
        return {}
    with disk_errors(path), path.open("rb") as opened:
        data = opened.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise LocalError(f"{path} is larger than {MAX_FILE} bytes and so no settings file. Name another one.")
    try:
        table: dict[str, object] = tomllib.loads(data.decode())
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError
        raise LocalError(f"The settings {path} are no TOML: {error}. Mend that place.") from error
    return {name: _value(str(path), name, raw) for name, raw in table.items()}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable with our prefix that is no setting: a slip, or another program's."""
    names = {variable: _setting_of(variable) for variable in sorted(environ)}
    return [
        f"The environment variable {variable} is no setting and is ignored.{_hint(name)}"
        for variable, name in names.items()
        if name is not None and name not in _KINDS
    ]


def _setting_of(variable: str) -> str | None:
    """The name of the setting that a variable means, which may not exist."""
    ours = variable.startswith(PREFIX) and variable not in NOT_SETTINGS
    return variable.removeprefix(PREFIX).lower() if ours else None


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, _KINDS, 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for variable in sorted(environ):
        name = _setting_of(variable)
        if name in _KINDS:
            found[name] = _value(f"The environment variable {variable}", name, environ[variable])
    return found


def _value(source: str, name: str, raw: object) -> object:
    kind = _KINDS.get(name)
    if kind is None:
        raise LocalError(
            f"{source}: there is no setting {name!r}.{_hint(name)} There are: {', '.join(_KINDS)}."
        )
    try:
        return kind.read(raw)
    except ValueError as error:
        raise LocalError(f"{source}: {name} cannot be {raw!r}. It takes {kind.allowed}.") from error
