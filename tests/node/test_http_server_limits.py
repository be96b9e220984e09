"""Chunks over HTTP: clients that take their time or too much, files that change, and limits of the node."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from nous_node.node import http_server, http_wire
from nous_node.node.blobs import BlobIndex
from nous_node.node.config import Settings
from nous_node.node.following import Following
from nous_node.node.http_server import HttpPortError, chunks_by_http, serve_chunks
from nous_node.node.network import NetworkConfig, open_network
from nous_node.node.sources import CHUNK_SECONDS
from nous_node.node.swarm import Swarm, serve_run
from nous_node.node.upload_limit import BURST_S, UploadLimit
from nous_node.node.uploads import HTTP_SHARE, SLOTS, slots_at
from nous_node.protocol.constants import MAX_CHUNK
from nous_node.protocol.encoding import encode
from nous_node.protocol.errors import LocalError
from nous_node.protocol.streams import BLOB_PROTOCOL, BlobRequest

from .web import CHUNK, CONTENT, GET, HASHES, Web, everything, read_answer


@pytest.fixture
def web(tmp_path: Path) -> Web:
    return Web(tmp_path)


# --- clients that take their time ------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /blob/"])
async def test_a_request_that_does_not_come_ends_its_connection(
    web: Web, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.1)
    async with web.open(), await web.connect() as stream:
        await stream.send_all(sent)
        assert await everything(stream) == b""
        assert web.faults == {"http-slow": 1}


async def test_a_request_that_trickles_has_no_longer_than_one_that_does_not_come(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.3)
    async with web.open(), await web.connect() as stream:
        started = trio.current_time()
        with suppress(trio.BrokenResourceError):
            while trio.current_time() - started < 60:
                await stream.send_all(b"G")
                await trio.sleep(0.01)
        assert trio.current_time() - started < 60


async def test_an_idle_connection_ends_without_a_fault(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.1)
    async with web.open(), await web.connect() as stream:
        await stream.send_all(GET + b"Host: a\r\n\r\n")
        assert CONTENT[:CHUNK] in await everything(stream)
        assert not web.faults


async def test_a_reader_that_stalls_is_cut_off_and_its_place_is_free_again(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_UPLOADS", 1)
    monkeypatch.setattr(http_wire, "STALL_S", 2.0)  # within which others are seen to be turned away
    name = web.large()
    async with web.open(), await web.deaf(name):
        assert (await web.until(503))[1]["retry-after"] == "1"
        assert (await web.until(200))[2] == CONTENT[:CHUNK]
        assert web.faults == {"http-slow": 1}


@pytest.mark.parametrize("rate", [None, 400_000.0])
async def test_one_client_takes_half_of_the_uploads(
    web: Web, monkeypatch: pytest.MonkeyPatch, rate: float | None
) -> None:
    """Both have two: the unlimited one here, the other by its rate."""
    if rate is None:
        monkeypatch.setattr(http_server, "MAX_UPLOADS", 2)
    name = web.large()
    async with web.open(rate):
        async with await web.deaf(name):
            assert (await web.until(503))[1]["retry-after"] == "1"
            plain = trio.socket.socket()  # another address of this machine
            await plain.bind(("127.0.0.2", 0))
            await plain.connect(("127.0.0.1", web.port))
            async with trio.SocketStream(plain) as other:
                await other.send_all(GET + b"Host: a\r\nConnection: close\r\n\r\n")
                assert read_answer(await everything(other))[0] == 200
        await web.until(200)


async def test_one_client_cannot_take_all_connections(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CLIENT_CONNECTIONS", 2)
    async with web.open():
        async with await web.connect() as one, await web.connect() as two:
            for stream in (one, two):
                await stream.send_all(GET + b"Host: a\r\n\r\n")
                await stream.receive_some(1)
            async with await web.connect() as three:
                with suppress(trio.BrokenResourceError):
                    assert await three.receive_some(1) == b""
            assert web.faults == {"http-too-many": 1}
        await web.until(200)


# --- a disk that is not what it was ------------------------------------------------------------------


@pytest.mark.parametrize("served_before", [False, True])
async def test_a_file_that_changed_is_served_to_nobody(web: Web, served_before: bool) -> None:
    async with web.open():
        if served_before:
            assert (await web.ask(f"/blob/{HASHES[1]}"))[0] == 200
        with web.path.open("r+b") as file:
            file.seek(CHUNK + 7)
            file.write(b"changed")
        os.utime(web.path, ns=(1, 1))
        assert (await web.ask(f"/blob/{HASHES[1]}"))[0] == 404
        assert web.damaged == [web.path]
        assert (await web.ask(f"/blob/{HASHES[0]}"))[2] == CONTENT[:CHUNK]


async def test_a_file_that_is_gone_is_not_found(web: Web) -> None:
    async with web.open():
        assert (await web.ask(f"/blob/{HASHES[1]}"))[0] == 200
        web.path.unlink()
        assert (await web.ask(f"/blob/{HASHES[1]}"))[0] == 404


async def test_an_answer_from_a_file_that_becomes_shorter_is_broken_off(web: Web) -> None:
    name = web.large()
    async with web.open():
        assert (await web.ask(f"/blob/{name}", method="HEAD"))[0] == 200
        async with await web.deaf(name) as stream:
            await stream.receive_some(1)
            os.truncate(web.path.with_name("large"), 0)
            assert len(await everything(stream)) < 1 << 25
        assert web.faults == {"http-broken-off": 1}


async def test_what_is_being_downloaded_is_served_from_where_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.part").mkdir()
    web = Web(tmp_path / "checkpoint.part")
    async with web.open():
        assert (await web.ask(f"/blob/{HASHES[2]}"))[2] == CONTENT[2 * CHUNK : 3 * CHUNK]


# --- limits of this node ---------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [300_000, 399_999, 400_000, 500_000, 599_999, 1_000_000, 10_000_000])
def test_chunks_of_all_kinds_together_come_within_their_deadline(rate: int) -> None:
    by_http = slots_at(rate * HTTP_SHARE, http_server.MAX_UPLOADS)
    by_streams = slots_at(rate * (1 - HTTP_SHARE), SLOTS)
    referred = 1
    assert MAX_CHUNK / (rate / (by_http + by_streams + referred)) < CHUNK_SECONDS


async def test_an_uplink_that_is_too_slow_for_http_is_told_with_what_would_do(tmp_path: Path) -> None:
    settings = Settings(threads=1, memory=1 << 30, http=8080, upload=299_999)
    async with open_network(bytes(32), NetworkConfig(listen=())) as network:
        swarm = Swarm(network, bytes(32), BlobIndex(lambda file: None))
        with pytest.raises(LocalError, match="at least 300 KB/s with --upload"):
            async with chunks_by_http(settings, network, swarm):
                pass
        assert swarm.http_port is None


@pytest.mark.parametrize(("http", "slots"), [(None, 6), (8080, 3)])
async def test_where_chunks_go_by_http_as_well_streams_have_half_of_the_uplink(
    http: int | None, slots: int
) -> None:
    config = NetworkConfig(listen=(), upload_limit=600_000)
    async with open_network(bytes(32), config) as network, trio.open_nursery() as nursery:
        swarm = Swarm(network, bytes(32), BlobIndex(lambda file: None))
        swarm.http_port = http
        served = Served(network.upload)
        serve_run(served, cast(Following, Answers()), swarm)
        turns = served.turns[BLOB_PROTOCOL]
        request = encode(BlobRequest(bytes(32)))
        made = 0

        async def upload(peer: str) -> None:
            nonlocal made
            async with turns.turn(peer, request):
                made += 1
                await trio.sleep_forever()

        for number in range(10):
            nursery.start_soon(upload, f"peer {number}")
        await trio.testing.wait_all_tasks_blocked()
        assert made == slots
        nursery.cancel_scope.cancel()


class Answers:
    async def answer_head(self, peer: str, request: bytes) -> bytes:
        return b""


class Served:
    """What a node is asked to serve."""

    def __init__(self, upload: UploadLimit) -> None:
        self.upload = upload
        self.turns: dict[str, Any] = {}

    def serve(self, protocol: str, handler: object, *, turns: object = None, **limits: object) -> None:
        self.turns[protocol] = turns


async def test_uploads_share_the_limit_of_the_node(web: Web) -> None:
    rate = 200_000.0
    async with web.open(rate) as limit:
        started = trio.current_time()
        await limit.take(150_000)  # another connection of the node
        for name in HASHES[:3]:
            await web.ask(f"/blob/{name}")
        before = (150_000 + 2 * CHUNK) / rate - BURST_S
        assert trio.current_time() - started >= before


async def test_a_port_that_is_taken_is_named_with_the_flag(web: Web) -> None:
    async with web.open():
        with pytest.raises(HttpPortError, match=f"port {web.port}: .* --http") as caught:
            await serve_chunks(web.index, web.port, UploadLimit(None), hosts=("127.0.0.1",))
        assert caught.value.address == str(web.port)
