"""Two muxers joined by memory streams, with framing but without encryption."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)

from nous_node.node import muxer as muxer_module
from nous_node.node.muxer import MAX_INBOUND_STREAMS, Muxer
from nous_node.node.muxer_stream import INITIAL_WINDOW, MAX_WINDOW
from nous_node.node.network_stats import NetworkStats
from nous_node.node.upload_limit import UploadLimit


class Raw:
    """A socket: one end of a memory stream pair."""

    def __init__(self, stream) -> None:
        self.stream = stream

    async def read(self, n=None) -> bytes:
        return bytes(await self.stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        await self.stream.send_all(data)


class Session:
    """A secure session whose cipher changes nothing; also its `conn`, `read_writer` and noise state."""

    def __init__(self, stream, is_initiator: bool) -> None:
        self.is_initiator = is_initiator
        self.conn = self.read_writer = self.noise_state = self
        self.read_write_closer = Raw(stream)

    def encrypt(self, data: bytes) -> bytes:
        return data

    def decrypt(self, data: bytes) -> bytes:
        return data

    def _drain(self, n) -> bytes:
        return b""

    async def close(self) -> None:
        await self.read_write_closer.stream.aclose()


@asynccontextmanager
async def pair(upload: float | None = None):
    left, right = trio.testing.memory_stream_pair()
    limit = UploadLimit(upload)
    one = Muxer(Session(left, True), "one", NetworkStats(), limit)
    two = Muxer(Session(right, False), "two", NetworkStats(), UploadLimit(None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        nursery.start_soon(two.start)
        yield one, two
        await one.close()
        await two.close()


async def open_pair(one: Muxer, two: Muxer):
    return await one.open_stream(), await two.accept_stream()


async def read_all(stream) -> bytes:
    data = bytearray()
    try:
        while True:
            data += await stream.read(50_000)
    except MuxedStreamEOF:
        return bytes(data)


async def test_bytes_arrive_whole_in_both_directions() -> None:
    async with pair() as (one, two):
        ours, theirs = await open_pair(one, two)
        there, back = bytes(range(256)) * 20_000, b"answer" * 1000
        received = {}

        async def send(stream, data) -> None:
            await stream.write(data)
            await stream.close_write()

        async def receive(name, stream) -> None:
            received[name] = await read_all(stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, ours, there)
            nursery.start_soon(send, theirs, back)
            nursery.start_soon(receive, "there", theirs)
            nursery.start_soon(receive, "back", ours)
        assert received == {"there": there, "back": back}
        assert ours.is_closed
        assert theirs.is_closed
        assert one.unread == two.unread == 0


async def test_a_writer_waits_for_the_window_and_never_gives_up(autojump_clock) -> None:
    async with pair() as (one, two):
        ours, theirs = await open_pair(one, two)
        with trio.move_on_after(3600) as scope:  # libp2p's own dies after 5 s
            await ours.write(bytes(INITIAL_WINDOW + 1))
        assert scope.cancelled_caught
        assert two.unread == INITIAL_WINDOW
        data = await theirs.read()
        assert len(data) == INITIAL_WINDOW


async def test_the_window_grows_for_a_reader_that_keeps_up() -> None:
    async with pair() as (one, two):
        ours, theirs = await open_pair(one, two)

        for _ in range(8):  # a reader that has read all when the next bytes come
            size = theirs._window // 2
            await ours.write(bytes(size))
            while size:
                size -= len(await theirs.read(size))
        assert theirs._window == MAX_WINDOW


async def test_concurrent_writers_do_not_interleave() -> None:
    async with pair() as (one, two):
        ours, theirs = await open_pair(one, two)

        async def send(byte: int) -> None:
            await ours.write(bytes([byte]) * 300_000)

        received = b""
        async with trio.open_nursery() as nursery:
            for byte in range(3):
                nursery.start_soon(send, byte)
            while len(received) < 900_000:
                received += await theirs.read()
        assert sorted(received[i * 300_000 : (i + 1) * 300_000] for i in range(3)) == [
            bytes([byte]) * 300_000 for byte in range(3)
        ]


async def test_a_cancelled_writer_leaves_the_connection_usable() -> None:
    async with pair() as (one, two):
        ours, _ = await open_pair(one, two)
        with trio.move_on_after(0.01):
            await ours.write(bytes(10 * INITIAL_WINDOW))
        other, theirs = await open_pair(one, two)
        await other.write(b"still in step")
        assert await theirs.read() == b"still in step"


async def test_a_reset_is_seen_by_reader_and_writer() -> None:
    async with pair() as (one, two):
        ours, theirs = await open_pair(one, two)
        async with trio.open_nursery() as nursery:

            async def blocked() -> None:
                with pytest.raises(MuxedStreamReset):
                    await ours.write(bytes(10 * INITIAL_WINDOW))

            nursery.start_soon(blocked)
            await trio.testing.wait_all_tasks_blocked()
            await theirs.reset()
        with pytest.raises(MuxedStreamReset):
            await ours.read()
        with pytest.raises(MuxedStreamReset):
            await theirs.read()
        assert two.unread == 0
        assert not one._streams
        assert not two._streams


async def test_writing_after_closing_is_an_error() -> None:
    async with pair() as (one, two):
        ours, _ = await open_pair(one, two)
        await ours.close()
        with pytest.raises(MuxedStreamClosed):
            await ours.write(b"x")


async def test_closing_wakes_everybody() -> None:
    async with pair() as (one, two):
        ours, theirs = await open_pair(one, two)
        await theirs.write(b"last words")
        async with trio.open_nursery() as nursery:

            async def accepting() -> None:
                with pytest.raises(MuxedConnUnavailable):
                    await one.accept_stream()

            async def pinging() -> None:
                with pytest.raises(MuxedConnUnavailable):
                    await one.ping()

            nursery.start_soon(accepting)
            await trio.testing.wait_all_tasks_blocked()
            await two.close()
            await one.event_closed.wait()
            nursery.start_soon(pinging)
        assert await ours.read() == b"last words"
        with pytest.raises(MuxedStreamReset):
            await ours.read()
        with pytest.raises(MuxedStreamError):
            await one.open_stream()


async def test_a_ping_measures_the_round_trip() -> None:
    async with pair() as (one, _):
        assert 0 <= await one.ping() < 1


async def test_streams_beyond_the_limit_are_reset() -> None:
    async with pair() as (one, two):
        streams = [await one.open_stream() for _ in range(MAX_INBOUND_STREAMS + 1)]
        with pytest.raises(MuxedStreamReset):
            await streams[-1].read()
        assert two.stats.faults["yamux-too-many-streams"] == 1


async def test_our_own_streams_are_limited_too(monkeypatch) -> None:
    monkeypatch.setattr(muxer_module, "MAX_OUTBOUND_STREAMS", 2)
    async with pair() as (one, _):
        await one.open_stream()
        await one.open_stream()
        with pytest.raises(MuxedStreamError, match="2 streams are open"):
            await one.open_stream()


async def test_a_stock_header_is_twelve_bytes_big_endian() -> None:
    """The wire format of the specification, once, byte by byte."""
    left, right = trio.testing.memory_stream_pair()
    one = Muxer(Session(left, True), "one", NetworkStats(), UploadLimit(None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        stream = await one.open_stream()
        await stream.write(b"hi")
        plain = b""
        while len(plain) < 26:  # in one or two Noise messages: u16 length, text
            size = int.from_bytes(await right.receive_some(2), "big")
            plain += await right.receive_some(size)
        assert plain == bytes.fromhex(
            "00 01 0001 00000001 00000000"  # window update, SYN, stream 1, no credit
            "00 00 0000 00000001 00000002 6869"  # data, no flags, stream 1, two bytes
        )
        await right.aclose()


async def test_the_upload_limit_holds_over_time(autojump_clock) -> None:
    async with pair(upload=100_000.0) as (one, two):
        ours, theirs = await open_pair(one, two)
        start = trio.current_time()

        async def send() -> None:
            await ours.write(bytes(1_000_000))
            await ours.close_write()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert len(await read_all(theirs)) == 1_000_000
        assert 8.5 < trio.current_time() - start < 11
