"""Nodes as real processes: `nous-node ... --json`, their events as they come, and an end for all of them."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from nous_node.node.events import Event, Note, RunReady, Summary, TrainerStatus, VolunteerStatus, from_line

PROGRAM = (sys.executable, "-P", "-m", "nous_node.node.cli")
LOOPBACK = "/ip4/127.0.0.1/tcp/0"

EVENT_SECONDS = 80.0
"""Until something is seen that takes seconds when the machine is idle."""
EXIT_SECONDS = 25.0

E = TypeVar("E")


class NodeProcess:
    """One node. `events` grows as lines come; `wait` looks at those from `mark` on."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.stderr"
        self.events: list[Event] = []
        self.lines: list[str] = []
        """What it said that is no event."""
        self._changed = threading.Condition()
        self._ended = False
        self._children: set[psutil.Process] = set()
        with self.log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    # --- what it says ----------------------------------------------------------------------------

    @property
    def mark(self) -> int:
        """For `wait(since=...)`: only what is said from now on."""
        return len(self.events)

    def wait(
        self,
        kind: type[E],
        condition: Callable[[E], object] = lambda event: True,
        *,
        since: int = 0,
        seconds: float = EVENT_SECONDS,
    ) -> E:
        """The first event of a kind that fulfils a condition."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                for event in self.events[since:]:
                    if isinstance(event, kind) and condition(event):
                        return event
                since = len(self.events)
                left = deadline - time.monotonic()
                if self._ended or (not self._changed.wait(max(0.0, left)) and left <= 0):
                    raise AssertionError(f"{self.name} never said so. {self.told()}")

    def until(self, condition: Callable[[], object], seconds: float = EVENT_SECONDS) -> None:
        """Looks again whenever the node says something, which it does every second."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.wait(VolunteerStatus, since=self.mark, seconds=deadline - time.monotonic())

    def note(self, text: str, *, since: int = 0, seconds: float = EVENT_SECONDS) -> Note:
        return self.wait(Note, lambda note: text in note.text, since=since, seconds=seconds)

    def invite(self) -> str:
        return self.wait(RunReady).invite

    def port(self) -> int:
        return int(self.wait(RunReady).addresses[0].split("/")[4])

    def accepted(self, more: int = 1, *, since: int | None = None, seconds: float = EVENT_SECONDS) -> int:
        """Waits until that many more groups were accepted than now; how many then are."""
        before = max((event.accepted for event in self.statuses()), default=0) if since is None else since
        status = self.wait(
            VolunteerStatus, lambda event: event.accepted >= before + more, since=self.mark, seconds=seconds
        )
        return status.accepted

    def statuses(self) -> list[VolunteerStatus]:
        return [event for event in self.events if isinstance(event, VolunteerStatus)]

    def version(self, at_least: int, *, since: int = 0, seconds: float = EVENT_SECONDS) -> int:
        """Of a trainer: waits for a version."""
        return self.wait(
            TrainerStatus, lambda event: event.version >= at_least, since=since, seconds=seconds
        ).version

    def summary(self) -> Summary:
        return self.wait(Summary, seconds=EXIT_SECONDS)

    def told(self) -> str:
        errors = self.log.read_text(errors="replace")[-2000:]
        return f"Its last words: {self.events[-3:]}; stderr: {errors or 'nothing'}"

    # --- its life --------------------------------------------------------------------------------

    def child(self) -> psutil.Process:
        """Its worker or learner, as soon as there is one."""
        deadline = time.monotonic() + EVENT_SECONDS
        while time.monotonic() < deadline:
            found = psutil.Process(self.process.pid).children()
            self._children.update(found)
            if found:
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"{self.name} has no child. {self.told()}")

    def kill(self) -> None:
        """kill -9, to the node alone: what becomes of its child is the child's matter."""
        self._note_children()
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def exit_code(self, seconds: float = EXIT_SECONDS) -> int:
        """Waits for its end."""
        self._note_children()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end. {self.told()}") from None

    def sentence(self) -> str:
        """What it said on stderr when it ended."""
        return self.log.read_text().strip()

    def clean_up(self) -> None:
        self._note_children()
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for child in self._children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._reader.join(5)

    def _note_children(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._children.update(psutil.Process(self.process.pid).children(recursive=True))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                try:
                    event = from_line(line)
                except msgspec.DecodeError:
                    self.lines.append(line.decode(errors="replace").rstrip("\n"))
                    continue
                with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class StoredOutbox:
    """A volunteer's outbox as it stands on the disk. Groups are named by their first envelope."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, state: str) -> set[bytes]:
        with closing(sqlite3.connect(self._path, timeout=10)) as connection:
            rows = connection.execute("SELECT id FROM groups WHERE state = ?", (state,)).fetchall()
        return {rollout for (rollout,) in rows}

    def waiting(self) -> set[bytes]:
        return self.of("waiting")

    def accepted(self) -> set[bytes]:
        return self.of("accepted")


class Village:
    """All nodes of one test, with a home each in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[NodeProcess] = []

    def start(self, name: str, *arguments: str) -> NodeProcess:
        """Any command, with a home of this name."""
        home = ["--home", str(self.home(name))]
        node = NodeProcess(f"{name}-{len(self.nodes)}", [*arguments, *home], self.folder)
        self.nodes.append(node)
        return node

    def home(self, name: str) -> Path:
        return self.folder / name

    def train(
        self, run: str = "run", name: str = "trainer", port: int = 0, flags: Sequence[str] = ()
    ) -> NodeProcess:
        listen = LOOPBACK.removesuffix("0") + str(port)
        return self.start(name, "train", run, "--json", "--threads", "1", "--listen", listen, *flags)

    def join(self, name: str, *arguments: str) -> NodeProcess:
        usual = ("--json", "--threads", "1", "--nice", "0", "--listen", LOOPBACK)
        return self.start(name, "join", *arguments, *usual)

    def relay(self, name: str, invite: str) -> NodeProcess:
        return self.start(name, "relay", invite, "--json", "--listen", LOOPBACK)

    def outbox(self, name: str) -> StoredOutbox:
        (path,) = self.home(name).glob("joined/*/outbox.sqlite")
        return StoredOutbox(path)

    def clean_up(self) -> None:
        for node in self.nodes:
            node.clean_up()
