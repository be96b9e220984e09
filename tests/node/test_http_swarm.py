"""A swarm with HTTP beside its streams: real networks, real servers, and checkpoints of several chunks."""

from __future__ import annotations

import random
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from nous_node.node.blobs import BlobIndex, FetchError, verify_folder
from nous_node.node.create import folder_entries
from nous_node.node.http_server import serve_chunks
from nous_node.node.network import Network, NetworkConfig, open_network
from nous_node.node.swarm import Swarm
from nous_node.node.upload_limit import UploadLimit
from nous_node.protocol.checkpoints import FULL, CheckpointManifest
from nous_node.protocol.constants import CHUNK
from nous_node.protocol.encoding import encode
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HAVE_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HAVE_REPLY,
    MAX_HAVE_REQUEST,
    MAX_REQUEST,
    HaveRequest,
    bitmap,
)

from .test_http_source import static

RUN = b"r" * 32
CHECKPOINT = b"c" * 32
LOCAL = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",))


class Counted(UploadLimit):
    """No limit; how much went out by HTTP."""

    def __init__(self) -> None:
        super().__init__(None)
        self.bytes = 0

    async def take(self, size: int) -> None:
        self.bytes += size


class Node:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.index = BlobIndex(lambda file: None)
        self.swarm = Swarm(network, RUN, self.index)
        self.sent = Counted()
        self.streams = 0

    def serve(self, *, streams: bool) -> None:
        """Without `streams` the libp2p protocol of chunks is refused."""

        async def blobs(peer: str, request: bytes) -> tuple[bytes, ...]:
            self.streams += 1
            assert streams
            return await self.index.answer(peer, request)

        self.network.serve(
            HAVE_PROTOCOL, self.swarm.answer, max_request=MAX_HAVE_REQUEST, max_response=MAX_HAVE_REPLY
        )
        self.network.serve(BLOB_PROTOCOL, blobs, max_request=MAX_REQUEST, max_response=MAX_BLOB_REPLY)


class Bench:
    def __init__(self, path: Path) -> None:
        self.source, self.folder = path / "source", path / "here"
        self.source.mkdir()
        (self.source / "model.safetensors").write_bytes(random.Random(1).randbytes((5 << 20) + 7))
        (self.source / "config.json").write_bytes(b"{}")
        self.files = folder_entries(self.source)
        self.size = sum(entry.size for entry in self.files)

    @asynccontextmanager
    async def open(self, *, streams: bool, http: bool) -> AsyncIterator[tuple[Node, Node]]:
        """A node that holds the checkpoint, and one that is connected to it."""
        async with (
            open_network(b"1" * 32, LOCAL) as first,
            open_network(b"2" * 32, LOCAL) as second,
            trio.open_nursery() as nursery,
        ):
            holder, other = Node(first), Node(second)
            holder.index.add(self.source, self.files)
            holder.swarm.hold(CHECKPOINT, self.manifest())
            holder.serve(streams=streams)
            if http:
                serve = partial(serve_chunks, hosts=("127.0.0.1",))
                holder.swarm.http_port = await nursery.start(serve, holder.index, 0, holder.sent)
            await second.connect(first.addresses[0])
            yield holder, other
            nursery.cancel_scope.cancel()

    def published(self, folder: Path, most: int = 1000, *, lies: bool = False) -> Path:
        """A folder for a static server: the first `most` chunks of each file."""
        (folder / "blob").mkdir(parents=True)
        for entry in self.files:
            content = (self.source / entry.path).read_bytes()
            for number, digest in list(enumerate(entry.hashes()))[:most]:
                data = content[number * entry.chunk :][: entry.chunk]
                (folder / "blob" / digest.hex()).write_bytes(bytes(len(data)) if lies else data)
        return folder

    def manifest(self, mirrors: list[str] | None = None) -> CheckpointManifest:
        return CheckpointManifest(
            1, FULL, self.files, {"w": bytes(32)}, bytes(32), b"p" * 32, mirrors=mirrors or []
        )

    async def fetch(self, node: Node, mirrors: list[str] | None = None) -> int:
        return await node.swarm.fetch(CHECKPOINT, self.manifest(mirrors), self.files, self.folder)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_join_by_http_alone_where_streams_are_refused(bench: Bench) -> None:
    async with bench.open(streams=False, http=True) as (holder, other):
        assert await bench.fetch(other) == bench.size
        verify_folder(bench.folder, bench.files)
        assert holder.sent.bytes >= bench.size


async def test_http_is_preferred_to_streams(bench: Bench) -> None:
    async with bench.open(streams=True, http=True) as (holder, other):
        assert await bench.fetch(other) == bench.size
        assert holder.streams == 0


async def test_a_port_at_which_nobody_answers_leaves_the_streams(bench: Bench) -> None:
    async with bench.open(streams=True, http=False) as (holder, other):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and listens to nobody
            holder.swarm.http_port = taken.getsockname()[1]
            assert await bench.fetch(other) == bench.size
        verify_folder(bench.folder, bench.files)
        assert len(other.network.peers()) == 1


async def test_other_bytes_by_http_cost_a_peer_its_port_and_not_its_streams(
    bench: Bench, tmp_path: Path
) -> None:
    """Behind a router the port may be that of another machine."""
    lies = bench.published(tmp_path / "lies", lies=True)
    async with bench.open(streams=True, http=False) as (holder, other):
        with static(lies) as port:
            holder.swarm.http_port = port
            assert await bench.fetch(other) == bench.size
        verify_folder(bench.folder, bench.files)
        assert len(other.network.peers()) == 1


async def test_a_peer_that_tells_another_port_after_a_lie_is_asked_by_its_streams(
    bench: Bench, tmp_path: Path
) -> None:
    lies = bench.published(tmp_path / "lies", lies=True)
    async with bench.open(streams=True, http=False) as (holder, other):
        with static(lies) as port:
            holder.swarm.http_port = port
            assert await bench.fetch(other) == bench.size
        other.index.drop(bench.folder)
        shutil.rmtree(bench.folder)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            listening.setblocking(False)
            count = sum(len(entry.hashes()) for entry in bench.files)
            told = HaveRequest(RUN, CHECKPOINT, bitmap((1 << count) - 1, count), listening.getsockname()[1])
            await other.swarm.answer(holder.network.peer_id, encode(told))
            assert await bench.fetch(other) == bench.size
            with pytest.raises(BlockingIOError):
                listening.accept()  # nobody came


async def test_bytes_that_are_all_wrong_never_become_a_checkpoint(bench: Bench, tmp_path: Path) -> None:
    lies = bench.published(tmp_path / "lies", lies=True)
    async with open_network(b"2" * 32, LOCAL) as network:
        with static(lies) as port, pytest.raises(FetchError):
            await bench.fetch(Node(network), [f"http://127.0.0.1:{port}/"])
    assert not bench.folder.exists()


async def test_a_mirror_delivers_what_it_has_and_peers_the_rest(bench: Bench, tmp_path: Path) -> None:
    mirror = bench.published(tmp_path / "mirror", 3)
    async with bench.open(streams=True, http=False) as (_, other):
        with static(mirror) as port:
            fetched = await bench.fetch(other, [f"http://127.0.0.1:{port}"])
        assert bench.size <= fetched <= bench.size + CHUNK  # the last chunk may be asked for twice
        verify_folder(bench.folder, bench.files)


async def test_a_mirror_is_enough_where_no_peer_has_anything(bench: Bench, tmp_path: Path) -> None:
    mirror = bench.published(tmp_path / "mirror")
    async with open_network(b"2" * 32, LOCAL) as network:
        with static(mirror) as port:
            assert await bench.fetch(Node(network), [f"http://127.0.0.1:{port}/"]) == bench.size
        verify_folder(bench.folder, bench.files)


async def test_a_mirror_that_lies_is_left_for_peers(bench: Bench, tmp_path: Path) -> None:
    lies = bench.published(tmp_path / "lies", lies=True)
    async with bench.open(streams=True, http=False) as (_, other):
        with static(lies) as port:
            await bench.fetch(other, [f"http://127.0.0.1:{port}/", "http://127.0.0.1:1/"])
        verify_folder(bench.folder, bench.files)
        assert len(other.network.peers()) == 1
