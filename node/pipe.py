"""A node's end of the pipe to the child process that does its torch work.

The frames, and the child's end, are those of `envs.framing`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Generic

import msgspec
import trio

from nous_node.envs.framing import LENGTH, MAX_FRAME, ParentPipe, Received, Sent, framed
from nous_node.protocol.errors import LocalError

__all__ = [
    "MAX_FRAME",
    "ChildDied",
    "ChildPipe",
    "ParentPipe",
    "Received",
    "Sent",
    "end_child",
    "start_child",
]


class ChildDied(LocalError):
    """The child process ended, or sent something that is no frame. What it worked on is lost."""


class ChildPipe(Generic[Sent, Received]):
    """The parent's end. One task receives; cancelling it, or a send, leaves the pipe unusable, so
    callers cancel only to end the child."""

    def __init__(self, process: trio.Process, received: type[Received]) -> None:
        self.process = process
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._sending = trio.Lock()

    async def send(self, message: Sent) -> None:
        """Waits while the child is busy: the pipe's own buffer is the back-pressure."""
        assert self.process.stdin is not None
        data = self._encoder.encode(message)
        if len(data) > MAX_FRAME:
            raise LocalError(f"A message of {len(data)} bytes is too large for the child process.")
        try:
            async with self._sending:
                await self.process.stdin.send_all(framed(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ChildDied(await self._epitaph()) from error

    async def receive(self) -> Received:
        """The next message; ChildDied at the end of the pipe."""
        (length,) = LENGTH.unpack(await self._exactly(LENGTH.size))
        if length > MAX_FRAME:
            raise ChildDied(f"The child process announced a frame of {length} bytes.")
        try:
            return self._decoder.decode(await self._exactly(length))
        except msgspec.MsgspecError as error:
            raise ChildDied(f"The child process sent something that is no message: {error}.") from error

    async def _exactly(self, count: int) -> bytes:
        assert self.process.stdout is not None
        while len(self._buffer) < count:
            try:
                data = await self.process.stdout.receive_some(1 << 18)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ChildDied(await self._epitaph()) from error
            if not data:
                raise ChildDied(await self._epitaph())
            self._buffer += data
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def _epitaph(self) -> str:
        code: int | None = None
        with trio.move_on_after(2):
            code = await self.process.wait()
        if code is None:
            return "The child process closed its pipe."
        if code == -9:
            return "The child process was killed (signal 9): most likely the machine ran out of memory."
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"The child process ended with {ended}."


async def start_child(
    module: str, received: type[Received], log: int | None = None, env: dict[str, str] | None = None
) -> ChildPipe[Sent, Received]:
    """Starts `python -m module` with a pipe to it; its stderr goes to the file descriptor `log`.

    The child leads a process group of its own: a Ctrl-C in the terminal reaches the node, which then
    ends the child in order.
    """
    process = await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", module],
        stdin=-1,
        stdout=-1,
        stderr=log,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    return ChildPipe(process, received)


async def end_child(process: trio.Process, grace: float = 1.0) -> None:
    """Closes the pipe, waits `grace` seconds, then kills. Returns when the process is gone."""
    with trio.CancelScope(shield=True):
        if process.stdin is not None:
            await process.stdin.aclose()
        with trio.move_on_after(grace):
            await process.wait()
        with contextlib.suppress(ProcessLookupError):  # it, and what it started and left behind
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if process.stdout is not None:
            await process.stdout.aclose()
