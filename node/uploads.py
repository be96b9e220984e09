"""Whose turn it is at the uplink: some uploads at once; of those who wait the next is one of the peer with
fewest, so that one with many requests does not hold up another with one.

An upload whose peer does not read gives its place to another peer and goes on beside the others, for as long
as it may take. How many do is bounded: the oldest of the peer with most of them is ended.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

SLOTS = 8
"""Uploads at once: more would each be slower, and be complete later."""

SLOT_RATE = 100_000.0
"""Bytes/s that an upload should have at least of a limited uplink: a chunk of 1 MiB in 10 s."""

HTTP_SHARE = 0.5
"""Of a limited uplink that uploads by HTTP are reckoned with, where there are any; others have the rest."""

MAX_WAITING = 256
"""Requests of all peers that wait; further ones are answered with `busy`."""

WAIT_SECONDS = 20.0
"""For which one waits before it is answered so."""

FAIR = 2
STALLED_SECONDS = 5.0
GREEDY_SECONDS = 2.0
"""An upload that its peer has let stand for so long makes way for another peer: sooner where its peer has
more than FAIR. Eight uploads over a line of 1 MB/s stand for a second each: that is no fault of theirs."""

MAX_ASIDE = 16
"""Uploads that have made way and are not over: chunks in memory."""


def slots_at(rate: float | None, most: int) -> int:
    """Uploads at once over an uplink that is limited to `rate` bytes/s."""
    return most if rate is None else max(1, min(most, int(rate / SLOT_RATE)))


class Turn:
    """One request's. False where it holds no upload: it did not come in time, or needs none."""

    def __init__(self, peer: str, answer: bytes | None = None, uploads: Uploads | None = None) -> None:
        self.peer, self.answer = peer, answer
        self._uploads = uploads

    def __bool__(self) -> bool:
        return self._uploads is not None

    def stalls(self, seconds: float) -> None:
        """The peer has not read on for so long. Raises TooSlowError where others cannot wait any more."""
        if self._uploads is not None:
            self._uploads.stalls(self, seconds)


class Uploads:
    """`async with uploads.turn(peer) as turn`: the upload is made where it is true, else `turn.answer` is the
    answer."""

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
        """By peer; whose last turn is longest ago first."""
        self._held: Counter[str] = Counter()
        self._aside: dict[Turn, None] = {}
        """Those that made way, the oldest first."""
        self._ended: set[Turn] = set()

    @classmethod
    def at(cls, rate: float | None, busy: bytes) -> Uploads:
        """For an uplink that is limited to `rate` bytes/s."""
        return cls(busy, slots_at(rate, SLOTS))

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[Turn]:
        """Waits for a slot; False where too many wait, or it has taken too long."""
        if not await self._take(peer):
            yield Turn(peer, self.busy)
            return
        turn = Turn(peer, uploads=self)
        try:
            yield turn
        finally:
            if turn in self._aside:
                del self._aside[turn]
            elif turn in self._ended:
                self._ended.remove(turn)
            else:
                self._pass_on(peer)

    def stalls(self, turn: Turn, seconds: float) -> None:
        """Raises TooSlowError where the upload has to end: others stand as well."""
        if turn in self._ended:
            raise trio.TooSlowError
        if turn in self._aside or not any(peer != turn.peer for peer in self._queues):
            return
        if seconds < (GREEDY_SECONDS if self._held[turn.peer] > FAIR else STALLED_SECONDS):
            return
        if len(self._aside) >= MAX_ASIDE:
            counts = Counter(one.peer for one in self._aside)
            oldest = max(self._aside, key=lambda one: counts[one.peer])
            del self._aside[oldest]
            self._ended.add(oldest)
        self._aside[turn] = None
        self._pass_on(turn.peer)

    async def _take(self, peer: str) -> bool:
        if self._free and not self._queues:
            self._free -= 1
            self._held[peer] += 1
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
                self._pass_on(peer)
            else:
                self._withdraw(peer, turn)
            raise
        if not turn.is_set():
            self._withdraw(peer, turn)
        return turn.is_set()

    def _pass_on(self, before: str) -> None:
        """A slot of a peer is free: it goes to one of the peer that has fewest, which then comes last."""
        self._held[before] -= 1
        if not self._held[before]:
            del self._held[before]
        if not self._queues:
            self._free += 1
            return
        peer = min(self._queues, key=lambda one: self._held[one])
        queue = self._queues.pop(peer)
        queue.popleft().set()
        self._held[peer] += 1
        self._waiting -= 1
        if queue:
            self._queues[peer] = queue

    def _withdraw(self, peer: str, turn: trio.Event) -> None:
        queue = self._queues[peer]
        queue.remove(turn)
        self._waiting -= 1
        if not queue:
            del self._queues[peer]
