"""Attacks on sockets, handshakes, the muxer and the built-in protocols."""

from __future__ import annotations

import psutil
import pytest
import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from nous_node.node.hardening import MAX_HANDSHAKES
from nous_node.node.muxer import MAX_INBOUND_STREAMS
from nous_node.node.muxer_stream import INITIAL_WINDOW
from nous_node.node.network import NetworkConfig, open_network

DATA, WINDOW_UPDATE, PING, GO_AWAY = 0, 1, 2, 3
SYN, ACK, FIN, RST = 1, 2, 4, 8
HUGE_LENGTH = bytes([0xFF] * 8 + [0x7F])  # a varint of 2^63 - 1
MULTISTREAM = b"\x13/multistream/1.0.0\n"


async def tcp(victim):
    return await trio.open_tcp_stream("127.0.0.1", victim.port)


async def closed(stream) -> None:
    """Until the other side has closed the socket."""
    try:
        while await stream.receive_some(4096):
            pass
    except trio.BrokenResourceError:
        return


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 5000,
        b"GET / HTTP/1.1\r\n\r\n",
        HUGE_LENGTH + b"x" * 100_000,
        b"\xff" * 20,
        b"\x03\xff\xfe\n",  # a line that is no UTF-8
        MULTISTREAM + b"\x07/noise\n" + b"\xff\xff" + b"x" * 65535,
        MULTISTREAM + b"\x07/noise\n" + b"\x00\x20" + b"x" * 32,
    ],
    ids=["zeros", "http", "huge-length", "endless-varint", "not-utf8", "noise-junk", "noise-short"],
)
@pytest.mark.attack("garbage on a socket", "")
async def test_garbage_on_a_socket_is_dropped(victim, garbage) -> None:
    async with victim() as node:
        stream = await tcp(node)
        async with stream:
            try:
                await stream.send_all(garbage)
                await stream.send_eof()
            except trio.BrokenResourceError:
                pass
            await closed(stream)
        await node.still_serves()


@pytest.mark.attack("claimed length", "")
async def test_a_claimed_length_buys_no_memory(victim) -> None:
    async with victim() as node:
        before = psutil.Process().memory_info().rss
        stream = await tcp(node)
        async with stream:
            await stream.send_all(HUGE_LENGTH)
            await closed(stream)
        assert psutil.Process().memory_info().rss - before < 16 * 2**20
        await node.still_serves()


@pytest.mark.attack("half-open sockets", "")
async def test_half_open_sockets_lose_to_a_peer_that_speaks(victim) -> None:
    async with victim() as node:
        sockets = [await tcp(node) for _ in range(3 * MAX_HANDSHAKES)]
        await node.fault("handshake-flood")
        await node.still_serves()
        for socket in sockets:
            await socket.aclose()


@pytest.mark.attack("plaintext transport", "")
@pytest.mark.parametrize("protocol", ["/plaintext/2.0.0", "/tls/1.0.0", "/secio/1.0.0"])
async def test_only_noise_is_offered(victim, protocol) -> None:
    async with victim() as node:
        stream = await tcp(node)
        async with stream:
            raw = RawConnection(TrioTCPStream(stream), True)
            with pytest.raises(MultiselectClientError):
                await MultiselectClient().select_one_of([protocol], MultiselectCommunicator(raw), 5)
        await node.still_serves()


@pytest.mark.attack("flood of connections", "")
async def test_connections_beyond_the_limit_are_refused_and_slots_come_back(victim) -> None:
    async with victim(max_connections=3) as node:
        for turn in range(3):  # the stock swarm never gives an inbound slot back
            async with trio.open_nursery() as nursery:
                release = trio.Event()

                async def stay(seed: bytes, release: trio.Event = release) -> None:
                    async with open_network(seed, NetworkConfig(listen=())) as peer:
                        try:
                            await peer.connect(node.address)
                        except Exception:
                            return
                        await release.wait()

                for number in range(5):
                    nursery.start_soon(stay, bytes([number + 1]) * 32)
                refused = 2 * (turn + 1)
                await node.until(lambda least=refused: node.network.stats.connections_refused >= least)
                assert len(node.network.peers()) <= 3
                release.set()
            await node.alone()
        await node.still_serves()


async def test_a_returning_peer_replaces_its_oldest_connection(victim, raw_yamux) -> None:
    async with victim() as node, raw_yamux(node.address) as first, raw_yamux(node.address):
        async with raw_yamux(node.address):
            await first.wait_closed()
            assert len(node.network.peers()) == 1
        await node.still_serves()


def line(text: str) -> bytes:
    """A multistream-select line."""
    return bytes([len(text) + 1]) + text.encode() + b"\n"


async def flood(peer, stream: int, pieces: int) -> None:
    """DATA frames without any regard for the window, until the other side hangs up."""
    piece = b"x" * 32_768
    try:
        for _ in range(pieces):
            await peer.frame(DATA, 0, stream, len(piece), piece)
    except Exception:
        return


@pytest.mark.attack("data past the window", "")
async def test_data_past_the_yamux_window_ends_the_connection(victim, raw_yamux) -> None:
    async def never(peer: str, request: bytes) -> bytes:
        await trio.sleep_forever()

    async with victim(handler=never) as node, raw_yamux(node.address) as peer:
        request = MULTISTREAM + line("/nous/echo/1") + b"\x00\x00\x00\x01?"
        await peer.frame(DATA, SYN, 1, len(request), request)
        before = psutil.Process().memory_info().rss
        async with trio.open_nursery() as nursery:  # 24 MB towards a handler that reads nothing
            nursery.start_soon(flood, peer, 1, 750)
            await peer.wait_closed()
            nursery.cancel_scope.cancel()
        assert node.faults["yamux-window-overrun"] == 1
        assert psutil.Process().memory_info().rss - before < 16 * 2**20
        await node.alone()


@pytest.mark.attack("memory of many streams", "")
async def test_unread_bytes_of_all_streams_are_bounded(victim, raw_yamux) -> None:
    async with victim() as node, raw_yamux(node.address) as peer:
        async with trio.open_nursery() as nursery:

            async def fill() -> None:
                for stream in range(1, 2 * MAX_INBOUND_STREAMS, 2):
                    request = MULTISTREAM + line("/ipfs/id/1.0.0")  # answered, then not read again
                    try:
                        await peer.frame(DATA, SYN, stream, len(request), request)
                    except Exception:
                        return
                    await flood(peer, stream, INITIAL_WINDOW // 32_768 - 1)

            nursery.start_soon(fill)
            await node.fault("yamux-unread-limit")
            nursery.cancel_scope.cancel()
        await peer.wait_closed()
        await node.still_serves()


@pytest.mark.parametrize(
    "frame",
    [
        (DATA, 0, 1, 2**32 - 1),
        (9, 0, 1, 0),
        (GO_AWAY, 0, 0, 7),
        (WINDOW_UPDATE, 0, 99, 2**32 - 1),
        (WINDOW_UPDATE, SYN, 2, 0),
        (DATA, FIN | RST, 77, 0),
        (PING, ACK, 0, 12345),
    ],
    ids=["huge-data", "unknown-type", "go-away", "window", "even-id", "fin-rst", "stray-pong"],
)
async def test_odd_yamux_frames_are_survived(victim, raw_yamux, frame) -> None:
    async with victim() as node, raw_yamux(node.address) as peer:
        await peer.frame(*frame)
        await node.still_serves()


async def test_bad_yamux_version_and_bad_noise_end_the_connection(victim, raw_yamux) -> None:
    async with victim() as node:
        async with raw_yamux(node.address) as peer:
            await peer.session.write(b"\xff" * 12)
            await peer.wait_closed()
            assert node.faults["yamux-bad-frame"] == 1
        async with raw_yamux(node.address) as peer:
            await peer.session.conn.read_writer.write_msg(b"never encrypted by anybody")
            await peer.wait_closed()
            assert node.faults["noise-bad-message"] == 1
        await node.still_serves()


@pytest.mark.attack("flood of streams", "")
async def test_too_many_streams_are_reset(victim, raw_yamux) -> None:
    async with victim() as node, raw_yamux(node.address) as peer:
        for number in range(3 * MAX_INBOUND_STREAMS):
            await peer.frame(WINDOW_UPDATE, SYN, 2 * number + 1, 0)
        await node.fault("yamux-too-many-streams")
        await node.still_serves()


@pytest.mark.attack("flood of pings", "")
async def test_a_ping_flood_that_reads_nothing_stops_itself(victim, raw_yamux) -> None:
    async with victim() as node, raw_yamux(node.address) as peer:
        flood = b"".join(b"\x00\x02\x00\x01" + bytes(4) + bytes(4) for _ in range(5000))
        with trio.move_on_after(1.0):
            while True:
                await peer.session.write(flood)
        await node.still_serves()


@pytest.mark.parametrize("protocol", ["/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"])
async def test_garbage_on_the_built_in_protocols_is_survived(victim, stock_peer, protocol) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        stream = await peer.stream(protocol)
        await stream.write(b"\xff" * 1000)
        await stream.reset()
        stream = await peer.stream(protocol)
        await stream.write(b"short")
        await stream.close()
        await node.still_serves()


async def test_a_stream_that_never_negotiates_is_reset(victim, raw_yamux) -> None:
    async with victim() as node, raw_yamux(node.address) as peer:
        await peer.frame(DATA, SYN, 1, 1005, b"\xe9\x07/" + b"a" * 1002)
        await node.fault("stream-negotiation")
        await peer.frame(DATA, SYN, 3, len(HUGE_LENGTH), HUGE_LENGTH)
        await peer.frame(DATA, SYN, 5, 4, b"\x03\xff\xfe\n")
        await node.fault("stream-negotiation", 3)
        await node.still_serves()
