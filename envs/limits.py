"""The first thing that runs in a child process: its bounds, before anything that somebody else wrote.

    python -S -P limits.py MEMORY PARENT MODULE

PARENT is 0 in a sandbox, which ends with its parent already.
`-S` keeps the interpreter from running what packages left in `site-packages` before the bounds are set.
This file imports nothing but the standard library: it runs in other interpreters than ours.
"""

from __future__ import annotations

import contextlib
import os
import resource
import runpy
import signal
import site
import sys

MAX_FILE = 64 << 20
"""Bytes of one file: a game's state or a cache, not a disk."""
MAX_OPEN = 256
"""Descriptors: a library with its data files needs some tens."""
MAX_TASKS = 256
"""Threads of the whole sandbox; `crowd` counts those that the kernel does not."""
COUNTED_APART = (5, 14)
"""Since this Linux the tasks of a user are counted in each user namespace for itself. Before, all that the
user runs would count against the child."""
LINUX = sys.platform.startswith("linux")
SET_PDEATHSIG = 1
"""prctl(2): the signal when the parent dies."""


def bound(memory: int) -> None:
    """Hard limits, for good. `memory`: bytes of address space, of all threads together."""
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, MAX_FILE)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN)


def bound_tasks() -> None:
    """The same of threads, in a user namespace of its own."""
    release = os.uname().release.split(".")
    if (int(release[0]), int(release[1].split("-")[0])) >= COUNTED_APART:
        _limit(resource.RLIMIT_NPROC, MAX_TASKS)


def allowed(kind: int, wanted: int) -> int:
    """A limit that can be set: never above what already holds."""
    hard = resource.getrlimit(kind)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def _limit(kind: int, wanted: int) -> None:
    limit = allowed(kind, wanted)
    if LINUX:
        resource.setrlimit(kind, (limit, limit))
        return
    with contextlib.suppress(OSError, ValueError):  # macOS has no limit of address space
        resource.setrlimit(kind, (limit, limit))


def die_with(parent: int) -> None:
    """Ends this process when `parent` ends, even by SIGKILL."""
    if LINUX:  # elsewhere the end of the pipe has to do
        import ctypes

        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"The parent {parent} is gone.")


def main() -> None:
    """Sets the bounds, then becomes `python -m MODULE`."""
    memory, parent, module = sys.argv[1:]
    bound(int(memory))
    if parent == "0":
        bound_tasks()
    else:
        die_with(int(parent))
    site.main()
    sys.argv[:] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
