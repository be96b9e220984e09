"""Processes of the demo: started, read line by line, stopped cleanly, and never left behind.

Each child leads a session of its own, so that Ctrl-C in the terminal reaches only us and a group can be
killed as a whole (a child may have a worker of its own). A child whose pipe to us breaks stops by itself,
which covers our own `kill -9`.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .events import Event, from_line

STOP_SECONDS = 20.0
"""For a child that was asked to finish: a learner in the middle of an update ends it first."""
DRAIN_SECONDS = 2.0
"""For what an ended child had written: it is read already unless this machine is busy."""
TAIL_LINES = 12
"""Lines of a dead child's stderr that are shown."""
TAIL_BYTES = 16_384
MAX_LINE = 1 << 20
"""Bytes of one line: an event has some kilobytes."""


@dataclass(slots=True)
class Child:
    """One `nous-node` process. `name` is how it is called in views; its stderr goes to `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    reader: threading.Thread | None = None
    code: int | None = None
    """Exit code, once it was reaped; negative for a signal."""

    def tail(self) -> str:
        """The last lines of its stderr."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def poll(self) -> int | None:
        """Its exit code if it has ended. What is left of its group is killed before it is reaped, while
        its process id cannot belong to anybody else."""
        if self.code is None and self._ended():
            self._kill_group()
            self.code = self.process.wait()
        return self.code

    def ask_to_stop(self) -> None:
        if self.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Ends the whole group now."""
        if self.code is None:
            self._kill_group()
            self.code = self.process.wait()

    def _ended(self) -> bool:
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(slots=True)
class Family:
    """All children of one demo, and the events that they report."""

    program: Sequence[str] = (sys.executable, "-P", "-m", "nous_node.node.cli")
    """What a child runs, before its arguments: `nous-node` under this interpreter."""
    events: queue.Queue[tuple[str, Event]] = field(default_factory=queue.Queue)
    children: list[Child] = field(default_factory=list)

    def start(
        self, name: str, arguments: Sequence[str], log: Path, program: Sequence[str] | None = None
    ) -> Child:
        """Starts the program, or another one, with these arguments: one torch thread, offline.

        Raises OSError where it cannot be started.
        """
        if not self.children:
            atexit.register(self.kill)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                [*(self.program if program is None else program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        child = Child(name, process, log)
        self.children.append(child)
        child.reader = threading.Thread(target=self._read, args=(child,), name=f"read {name}", daemon=True)
        child.reader.start()
        return child

    def stop(self, children: Sequence[Child], seconds: float = STOP_SECONDS) -> list[Child]:
        """Asks these to finish, waits, and kills what does not; returns those that had to be killed."""
        for child in children:
            child.ask_to_stop()
        deadline = time.monotonic() + seconds
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        stubborn = [child for child in children if child.poll() is None]
        for child in stubborn:
            child.kill()
        for child in children:
            if child.reader is not None:  # its last words are in the pipe
                child.reader.join(DRAIN_SECONDS)
        return stubborn

    def kill(self) -> None:
        """Ends all of them at once."""
        for child in self.children:
            child.kill()

    def _read(self, child: Child) -> None:
        """A thread a child: its lines become events; a line that is none is dropped."""
        assert child.process.stdout is not None
        with child.process.stdout as stream:
            while line := stream.readline(MAX_LINE):
                try:
                    self.events.put((child.name, from_line(line)))
                except msgspec.DecodeError:
                    continue
