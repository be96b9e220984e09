"""One stream of a `Muxer`: a receive buffer with a window, and a write lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import (
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamReset,
)
from trio.lowlevel import ParkingLot

from .muxer_buffer import Unread

if TYPE_CHECKING:
    from .muxer import Muxer

INITIAL_WINDOW = 256 * 1024  # fixed by the Yamux specification
# A stream whose reader keeps up grows to this: 20 MB/s at 50 ms of round trip.
MAX_WINDOW = 1024 * 1024
# One frame and its 12-byte header fill one Noise message.
MAX_FRAME = 65535 - 16 - 12


class Patience(Protocol):
    """With a peer that does not read."""

    async def park(self, lot: ParkingLot, sent: int) -> None:
        """Waits in `lot`, or for a while. `sent`: bytes of the stream so far. Raises TooSlowError."""


class MuxerStream(IMuxedStream):  # type: ignore[misc]  # untyped base
    """A bidirectional byte stream with flow control. Raises the muxer exceptions of libp2p."""

    def __init__(self, stream_id: int, conn: Muxer) -> None:
        self.stream_id = stream_id
        self.muxed_conn = conn
        self._unread = Unread()
        self._window = INITIAL_WINDOW  # the size we aim at
        self._allowed = INITIAL_WINDOW  # bytes the peer may still send
        self._consumed = 0  # bytes read since the last window update
        self._send_window = INITIAL_WINDOW
        self._readable = ParkingLot()
        self._writable = ParkingLot()
        self._sent = 0  # bytes that were queued
        self.patience: Patience | None = None  # with a peer that does not read; None: for ever
        # Concurrent writers never interleave: gossip frames are longer than Yamux frames.
        self._write_lock = trio.Lock()
        self._read_ended = False
        self._write_ended = False
        self._reset = False

    @property
    def is_closed(self) -> bool:
        return self._reset or (self._read_ended and self._write_ended)

    async def read(self, n: int | None = None) -> bytes:
        """At least one and at most `n` bytes (None, -1: all there is).

        Raises MuxedStreamEOF at the end, MuxedStreamReset after a reset.
        """
        if n == 0:
            return b""
        pieces = [await self.read_piece(n)]
        left = self._unread.size if n is None or n < 0 else min(n - len(pieces[0]), self._unread.size)
        while left:
            pieces.append(self._take(left))
            left -= len(pieces[-1])
        return b"".join(pieces)

    async def read_piece(self, n: int | None = None) -> bytes | memoryview:
        """As `read`, but only what lies together, without a copy where that is possible."""
        while not self._unread.size:
            self._raise_if_read_ended()
            await self._readable.park()
        return self._take(self._unread.size if n is None or n < 0 else n)

    def _take(self, most: int) -> bytes | memoryview:
        piece = self._unread.take(most)
        self._release(len(piece))
        return piece

    def _raise_if_read_ended(self) -> None:
        if self._reset:
            raise MuxedStreamReset("the stream was reset")
        if self._read_ended:
            raise MuxedStreamEOF("the peer closed the stream")

    def _release(self, size: int) -> None:
        """Give the peer credit for what was read, in halves of the window rather than per read."""
        self.muxed_conn.unread -= size
        self._consumed += size
        if self._consumed < self._window // 2 or self._read_ended or self._reset:
            return
        growth = 0
        if not self._unread.size and self._window < MAX_WINDOW:  # the reader keeps up
            growth = min(self._window, MAX_WINDOW - self._window)
            self._window += growth
        credit = self._consumed + growth
        self._allowed += credit
        self._consumed = 0
        self.muxed_conn.send_window(self.stream_id, credit)

    async def write(self, data: bytes) -> None:
        """Queue all of `data`, waiting for the peer to read as long as `patience` lasts.

        Raises MuxedStreamClosed after our close, MuxedStreamReset after a reset. A caller that is
        cancelled leaves whole frames behind, so only this stream is unusable afterwards.
        """
        try:
            self._write_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._write_lock.acquire()
        try:
            view = memoryview(data)
            while view:
                while not self._send_window and not self._write_ended:
                    await self._park(self._writable)
                if self._reset:
                    raise MuxedStreamReset("the stream was reset")
                if self._write_ended:
                    raise MuxedStreamClosed("the stream is closed for writing")
                size = min(len(view), self._send_window, MAX_FRAME)
                self._send_window -= size
                await self.muxed_conn.send_data(self.stream_id, view[:size], self._park)
                self._sent += size
                view = view[size:]
        finally:
            self._write_lock.release()

    async def _park(self, lot: ParkingLot) -> None:
        if self.patience is None:
            await lot.park()
        else:
            await self.patience.park(lot, self._sent)

    async def close(self) -> None:
        """Close our side; the peer's side stays readable."""
        await self.close_write()

    async def close_write(self) -> None:
        if not self._write_ended:
            self._write_ended = True
            self.muxed_conn.send_fin(self.stream_id)
            self._writable.unpark_all()
            self._forget_if_over()
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """End both directions now."""
        if self.muxed_conn.is_closed:  # a reader may still take what had arrived before
            self.connection_lost()
            return
        if not self.is_closed:
            self.muxed_conn.send_reset(self.stream_id)
        self._end_by_reset()
        await trio.lowlevel.checkpoint()

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("use trio.fail_after around the call")

    def get_remote_address(self) -> Any:
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> MuxerStream:
        return self

    # What the muxer calls

    def may_receive(self, size: int) -> bool:
        """Whether the peer's credit covers a frame of this size; it is taken off at once."""
        if size > self._allowed:
            return False
        self._allowed -= size
        return True

    def receive(self, data: memoryview) -> None:
        """Takes over a part of a frame; what it lies in does not change any more."""
        if self._read_ended or self._reset:
            return
        self._unread.put(data)
        self.muxed_conn.unread += len(data)
        self._readable.unpark_all()

    def grant(self, size: int) -> None:
        self._send_window += size
        self._writable.unpark_all()

    def peer_finished(self, *, reset: bool) -> None:
        if reset:
            self._end_by_reset()
            return
        self._read_ended = True
        self._readable.unpark_all()
        self._forget_if_over()

    def connection_lost(self) -> None:
        """What was received stays readable; then a reset is seen, not a plain end."""
        self._reset = self._write_ended = True
        self._readable.unpark_all()
        self._writable.unpark_all()

    def _end_by_reset(self) -> None:
        self._reset = self._read_ended = self._write_ended = True
        self.muxed_conn.unread -= self._unread.size
        self._unread.clear()
        self._readable.unpark_all()
        self._writable.unpark_all()
        self.muxed_conn.forget(self.stream_id)

    def _forget_if_over(self) -> None:
        if self._read_ended and self._write_ended:
            self.muxed_conn.forget(self.stream_id)
