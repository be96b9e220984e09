"""A client's adapter as a child process: lines go in, as many come back, and nothing that it does hurts us.

It may hang, flood, print garbage, answer what nobody asked, close its pipes or never start: each is a
`Fault`, a sentence. One thread moves the bytes of all three pipes, so that none fills while another is
waited for; what is kept of each is bounded. The child leads a process group, which is killed at the end.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from nous_node.protocol.errors import NousError

from .wording import plural, printable

MAX_LINE = 1 << 25
"""Bytes of one answer, and of all of a batch: the largest of the vectors has 4 MiB as hex."""
READ = 1 << 16
"""Bytes of one read: what a pipe holds."""
TAIL = 4_096
"""Bytes of stderr that are kept: the end of a traceback."""
SHOWN_TAIL = 300
"""Characters of it that are shown in a row."""
SHOWN_LINE = 120
"""Characters of a line that is no answer."""
GRACE_S = 1.0
"""For the exit code of a child that has closed a pipe: ending takes some milliseconds."""
POLL_S = 0.01
"""Between two looks at whether it has ended."""
LOOK_S = 0.5
"""The same, while an answer is waited for: a child of its own may hold its output open."""
REAP_S = 5.0
"""For a killed child to be gone. One that runs as another user cannot be killed, and may stay."""


class Fault(NousError):
    """What the client did wrong, as a sentence without a subject: `gave no answer within 10 s`."""


class Hung(Fault):
    """It let its deadline pass."""


class Stray(Fault):
    """It wrote something that nobody had asked for: which question it belongs to cannot be told."""


@dataclass(slots=True)
class Process:
    """A running adapter. After a Fault it is of no use any more: close it."""

    child: subprocess.Popen[bytes]
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    received: bytearray = field(default_factory=bytearray)
    """Of stdout, from the first byte that is in no answer yet."""
    tail: bytes = b""
    """The end of stderr."""
    finishing: bool = False
    """Whether its input has ended: its output may, too."""

    @classmethod
    def start(cls, command: Sequence[str]) -> Process:
        """Raises Fault where there is no such program."""
        pipe = subprocess.PIPE
        try:
            child = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except (OSError, ValueError) as error:  # no such file, no right to run it; a zero byte in its name
            raise Fault(f"cannot be started: {printable(str(error))}") from error
        process = cls(child)
        for pipe_end in (child.stdin, child.stdout, child.stderr):
            assert pipe_end is not None
            os.set_blocking(pipe_end.fileno(), False)
        process.selector.register(_end(child.stdout), selectors.EVENT_READ)
        process.selector.register(_end(child.stderr), selectors.EVENT_READ)
        return process

    def exchange(self, lines: Sequence[bytes], seconds: float) -> list[bytes]:
        """Writes these lines, each with its line feed, and gives as many answers without theirs; each may
        take `seconds`. Raises Fault, Stray where something came before or beyond."""
        self._check_quiet()
        unsent = memoryview(b"".join(lines))
        answers: list[bytes] = []
        self.selector.register(_end(self.child.stdin), selectors.EVENT_WRITE)
        try:
            deadline = time.monotonic() + seconds
            while len(answers) < len(lines):
                unsent = self._turn(unsent, deadline, seconds)
                if self._take(answers, len(lines)):
                    deadline = time.monotonic() + seconds
        finally:
            with suppress(KeyError):
                self.selector.unregister(_end(self.child.stdin))
        if unsent or self.received:
            raise Stray(f"wrote more than {plural(len(lines), 'answer')}: {self._beginning()}")
        return answers

    def finish(self, seconds: float) -> None:
        """Ends its input. Raises Fault unless it ends with exit code 0 and has nothing more to say."""
        self._check_quiet()
        self.finishing = True
        _end(self.child.stdin).close()
        deadline = time.monotonic() + seconds
        while self._code() is None:
            if time.monotonic() >= deadline:
                raise Fault(f"did not end within {seconds:g} s of the end of its input")
            self._check_quiet(POLL_S)
        self._check_quiet()
        if self._code():
            raise Fault(f"ended its work with {self._how()}")

    def close(self) -> None:
        """Kills the whole group, and then reaps the child: until then nobody else has its number."""
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(self.child.pid, signal.SIGKILL)
        for pipe_end in (self.child.stdin, self.child.stdout, self.child.stderr):
            with suppress(OSError):
                _end(pipe_end).close()
        self.selector.close()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(REAP_S)

    def _check_quiet(self, seconds: float = 0.0) -> None:
        """Nothing may come now that nothing is asked."""
        for key, _ in self.selector.select(seconds):
            self._receive(key.fileobj)
        if self.received:
            raise Stray(f"wrote to its output without being asked: {self._beginning()}")

    def _turn(self, unsent: memoryview, deadline: float, seconds: float) -> memoryview:
        """Moves what can be moved now; what is still to be sent."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise Hung(f"gave no answer within {seconds:g} s{self._last_words()}")
        ready = self.selector.select(min(left, LOOK_S))
        if not ready and self._code() is not None:
            raise Fault(self._ending("ended"))
        for key, _ in ready:
            if key.fileobj is not self.child.stdin:
                self._receive(key.fileobj)
                continue
            unsent = unsent[self._send(unsent) :]
            if not unsent:
                self.selector.unregister(key.fileobj)
        return unsent

    def _send(self, unsent: memoryview) -> int:
        try:
            return os.write(_end(self.child.stdin).fileno(), unsent[:READ])
        except BlockingIOError:
            return 0
        except BrokenPipeError as error:
            raise Fault(self._ending("closed its input")) from error

    def _receive(self, source: object) -> None:
        """One read of stdout or stderr."""
        is_output = source is self.child.stdout
        pipe_end = _end(self.child.stdout if is_output else self.child.stderr)
        try:
            data = os.read(pipe_end.fileno(), READ)
        except BlockingIOError:
            return
        if is_output:
            self.received += data
        else:
            self.tail = (self.tail + data)[-TAIL:]
        if not data:
            self.selector.unregister(pipe_end)
            if is_output and not self.finishing:
                raise Fault(self._ending("closed its output"))

    def _take(self, answers: list[bytes], most: int) -> bool:
        """Moves whole lines from what was received to the answers; whether there were any."""
        before = len(answers)
        while len(answers) < most and (end := self.received.find(b"\n")) >= 0:
            answers.append(bytes(self.received[:end]))
            del self.received[: end + 1]
        if len(self.received) + sum(map(len, answers)) > MAX_LINE:
            raise Fault(f"wrote a line of more than {MAX_LINE:,} bytes: {self._beginning()}")
        return len(answers) > before

    def _code(self) -> int | None:
        """Its exit code, negative for a signal, once it has ended. It is not reaped yet."""
        ended = os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _ending(self, otherwise: str) -> str:
        """How it ended, or that it is still there and has closed a pipe."""
        deadline = time.monotonic() + GRACE_S
        while self._code() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return otherwise if self._code() is None else f"ended early with {self._how()}"

    def _how(self) -> str:
        code = self._code() or 0
        return f"{f'exit code {code}' if code >= 0 else f'signal {-code}'}{self._last_words()}"

    def _last_words(self) -> str:
        with suppress(OSError, ValueError):  # it may be closed
            self.tail = (self.tail + os.read(_end(self.child.stderr).fileno(), READ))[-TAIL:]
        text = self.tail.decode(errors="replace").strip()
        return f"; the end of its stderr: {printable(text[-SHOWN_TAIL:])}" if text else ""

    def _beginning(self) -> str:
        return shown_line(bytes(self.received[: SHOWN_LINE + 1]))


def shown_line(line: bytes) -> str:
    """The beginning of what a client wrote, of its first line."""
    return printable(line[: SHOWN_LINE + 1].decode(errors="replace").split("\n")[0], SHOWN_LINE)


def _end(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
