"""Peers that answer requests for chunks, each in its own way, and a checkpoint's files to ask for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from nous_node.node.blobs import BlobIndex, verify_folder
from nous_node.node.network_errors import NotConnectedError
from nous_node.node.swarm import Swarm
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, FileEntry, file_entry
from nous_node.protocol.encoding import read
from nous_node.protocol.streams import MAX_REQUEST, BlobRequest, blob_reply

CHUNK = 1 << 14
FILES = {
    "chat/template.jinja": b"{{ text }}",
    "config.json": b"{}",
    "empty.txt": b"",
    "model.safetensors": random.Random(1).randbytes(9 * CHUNK + 100),
}
CHECKPOINT = b"c" * 32
CHUNKS = 12
"""Of FILES: ten of the model, one each of two small files."""


@dataclass
class Peer:
    peer_id: str
    address: str = "/ip4/127.0.0.1/tcp/1"
    inbound: bool = False


@dataclass
class Peers:
    """A network of peers, each of which answers every request for a chunk in its own way."""

    peer_id = "us"
    answers: dict[str, Callable[[bytes], bytes]]
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    """Refused since then."""
    in_flight: int = 0
    most_in_flight: int = 0

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        digest = read(payload, BlobRequest, MAX_REQUEST).hash
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await trio.lowlevel.checkpoint()
        self.in_flight -= 1
        if peer in self.cut:
            raise NotConnectedError(peer)
        self.asked.append((peer, digest))
        return self.answers[peer](digest)

    def peers(self) -> list[Peer]:
        return [Peer(name) for name in self.answers if name not in self.cut]

    async def refuse(self, peer: str, fault: str) -> None:
        self.cut.append(peer)

    def count(self) -> Counter[str]:
        return Counter(peer for peer, _ in self.asked)


def honest(index: BlobIndex) -> Callable[[bytes], bytes]:
    return lambda digest: blob_reply(index.read(digest))


def liar(digest: bytes) -> bytes:
    return blob_reply(b"not what you asked for")


def empty_handed(digest: bytes) -> bytes:
    return blob_reply(None)


def babbler(digest: bytes) -> bytes:
    return b"\xc1 no reply"


def gone(digest: bytes) -> bytes:
    raise NotConnectedError("gone")


class Bench:
    def __init__(self, path: Path, files: dict[str, bytes]) -> None:
        self.source = path / "source"
        for name, content in files.items():
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
            (self.source / name).write_bytes(content)
        self.files = [entry(name, content) for name, content in sorted(files.items())]
        self.server = BlobIndex(lambda file: None)
        self.server.add(self.source, self.files)
        self.folder = path / "here" / "checkpoint"
        self.part = path / "here" / "checkpoint.part"
        self.index = BlobIndex(lambda file: None)

        self.manifest = CheckpointManifest(1, FULL, self.files, {"w": bytes(32)}, bytes(32), bytes(32))

    def peers(self, **answers: Callable[[bytes], bytes]) -> Peers:
        return Peers(answers or {"honest": honest(self.server)})

    async def fetch(self, peers: Peers, seed: int = 0) -> int:
        swarm = Swarm(peers, bytes(32), self.index, entropy=random.Random(seed))
        return await swarm.fetch(CHECKPOINT, self.manifest, self.files, self.folder)

    def assert_complete(self) -> None:
        verify_folder(self.folder, self.files)
        assert not self.part.exists()
        held = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
        assert held == {one.path for one in self.files}
        for one in self.files:
            assert all(self.index.read(digest) is not None for digest in one.hashes())


def entry(name: str, content: bytes) -> FileEntry:
    return file_entry(name, [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)], CHUNK)
