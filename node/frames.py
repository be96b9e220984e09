"""Length-prefixed frames out of a byte stream, whatever the pieces it arrives in. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

MAX_VARINT_BYTES = 10  # an unsigned 64-bit number


class FrameError(Exception):
    """The bytes on a stream are not frames within the limit: it cannot be followed any further."""


class OversizeFrameError(FrameError):
    """The announced length is above the limit; nothing of the payload was kept."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size} bytes, the limit is {limit}")
        self.size = size
        self.limit = limit


class VarintFrames:
    """Cuts a stream of `unsigned varint length, payload` into payloads of at most `limit` bytes.

    Holds at most one incomplete frame. Raises OversizeFrameError, or FrameError for a varint that does
    not end.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes; yields every payload that is now complete."""
        self._buffer += data
        start = 0
        try:
            while True:
                size, body = self._header(start)
                if body == 0 or len(self._buffer) - body < size:
                    return
                start = body + size
                yield bytes(self._buffer[body:start])
        finally:
            del self._buffer[:start]

    def _header(self, start: int) -> tuple[int, int]:
        """(length, offset of the payload); the offset is 0 while the varint is incomplete."""
        size = shift = 0
        for offset in range(start, min(len(self._buffer), start + MAX_VARINT_BYTES)):
            byte = self._buffer[offset]
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                if size > self._limit:
                    raise OversizeFrameError(size, self._limit)
                return size, offset + 1
            shift += 7
        if len(self._buffer) - start >= MAX_VARINT_BYTES:
            raise FrameError("a varint of more than 10 bytes")
        return 0, 0
