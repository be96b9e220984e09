"""The client under test as a process: started with an invite and a home, killed, started again.

Whatever it prints is read and counted, and only its last words are kept: a client that floods its output
fills neither a pipe nor this node's memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from .conformance_process import REAP_S
from .demo_clients import HOME, filled
from .wording import printable

LAST_WORDS = 600
"""Bytes of its output that are shown where it failed."""
FLOOD_BYTES = 16 << 20
"""Of output in a play: a client that says something each second writes a thousandth of that."""
READ_BYTES = 1 << 16


@dataclass(slots=True)
class Output:
    """What a client has printed."""

    total: int = 0
    last: bytes = b""

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self.last = (self.last + data)[-LAST_WORDS:]

    @property
    def flooded(self) -> bool:
        return self.total > FLOOD_BYTES

    def words(self) -> str:
        text = self.last.decode(errors="replace").strip()
        return f" Its last words: {printable(text, LAST_WORDS)}" if text else " It printed nothing."


class Client:
    """A command that is run in a folder of its own."""

    def __init__(
        self, command: Sequence[str], invite: str, folder: Path, changed: Callable[[], None]
    ) -> None:
        self.output = Output()
        self.keeps_home = any(HOME in word for word in command)
        """Whether it can be started again with what it had stored."""
        home = folder / "home"
        home.mkdir()
        self._words = filled(command, invite, home)
        self._folder, self._changed = folder, changed
        self._process: trio.Process | None = None

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.returncode

    async def run(self, nursery: trio.Nursery) -> None:
        """Starts it, again after `kill`. Raises OSError where there is no such program."""
        process = await trio.lowlevel.open_process(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=Path.cwd(),
            start_new_session=True,  # what it starts itself ends with it
        )
        self._process = process
        nursery.start_soon(self._read, process)

    async def kill(self) -> None:
        """As a power failure would."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.CancelScope(deadline=trio.current_time() + REAP_S, shield=True):
            await process.wait()

    async def _read(self, process: trio.Process) -> None:
        assert process.stdout is not None
        async with process.stdout as stream:
            while data := await stream.receive_some(READ_BYTES):
                self.output.add(data)
                if self.output.flooded:
                    await self.kill()
                    break
        await process.wait()
        self._changed()
