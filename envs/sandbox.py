"""Child processes for code that we did not write: what they can see and use.

process = start(Launch(python, "nous_node.envs.host", ...))
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = ("envs", "protocol")
"""What of ours a child imports. Not the node and not the trainer: they hold keys and weights."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start, and what it may see."""

    python: Path
    """The interpreter: ours, or that of another virtual environment."""
    module: str
    """Run as `python -m MODULE`."""
    readable: tuple[Path, ...]
    """Folders and files that it can read beside the system's and the interpreter's own."""
    paths: tuple[Path, ...]
    """Where it finds modules beside its own packages; they have to be readable."""
    sandboxed: bool
    """False: as a plain process, because the user trusts it."""
    network: bool
    """Whether the sandbox has the machine's network; a plain process always has."""
    memory: int
    """Bytes of address space, of all its threads together."""
    hidden: tuple[Path, ...]
    """Folders that it sees empty even where they lie under something readable."""


def unavailable() -> str | None:
    """Why bubblewrap cannot be used here, in one sentence; None where it can."""
    return None


def start(launch: Launch) -> subprocess.Popen[bytes]:
    """Starts it with pipes at stdin, stdout and stderr, as the leader of a process group."""
    return _starter().submit(_started, launch).result()


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """One thread for the life of this process starts all children: the kernel ends a child with the thread
    that started it, and ours come and go."""
    return ThreadPoolExecutor(1, "children")


def _started(launch: Launch) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        _plain(launch),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=_environment([_ours(), *launch.paths]),
        cwd="/",
        start_new_session=True,
    )


def _plain(launch: Launch) -> list[str]:
    return _python(launch, _ours(), os.getpid())


def _python(launch: Launch, ours: Path, parent: int) -> list[str]:
    limits = ours / "nous_node" / "envs" / "limits.py"
    return [str(launch.python), "-S", "-P", str(limits), str(launch.memory), str(parent), launch.module]


def _environment(paths: list[Path]) -> dict[str, str]:
    """All variables of a child; nothing of ours goes there."""
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONHASHSEED": "0",  # reproducible environments [EVM-5]
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/tmp",
        "USER": "nous",  # there is no /etc/passwd to look it up in
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",  # the node's own work has the cores
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@functools.cache
def _ours() -> Path:
    """A folder with our packages under their name and nothing else, for any interpreter."""
    folder = tempfile.TemporaryDirectory(prefix="nous-")
    atexit.register(folder.cleanup)
    package = Path(folder.name) / "nous_node"
    package.mkdir()
    for name, place in _packages().items():
        (package / name).symlink_to(place)
    return Path(folder.name)


def _packages() -> dict[str, Path]:
    """Where our packages lie: an editable checkout or `site-packages`."""
    import nous_node.envs
    import nous_node.protocol

    return {
        "envs": Path(nous_node.envs.__path__[0]).resolve(),
        "protocol": Path(nous_node.protocol.__path__[0]).resolve(),
    }
