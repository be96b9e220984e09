"""The swarm of a run: checkpoints come from every peer that has parts of them, and go on to every other.

One `Swarm` a node. `fetch` brings files, `hold` says what others may be told that this node has.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import trio

from nous_node.protocol.checkpoints import CheckpointManifest, FileEntry, check_chunk
from nous_node.protocol.encoding import encode
from nous_node.protocol.errors import NousError
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HEAD_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HEAD_REPLY,
    MAX_REQUEST,
    BlobRequest,
    read_blob,
)

from .blobs import CHUNK_SECONDS, BlobIndex, FetchError, fetch_files
from .following import Following
from .requests import Handler


class Peer(Protocol):
    """A connected peer."""

    @property
    def peer_id(self) -> str: ...


class SwarmNetwork(Protocol):
    """The part of the network that a swarm needs."""

    def peers(self) -> Sequence[Peer]: ...

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes: ...

    async def disconnect(self, peer: str) -> None: ...


class Server(Protocol):
    """The part of the network that answers requests."""

    def serve(self, protocol: str, handler: Handler, *, max_request: int, max_response: int) -> None: ...


class Swarm:
    """What one node fetches of a run's checkpoints, and what it serves."""

    def __init__(
        self, network: SwarmNetwork, run: bytes, index: BlobIndex, entropy: random.Random | None = None
    ) -> None:
        self.index = index
        self._network, self._run = network, run
        self._entropy = entropy or random.Random()
        self._held: set[bytes] = set()

    async def fetch(
        self, checkpoint: bytes, manifest: CheckpointManifest, entries: Sequence[FileEntry], folder: Path
    ) -> int:
        """Puts entries of a checkpoint's files, or of its deltas, into `folder`, which then exists and is
        complete; bytes fetched.

        Raises FetchError where no peer delivers a chunk (what was verified stays for the next try), and
        StorageError where the disk refuses.
        """
        peers = [peer.peer_id for peer in self._network.peers()]
        return await fetch_files(self._network, peers, entries, folder, self.index, self._entropy)

    async def blob(self, digest: bytes, limit: int) -> bytes:
        """A blob of at most `limit` bytes, such as a manifest. Raises FetchError where nobody has it."""
        held = await trio.to_thread.run_sync(self.index.read, digest)
        if held is not None:
            return held
        peers = [peer.peer_id for peer in self._network.peers()]
        for peer in self._entropy.sample(peers, len(peers)):
            try:
                frame = await self._network.request(
                    peer,
                    BLOB_PROTOCOL,
                    encode(BlobRequest(digest)),
                    max_response=min(limit + 1_024, MAX_BLOB_REPLY),
                    deadline=CHUNK_SECONDS,
                )
                data = read_blob(frame)
                check_chunk(data, digest)
            except NousError:
                continue
            return data
        raise FetchError("No connected peer delivers a part of the checkpoint; it is tried again.")

    def hold(
        self, checkpoint: bytes, manifest: CheckpointManifest, *, files: bool = True, deltas: bool = True
    ) -> None:
        """From now on others are told that this node has all files, all deltas, or both."""
        self._held.add(checkpoint)

    def release(self, checkpoint: bytes) -> None:
        """Others are told of this checkpoint no more."""
        self._held.discard(checkpoint)

    def retain(self, checkpoints: Collection[bytes]) -> None:
        """Releases all others."""
        self._held.intersection_update(checkpoints)

    async def run(self) -> None:
        """Forever: tells others what changed."""
        await trio.sleep_forever()


def serve_run(network: Server, following: Following, swarm: Swarm) -> None:
    """Answers what every node of a run answers: its manifest, its newest checkpoint, and chunks of those."""
    network.serve(HEAD_PROTOCOL, following.answer_head, max_request=MAX_REQUEST, max_response=MAX_HEAD_REPLY)
    network.serve(BLOB_PROTOCOL, swarm.index.answer, max_request=MAX_REQUEST, max_response=MAX_BLOB_REPLY)
