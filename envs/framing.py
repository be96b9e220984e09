"""Frames between a process of ours and its child, and the child's end of the pipe.

    frame = u32 big-endian length, then that many bytes of msgpack: one tagged struct

The child talks over its original stdin and stdout, which it moves away at once, so that a library or an
environment that prints cannot break a frame: its prints go to stderr, and its reads find nothing.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, Final, Generic, TypeVar

import msgspec

from nous_node.protocol.errors import LocalError

MAX_FRAME: Final = 1 << 28
"""256 MiB: a batch of groups, the last of which may be the largest by reference. A length above it is a
broken pipe, not a message."""

LENGTH: Final = struct.Struct(">I")

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class FrameTooLarge(LocalError):
    """The other end announced a frame above the limit."""


def framed(data: bytes) -> bytes:
    """`data` as one frame."""
    return LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into frames. Holds one incomplete frame and one chunk at most, if the caller
    takes what is there before it feeds more."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        """The next frame's content; None where it is not complete. Raises FrameTooLarge, from its length
        alone."""
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > self._limit:
            raise FrameTooLarge(
                f"The other end announced a frame of {length} bytes; at most {self._limit} are taken."
            )
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            taken = bytes(view[LENGTH.size : end])
        del self._buffer[:end]
        return taken


class ParentPipe(Generic[Sent, Received]):
    """The child's end: blocking, single-threaded."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO, received: type[Received]) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    def take_over(cls, received: type[Received]) -> ParentPipe[Sent, Received]:
        """Moves stdin and stdout away from whatever else this process runs."""
        reader, writer = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
        return cls(os.fdopen(reader, "rb"), os.fdopen(writer, "wb", buffering=0), received)

    def send(self, message: Sent) -> None:
        data = memoryview(framed(self._encoder.encode(message)))
        while data:
            data = data[self._writer.write(data) :]

    def receive(self) -> Received | None:
        """The next message; None when the parent closed the pipe or died."""
        header = self._reader.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(header)
        data = self._reader.read(length)
        return self._decoder.decode(data) if len(data) == length else None
