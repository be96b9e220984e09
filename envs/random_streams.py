"""Random streams of a task: foreign code that draws from process-wide state, made a function of the seed.

    streams = Streams(seed)
    task = streams.start(play())

Whatever the task runs, tasks that it starts included, draws from `random` and `numpy.random` as if it were
alone in the process: each step of it runs with the streams' state, which is put aside after it. All that one
`Streams` starts begins alike: what an environment draws belongs to its task. [VFR-3]
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from .determinism import Rng
from .environment import small_seed

T = TypeVar("T")

DOMAIN: Final = b"nous/streams/1\0"


def stream_seed(seed: bytes) -> int:
    """Where the streams of a task begin. [VFR-3]"""
    return small_seed(hashlib.sha256(DOMAIN + seed).digest())


class Streams:
    """Of the task of a 32-byte seed."""

    def __init__(self, seed: bytes) -> None:
        self._start = stream_seed(seed)

    def start(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """A task with streams of its own."""
        loop = asyncio.get_running_loop()
        inner = loop.get_task_factory()
        if not isinstance(inner, _Factory):
            loop.set_task_factory(_Factory(inner))
        before = _current.set(Rng(self._start))
        try:
            return asyncio.ensure_future(_awaited(work))
        finally:
            _current.reset(before)


_current: ContextVar[Rng | None] = ContextVar("current", default=None)
"""The streams from which the present task draws."""


class _Streamed(Coroutine[Any, Any, T]):
    """A coroutine that draws from streams of its own whenever it runs."""

    def __init__(self, work: Coroutine[Any, Any, T], rng: Rng) -> None:
        self._work = work
        self._rng = rng

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        with self._rng:
            return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        with self._rng:
            return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()


class _Factory:
    """A task factory around the loop's own: what a task with streams starts draws from them too."""

    def __init__(self, inner: Callable[..., Any] | None) -> None:
        self._inner = inner

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **options: Any,
    ) -> Any:
        context = options.get("context")
        rng = _current.get() if context is None else context.get(_current)
        if rng is not None and isinstance(work, Coroutine):
            work = _Streamed(work, rng)
        if self._inner is not None:
            return self._inner(loop, work, **options)
        return asyncio.Task(work, loop=loop, **options)


async def _awaited(work: Awaitable[T]) -> T:
    return await work
