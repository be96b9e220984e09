"""Attacks on request/response streams."""

from __future__ import annotations

import contextlib

import pytest
import trio

from nous_node.node import requests, uploads
from nous_node.node.blob_turns import BlobTurns
from nous_node.node.blobs import BlobIndex
from nous_node.node.network import DEFAULT_PER_PEER, NetworkConfig, open_network
from nous_node.node.network_errors import RequestFailedError
from nous_node.node.swarm import BLOBS_OF_PEER
from nous_node.protocol.encoding import encode
from nous_node.protocol.streams import BLOB_PROTOCOL, MAX_BLOB_REPLY, MAX_REQUEST, BlobRequest, read_blob

ECHO = "/nous/echo/1"
MAX_ECHO = 64 * 1024


async def until_reset(stream) -> bytes:
    """What comes back before the other side ends the stream."""
    received = b""
    with contextlib.suppress(Exception):
        while data := await stream.read(4096):
            received += data
    return received


@pytest.mark.parametrize(
    "sent",
    [b"", b"\x00", b"\x00\x00\x00\x05four", b"\x00\x00\x00\x05"],
    ids=["nothing", "half-a-length", "one-byte-short", "only-a-length"],
)
async def test_a_request_broken_off_is_dropped(victim, stock_peer, sent) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        stream = await peer.stream(ECHO)
        await stream.write(sent)
        await stream.close_write()
        assert await until_reset(stream) == b""
        await node.fault("request-broken-off")
        await node.still_serves()


@pytest.mark.attack("oversize request", "")
@pytest.mark.parametrize("size", [MAX_ECHO + 1, 2**32 - 1])
async def test_an_oversize_request_is_refused_before_it_is_read(victim, stock_peer, size) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        stream = await peer.stream(ECHO)
        await stream.write(size.to_bytes(4, "big"))
        assert await until_reset(stream) == b""
        assert node.faults["request-oversize"] == 1
        await node.still_serves()


@pytest.mark.attack("request of a byte at a time", "")
async def test_a_request_of_a_byte_at_a_time_runs_out_of_time(victim, stock_peer, monkeypatch) -> None:
    monkeypatch.setattr(requests, "READ_REQUEST_S", 0.3)
    async with victim() as node, stock_peer(node.address) as peer:
        stream = await peer.stream(ECHO)
        await stream.write((1000).to_bytes(4, "big"))
        with contextlib.suppress(Exception):
            while not node.faults["request-slow"]:
                await stream.write(b"x")
                await trio.sleep(0.05)
        assert node.faults["request-slow"] == 1
        await node.still_serves()


@pytest.mark.attack("client that never reads", "")
async def test_a_client_that_never_reads_its_answer_runs_out_of_time(victim, raw_yamux) -> None:
    async def large(peer: str, request: bytes) -> bytes:
        return bytes(MAX_ECHO)

    async with victim(handler=large) as node:
        node.network.serve(
            "/nous/large/1",
            lambda peer, request: _megabytes(),
            max_request=10,
            max_response=2**22,
            deadline=0.3,
        )
        async with raw_yamux(node.address) as peer:  # never grants any window
            hello = b"\x13/multistream/1.0.0\n" + b"\x0e/nous/large/1\n" + b"\x00\x00\x00\x01?"
            await peer.frame(0, 1, 1, len(hello), hello)
            await node.fault("request-slow")


@pytest.mark.attack("client that reads a little now and then", "")
@pytest.mark.parametrize("window", [1, 2**22])
async def test_a_client_that_reads_next_to_nothing_loses_its_answer(
    victim, raw_yamux, monkeypatch, window
) -> None:
    """Long before its deadline, though its window opens again and again, or its socket is not read."""
    monkeypatch.setattr(requests, "LOOK_S", 0.02)
    monkeypatch.setattr(requests, "STALL_S", 0.3)
    async with victim() as node:
        node.network.serve(
            "/nous/large/1",
            lambda peer, request: _megabytes(),
            max_request=10,
            max_response=2**22,
            deadline=60,
        )
        async with raw_yamux(node.address) as peer:
            hello = b"\x13/multistream/1.0.0\n" + b"\x0e/nous/large/1\n" + b"\x00\x00\x00\x01?"
            await peer.frame(0, 1, 1, len(hello), hello)
            with contextlib.suppress(Exception):
                while not node.faults["request-slow"]:
                    await peer.frame(1, 0, 1, window)
                    await trio.sleep(0.05)
            assert node.faults["request-slow"] == 1
        await node.still_serves()


@pytest.mark.attack("client that takes all uploads and reads none", "")
async def test_peers_that_do_not_read_their_chunks_hold_up_nobody(victim, stock_peer, monkeypatch) -> None:
    monkeypatch.setattr(requests, "LOOK_S", 0.02)
    monkeypatch.setattr(uploads, "GREEDY_SECONDS", 0.1)
    monkeypatch.setattr(uploads, "STALLED_SECONDS", 0.2)
    index = BlobIndex(lambda file: None)
    large, small = index.add_bytes(bytes(2**20)), index.add_bytes(b"a chunk")
    async with victim() as node:
        node.network.serve(
            BLOB_PROTOCOL,
            index.answer,
            max_request=MAX_REQUEST,
            max_response=MAX_BLOB_REPLY,
            per_peer=BLOBS_OF_PEER,
            deadline=60,
            turns=BlobTurns(index, None),
        )
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                peer = await stack.enter_async_context(stock_peer(node.address))
                for _ in range(BLOBS_OF_PEER):
                    request = encode(BlobRequest(large))
                    stream = await peer.stream(BLOB_PROTOCOL)
                    await stream.write(len(request).to_bytes(4, "big") + request)
            async with open_network(b"q" * 32, NetworkConfig(listen=())) as honest:
                server = await honest.connect(node.address)
                with trio.fail_after(5):
                    for _ in range(20):
                        frame = await honest.request(
                            server, BLOB_PROTOCOL, encode(BlobRequest(small)), max_response=MAX_BLOB_REPLY
                        )
                        assert read_blob(frame) == b"a chunk"
        await node.still_serves()


async def _megabytes() -> bytes:
    return bytes(2**22)


async def test_a_handler_that_raises_resets_only_its_stream(victim, stock_peer) -> None:
    async def moody(peer: str, request: bytes) -> bytes:
        if request == b"alive?":
            return request
        raise RuntimeError("a fault of ours")

    async with victim(handler=moody) as node, stock_peer(node.address) as peer:
        stream = await peer.stream(ECHO)
        await stream.write(b"\x00\x00\x00\x01?")
        assert await until_reset(stream) == b""
        assert node.faults["request-handler"] == 1
        await node.still_serves()


async def test_a_handler_with_too_long_an_answer_resets_its_stream(victim) -> None:
    async def talkative(peer: str, request: bytes) -> bytes:
        return bytes(MAX_ECHO + 1)

    async with victim(handler=talkative) as node:
        async with open_network(b"q" * 32, NetworkConfig(listen=())) as client:
            peer = await client.connect(node.address)
            with pytest.raises(RequestFailedError):
                await client.request(peer, ECHO, b"?", max_response=2**20)
        assert node.faults["request-handler"] == 1


@pytest.mark.attack("one peer asking for everything", "")
async def test_one_peer_cannot_take_all_turns(victim, stock_peer) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        held = [await peer.stream(ECHO) for _ in range(DEFAULT_PER_PEER)]
        for stream in held:
            await stream.write(b"\x00\x00\x00\x05")  # and then silence
        with contextlib.suppress(Exception):  # the reset may overtake the negotiation
            await peer.stream(ECHO)
        await node.fault("request-too-many")
        await node.still_serves()


@pytest.mark.attack("server that floods or holds its client", "")
async def test_a_hostile_server_cannot_hold_or_flood_a_client(victim, stock_peer) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        me = str(peer.host.get_id())

        async def silent(stream) -> None:
            await trio.sleep_forever()

        async def boastful(stream) -> None:
            await stream.write(b"\xff\xff\xff\xff" + b"x" * 1000)

        async def curt(stream) -> None:
            await stream.write(b"\x00\x00\x01\x00short")
            await stream.close()

        async def rude(stream) -> None:
            await stream.reset()

        for protocol, handler, reason in (
            ("/hostile/silent", silent, "within 0.3 s"),
            ("/hostile/boastful", boastful, "4294967295 bytes"),
            ("/hostile/curt", curt, "before a complete answer"),
            ("/hostile/rude", rude, "before a complete answer"),
            ("/hostile/none", None, "does not serve"),
        ):
            if handler is not None:
                peer.host.set_stream_handler(protocol, handler)
            with pytest.raises(RequestFailedError, match=reason):
                await node.network.request(me, protocol, b"?", max_response=1000, deadline=0.3)
        await node.still_serves()
