"""pip as a child process: its progress as lines, its failures as sentences.

Only wheels are taken where nothing else is said (`--only-binary :all:`): a wheel is unpacked, a source
distribution runs code of its own with this user's rights, and no sandbox is around pip.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from nous_node.protocol.errors import LocalError

from .home import DiskFullError
from .network_errors import UnreachableError
from .wording import printable

LIMIT_S: Final = 3600.0
"""A child that takes longer than an hour hangs: the largest recipe takes a minute on a fast line, and pip
gives up by itself where a server is silent."""

MAX_LINE: Final = 500
"""Characters of one line that are looked at."""

_TAIL: Final = 40
"""Last lines that are kept to explain a failure."""

_TOLD: Final = 3
"""Of pip's own errors that are repeated."""

_STEPS: Final = ("Collecting ", "Downloading ", "Building ", "Installing ", "Processing ", "Successfully ")
_FULL: Final = "No space left on device"
_OFFLINE: Final = re.compile(
    r"NewConnectionError|NameResolutionError|name resolution|ConnectTimeout|ReadTimeout|ProxyError|"
    r"Network is unreachable|Connection refused|Max retries exceeded|Connection reset|SSLError"
)
_NOISE: Final = re.compile(r"^(ERROR|error): *")
_CHATTER: Final = re.compile(r"^\[notice\]|^WARNING: (Location|Running pip as|Cache)|^\s*$")

Told = Callable[[str], None]
"""Hears of each step, one line."""


class InstallError(LocalError):
    """The packages of an ecosystem cannot be installed."""


def run(command: Sequence[str | Path], told: Told, limit: float = LIMIT_S) -> None:
    """Runs pip or venv to its end. Raises InstallError, UnreachableError or DiskFullError.

    Interrupted, it ends the child first.
    """
    tail: deque[str] = deque(maxlen=_TAIL)
    child = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environ(os.environ),
        start_new_session=True,  # its builds are ended with it
    )
    alarm = threading.Timer(limit, _end, (child.pid,))
    alarm.start()
    try:
        for line in _lines(child):
            tail.append(line)
            if line.lstrip().startswith(_STEPS):
                told(line.strip())
        code = child.wait()
    except BaseException:
        _end(child.pid)
        child.wait()
        raise
    finally:
        alarm.cancel()
    if code:
        raise failure(code, list(tail))


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Ours without what would lead Python to other packages; settings of pip stay."""
    dropped = ("PYTHON", "VIRTUAL_ENV", "__PYVENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    kept = {key: value for key, value in environ.items() if not key.startswith(dropped)}
    return {**kept, "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "PIP_NO_INPUT": "1"}


def _lines(child: subprocess.Popen[bytes]) -> Iterator[str]:
    assert child.stdout is not None
    with child.stdout as stream:
        while raw := stream.readline(1 << 16):
            yield printable(raw.decode("utf-8", "replace").rstrip(), MAX_LINE)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def failure(code: int, tail: list[str]) -> LocalError:
    """What to say where the child ended with `code` after these last lines."""
    text = "\n".join(tail)
    if _FULL in text:
        return DiskFullError(
            "The disk is full: the packages could not be installed, and nothing was changed. Make room and "
            "run the command again."
        )
    told = _reasons(tail)
    if _OFFLINE.search(text):
        return UnreachableError("the package index", f"pip says: {told}")
    if code == -signal.SIGKILL:
        return InstallError(
            f"The install was ended from outside, or took more than {LIMIT_S / 60:.0f} minutes."
        )
    if "No module named ensurepip" in text or "ensurepip is not" in text:
        return InstallError(
            "This Python cannot make virtual environments. Install its venv package (Debian: apt install "
            "python3-venv), or name another interpreter with --python."
        )
    return InstallError(f"The packages cannot be installed, and nothing was changed. pip says: {told}")


def _reasons(tail: list[str]) -> str:
    """pip's own errors, else its last lines."""
    said = [line for line in tail if not _CHATTER.match(line)]
    errors = [line for line in said if _NOISE.match(line)] or said
    return " / ".join(_NOISE.sub("", line).strip() for line in errors[-_TOLD:]) or "nothing"
