"""Child processes for code that we did not write: what they can see and use.

    process = start(Launch(python, "nous_node.envs.host", ...))

Under bubblewrap (Linux) such a process has namespaces of its own, no network unless it is given one, no
capabilities, an environment of a few variables, the file system of `mounts`, the system calls of `seccomp`
and the limits of `limits`. It ends with this process, however that ends. A plain one, for code that the user
trusts, has only the variables and the limits. What no limit counts is bounded by the deadlines of `child`.
"""

from __future__ import annotations

import atexit
import functools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import nous_node.envs
import nous_node.protocol

from . import seccomp
from .access import DEFAULT_SECONDS
from .errors import CannotStart
from .limits import MAX_OPEN, allowed
from .mounts import OURS, View, mounts

TRIAL_S: Final = 20.0
"""How long bubblewrap may take to start nothing, on a machine that is busy."""
TRIAL_BYTES: Final = 1 << 30
_INSTALL: Final = "`apt install bubblewrap`, `dnf install bubblewrap` or `pacman -S bubblewrap`"
_SWITCHES: Final = {
    "kernel.unprivileged_userns_clone": "0",
    "kernel.apparmor_restrict_unprivileged_userns": "1",
    "user.max_user_namespaces": "0",
}
"""Settings, and the values of them that forbid user namespaces: Debian's, Ubuntu's, anybody's."""
_PERMITTING: Final = {
    "kernel.unprivileged_userns_clone": "1",
    "kernel.apparmor_restrict_unprivileged_userns": "0",
    "user.max_user_namespaces": "10000",
}
"""What to set instead."""


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
    """Whether the sandbox has the machine's network, with whatever listens on it; a plain process always
    has."""
    memory: int
    """Bytes of address space, of all its threads together."""
    hidden: tuple[Path, ...]
    """Folders that it sees empty even where they lie under something readable."""
    hash_seed: int = 0
    """PYTHONHASHSEED. Any other than 0 is for finding out who depends on it. [EVM-5]"""
    seconds: float = DEFAULT_SECONDS
    """That whoever asks waits for an answer."""
    whose: str = ""
    """The family or the package that it is for: code in one process can change what other code in it does,
    so that processes are shared within one of them only."""


@functools.cache
def unavailable() -> str | None:
    """Why bubblewrap cannot be used here, in one sentence; None where it can. Found out once, by use."""
    if not sys.platform.startswith("linux"):
        return f"The sandbox is bubblewrap, which needs Linux; this is {sys.platform}."
    program = shutil.which("bwrap")
    if program is None:
        return f"bubblewrap is not installed; get it with {_INSTALL}."
    if (version := _too_old(program)) is not None:
        return f"bubblewrap {version} cannot bound a folder in memory; 0.7 or newer is needed."
    problem = _trials()[-1]
    return None if problem is None else f"bubblewrap fails here ({problem}): {advice()}."


@functools.cache
def unfiltered() -> str | None:
    """Why the sandbox has no filter of system calls here; None where it has."""
    if seccomp.program(network=False) is None:
        return f"no filter of system calls is known for {os.uname().machine}"
    return None if _trials()[0] is None else "this kernel takes no filter of system calls"


def start(launch: Launch) -> subprocess.Popen[bytes]:
    """Starts it with pipes at stdin, stdout and stderr, as the leader of a process group.

    Raises CannotStart where there is no sandbox, and BrokenEnvironment where there is no interpreter.
    """
    if launch.sandboxed and (problem := unavailable()) is not None:
        raise CannotStart(f"{problem} To run an environment without a sandbox, trust it: --trust-env NAME.")
    return _starter().submit(_sandboxed if launch.sandboxed else _plain, launch).result()


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """One thread for the life of this process starts all children: the kernel ends a child with the thread
    that started it, and ours come and go."""
    return ThreadPoolExecutor(1, "children")


def _plain(launch: Launch) -> subprocess.Popen[bytes]:
    return _popen(
        _command(launch, _ours(), os.getpid()), _variables([_ours(), *launch.paths], launch.hash_seed)
    )


def _sandboxed(launch: Launch) -> subprocess.Popen[bytes]:
    return _wrapped(launch, _command(launch, OURS, parent=0), filtered=unfiltered() is None)


def _wrapped(launch: Launch, command: Sequence[str], *, filtered: bool) -> subprocess.Popen[bytes]:
    view = View(launch.python, _packages(), launch.readable, launch.hidden, launch.network)
    arguments = [*_namespaces(launch.network), *mounts(view), "--chdir", "/tmp"]
    variables = _variables([OURS, *launch.paths], launch.hash_seed)
    if not filtered:
        return _popen([*_bounded(launch.memory), _bubblewrap(), *arguments, "--", *command], variables)
    reading = _in_pipe(seccomp.program(launch.network) or b"")
    try:
        arguments += ["--seccomp", str(reading)]
        bounded = _bounded(launch.memory)
        return _popen([*bounded, _bubblewrap(), *arguments, "--", *command], variables, (reading,))
    finally:
        os.close(reading)


def _bounded(memory: int) -> list[str]:
    """The limits that have to hold whatever runs inside: a package can put another program where `limits`
    expects an interpreter."""
    opened, space = allowed(resource.RLIMIT_NOFILE, MAX_OPEN), allowed(resource.RLIMIT_AS, memory)
    limits = f"ulimit -c 0 && ulimit -n {opened} && ulimit -v {space >> 10}"
    return ["/bin/sh", "-c", f'{limits} && exec "$@"', "sh"]


def _namespaces(network: bool) -> list[str]:
    shared = ["--share-net"] if network else []
    return [
        *("--unshare-all", *shared, "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--hostname", "sandbox"),
    ]


def _popen(
    command: Sequence[str], variables: dict[str, str], passed: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=variables,
            cwd="/",
            start_new_session=True,
            pass_fds=passed,
        )
    except OSError as error:
        raise CannotStart(
            f"{command[0]} cannot be started: {error.strerror}. Install it, or end other programs."
        ) from error


def _command(launch: Launch, ours: Path, parent: int) -> list[str]:
    """See `limits`, which runs first."""
    limits = ours / "nous_node" / "envs" / "limits.py"
    return [str(launch.python), "-S", "-P", str(limits), str(launch.memory), str(parent), launch.module]


def _variables(paths: Sequence[Path], hash_seed: int) -> dict[str, str]:
    """All variables of a child; nothing of ours goes there."""
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONHASHSEED": str(hash_seed),  # reproducible environments [EVM-5]
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",  # its last words come out before it is killed
        "HOME": "/tmp",
        "USER": "nous",  # there is no /etc/passwd to look it up in
        "LANG": "C.UTF-8",
        "TZ": "UTC",  # also without the sandbox, which hides what the machine is set to [EVM-5]
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
    """Where our packages lie: an editable checkout or `site-packages`. Not the node and not the trainer: a
    child imports nothing of them."""
    return {
        "envs": Path(nous_node.envs.__path__[0]).resolve(),
        "protocol": Path(nous_node.protocol.__path__[0]).resolve(),
    }


def _in_pipe(data: bytes) -> int:
    """A descriptor from which `data` can be read; it has to fit into a pipe, as a filter does."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(data)
    return reading


# --- whether it works here ---


def _bubblewrap() -> str:
    return shutil.which("bwrap") or "bwrap"


@functools.cache
def _trials() -> tuple[str | None, ...]:
    """What went wrong with the filter of system calls and, where something did, without it."""
    with_filter = _trial(filtered=True) if seccomp.program(network=False) is not None else "no filter"
    return (with_filter,) if with_filter is None else (with_filter, _trial(filtered=False))


def _trial(*, filtered: bool) -> str | None:
    """What bubblewrap says when our own interpreter is to do nothing in the sandbox; None: it worked."""
    python = Path(sys.executable)
    launch = Launch(python, "", (), (), sandboxed=True, network=False, memory=TRIAL_BYTES, hidden=())
    process = _wrapped(launch, [str(python), "-S", "-c", ""], filtered=filtered)
    try:
        _, told = process.communicate(timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"it does not start within {TRIAL_S:g} s"
    return None if process.returncode == 0 else " ".join(told.decode("utf-8", "replace").split())[-200:]


def _too_old(program: str) -> str | None:
    """Its version, where it is older than the options used here."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=TRIAL_S, check=False)
    if "--size" in done.stdout + done.stderr:
        return None
    told = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=TRIAL_S, check=False
    )
    return told.stdout.split()[-1] if told.stdout.split() else "of this machine"


def advice(settings: Path = Path("/proc/sys")) -> str:
    """Which of the kernel's settings forbids user namespaces, where one does, and what to set."""
    for name, forbidding in _SWITCHES.items():
        file = settings.joinpath(*name.split("."))
        if file.exists() and file.read_text().strip() == forbidding:
            return (
                f"user namespaces are not permitted; allow them with `sysctl -w {name}={_PERMITTING[name]}`"
            )
    return "a container may have to be started with user namespaces and a /proc of its own permitted"
