"""The host's end of its pipe, and an event loop that says whose code it runs.

All in one thread: the loop reads when there is something, and a question (what are the ids of this text?)
blocks until its answer comes, while everything else that arrives meanwhile waits for the loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import TypeVarTuple, Unpack, cast

import msgspec

from .framing import Frames, framed
from .host_messages import FromHost, Question, Reply, ToHost

Ts = TypeVarTuple("Ts")

CHUNK = 1 << 18
"""Bytes of one read."""

CALL: ContextVar[int] = ContextVar("call", default=0)
"""Whose code runs, in the context of every task and callback that a call brings about."""


class Line:
    """The pipe to the node."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader = reader
        self._writer = writer
        self._frames = Frames()
        self._decoder: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(cast("type[ToHost]", ToHost))
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: deque[ToHost] = deque()
        self._owner = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pipe = select.poll()
        self._pipe.register(reader, select.POLLIN)

    @classmethod
    def take_over(cls) -> Line:
        """Moves stdin and stdout away from whatever else this process runs: what prints goes to stderr."""
        reader, writer = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
        return cls(reader, writer)

    def serve(self, loop: asyncio.AbstractEventLoop, act: Callable[[ToHost], None]) -> None:
        """Has the loop read, and `act` hear of each message; the loop stops when the node is gone."""
        self._loop, self._act = loop, act
        loop.add_reader(self.reader, self._readable)

    def send(self, message: FromHost) -> None:
        data = memoryview(framed(self._encoder.encode(message)))
        while data:
            data = data[os.write(self._writer, data) :]

    def ask(self, question: Question) -> Reply:
        """The answer to a question, from any thread. Ends the process where the node is gone."""
        if threading.get_ident() != self._owner:
            return self._asked_elsewhere(question)
        self.send(question)
        while True:
            if not self._read():
                os._exit(0)
            for place, message in enumerate(self._waiting):
                if isinstance(message, Reply):
                    del self._waiting[place]  # the others stay in order: a Cancel behind its Collect
                    self._look_again()
                    return message

    def _asked_elsewhere(self, question: Question) -> Reply:
        async def asked() -> Reply:
            return self.ask(question)

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result()

    def _look_again(self) -> None:
        """What came beside an answer is no longer in the pipe: the loop would not notice it."""
        if self._waiting and self._loop is not None:
            self._loop.call_soon(self._hand_out, context=Context())

    def _read(self) -> bool:
        """Reads what there is, one byte at least. False: the node is gone."""
        data = os.read(self.reader, CHUNK)
        self._frames.feed(data)
        while (frame := self._frames.take()) is not None:
            self._waiting.append(self._decoder.decode(frame))
        return bool(data)

    def _readable(self) -> None:
        if not self._pipe.poll(0):
            return  # a question that was asked in the meantime has read it, and looks again
        if not self._read():
            assert self._loop is not None
            self._loop.stop()
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            self._act(self._waiting.popleft())


class _Selector(selectors.DefaultSelector):
    """Says when there is nothing left to do but to wait."""

    idle: Callable[[], None] = staticmethod(lambda: None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self.idle()
        return super().select(timeout)


class CallLoop(asyncio.SelectorEventLoop):
    """`working` hears of each call before code of it runs, and of 0 before the loop waits."""

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.idle = lambda: self.idle()
        self.working: Callable[[int], None] = lambda call: None
        self.idle: Callable[[], None] = lambda: None

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        call = context.get(CALL, 0)
        if not call:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(self._run, call, callback, args, context=context)

    def _run(self, call: int, callback: Callable[[Unpack[Ts]], object], args: tuple[*Ts]) -> None:
        self.working(call)
        callback(*args)
