"""Bytes of a stream that have arrived and are not read yet."""

from __future__ import annotations

from collections import deque

KEPT = 32 * 1024
"""Bytes from which on a part is kept as it lies in its Noise message, which has twice as many at most;
smaller ones are copied together. So a peer cannot have us hold much more than it has sent."""


class Unread:
    """A queue of bytes: `put` at the end, `take` from the front. `size`: how many there are."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: deque[memoryview | bytearray] = deque()

    def put(self, part: memoryview) -> None:
        """Takes over a part of a buffer that does not change."""
        self.size += len(part)
        if len(part) >= KEPT:
            self._parts.append(part)
        elif self._parts and isinstance(self._parts[-1], bytearray):
            self._parts[-1] += part
        else:
            self._parts.append(bytearray(part))

    def take(self, most: int) -> bytes | memoryview:
        """From one to `most` bytes, as many as lie together, without a copy where that is possible."""
        first = self._parts[0]
        taken: bytes | memoryview
        if len(first) <= most:
            self._parts.popleft()
            taken = first if isinstance(first, memoryview) else bytes(first)
        elif isinstance(first, memoryview):
            taken, self._parts[0] = first[:most], first[most:]
        else:
            taken = bytes(first[:most])
            del first[:most]
        self.size -= len(taken)
        return taken

    def clear(self) -> None:
        self._parts.clear()
        self.size = 0
