"""A child process that runs code we do not trust, and one pipe to it.

    child: Child[Asked, Answered] = Child(launch, Answered)
    answer = child.ask(Asked(...), seconds=5.0)        outside of a loop
    child.attach(heard, ended); child.send(Asked(...)) inside one

Everything that comes out of it is hostile: a frame is capped before it is read, decoded by type, and whatever
is wrong with it ends the child. Nothing that it does, or leaves undone, can hold this process up: reads and
writes never block, waits have a deadline, and what it writes is kept within bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
import unicodedata
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Final, Generic, Self

import msgspec

from .crowd import CROWD
from .errors import EnvError
from .framing import Frames, FrameTooLarge, Received, Sent, framed
from .limits import MAX_TASKS
from .sandbox import Launch, start

MAX_CHILD_FRAME: Final = 1 << 24
"""16 MiB: a group of 64 samples of 8,000 tokens with their log-probs is half of it. Decoded, hostile bytes
can take some sixty times as much."""
MAX_QUEUE: Final = 1 << 27
"""128 MiB that a child does not read: it will not read more."""
CHUNK: Final = 1 << 18
"""Bytes of one read: the event loop and the other children have their turn in between."""
TAIL: Final = 2000
"""Bytes of stderr that are kept: the end of a traceback."""
LAST_WORDS: Final = 300
"""Characters of them in a sentence: the error itself and the line before it."""
GRACE_S: Final = 1.0
"""Between the end of its pipe and the end of the process: how it ended is worth waiting for."""
LOOK_S: Final = 0.02
"""How often a process whose pipe ended is looked at."""

BURIAL_S: Final = 5.0
"""A killed process is gone in milliseconds, unless a disk holds it."""
LAST_READS: Final = 8
"""Chunks of stderr that are read after the end."""

_OUT_OF_MEMORY: Final = ("MemoryError", "Cannot allocate memory", "std::bad_alloc")
_UNSAFE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, reorder text or have no glyph."""


class ChildEnded(EnvError):
    """The child process is gone: it ended, broke a rule, or was ended at its deadline. The text says why."""


@dataclass
class _Attached(Generic[Received]):
    """The loop that reads, and whom it tells."""

    loop: asyncio.AbstractEventLoop
    heard: Callable[[Received], None]
    ended: Callable[[ChildEnded], None]
    timer: asyncio.Handle | None = None
    """What is to be called next without the pipe saying so."""


class Child(Generic[Sent, Received]):
    """One process from its start to its end; it is not started again. For one thread at a time.

    `frame`: bytes of the largest message that it may send.
    """

    def __init__(self, launch: Launch, received: type[Received], frame: int = MAX_CHILD_FRAME) -> None:
        self._launch = launch
        self._frames = Frames(frame)
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._encoder = msgspec.msgpack.Encoder()
        self._queue = bytearray()
        self._asked = time.monotonic()
        """When it was last told something."""
        self._stderr = bytearray()
        self._open = {"out", "err"}
        self._end: ChildEnded | None = None
        self._attached: _Attached[Received] | None = None
        self._telling: asyncio.Handle | None = None
        """The listener is about to be told of the end."""
        self._process = start(launch)
        self._in = _unblocked(self._process.stdin)
        self._out = _unblocked(self._process.stdout)
        self._err = _unblocked(self._process.stderr)
        self._buried = weakref.finalize(self, _bury, self._process)  # at exit at the latest
        if launch.sandboxed:
            CROWD.add(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._end is None and not _exited(self._process)

    @property
    def pid(self) -> int:
        """Of the process that was started: in a sandbox, the one outside of it."""
        return self._process.pid

    @property
    def tail(self) -> str:
        """The end of what it wrote to stderr, printable, on one line."""
        return _printable(bytes(self._stderr))

    def ask(self, message: Sent, seconds: float) -> Received:
        """Sends a message and returns the next one that comes. Not while attached.

        Raises ChildEnded; at the deadline the child is killed first.
        """
        self.send(message)
        return self.hear(seconds)

    def hear(self, seconds: float) -> Received:
        """The next message that comes. Not while attached. Raises ChildEnded as `ask` does."""
        assert self._attached is None, "A child that is attached to a loop is not asked."
        if self._end is not None:
            raise self._end
        deadline = time.monotonic() + seconds
        while (answer := self._next()) is None:
            self._wait(deadline)
        return answer

    def send(self, message: Sent) -> None:
        """Queues a message; never blocks. Raises ChildEnded where it is gone or does not read."""
        if self._end is not None:
            raise self._end
        self._asked = time.monotonic()
        self._queue += framed(self._encoder.encode(message))
        self._write()
        if len(self._queue) > MAX_QUEUE:
            raise self._finish(f"did not read what it was sent ({len(self._queue)} bytes)")
        if self._attached is not None and self._queue:
            self._attached.loop.add_writer(self._in, self._writable)

    def attach(self, heard: Callable[[Received], None], ended: Callable[[ChildEnded], None]) -> None:
        """From now on the running loop reads: `heard` has each message, `ended` once the end. Both are called
        from the loop, never from here. Raises ChildEnded where it is gone."""
        if self._end is not None:
            raise self._end
        assert self._attached is None, "A child is attached to one loop at a time."
        loop = asyncio.get_running_loop()
        self._attached = _Attached(loop, heard, ended)
        if "out" in self._open:
            loop.add_reader(self._out, self._readable)
        if "err" in self._open:
            loop.add_reader(self._err, self._complaining)
        if self._queue:
            loop.add_writer(self._in, self._writable)
        self._attached.timer = loop.call_soon(self._hand_out)  # what came before

    def detach(self) -> None:
        """Leaves the loop, which may end then; what comes meanwhile waits in the pipe. Nobody is told of
        anything from now on, even of an end that was noticed already."""
        if self._telling is not None:
            self._telling.cancel()
        if self._attached is None:
            return
        attached, self._attached = self._attached, None
        if attached.timer is not None:
            attached.timer.cancel()
        if not attached.loop.is_closed():
            attached.loop.remove_reader(self._out)
            attached.loop.remove_reader(self._err)
            attached.loop.remove_writer(self._in)

    def kill(self) -> None:
        """Ends it and all that it started. Nobody is told."""
        self.detach()
        self._finish("was ended")

    # --- in a loop ---

    def _readable(self) -> None:
        if self._read():
            self._hand_out()
        elif self._attached is not None:
            self._attached.loop.remove_reader(self._out)
            self._look(time.monotonic() + GRACE_S)

    def _hand_out(self) -> None:
        """All complete messages, until the listener leaves."""
        attached = self._attached
        with contextlib.suppress(ChildEnded):  # the listener is told
            while attached is not None and self._attached is attached:
                if (message := self._next()) is None:
                    break
                attached.heard(message)
        if attached is not None and self._attached is attached and "out" not in self._open:
            self._look(time.monotonic() + GRACE_S)

    def _look(self, deadline: float) -> None:
        """Its pipe has ended: tells how it ended itself, as soon as that is known."""
        if _exited(self._process) or time.monotonic() >= deadline:
            self._finish(None)
        elif self._attached is not None:
            self._attached.timer = self._attached.loop.call_later(LOOK_S, self._look, deadline)

    def _complaining(self) -> None:
        if not self._listen() and self._attached is not None:
            self._attached.loop.remove_reader(self._err)

    def _writable(self) -> None:
        self._write()
        if not self._queue and self._attached is not None:
            self._attached.loop.remove_writer(self._in)

    # --- without one ---

    def _wait(self, deadline: float) -> None:
        """Until the pipe moves; raises ChildEnded at the deadline."""
        if "out" not in self._open:
            self._await_exit(min(deadline, time.monotonic() + GRACE_S))
            raise self._finish(None)
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._finish(f"did not answer within {time.monotonic() - self._asked:.1f} s")
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if "err" in self._open:
            poll.register(self._err, select.POLLIN)
        if self._queue:
            poll.register(self._in, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
        if self._in in ready:
            self._write()
        if self._err in ready:
            self._listen()
        if self._out in ready:
            self._read()

    def _await_exit(self, deadline: float) -> None:
        while not _exited(self._process) and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    # --- the pipe ---

    def _next(self) -> Received | None:
        """The next message that is complete; raises ChildEnded where it is none."""
        try:
            data = self._frames.take()
            return None if data is None else self._decoder.decode(data)
        except FrameTooLarge as error:
            raise self._finish(f"broke the pipe's rules: {error}") from error
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise self._finish(f"sent something that is no message: {error}") from error

    def _read(self) -> bool:
        """Takes what is there, a chunk at most; False at the end of the pipe."""
        data = _chunk(self._out)
        if data is not None:
            self._frames.feed(data)
        if data == b"":
            self._open.discard("out")
        return data != b""

    def _listen(self) -> bool:
        """The same of its stderr, of which only the end is kept."""
        data = _chunk(self._err)
        if data is not None:
            self._stderr = (self._stderr + data)[-TAIL:]
        if data == b"":
            self._open.discard("err")
        return data != b""

    def _write(self) -> None:
        """Writes what the pipe takes. Where nobody reads any more, the end of the other pipe says why."""
        try:
            while self._queue:
                with memoryview(self._queue) as view, view[:CHUNK] as piece:
                    written = os.write(self._in, piece)
                del self._queue[:written]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._queue.clear()

    # --- the end ---

    def _finish(self, cause: str | None) -> ChildEnded:
        """Ends the process and tells the listener; None: it ended by itself. The first cause counts."""
        if self._end is not None:
            return self._end
        attached, exited = self._attached, _exited(self._process)
        self.detach()
        if not CROWD.remove(self._process) and self._launch.sandboxed:
            cause = f"started more than {MAX_TASKS} threads"
        _signal(self._process)
        for _ in range(LAST_READS):
            if "err" not in self._open or not self._listen():
                break
        self._buried()
        if cause is None:
            cause = self._cause() if exited else "closed its end of the pipe"
        words = f" Its last words: {self.tail[-LAST_WORDS:]}" if self._stderr else ""
        self._end = ChildEnded(f"The environment's process {cause}.{words}")
        if attached is not None:
            self._telling = attached.loop.call_soon(attached.ended, self._end)
        return self._end

    def _cause(self) -> str:
        """How it ended by itself, in words."""
        code = self._process.returncode
        if code != 0 and any(sign in self.tail for sign in _OUT_OF_MEMORY):
            return f"ran out of memory: it may use {self._launch.memory >> 20} MiB"
        number = -code if code < 0 else code - 128 if self._launch.sandboxed else 0
        if number == signal.SIGKILL:
            return "was killed (signal 9): most likely the machine ran out of memory"
        if number == signal.SIGSYS:
            return "was killed (signal 31): it made a system call that the sandbox forbids"
        return f"ended with signal {number}" if number > 0 else f"ended with exit code {code}"


def _bury(process: subprocess.Popen[bytes]) -> None:
    """Ends the process with its group, and takes note of how it ended."""
    CROWD.remove(process)
    _signal(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(BURIAL_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _signal(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # else its number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended. Its number stays taken, so that its group can still be signalled."""
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else in this process took note of it
        return True


def _unblocked(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()


def _chunk(descriptor: int) -> bytes | None:
    """What can be read now; None: nothing yet; empty: the end."""
    try:
        return os.read(descriptor, CHUNK)
    except BlockingIOError:
        return None


def _printable(data: bytes) -> str:
    """On one line, without anything that moves a cursor."""
    text = data.decode("utf-8", "replace")
    shown = "".join(" " if unicodedata.category(c) in _UNSAFE else c for c in text)
    return " ".join(shown.split())
