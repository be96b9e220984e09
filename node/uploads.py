"""Whose turn it is at the uplink: some uploads at once, and those who wait are served round robin over peers,
so that one with many requests does not hold up another with one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

SLOTS = 8
"""Uploads at once: more would each be slower, and be complete later."""

SLOT_RATE = 100_000.0
"""Bytes/s that an upload should have at least of a limited uplink: a chunk of 1 MiB in 10 s."""

MAX_WAITING = 256
"""Requests of all peers that wait; further ones are answered with `busy`."""

WAIT_SECONDS = 20.0
"""For which one waits before it is answered so."""


class Uploads:
    """`async with uploads.turn(peer) as granted`: the upload is made where `granted`, else `busy` answers."""

    def __init__(
        self,
        busy: bytes,
        slots: int = SLOTS,
        waiting: int = MAX_WAITING,
        seconds: float = WAIT_SECONDS,
    ) -> None:
        """`busy`: the answer to those for whom there is no time."""
        self.busy = busy
        self._free, self._most_waiting, self._seconds = slots, waiting, seconds
        self._waiting = 0
        self._queues: OrderedDict[str, deque[trio.Event]] = OrderedDict()

    @classmethod
    def at(cls, rate: float | None, busy: bytes) -> Uploads:
        """For an uplink that is limited to `rate` bytes/s."""
        slots = SLOTS if rate is None else max(1, min(SLOTS, int(rate / SLOT_RATE)))
        return cls(busy, slots)

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[bool]:
        """Waits for a slot; False where too many wait, or it has taken too long."""
        granted = await self._take(peer)
        try:
            yield granted
        finally:
            if granted:
                self._pass_on()

    async def _take(self, peer: str) -> bool:
        if self._free and not self._queues:
            self._free -= 1
            return True
        if self._waiting >= self._most_waiting:
            return False
        turn = trio.Event()
        self._queues.setdefault(peer, deque()).append(turn)
        self._waiting += 1
        try:
            with trio.move_on_after(self._seconds):
                await turn.wait()
        except BaseException:
            if turn.is_set():
                self._pass_on()
            else:
                self._withdraw(peer, turn)
            raise
        if not turn.is_set():
            self._withdraw(peer, turn)
        return turn.is_set()

    def _pass_on(self) -> None:
        """A slot is free: it goes to the first of the peer whose turn it is, which then comes last."""
        if not self._queues:
            self._free += 1
            return
        peer, queue = self._queues.popitem(last=False)
        queue.popleft().set()
        self._waiting -= 1
        if queue:
            self._queues[peer] = queue

    def _withdraw(self, peer: str, turn: trio.Event) -> None:
        queue = self._queues[peer]
        queue.remove(turn)
        self._waiting -= 1
        if not queue:
            del self._queues[peer]
