"""What the command line answers with when it ends. The only place that maps errors to exit codes.

Nothing heavy is imported here: the modules of errors are small, and only looked at once one was raised.
"""

from __future__ import annotations

import errno
import sqlite3
import time
import traceback
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

CRASH_FOLDER = "crashes"
"""Folder in the home where tracebacks of unexpected errors are kept."""

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM})
_NET = frozenset(
    {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH}
)
_UNREACHABLE = frozenset({"FetchError", "UnreachableRunError"})
"""Errors of modules that import the network: told by name, so that this one does not."""


class Exit(IntEnum):
    """Exit codes of every command; the README and `--help` repeat them."""

    OK = 0
    FAILED = 1
    """The demo did not learn, doctor found a problem, audit another verdict than was recorded, a checkpoint
    is damaged, an environment failed, or a client a conformance test."""
    INPUT = 2
    """A flag, an invite, a file or a folder that cannot be used as it is."""
    NETWORK = 3
    """A peer that cannot be reached, or a port that is taken."""
    STORAGE = 4
    """A full disk, or state on it that is damaged."""
    INTERNAL = 5
    """An error of this program."""
    INTERRUPTED = 130
    """Ctrl-C a second time."""


EXIT_CODES = """Exit codes: 0 ok · 1 the demo did not learn, doctor found a problem, audit another verdict
than was recorded, a checkpoint is damaged, an environment failed, or a client a conformance test · 2 bad
input (flag, invite, file) · 3 network (unreachable, port in use) · 4 storage (disk full, damaged state) · 5
internal error · 130 Ctrl-C pressed twice""".replace("\n", " ")


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in an exception group of any depth, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


def verdict(error: BaseException) -> tuple[Exit, str]:
    """The exit code of an error and the sentence to print. An unexpected one decides for its group."""
    judged = [_judged(leaf) for leaf in leaves(error)]
    return max(judged, key=lambda pair: pair[0])


def _judged(error: BaseException) -> tuple[Exit, str]:
    from nous_node.protocol.errors import NousError

    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED, "Interrupted."
    if isinstance(error, NousError):
        return _code_of(error), str(error)
    if isinstance(error, sqlite3.DatabaseError):
        return Exit.STORAGE, f"A database in the home cannot be used ({error}); `nous-node doctor` says more."
    if isinstance(error, OSError) and error.errno in _DISK:
        where = f" ({error.filename})" if error.filename else ""
        return (
            Exit.STORAGE,
            f"The disk refused{where}: {error.strerror}. Make room or mend it, and start again.",
        )
    if isinstance(error, OSError) and error.errno in _NET:
        return Exit.NETWORK, f"The network refused: {error.strerror}. Choose another port or check the line."
    return Exit.INTERNAL, f"{type(error).__name__}: {error}"


def _code_of(error: Exception) -> Exit:
    """Storage and network errors by their place in the trees of their modules; the rest is input."""
    from nous_node.protocol.errors import Code, RemoteError
    from nous_node.trainer.errors import CheckpointError

    from . import network_errors as net
    from .home import StorageError

    unreachable = (net.ListenError, net.UnreachableError, net.NotConnectedError, net.NoSubscribersError)
    if isinstance(error, (StorageError, CheckpointError)):
        return Exit.STORAGE
    if isinstance(error, unreachable) or type(error).__name__ in _UNREACHABLE:
        return Exit.NETWORK
    if isinstance(error, RemoteError) and error.code is not Code.INVITE:
        return Exit.NETWORK
    return Exit.INPUT


def write_crash(home: Path, error: BaseException) -> Path | None:
    """Keeps the traceback of an unexpected error in the home; None where even that is impossible."""
    text = "".join(traceback.format_exception(error))
    try:
        folder = home / CRASH_FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 1_000_000:06d}.txt"
        path.write_text(text)
    except OSError:
        return None
    return path
