"""What gossip remembers, all of it bounded: seen ids, recent messages, one queue a peer.

py-libp2p's own: `LastSeenCache` starts a thread a node and grows without limit; `MessageCache` keeps
whatever arrived in five heartbeats; `RpcQueue` holds 32 messages of any size and drops without a word.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import trio
from libp2p.pubsub.mcache import MessageCache
from trio.lowlevel import ParkingLot

# The gossip specification keeps ids for 120 s; two generations of 60 s to 120 s.
SEEN_GENERATION_S = 60.0
# Ids of 46 bytes cost about 150 bytes each: 2 x 100,000 are 30 MB. A flood makes generations shorter.
SEEN_GENERATION_SIZE = 100_000

# Five heartbeats of 150 messages of 25 KB a second are 19 MB.
RECENT_BYTES = 32 * 1024 * 1024

# Messages waiting for one peer. 64 groups of 25 KB are 1.6 MB; large messages are bounded by bytes.
QUEUE_MESSAGES = 64
QUEUE_BYTES = 4 * 1024 * 1024
# Control messages are small and many may come at once (one GRAFT or IHAVE a topic). An IHAVE of 5,000 ids
# has 240 KB: four topics of a busy run at once.
QUEUE_CONTROL = 512
QUEUE_CONTROL_BYTES = 1024 * 1024

# A few small messages wait this long for company. At 200 messages/s four then share one write, one Noise
# message and one wake-up on each side, which are most of their cost; nobody needs a rollout sooner.
LINGER_S = 0.02
LINGER_BELOW = 16 * 1024  # bytes queued

# How long we wait for one peer's full queue while other peers have room: this much at once, and a tenth
# of the time in the long run. So a slow reader slows the flow, and a hostile one cannot stop it.
PATIENCE_S = 5.0
PATIENCE_REFILL = 0.1


class SeenMessages:
    """A set of ids that forgets: an id stays for at least one generation, at most two."""

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._turn_at = trio.current_time() + SEEN_GENERATION_S

    def has(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def add(self, key: bytes) -> None:
        now = trio.current_time()
        if now >= self._turn_at or len(self._young) >= SEEN_GENERATION_SIZE:
            self._old, self._young = self._young, set()
            self._turn_at = now + SEEN_GENERATION_S
        self._young.add(key)

    def discard(self, key: bytes) -> None:
        self._young.discard(key)
        self._old.discard(key)


class RecentMessages(MessageCache):  # type: ignore[misc]  # untyped base
    """The message cache, with a limit in bytes: the oldest are dropped first."""

    def __init__(self, window_size: int, history_size: int) -> None:
        super().__init__(window_size, history_size)
        self._bytes = 0

    def put(self, msg: Any) -> None:
        before = len(self.msgs)
        super().put(msg)
        if len(self.msgs) > before:
            self._bytes += len(msg.data)
        while self._bytes > RECENT_BYTES:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        for slot in reversed(self.history):
            if slot:
                self._remove(slot.pop(0).mid)
                return

    def _remove(self, mid: bytes) -> None:
        message = self.msgs.pop(mid, None)
        if message is not None:
            self._bytes -= len(message.data)

    def shift(self) -> None:
        for entry in self.history.pop():
            self._remove(entry.mid)
        self.history.insert(0, [])


class OutboundQueue:
    """Serialized RPCs for one peer: control first, then messages, each with its own bound."""

    def __init__(self) -> None:
        self._control: deque[bytes] = deque()
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._control_bytes = 0
        self._closed = False
        self._writing = False  # the last batch is on its way
        self._filled = ParkingLot()
        self._drained = ParkingLot()
        self._patience = PATIENCE_S
        self._patience_at = trio.current_time()

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def has_room(self) -> bool:
        return len(self._messages) < QUEUE_MESSAGES and self._bytes < QUEUE_BYTES

    @property
    def closed(self) -> bool:
        return self._closed

    def push_message(self, frame: bytes) -> bool:
        """Queue a message; False when full or closed."""
        if self._closed or not self.has_room:
            return False
        self._messages.append(frame)
        self._bytes += len(frame)
        self._filled.unpark_all()
        return True

    def push_control(self, frame: bytes) -> bool:
        """Queue a control message; False when full or closed."""
        if self._closed or len(self._control) >= QUEUE_CONTROL:
            return False
        if self._control and self._control_bytes + len(frame) > QUEUE_CONTROL_BYTES:
            return False
        self._control.append(frame)
        self._control_bytes += len(frame)
        self._filled.unpark_all()
        return True

    @property
    def patience(self) -> float:
        """Seconds that others may still wait for this peer now."""
        now = trio.current_time()
        refill = (now - self._patience_at) * PATIENCE_REFILL
        self._patience, self._patience_at = min(PATIENCE_S, self._patience + refill), now
        return self._patience

    def spend(self, seconds: float) -> None:
        """Others have waited this long until now."""
        self._patience -= seconds
        self._patience_at = trio.current_time()

    async def push_patiently(self, frame: bytes) -> bool:
        """Queue a message, waiting for room as long as there is patience; False if it did not fit."""
        if not self.has_room and self.patience > 0:
            start = trio.current_time()
            with trio.move_on_after(self.patience):
                await self.wait_room()
            self.spend(trio.current_time() - start)
        return self.push_message(frame)

    async def wait_room(self) -> None:
        """Until there is room or the queue is closed."""
        while not self.has_room and not self._closed:
            await self._drained.park()

    async def wait_written(self) -> None:
        """Until all that was queued has been written, or the queue is closed."""
        while (self._messages or self._writing) and not self._closed:
            await self._drained.park()

    async def pop_batch(self, limit: int) -> bytes:
        """What is queued, at least one frame, about `limit` bytes; b"" once closed.

        Asking for the next batch says that the last one was written.
        """
        self._writing = False
        self._drained.unpark_all()
        while not self._control and not self._messages:
            if self._closed:
                return b""
            await self._filled.park()
        if not self._control and self._bytes < LINGER_BELOW:
            await trio.sleep(LINGER_S)
        self._writing = True
        batch: list[bytes] = []
        size = 0
        while self._control and size < limit:
            batch.append(self._control.popleft())
            size += len(batch[-1])
            self._control_bytes -= len(batch[-1])
        while self._messages and (not batch or size + len(self._messages[0]) <= limit):
            frame = self._messages.popleft()
            self._bytes -= len(frame)
            batch.append(frame)
            size += len(frame)
        self._drained.unpark_all()
        return batch[0] if len(batch) == 1 else b"".join(batch)

    def close(self) -> None:
        self._closed = True
        self._control.clear()
        self._messages.clear()
        self._bytes = self._control_bytes = 0
        self._filled.unpark_all()
        self._drained.unpark_all()
