"""Swarms of real nodes on 127.0.0.1: what peers do wrong on the wire costs a download little, and a node that
was killed asks only for what it lacks."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from nous_node.node import requests
from nous_node.node.blobs import BlobIndex, FetchError, verify_folder
from nous_node.node.network import Network, NetworkConfig, open_network
from nous_node.node.swarm import Swarm, serve_run
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, FileEntry, file_entry
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.errors import NousError
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HAVE_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HAVE_REPLY,
    MAX_HAVE_REQUEST,
    HaveReply,
    HaveRequest,
)

RUN, CHECKPOINT = bytes(32), b"c" * 32
LISTEN = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",))
CHUNK = 1 << 17
DATA = random.Random(7).randbytes(20 * CHUNK + 5)
FILES = [file_entry("model.safetensors", [DATA[at : at + CHUNK] for at in range(0, len(DATA), CHUNK)], CHUNK)]
MANIFEST = CheckpointManifest(1, FULL, FILES, {"w": bytes(32)}, bytes(32), bytes(32))


class Node:
    """A node with a folder, and its swarm."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.damaged: list[Path] = []
        self.index = BlobIndex(self.damaged.append)
        self.swarm = Swarm(network, RUN, self.index, entropy=random.Random(3))
        self.asked = 0
        following: Any = Silent()
        serve_run(network, following, self.swarm)

    def seed(self) -> None:
        self.folder.mkdir()
        (self.folder / "model.safetensors").write_bytes(DATA)
        self.index.add(self.folder, FILES)
        self.swarm.hold(CHECKPOINT, MANIFEST)

    async def fetch(self, entries: list[FileEntry] = FILES) -> int:
        return await self.swarm.fetch(CHECKPOINT, MANIFEST, entries, self.folder)


class Silent:
    async def answer_head(self, peer: str, request: bytes) -> bytes:
        return b""


@pytest.fixture
def nodes(tmp_path: Path) -> Callable[..., Any]:
    """Opens so many nodes, each connected with all before it, the first of which has the checkpoint and
    an uplink of `uplink` bytes/s."""

    @asynccontextmanager
    async def opened(count: int, uplink: float | None = None) -> AsyncIterator[list[Node]]:
        async with AsyncExitStack() as stack:
            found: list[Node] = []
            for number in range(count):
                config = NetworkConfig(LISTEN.listen, upload_limit=uplink if number == 0 else None)
                network = await stack.enter_async_context(open_network(bytes([number + 1]) * 32, config))
                for other in found:
                    await network.connect(other.network.addresses[0])
                found.append(Node(network, tmp_path / f"node-{number}"))
            found[0].seed()
            async with trio.open_nursery() as nursery:
                for node in found:
                    nursery.start_soon(node.swarm.run)
                yield found
                nursery.cancel_scope.cancel()

    return opened


def take_over(node: Node, answer: Callable[[str, bytes], Awaitable[bytes]]) -> None:
    """From now on the node announces everything and answers requests for chunks in its own way."""

    async def have(peer: str, request: bytes) -> bytes:
        read(request, HaveRequest, MAX_HAVE_REQUEST)
        return encode(HaveReply(b"\xff\xff\x1f"))

    bounds = {"max_request": MAX_HAVE_REQUEST, "max_response": 2 * MAX_BLOB_REPLY}
    node.network.serve(HAVE_PROTOCOL, have, **bounds)
    node.network.serve(BLOB_PROTOCOL, answer, **bounds)


def take_over_stream(node: Node, write: Callable[[Any], Awaitable[None]]) -> None:
    """The same with a stream at its disposal, once the request is read."""

    async def handle(stream: Any) -> None:
        await requests.read_frame(stream.muxed_stream, 1_024)
        await write(stream.muxed_stream)

    async def never(peer: str, request: bytes) -> bytes:
        raise AssertionError("the handler below is in its place")

    take_over(node, never)
    node.network._host.set_stream_handler(BLOB_PROTOCOL, handle)


async def test_those_who_fetch_together_serve_each_other(nodes: Callable[..., Any]) -> None:
    async with nodes(4, uplink=1_500_000) as (trainer, *others):
        before = trainer.network.stats.bytes_out
        async with trio.open_nursery() as nursery:
            for node in others:
                nursery.start_soon(node.fetch)
        for node in others:
            verify_folder(node.folder, FILES)
            assert not node.damaged
        assert trainer.network.stats.bytes_out - before < 2 * len(DATA)


async def test_one_that_has_it_only_in_part_serves_that_part(nodes: Callable[..., Any]) -> None:
    async with nodes(3) as (_, part, late):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(part.fetch)
            while len(part.index.places) < 8:  # noqa: ASYNC110
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        served = set(part.index.places)
        assert all(part.index.read(digest) is not None for digest in served)
        before = part.network.stats.bytes_out
        await late.fetch()
        verify_folder(late.folder, FILES)
        assert part.network.stats.bytes_out - before >= 0.5 * len(served) * CHUNK


async def test_a_download_that_was_killed_asks_only_for_what_is_missing(
    nodes: Callable[..., Any], tmp_path: Path
) -> None:
    """Its folder is as a kill leaves it: some chunks, a torn one, and a hole."""
    async with nodes(2) as (_, node):
        part = tmp_path / "node-1.part"
        part.mkdir()
        with (part / "model.safetensors").open("wb") as file:
            file.write(DATA[: 7 * CHUNK])
            file.write(DATA[7 * CHUNK : 7 * CHUNK + 1000])
        fetched = await node.fetch()
        assert fetched == len(DATA) - 7 * CHUNK
        verify_folder(node.folder, FILES)


async def test_what_was_there_already_is_announced_before_anything_comes(
    nodes: Callable[..., Any], tmp_path: Path
) -> None:
    async with nodes(3, uplink=1_000) as (_, node, other), trio.open_nursery() as nursery:
        part = tmp_path / "node-1.part"
        part.mkdir()
        (part / "model.safetensors").write_bytes(DATA[: 7 * CHUNK])
        nursery.start_soon(node.fetch)
        have = None
        with trio.fail_after(20):
            while have is None:
                frame = await other.network.request(
                    node.network.peer_id,
                    HAVE_PROTOCOL,
                    encode(HaveRequest(RUN, CHECKPOINT)),
                    max_response=MAX_HAVE_REPLY,
                )
                have = read(frame, HaveReply, MAX_HAVE_REPLY).have
                await trio.sleep(0.3)  # four a second are taken
        assert have == b"\x7f\x00\x00"
        nursery.cancel_scope.cancel()


async def test_chunks_are_served_without_a_gap_while_the_folder_gets_its_name(
    nodes: Callable[..., Any],
) -> None:
    async with nodes(2) as (_, node):
        missed: list[bytes] = []
        done = trio.Event()
        digests = FILES[0].hashes()

        def read_all() -> None:
            known = [digest for digest in digests if node.index.place(digest) is not None]
            missed.extend(digest for digest in known if node.index.read(digest) is None)

        async def keep_reading() -> None:
            while not done.is_set():
                await trio.to_thread.run_sync(read_all)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_reading)
            await node.fetch()
            await trio.to_thread.run_sync(read_all)
            done.set()
        assert not missed
        assert all(node.index.place(digest)[0].parent == node.folder for digest in digests)  # type: ignore[index]


# --- what peers do wrong -------------------------------------------------------------------------


async def close_in_the_middle(muxed: Any) -> None:
    await muxed.write((CHUNK + 10).to_bytes(4, "big") + bytes(1000))
    await muxed.close()


async def reset_in_the_middle(muxed: Any) -> None:
    await muxed.write((CHUNK + 10).to_bytes(4, "big") + bytes(1000))
    await muxed.reset()


async def announce_too_much(muxed: Any) -> None:
    await muxed.write((MAX_BLOB_REPLY + 1).to_bytes(4, "big"))


async def say_nothing_more(muxed: Any) -> None:
    await muxed.close()


async def send_garbage(muxed: Any) -> None:
    await muxed.write(b"\x00\x00\x00\x04\xc1\xff\x00\x81")
    await muxed.close()


FAULTS = [close_in_the_middle, reset_in_the_middle, announce_too_much, say_nothing_more, send_garbage]


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_on_the_wire_are_failures_of_the_source_and_not_of_the_download(
    nodes: Callable[..., Any], fault: Callable[[Any], Awaitable[None]]
) -> None:
    async with nodes(3) as (_, hostile, node):
        take_over_stream(hostile, fault)
        assert await node.fetch() == len(DATA)
        verify_folder(node.folder, FILES)
        assert node.swarm._records.of(hostile.network.peer_id, 0.0).failures


@pytest.mark.parametrize("fault", FAULTS)
async def test_with_nobody_else_they_end_it_with_a_sentence(
    nodes: Callable[..., Any], fault: Callable[[Any], Awaitable[None]]
) -> None:
    async with nodes(3) as (trainer, hostile, node):
        await node.network.disconnect(trainer.network.peer_id)
        take_over_stream(hostile, fault)
        with pytest.raises(FetchError, match="it is tried again"):
            await node.fetch()
        assert not node.index.places


async def test_a_byte_a_second_is_no_progress(
    nodes: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "STALL_S", 0.5)

    async def trickle(muxed: Any) -> None:
        await muxed.write((CHUNK + 10).to_bytes(4, "big"))
        while True:
            await muxed.write(b"\0")
            await trio.sleep(0.05)

    async with nodes(3) as (trainer, hostile, node):
        await node.network.disconnect(trainer.network.peer_id)
        take_over_stream(hostile, trickle)
        with trio.fail_after(10), pytest.raises(FetchError):
            await node.fetch()


async def test_a_bad_chunk_costs_its_source_the_connection_and_its_standing(
    nodes: Callable[..., Any],
) -> None:
    async def lie(peer: str, request: bytes) -> bytes:
        return encode({"data": bytes(CHUNK)})

    async with nodes(3) as (_, hostile, node):
        take_over(hostile, lie)
        await node.fetch()
        verify_folder(node.folder, FILES)
        name = hostile.network.peer_id
        assert name not in [peer.peer_id for peer in node.network.peers()]
        assert [(one.peer, one.refused_until_ms > 0) for one in node.network.offenders()] == [(name, True)]
        assert node.network.stats.faults["bad-chunk"] == 1


@pytest.mark.parametrize("have", [b"", b"\xff\xff", b"\xff\xff\xff", b"\xff\xff\x1f\x00"])
async def test_a_bitmap_that_is_none_costs_its_sender_the_connection(
    nodes: Callable[..., Any], have: bytes
) -> None:
    """In a reply as in a request."""

    async def answer(peer: str, request: bytes) -> bytes:
        return encode(HaveReply(have))

    async with nodes(3) as (trainer, hostile, node):
        hostile.network.serve(
            HAVE_PROTOCOL, answer, max_request=MAX_HAVE_REQUEST, max_response=MAX_HAVE_REPLY
        )
        await node.fetch()
        verify_folder(node.folder, FILES)
        name = hostile.network.peer_id
        assert name not in [peer.peer_id for peer in node.network.peers()]
        request = encode(HaveRequest(RUN, CHECKPOINT, have))
        with trio.move_on_after(5):
            with pytest.raises(NousError):
                await hostile.network.request(
                    trainer.network.peer_id, HAVE_PROTOCOL, request, max_response=MAX_HAVE_REPLY
                )
        await hostile.network.wait_lost(trainer.network.peer_id)
        assert trainer.network.stats.faults["bad-have-bitmap"] == 1


async def test_a_file_that_changes_under_a_source_is_not_served_and_comes_from_another(
    nodes: Callable[..., Any],
) -> None:
    async with nodes(3) as (trainer, second, node):
        second.seed()
        with (second.folder / "model.safetensors").open("r+b") as file:
            file.seek(3 * CHUNK)
            file.write(b"changed")
        await trainer.network.disconnect(node.network.peer_id)
        with pytest.raises(FetchError):
            await node.fetch()
        assert second.damaged == [second.folder / "model.safetensors"]
        await node.network.connect(trainer.network.addresses[0])
        assert await node.fetch() == CHUNK
        verify_folder(node.folder, FILES)
        assert not node.network.stats.faults["bad-chunk"]


async def test_what_a_peer_does_not_know_it_says(nodes: Callable[..., Any]) -> None:
    async with nodes(2) as (trainer, node):
        for request, error in (
            (HaveRequest(os.urandom(32), CHECKPOINT), "wrong-run"),
            (HaveRequest(RUN, os.urandom(32)), "unknown-checkpoint"),
            (HaveRequest(RUN, CHECKPOINT), None),
        ):
            frame = await node.network.request(
                trainer.network.peer_id, HAVE_PROTOCOL, encode(request), max_response=MAX_HAVE_REPLY
            )
            assert read(frame, HaveReply, MAX_HAVE_REPLY).error == error


async def test_a_small_blob_comes_from_anybody_and_a_liar_is_refused(nodes: Callable[..., Any]) -> None:
    async def lie(peer: str, request: bytes) -> bytes:
        return encode({"data": b"another"})

    async with nodes(3) as (trainer, hostile, node):
        take_over(hostile, lie)
        digest = trainer.index.add_bytes(b"a manifest")
        for _ in range(4):
            assert await node.swarm.blob(digest, 100) == b"a manifest"
        trainer.index.drop_bytes(digest)
        with pytest.raises(FetchError):
            await node.swarm.blob(digest, 100)
        assert node.network.stats.faults["bad-chunk"] == 1
