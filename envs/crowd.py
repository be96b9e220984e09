"""How many threads and processes a sandboxed child has: what no limit holds, a look every LOOK_S does.

The kernel counts the tasks of a user, but not those of root and, before Linux 5.14, not those of a sandbox
apart from all others. Stacks can be small or shared, so the limit of memory holds tens of thousands.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Final

from .limits import MAX_TASKS

LOOK_S: Final = 0.2
"""A child starts some thousand threads in it: what the machine can bear."""


OWN: Final = 4
"""Tasks that are bubblewrap's, one of them outside of what the kernel counts."""


class Crowd:
    """Ends the children with more than `limit` tasks. One thread looks, as long as there are children."""

    def __init__(self, limit: int = MAX_TASKS + OWN, every: float = LOOK_S) -> None:
        self._limit = limit
        self._every = every
        self._lock = threading.Lock()
        self._living: set[subprocess.Popen[bytes]] = set()
        self._looking = False

    def add(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._living.add(process)
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="crowd", daemon=True).start()

    def remove(self, process: subprocess.Popen[bytes]) -> bool:
        """Before its number is given back to the system; False: it was ended for its crowd."""
        with self._lock:
            known = process in self._living
            self._living.discard(process)
            return known

    def _look(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._every):
            with self._lock:
                for process in [one for one in self._living if tasks(one.pid, self._limit) > self._limit]:
                    self._living.remove(process)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                if not self._living:
                    self._looking = False
                    return


def tasks(pid: int, limit: int) -> int:
    """Threads of a process and of its descendants, counted until they are more than `limit`."""
    total, processes = 0, [str(pid)]
    while processes and total <= limit:
        place = Path("/proc", processes.pop(), "task")
        with contextlib.suppress(OSError):  # it ended meanwhile
            threads = os.listdir(place)
            total += len(threads)
            if total <= limit:
                processes += [child for thread in threads for child in _children(place / thread)]
    return total


def _children(thread: Path) -> list[str]:
    try:
        return (thread / "children").read_text().split()
    except OSError:
        return []


CROWD: Final = Crowd()
"""Of this process."""
