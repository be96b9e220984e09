"""Nodes of one swarm in one process, with uplinks of given rates in virtual time."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from nous_node.node.blobs import BlobIndex
from nous_node.node.network_errors import NotConnectedError, RequestTimeoutError
from nous_node.node.swarm import Swarm
from nous_node.node.uploads import Uploads
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.streams import BLOB_PROTOCOL, HAVE_PROTOCOL, busy_reply

from .swarm import CHECKPOINT, Peer

RUN = bytes(32)
MB = 1_000_000
CHUNK = 1 << 20
PIECE = 1 << 17
"""Bytes that a connection sends before another has its turn."""
LATENCY_S = 0.02


async def inline(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """In the place of `trio.to_thread.run_sync`: virtual time stands still while a real thread works."""
    await trio.lowlevel.checkpoint()
    return function(*args)


@dataclass
class Node:
    """One node and its uplink."""

    fabric: Fabric
    name: str
    rate: float
    swarm: Swarm = field(init=False)
    index: BlobIndex = field(init=False)
    uploads: Uploads = field(init=False)
    sent: int = 0
    gone: bool = False
    refused: list[str] = field(default_factory=list)
    haves: int = 0
    """Exchanges of bitmaps that it began."""
    note: Callable[[str], None] = lambda peer: None
    """Is told of each request for a chunk that it makes, and of whom."""
    answers: Callable[[], Awaitable[bytes]] | None = None
    """What it says instead of the truth when it is asked for a chunk."""
    _line: trio.Lock = field(default_factory=trio.Lock)

    def __post_init__(self) -> None:
        self.index = BlobIndex(lambda file: None)
        seed = random.Random(self.name)
        self.swarm = Swarm(self, RUN, self.index, entropy=seed)
        self.uploads = Uploads.at(None, busy_reply())

    @property
    def peer_id(self) -> str:
        return self.name

    def peers(self) -> list[Peer]:
        return [
            Peer(name)
            for name, node in self.fabric.nodes.items()
            if node is not self and not node.gone and name not in self.refused
        ]

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        other = self.fabric.nodes[peer]
        await trio.sleep(LATENCY_S)
        if other.gone:
            raise NotConnectedError(peer)
        if protocol == HAVE_PROTOCOL:
            self.haves += 1
            return await other.swarm.answer(self.name, payload)
        assert protocol == BLOB_PROTOCOL
        self.note(peer)
        if other.answers is not None:
            with trio.move_on_after(deadline):
                return await other.answers()
            raise RequestTimeoutError(peer, deadline)
        async with other.uploads.turn(self.name) as granted:
            reply = b"".join(await other.index.answer(self.name, payload)) if granted else busy_reply()
            await other.send(reply)
        if other.gone:
            raise NotConnectedError(peer)
        await trio.sleep(LATENCY_S)
        return reply

    async def send(self, reply: bytes) -> None:
        for start in range(0, len(reply), PIECE):
            async with self._line:
                size = min(PIECE, len(reply) - start)
                await trio.sleep(size / self.rate)
                self.sent += size
            if self.gone:
                return

    async def refuse(self, peer: str, fault: str) -> None:
        self.refused.append(peer)


class Fabric:
    """A checkpoint of some chunks, a trainer that has it, and whoever else takes part."""

    def __init__(self, path: Path, chunks: int, uplink: float) -> None:
        self.path = path
        self.nodes: dict[str, Node] = {}
        data = [random.Random(number).randbytes(CHUNK) for number in range(chunks)]
        (path / "trainer").mkdir()
        (path / "trainer" / "model.safetensors").write_bytes(b"".join(data))
        self.size = chunks * CHUNK
        files = [file_entry("model.safetensors", data, CHUNK)]
        self.manifest = CheckpointManifest(1, FULL, files, {"w": bytes(32)}, bytes(32), bytes(32))
        self.trainer = self.add("trainer", uplink)
        self.trainer.index.add(path / "trainer", files)
        self.trainer.swarm.hold(CHECKPOINT, self.manifest)

    def add(self, name: str, rate: float) -> Node:
        node = self.nodes[name] = Node(self, name, rate)
        return node

    async def fetch(self, node: Node) -> float:
        """Seconds until the node has all of it."""
        start = trio.current_time()
        files = self.manifest.files
        await node.swarm.fetch(CHECKPOINT, self.manifest, files, self.path / node.name)
        node.swarm.hold(CHECKPOINT, self.manifest)
        return trio.current_time() - start

    async def fetch_all(self, nodes: list[Node]) -> list[float]:
        """The same of several that begin together."""
        seconds: list[float] = []

        async def one(node: Node) -> None:
            seconds.append(await self.fetch(node))

        async with trio.open_nursery() as running:
            for node in self.nodes.values():
                running.start_soon(node.swarm.run)
            async with trio.open_nursery() as nursery:
                for node in nodes:
                    nursery.start_soon(one, node)
            running.cancel_scope.cancel()
        return seconds
