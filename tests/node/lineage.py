"""A trainer that publishes checkpoints of a small model as it likes, and nodes that hold them.

Peers are in memory and answer from a `BlobIndex`; everything else of a node is real: following, swarm, disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import trio
from safetensors.numpy import save

from nous_node.node.blobs import BlobIndex
from nous_node.node.delta_files import write_delta
from nous_node.node.events import Event, Note
from nous_node.node.following import Following, Head
from nous_node.node.holdings import Holdings
from nous_node.node.home import Home
from nous_node.node.joined import JoinedFolder
from nous_node.node.network_errors import NotConnectedError
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import DELTA, FULL, CheckpointManifest, FileEntry, file_entry
from nous_node.protocol.encoding import read
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.identity import Identity
from nous_node.protocol.streams import MAX_REQUEST, BlobRequest, blob_reply

CHUNK = 1 << 14
VALUES = 6 * CHUNK
"""Of the model, in fp32: 24 chunks and a bit, with what a safetensors file has beside them."""
WEIGHTS, CONFIG = "model.safetensors", "config.json"
NOW = 1_800_000_000_000
PLENTY = 1 << 30


@dataclass
class Peer:
    peer_id: str
    address: str = "/ip4/127.0.0.1/tcp/1"
    inbound: bool = False


@dataclass
class Net:
    """Peers by name, each of which answers from an index; those that are `lying` turn a bit of it."""

    served: dict[str, BlobIndex]
    peer_id: str = "us"
    addresses: tuple[str, ...] = ()
    lying: set[str] = field(default_factory=set)
    missing: set[bytes] = field(default_factory=set)
    """What nobody has."""
    cut: list[str] = field(default_factory=list)
    asked: Counter[bytes] = field(default_factory=Counter)
    """Blobs that were delivered, by hash."""
    before: Callable[[bytes], None] = lambda digest: None
    """Called with each blob that is asked for."""
    gate: trio.Event | None = None
    """Nothing more is answered before it is set."""
    room: int = 0
    """Answers that are given before that."""

    def peers(self) -> list[Peer]:
        return [Peer(name) for name in self.served if name not in self.cut]

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.gate is not None and sum(self.asked.values()) >= self.room:
            await self.gate.wait()
        digest = read(payload, BlobRequest, MAX_REQUEST).hash
        self.before(digest)
        if peer in self.cut:
            raise NotConnectedError(peer)
        data = None if digest in self.missing else self.served[peer].read(digest)
        if data is None:
            return blob_reply(None)
        self.asked[digest] += 1
        return blob_reply(data[:-1] + bytes([data[-1] ^ 1]) if peer in self.lying else data)

    async def refuse(self, peer: str, fault: str) -> None:
        self.cut.append(peer)

    async def disconnect(self, peer: str) -> None:
        self.cut.append(peer)


class Lineage:
    """The trainer. Version 0 is the run's base and is not published here; the first one is version 1."""

    def __init__(self, path: Path, run: RunFolder, root: Identity) -> None:
        self.path, self.run, self.root = path, run, root
        self.heads: list[Head] = []
        self.index = BlobIndex(lambda file: None)
        self.net = Net({"trainer": self.index})
        self._folders: dict[bytes, Path] = {}
        self._weights = np.random.default_rng(0).standard_normal(VALUES, dtype=np.float32)
        self._config = b"{}"

    def full(self) -> Head:
        """A version that stands alone."""
        return self._publish(FULL, self._update())

    def delta(self, config: bytes | None = None) -> Head:
        """A few weights change; `config`: and that file."""
        self._config = self._config if config is None else config
        return self._publish(DELTA, self._update())

    def renewal(self, kind: str = DELTA) -> Head:
        """The same files with a new beacon."""
        return self._publish(kind, self.folder(self.heads[-1]))

    def forged(self, **changes: Any) -> Head:
        """The newest as it might also have been signed; it takes its place."""
        old = self.heads.pop()
        return self._add(msgspec.structs.replace(old.manifest, **changes), self.folder(old))

    def folder(self, head: Head) -> Path:
        return self._folders[head.hash]

    def content(self, head: Head, file: str = WEIGHTS) -> bytes:
        return (self.folder(head) / file).read_bytes()

    def files_of(self, head: Head) -> set[bytes]:
        return {digest for entry in head.manifest.files for digest in entry.hashes()}

    def deltas_of(self, *heads: Head) -> set[bytes]:
        return {digest for head in heads for entry in head.manifest.deltas for digest in entry.hashes()}

    def sealed(self, manifest: CheckpointManifest) -> bytes:
        body = manifest.to_bytes()
        return seal(self.root, Kind.CHECKPOINT, self.run.run, body, seq=len(self.heads), ts=NOW)

    def node(self, name: str = "node", disk: int = PLENTY, keep: int | None = None) -> Node:
        """A node, also one that has been there before: it finds what it left."""
        return Node(self, name, disk, keep)

    def _update(self) -> Path:
        self._weights = self._weights.copy()
        self._weights[len(self.heads) % 7 :: 997] += np.float32(0.5)
        folder = self.path / "trainer" / f"{len(self.heads) + 1}"
        folder.mkdir(parents=True)
        (folder / WEIGHTS).write_bytes(save({"w": self._weights}))
        (folder / CONFIG).write_bytes(self._config)
        return folder

    def _publish(self, kind: str, folder: Path) -> Head:
        version = len(self.heads) + 1
        before = self.heads[-1] if self.heads else None
        files = [entry(folder / name, name) for name in (CONFIG, WEIGHTS)]
        tensors = {"w": sha256(self._weights.tobytes()).digest()}
        manifest = CheckpointManifest(version, FULL, files, tensors, bytes([version]) * 32, bytes(32))
        if before is not None:
            manifest = msgspec.structs.replace(manifest, parent=before.hash)
        if kind == DELTA:
            assert before is not None
            chain = [*before.manifest.chain, before.hash]
            deltas = self._deltas(before, folder, version)
            manifest = msgspec.structs.replace(manifest, kind=DELTA, chain=chain, deltas=deltas)
        self.index.add(folder, files)
        return self._add(manifest, folder)

    def _add(self, manifest: CheckpointManifest, folder: Path) -> Head:
        digest = self.index.add_bytes(manifest.to_bytes())
        head = Head(digest, manifest, self.sealed(manifest))
        self._folders[digest] = folder
        self.heads.append(head)
        return head

    def _deltas(self, before: Head, folder: Path, version: int) -> list[FileEntry]:
        old, new = self.folder(before) / WEIGHTS, folder / WEIGHTS
        if old.read_bytes() == new.read_bytes():
            return []
        place = self.path / "trainer" / f"{version}.deltas"
        place.mkdir()
        assert write_delta(old, new, place / WEIGHTS, most=1 << 20) is not None
        deltas = [entry(place / WEIGHTS, WEIGHTS)]
        self.index.add(place, deltas)
        return deltas


def entry(file: Path, name: str) -> FileEntry:
    data = file.read_bytes()
    return file_entry(name, [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)], CHUNK)


class Node:
    def __init__(self, lineage: Lineage, name: str, disk: int, keep: int | None) -> None:
        self.lineage = lineage
        self.events: list[Event] = []
        self.following = Following.of(lineage.run.run, lineage.run.envelope)
        self.folder = JoinedFolder.of(Home.open(lineage.path / name), lineage.run.run)
        self.folder.make()
        network: Any = lineage.net
        self.holdings = Holdings(network, self.following, self.folder, disk, self.events.append, keep)

    def hears(self, head: Head) -> None:
        self.following.offer(head.envelope)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.holdings.fetch_loop)
            yield
            nursery.cancel_scope.cancel()

    async def gets(self, head: Head) -> None:
        """Hears of a head, and waits until it is here."""
        self.hears(head)
        with trio.fail_after(60):
            while self.holdings.newest is None or self.holdings.newest.hash != head.hash:
                await self.holdings.changed()
        self.assert_whole(head)

    async def follows(self, *heads: Head) -> None:
        async with self.at_work():
            for head in heads:
                await self.gets(head)

    def assert_whole(self, head: Head) -> None:
        for name in (WEIGHTS, CONFIG):
            held = self.folder.checkpoint(head.hash) / name
            assert held.read_bytes() == self.lineage.content(head, name)

    def here(self, head: Head) -> set[str]:
        """What of a version is on the disk: `files`, `deltas`, `manifest`, `part`."""
        name = self.folder.checkpoint(head.hash).name
        places = {place.name for place in self.folder.checkpoints.iterdir()}
        return {place.removeprefix(name).lstrip(".") or "files" for place in places if place.startswith(name)}

    def bytes_on_disk(self) -> int:
        """Of files, each counted once whatever names it has; manifests are not counted."""
        found = {}
        for path in self.folder.checkpoints.rglob("*"):
            if ".manifest" not in path.name and path.is_file():
                state = path.stat()
                found[state.st_ino] = state.st_size
        return sum(found.values())

    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]
