"""The socket of a `Muxer`: Noise messages, each with its length before it (u16 big-endian).

Bytes come and go through memory that the connection keeps: to touch new memory each time costs as much as to
encrypt. It grows with what the peer sends, and what is sent to it.
"""

from __future__ import annotations

from typing import Any

import trio

MESSAGE = 65535
"""Bytes of a Noise message at most."""

LENGTH = 2
READ_SIZE = 4 * (LENGTH + MESSAGE)
"""Bytes a system call at most: four messages of the largest size."""

FIRST_SIZE = 4 * 1024
"""Bytes a system call at first."""


class Incoming:
    """Cuts what comes from a socket into messages."""

    def __init__(self, raw: Any) -> None:
        """`raw`: libp2p's layer over the socket."""
        self._raw, self._socket = raw, _socket(raw)
        self._room = bytearray(FIRST_SIZE)
        self._start = self._end = 0

    def message(self) -> bytes | None:
        """The next message, if all of it is here."""
        start, held = self._start + LENGTH, self._end - self._start
        if held < LENGTH:
            return None
        size = int.from_bytes(self._room[self._start : start], "big")
        if held < LENGTH + size:
            return None
        self._start = start + size
        with memoryview(self._room) as view:
            return bytes(view[start : start + size])

    async def receive(self) -> int:
        """Waits for more; 0 at the end. Raises what the socket or its layers raise."""
        if self._end == len(self._room) < READ_SIZE:
            self._room.extend(bytes(min(len(self._room), READ_SIZE - len(self._room))))
        with memoryview(self._room) as view:
            if self._start:
                held = self._end - self._start
                view[:held] = bytes(view[self._start : self._end])
                self._start, self._end = 0, held
            with view[self._end :] as rest:
                if self._socket is not None:
                    count = await self._socket.recv_into(rest)
                else:
                    data = await self._raw.read(len(rest))
                    count = len(data)
                    rest[:count] = data
        self._end += count
        return count


class Outgoing:
    """Puts messages together and sends them in one go."""

    def __init__(self, raw: Any) -> None:
        """`raw`: libp2p's layer over the socket."""
        self._raw, self._socket = raw, _socket(raw)
        self._room = bytearray()
        self.size = 0
        """Bytes that are ready to be sent."""

    def put(self, message: bytes) -> None:
        start = self.size + LENGTH
        self.size = start + len(message)
        if self.size > len(self._room):
            self._room.extend(bytes(self.size - len(self._room)))
        self._room[start - LENGTH : start] = len(message).to_bytes(LENGTH, "big")
        self._room[start : self.size] = message

    async def send(self) -> None:
        """Raises what the socket or its layers raise."""
        size, self.size = self.size, 0
        with memoryview(self._room) as view, view[:size] as rest:
            if self._socket is None:
                await self._raw.write(bytes(rest))
                return
            sent = 0
            while sent < size:
                with rest[sent:] as left:
                    sent += await self._socket.send(left)


def _socket(raw: Any) -> trio.socket.SocketType | None:
    """The socket under libp2p's layers, where they are the ones of TCP."""
    stream = getattr(getattr(raw, "stream", None), "stream", None)
    return stream.socket if isinstance(stream, trio.SocketStream) else None
