"""Where chunks come from: one class for each way, all asked alike.

Whoever asks checks the hash of what came.
"""

from __future__ import annotations

from typing import Protocol

from nous_node.protocol.encoding import encode
from nous_node.protocol.streams import BLOB_PROTOCOL, MAX_BLOB_REPLY, BlobRequest, view_blob

CHUNK_SECONDS = 60.0
"""Deadline of one chunk: 4 MiB at 70 KB/s."""

REPLY_BYTES = 1_024
"""Of a blob reply beside its data, at most."""


class Source(Protocol):
    """Delivers chunks by their hashes."""

    @property
    def name(self) -> str:
        """Peer id, or base URL: what failures are remembered by."""
        ...

    async def fetch(self, digest: bytes, length: int) -> bytes | memoryview:
        """What it says is the chunk, `length` bytes at most; the caller checks the hash.

        Raises RemoteError, with the code `not-found` where it does not hold the chunk and `busy` where it has
        no time (no failure; RequestTimeoutError, where it is too slow, is one), NotConnectedError where the
        peer is gone, another LocalError where it cannot be reached.
        """
        ...

    def close(self) -> None:
        """Lets go of what is kept open for further chunks."""


class Requester(Protocol):
    """The part of the network that a request needs."""

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes: ...


class PeerSource:
    """A connected peer, by /nous/blob/1."""

    def __init__(self, network: Requester, peer: str) -> None:
        self.name = peer
        self._network = network

    async def fetch(self, digest: bytes, length: int) -> bytes | memoryview:
        frame = await self._network.request(
            self.name,
            BLOB_PROTOCOL,
            encode(BlobRequest(digest)),
            max_response=min(length + REPLY_BYTES, MAX_BLOB_REPLY),
            deadline=CHUNK_SECONDS,
        )
        return view_blob(frame)

    def close(self) -> None:
        """A connection is the network's."""
