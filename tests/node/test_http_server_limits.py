"""Chunks over HTTP: clients that take their time or too much, files that change, and limits of the node."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from nous_node.node import http_server, http_wire
from nous_node.node.http_server import HttpPortError, serve_chunks
from nous_node.node.upload_limit import BURST_S, UploadLimit

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


async def test_one_client_cannot_take_all_uploads(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CLIENT_UPLOADS", 1)
    name = web.large()
    async with web.open():
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
