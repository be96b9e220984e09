"""A Yamux multiplexer that keeps its word: windows are enforced, memory is bounded, nothing polls.

It stands in for libp2p 0.8.1's own, through the upgrader, because that one
- only warns when a peer writes past its window, so a peer decides how much memory we use;
- kills a writer after 5 s of zero window, and the reader then sees a plain end of stream;
- sends a window update per read, so per byte of a varint, and formats log text per frame;
- corrupts the connection when a caller is cancelled in the middle of a write.

Here one task a connection reads, one writes. A caller's `write` only queues frames, so cancelling it
(every call of ours has a deadline) leaves whole frames on the wire. The writer packs what is queued
into as few Noise messages as fit: many small gossip messages cost one system call.

Wire format: https://github.com/hashicorp/yamux/blob/master/spec.md; Noise framing (u16 length):
https://github.com/libp2p/specs/blob/master/noise/README.md.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from libp2p.abc import IMuxedConn
from libp2p.io.exceptions import IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError
from trio.lowlevel import ParkingLot

from .muxer_socket import Incoming, Outgoing
from .muxer_stream import MuxerStream
from .network_stats import NetworkStats
from .upload_limit import UploadLimit

HEADER = struct.Struct(">BBHII")  # version, type, flags, stream id, length
DATA, WINDOW_UPDATE, PING, GO_AWAY = 0, 1, 2, 3
SYN, ACK, FIN, RST = 1, 2, 4, 8
NORMAL, PROTOCOL_ERROR = 0, 1

NOISE_PLAINTEXT = 65535 - 16  # a Noise message is at most 65535 bytes, 16 of them the tag
BATCH = 4  # Noise messages that are written in one go; 2 where the uplink is limited

# Streams that a peer may have open towards us. Gossip takes one, ping none; a busy downloader a few.
MAX_INBOUND_STREAMS = 64
MAX_OUTBOUND_STREAMS = 256

# Unread bytes of all streams of a connection: 8 MiB is several 1 MiB chunks in flight; a peer that
# fills 64 windows without our reading them is no peer of ours.
UNREAD_LIMIT = 8 * 1024 * 1024

# Frames queued for the socket before writers wait: enough to keep it busy while Python runs.
QUEUE_LIMIT = 256 * 1024
# Answers to a peer that does not read its socket: above this we stop reading from it, too.
ANSWER_LIMIT = 1024 * 1024

GOODBYE_S = 0.5  # how long closing may take to flush what is queued
NOTICE_S = 2.0  # how long those who are told of the end may take


Park = Callable[[ParkingLot], Awaitable[None]]
"""Waits in a lot, or for a while."""


class Muxer(IMuxedConn):  # type: ignore[misc]  # untyped base
    """One Yamux connection over a Noise session. `start()` runs it and returns when it is closed."""

    def __init__(self, secured_conn: Any, peer_id: Any, stats: NetworkStats, upload: UploadLimit) -> None:
        self.peer_id = peer_id
        self.secured_conn = secured_conn
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.on_close: Callable[[], Awaitable[Any]] | None = None
        self.stats = stats
        self.last_heard = trio.current_time()  # trio time of the last bytes from the peer
        self.unread = 0  # bytes in the receive buffers of all streams
        self.spoken: set[str] = set()  # protocols that the peer has agreed to on streams of ours
        self._upload = upload
        self._raw = secured_conn.conn.read_writer.read_write_closer
        self._noise = secured_conn.conn.noise_state
        self._incoming, self._outgoing = Incoming(self._raw), Outgoing(self._raw)
        # What the muxer negotiation read beyond its own last line belongs to us.
        self._plain = bytes(secured_conn._drain(None))
        self._at = 0  # how much of it is handled
        self._streams: dict[int, MuxerStream] = {}
        self._next_id = 1 if secured_conn.is_initiator else 2
        self._last_peer_id = 0
        self._accept_send, self._accept_receive = trio.open_memory_channel[MuxerStream](MAX_INBOUND_STREAMS)
        self._batch = BATCH if upload.rate is None else BATCH // 2
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._work = ParkingLot()
        self._room = ParkingLot()
        self._pings: dict[int, trio.Event] = {}
        self._next_ping = 1
        self._closing = False
        self._scope = trio.CancelScope()

    # What libp2p asks of a muxed connection

    @property
    def is_initiator(self) -> bool:
        return bool(self.secured_conn.is_initiator)

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self._closing

    @property
    def is_closed(self) -> bool:
        return self.event_closed.is_set()

    def get_transport_addresses(self) -> Any:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> Any:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> Any:
        return self.secured_conn.get_remote_address()

    async def start(self) -> None:
        """Run until either side closes. Never raises: what goes wrong closes this connection only."""
        self.event_started.set()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_loop)
                    await self._read_loop()
                    nursery.cancel_scope.cancel()
        except Exception:
            self.stats.fault("muxer-failed")
        finally:
            with trio.CancelScope(shield=True):
                await self._finish()

    async def open_stream(self) -> MuxerStream:
        """Open a stream; raises MuxedStreamError when closed or when too many are open."""
        if self._closing:
            raise MuxedStreamError("the connection is closed")
        ours = sum(1 for stream_id in self._streams if stream_id % 2 == self._next_id % 2)
        if ours >= MAX_OUTBOUND_STREAMS:
            raise MuxedStreamError(f"{ours} streams are open on this connection, the limit")
        stream = MuxerStream(self._next_id, self)
        self._streams[stream.stream_id] = stream
        self._next_id += 2
        self.send_window(stream.stream_id, 0, SYN)
        await trio.lowlevel.checkpoint()
        return stream

    async def accept_stream(self) -> MuxerStream:
        """The next stream that the peer opened; raises MuxedConnUnavailable when closed."""
        try:
            return await self._accept_receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise MuxedConnUnavailable("the connection is closed") from None

    async def close(self) -> None:
        """Say goodbye, flush for at most GOODBYE_S, close. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        self._put(HEADER.pack(0, GO_AWAY, 0, 0, NORMAL))
        with trio.CancelScope(deadline=trio.current_time() + GOODBYE_S, shield=True):
            while self._queued and self.event_started.is_set():
                await self._room.park()
        self._scope.cancel()
        with trio.CancelScope(shield=True):
            await self._finish()

    async def ping(self) -> float:
        """Round trip in seconds. The caller sets the deadline."""
        if self._closing:
            raise MuxedConnUnavailable("the connection is closed")
        number, self._next_ping = self._next_ping, (self._next_ping + 1) % 2**32
        pong = self._pings[number] = trio.Event()
        start = trio.current_time()
        try:
            self._put(HEADER.pack(0, PING, SYN, 0, number))
            await pong.wait()
        finally:
            del self._pings[number]
        if self._closing:
            raise MuxedConnUnavailable("the connection was closed while waiting for a pong")
        return trio.current_time() - start

    # What the streams call

    async def send_data(self, stream_id: int, payload: bytes | memoryview, park: Park) -> None:
        """Queue one DATA frame of at most MAX_FRAME bytes; waits for room before, never after."""
        while self._queued > QUEUE_LIMIT and not self._closing:
            await park(self._room)
        if self._closing:
            raise MuxedStreamError("the connection is closed")
        self._put(b"".join((HEADER.pack(0, DATA, 0, stream_id, len(payload)), payload)))

    def send_window(self, stream_id: int, increment: int, flags: int = 0) -> None:
        """Queue a WINDOW_UPDATE, which also carries SYN, FIN and RST."""
        self._put(HEADER.pack(0, WINDOW_UPDATE, flags, stream_id, increment))

    def send_fin(self, stream_id: int) -> None:
        self.send_window(stream_id, 0, FIN)

    def send_reset(self, stream_id: int) -> None:
        self.send_window(stream_id, 0, RST)

    def forget(self, stream_id: int) -> None:
        """A stream is over in both directions."""
        self._streams.pop(stream_id, None)

    # Writing

    def _put(self, frame: bytes) -> None:
        self._queue.append(frame)
        self._queued += len(frame)
        self._work.unpark_all()

    async def _write_loop(self) -> None:
        encrypt, outgoing = self._noise.encrypt, self._outgoing
        try:
            while True:
                while not self._queue:
                    await self._work.park()
                size = 0
                for _ in range(self._batch):
                    plain = self._take_message()
                    outgoing.put(encrypt(plain))
                    size += len(plain)
                    if not self._queue:
                        break
                sealed = outgoing.size
                await self._upload.take(sealed)
                await outgoing.send()
                self.stats.bytes_out += sealed
                self._queued -= size
                self._wake_writers()
        except Exception:  # the socket broke: reading would not last longer
            self._scope.cancel()

    def _wake_writers(self) -> None:
        """As many as have room, one after the other; all where nothing is queued, so that none is forgotten:
        to wake them all each time would cost more than to encrypt."""
        if not self._queued:
            self._room.unpark_all()
        elif self._queued <= QUEUE_LIMIT // 2:
            self._room.unpark(count=2)

    def _take_message(self) -> bytes:
        """As many of the queued frames as fit into one Noise message."""
        first = self._queue.popleft()
        left = NOISE_PLAINTEXT - len(first)
        if not self._queue or len(self._queue[0]) > left:
            return first
        frames = [first]
        while self._queue and len(self._queue[0]) <= left:
            frames.append(self._queue.popleft())
            left -= len(frames[-1])
        return b"".join(frames)

    # Reading

    async def _read_loop(self) -> None:
        try:
            while not self._closing:
                while len(self._plain) - self._at < HEADER.size:
                    if not await self._fill():
                        return
                header = HEADER.unpack_from(self._plain, self._at)
                self._at += HEADER.size
                if not await self._handle(*header):
                    return
                while self._queued > ANSWER_LIMIT:
                    await self._room.park()
        except (IOException, RawConnError, OSError, trio.ClosedResourceError):
            return  # the peer went away without a goodbye: not a fault
        except Exception:  # a Noise message that does not decrypt
            self.stats.fault("noise-bad-message")

    async def _fill(self) -> bool:
        """Add a decrypted Noise message to what is left of `_plain`; False at the end of the stream."""
        while (sealed := self._incoming.message()) is None:
            count = await self._incoming.receive()
            if not count:
                return False
            self.stats.bytes_in += count
            self.last_heard = trio.current_time()
        opened = self._noise.decrypt(sealed)
        self._plain = self._plain[self._at :] + opened if self._at < len(self._plain) else opened
        self._at = 0
        return True

    async def _handle(self, version: int, kind: int, flags: int, stream_id: int, length: int) -> bool:
        """One frame. False ends the connection."""
        if version != 0 or kind > GO_AWAY:
            return self._offend("yamux-bad-frame")
        if kind == PING:
            self._handle_ping(flags, length)
            return True
        if kind == GO_AWAY:
            return False
        stream = self._streams.get(stream_id)
        if flags & SYN:
            stream = self._handle_syn(stream_id, stream)
        if kind == WINDOW_UPDATE:
            if stream is not None:
                stream.grant(length)
        elif not await self._handle_data(stream, length):
            return False
        if stream is not None and flags & (FIN | RST):
            stream.peer_finished(reset=bool(flags & RST))
        return True

    def _handle_ping(self, flags: int, number: int) -> None:
        if flags & SYN:
            self._put(HEADER.pack(0, PING, ACK, 0, number))
        elif number in self._pings:
            self._pings[number].set()

    def _handle_syn(self, stream_id: int, known: MuxerStream | None) -> MuxerStream | None:
        theirs = stream_id % 2 != self._next_id % 2
        if known is not None or not theirs or stream_id <= self._last_peer_id:
            self.stats.fault("yamux-bad-stream-id")
            self.send_reset(stream_id)
            return known
        self._last_peer_id = stream_id
        if sum(1 for i in self._streams if i % 2 == stream_id % 2) >= MAX_INBOUND_STREAMS:
            self.stats.fault("yamux-too-many-streams")
            self.send_reset(stream_id)
            return None
        stream = MuxerStream(stream_id, self)
        try:
            self._accept_send.send_nowait(stream)
        except trio.WouldBlock:  # opened and finished faster than we take them
            self.stats.fault("yamux-too-many-streams")
            self.send_reset(stream_id)
            return None
        self._streams[stream_id] = stream
        self.send_window(stream_id, 0, ACK)
        return stream

    async def _handle_data(self, stream: MuxerStream | None, length: int) -> bool:
        """Move a frame's payload to its stream as it arrives: no frame is ever held whole."""
        if stream is not None and not stream.may_receive(length):
            return self._offend("yamux-window-overrun")
        if self.unread + length > UNREAD_LIMIT:
            return self._offend("yamux-unread-limit")
        left = length
        while left:
            if self._at == len(self._plain) and not await self._fill():
                return False
            part = memoryview(self._plain)[self._at : self._at + left]
            self._at += len(part)
            left -= len(part)
            if stream is not None:  # a frame for a stream that we have just reset is skipped
                stream.receive(part)
        return True

    def _offend(self, fault: str) -> bool:
        self.stats.fault(fault)
        self._put(HEADER.pack(0, GO_AWAY, 0, 0, PROTOCOL_ERROR))
        return False

    async def _finish(self) -> None:
        """Release everything once; every waiter wakes and sees the connection closed."""
        if self.event_closed.is_set():
            return
        self._closing = True
        self.event_closed.set()
        self.event_started.set()
        self._accept_send.close()
        self._accept_receive.close()
        for stream in list(self._streams.values()):
            stream.connection_lost()
        self._streams.clear()
        for pong in self._pings.values():
            pong.set()
        self._queue.clear()
        self._queued = 0
        self._room.unpark_all()
        with trio.move_on_after(GOODBYE_S):
            try:
                await self.secured_conn.close()
            except Exception:
                self.stats.fault("connection-close-failed")
        with trio.move_on_after(NOTICE_S):
            try:
                if self.on_close is not None:
                    await self.on_close()
            except Exception:
                self.stats.fault("connection-close-failed")
