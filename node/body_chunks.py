"""One chunk of a group by reference, from whoever has it. [ROL-17]

    forwarder, sender    asked one after the other; then again and again, each for itself
    some others          beside them, once these have failed

A peer that is busy has done nothing wrong and is asked again soon [STR-3]: patience counts only while none of
the first two is.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

import trio

from nous_node.protocol.checkpoints import check_chunk
from nous_node.protocol.encoding import encode
from nous_node.protocol.errors import Code, NousError, RemoteError
from nous_node.protocol.streams import BLOB_PROTOCOL, BlobRequest, read_blob

from .network_errors import RequestTimeoutError
from .swarm_download import BAD_CHUNK

PATIENCE_SECONDS: Final = 20.0
"""Without a source that has the next chunk: time for a volunteer to come back after a broken line."""

ROUNDS: Final = 3
"""In which whoever should have it is asked at least: one answer may be missed, or take all of that time."""

RETRY_SECONDS: Final = 1.0
BUSY_SECONDS: Final = 0.5
"""Between two rounds, and after one in which somebody was busy."""

CHUNK_SECONDS: Final = 10.0
CHUNK_RATE: Final = 32 << 10
"""A chunk has to be here within so many seconds, and one more for so many bytes: a byte a second is none."""

FURTHER: Final = 4
OTHER_SECONDS: Final = 5.0
"""Peers asked beside the forwarder and the sender, and for how long each: they may have forwarded it, too."""

REPLY_BYTES: Final = 1_024
"""Of a reply beside its chunk."""


class Peer(Protocol):
    """A connected peer."""

    @property
    def peer_id(self) -> str: ...


class BodyNetwork(Protocol):
    """The part of the network that is needed here."""

    def peers(self) -> Sequence[Peer]: ...

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes: ...

    async def refuse(self, peer: str, fault: str) -> None: ...


async def ask_chunk(network: BodyNetwork, peer: str, digest: bytes, length: int) -> bytes:
    """One chunk from one peer, checked. Raises NousError; HASH_MISMATCH where the peer sent another one."""
    frame = await network.request(
        peer,
        BLOB_PROTOCOL,
        encode(BlobRequest(digest)),
        max_response=length + REPLY_BYTES,
        deadline=CHUNK_SECONDS + length / CHUNK_RATE,
    )
    data = read_blob(frame)
    check_chunk(data, digest)
    return data


class ChunkSearch:
    """For one chunk. `sources`: peers that should have it, in the order in which they are asked; who fails
    comes last from then on. `sender`: who signed that it is part of the group."""

    def __init__(
        self,
        network: BodyNetwork,
        entropy: random.Random,
        sources: list[str],
        sender: str,
        digest: bytes,
        length: int,
    ) -> None:
        self._network, self._entropy = network, entropy
        self._sources, self._sender = sources, sender
        self._digest, self._length = digest, length
        self._data: bytes | None = None
        self._error: RemoteError | None = None
        self._over = trio.Event()
        self._asked: Counter[str] = Counter()
        self._end = 0.0

    async def run(self) -> bytes:
        """Raises RemoteError: UNAVAILABLE, or HASH_MISMATCH where the sender sent another one."""
        self._end = trio.current_time() + PATIENCE_SECONDS
        async with trio.open_nursery() as nursery:
            await self._ask_sources()
            if not self._over.is_set():
                nursery.start_soon(self._ask_others)
                await self._ask_again(nursery)
            nursery.cancel_scope.cancel()
        if self._data is not None:
            return self._data
        raise self._error or RemoteError(Code.UNAVAILABLE, "Nobody who is connected has the group.")

    async def _ask_sources(self) -> None:
        """The first round."""
        for peer in self._sources[:]:
            if not self._over.is_set():
                await self._ask(peer)

    async def _ask_again(self, nursery: trio.Nursery) -> None:
        """Each of them for itself, so that one that stalls holds up no other, until patience is over."""
        asked = set[str]()
        while not self._over.is_set():
            for peer in self._sources:
                if peer not in asked:
                    nursery.start_soon(self._ask_often, peer)
                    asked.add(peer)
            enough = all(self._asked[peer] >= ROUNDS for peer in self._connected().intersection(asked))
            if enough and trio.current_time() >= self._end:
                return
            with trio.move_on_after(RETRY_SECONDS):
                await self._over.wait()

    async def _ask_often(self, peer: str) -> None:
        while not self._over.is_set():
            busy = await self._ask(peer)
            await trio.sleep(BUSY_SECONDS if busy else RETRY_SECONDS)

    async def _ask_others(self) -> None:
        while not self._over.is_set():
            others = sorted(self._connected().difference(self._sources))
            for peer in self._entropy.sample(others, min(FURTHER, len(others))):
                with trio.move_on_after(OTHER_SECONDS):
                    await self._ask(peer)
            await trio.sleep(RETRY_SECONDS)

    async def _ask(self, peer: str) -> bool:
        """Whether it is busy. A peer that lied is cut off. [CKP-7]"""
        if peer not in self._connected():
            return False
        try:
            self._data = await ask_chunk(self._network, peer, self._digest, self._length)
        except NousError as error:
            self._asked[peer] += 1
            return await self._failed(peer, error)
        self._over.set()
        return False

    async def _failed(self, peer: str, error: NousError) -> bool:
        code = error.code if isinstance(error, RemoteError) else None
        if code == Code.BUSY and not isinstance(error, RequestTimeoutError):
            if peer in self._sources:
                self._end = trio.current_time() + PATIENCE_SECONDS
            return True
        if peer in self._sources:
            self._sources.remove(peer)
            self._sources.append(peer)
        if code == Code.HASH_MISMATCH:
            await self._network.refuse(peer, BAD_CHUNK)
            if peer == self._sender and isinstance(error, RemoteError):
                self._error = error
                self._over.set()
        return False

    def _connected(self) -> set[str]:
        return {peer.peer_id for peer in self._network.peers()}
