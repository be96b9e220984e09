"""What a sandboxed child sees of the file system, as arguments of bubblewrap.

The system's programs and libraries, the interpreter with its packages, our two packages under PACKAGE, and
what a launch names: all of it read-only. A new /proc, a small /dev, and a /tmp in memory. No home, no
configuration, no sockets of services. Deeper mounts come later and win, so that what is hidden stays hidden
inside of what is readable, and an environment's own folder inside of a hidden home can still be shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import BrokenEnvironment

OURS: Final = Path("/nous")
"""Where a child finds our packages."""
TMP_BYTES: Final = 64 << 20
"""What fits into /tmp; the machine's memory holds it."""
SHM_BYTES: Final = 16 << 20
"""The same of /dev/shm."""
EMPTY_BYTES: Final = 4096
"""What is hidden is an empty folder in memory, and read-only: the smallest one."""

_SYSTEM: Final = ("/usr", "/nix/store")
_UNMERGED: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Links into /usr on most systems, folders on some."""
_LOADER: Final = ("/etc/ld.so.cache", "/etc/alternatives")
_NETWORK: Final = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/services",
    "/etc/protocols",
    "/etc/ssl/certs",  # not /etc/ssl: a server's private keys lie beside
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust",
    "/etc/ca-certificates",
    "/var/lib/ca-certificates",
)
"""Names are resolved and certificates are checked with these, on the distributions that we know."""
_CLOSED: Final = (Path("/proc"), Path("/dev"), Path("/"))
"""Read-only once all is in place. /proc because a node that runs as root has a child that owns the files in
/proc/sys, whatever its capabilities; the others because files there would take unbounded memory."""
_INSTALLED: Final = ("bin", "lib", "lib64", "ssl")
"""Of an interpreter: its prefix may be a home."""
_ENVIRONMENT: Final = ("bin", "lib", "lib64", "share", "etc", "pyvenv.cfg")
"""The same of a virtual environment, which many make inside of a project's own folder."""


@dataclass(frozen=True, slots=True)
class View:
    """What to show beside the system."""

    python: Path
    packages: Mapping[str, Path]
    """Our packages by their name under `nous_node`."""
    readable: tuple[Path, ...]
    hidden: tuple[Path, ...]
    network: bool


def mounts(view: View) -> list[str]:
    """The arguments, in order. Raises BrokenEnvironment where there is no interpreter."""
    shown = {Path(name): Path(name) for name in _SYSTEM if Path(name).exists()}
    shown |= {folder: folder for folder in _interpreter(view.python)}
    shown |= {OURS / "nous_node" / name: folder for name, folder in view.packages.items()}
    shown |= {path.absolute(): path for path in view.readable}
    masked = set(_masked(shown, [*view.hidden, *_installed_nodes(view.python)]))
    steps = {target: ["--ro-bind", str(source), str(target)] for target, source in shown.items()}
    steps |= {target: _memory(target, EMPTY_BYTES) for target in masked}
    steps[Path("/tmp")] = _memory(Path("/tmp"), TMP_BYTES)
    steps[Path("/dev")] = ["--dev", "/dev"]
    steps[Path("/dev/shm")] = _memory(Path("/dev/shm"), SHM_BYTES)
    steps[Path("/proc")] = ["--proc", "/proc"]
    files = [*_LOADER, *(_NETWORK if view.network else ())]
    steps |= {Path(name): ["--ro-bind-try", name, name] for name in files}
    ordered = [word for target in sorted(steps, key=_depth) for word in steps[target]]
    closed = [word for target in (*masked, *_CLOSED) for word in ("--remount-ro", str(target))]
    return [*ordered, *_unmerged(), *_links(view.python, list(shown)), *closed]


def _depth(path: Path) -> tuple[int, Path]:
    return len(path.parts), path


def _memory(target: Path, size: int) -> list[str]:
    return ["--size", str(size), "--tmpfs", str(target)]


def _masked(shown: Mapping[Path, Path], hidden: list[Path]) -> Iterator[Path]:
    """Where the hidden folders would be seen, under whatever name."""
    for folder in {path.resolve() for path in hidden}:
        for target, source in shown.items():
            if folder.is_dir() and folder.is_relative_to(source.resolve()):
                yield target / folder.relative_to(source.resolve())


def _unmerged() -> Iterator[str]:
    for name in _UNMERGED:
        if os.path.islink(name):
            yield from ("--symlink", os.readlink(name), name)
        elif os.path.isdir(name):
            yield from ("--ro-bind", name, name)


def _interpreter(python: Path) -> list[Path]:
    """What it needs: of its virtual environment, and of the interpreter that this was made of."""
    installed = [_base(python) / name for name in _INSTALLED]
    found = [folder for folder in installed if folder.is_dir() and not folder.is_relative_to("/usr")]
    environment = _environment(python)
    own = [] if environment is None else [environment / name for name in _ENVIRONMENT]
    return [*(path for path in own if path.exists()), *found]


def _environment(python: Path) -> Path | None:
    """The virtual environment that it is of."""
    folder = python.absolute().parent.parent
    return folder if (folder / "pyvenv.cfg").exists() else None


def _installed_nodes(python: Path) -> list[Path]:
    """Where this package is installed as a whole, with the node: the child has OURS instead."""
    folders = [folder for folder in (_environment(python), _base(python)) if folder is not None]
    return [found for folder in folders for found in folder.glob("lib*/python*/site-packages/nous_node")]


def _base(python: Path) -> Path:
    """The prefix of the interpreter that a virtual environment was made of.

    Read, not asked: a package may have put a program of its own in the interpreter's place, which may run
    inside of the sandbox only.
    """
    environment = _environment(python)
    if python == Path(sys.executable):
        return Path(sys.base_prefix)
    if not python.exists():
        raise BrokenEnvironment(f"There is no interpreter {python}; make its virtual environment again.")
    if environment is None:
        return python.resolve().parent.parent
    lines = (environment / "pyvenv.cfg").read_text("utf-8", "replace").splitlines()
    settings = dict(line.split(" = ", 1) for line in lines if " = " in line)
    home = Path(settings.get("home", ""))
    if not home.is_absolute() or not (home / "python3").is_file():
        raise BrokenEnvironment(f"{environment} names no interpreter that it is made of; make it again.")
    return home.parent


def _links(python: Path, shown: list[Path]) -> Iterator[str]:
    """The links from its name to its file that lie outside of what is shown."""
    place = python.absolute()
    while place.is_symlink():
        if not any(place.is_relative_to(folder) for folder in shown):
            yield from ("--symlink", os.readlink(place), str(place))
        place = place.parent / os.readlink(place)
