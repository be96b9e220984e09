"""What a relay passes on of groups by reference: chunks, asked for when somebody asks for them. [ROL-18]

    accepted reference -> who has its chunks -> one is asked for -> fetched, checked, kept a while

A volunteer that can only reach a relay is reached through it in turn. Nothing is fetched that nobody asked
for, and nothing that no accepted reference names. What is remembered and kept is bounded; where it is full,
that of the key with most goes first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import trio

from nous_node.protocol.errors import Code, NousError, RemoteError
from nous_node.protocol.identity import peer_id
from nous_node.protocol.references import chunks
from nous_node.protocol.rollouts import Reference

from .bodies import BodyNetwork, ask_chunk
from .swarm_download import BAD_CHUNK

REMEMBERED: Final = 65_536
"""Chunks of which it is known who has them: 64 GiB of groups in chunks of 1 MiB."""

PASSED_BYTES: Final = 64 << 20
"""Of chunks that were passed on and are kept: several trainers ask for the same ones."""

PULLS: Final = 16
OWN_PULLS: Final = 4
"""Chunks fetched at once, and of one key."""

ORIGINS: Final = 4
"""Keys that are remembered to have named the same chunk: whoever names another's chunks stands beside it, and
not in its place."""

T = TypeVar("T")


class Shares(Generic[T]):
    """A table whose weights are bounded in sum. Where they exceed it, the oldest entry of the owner that has
    most goes: whoever fills it loses its own."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._entries: dict[bytes, tuple[bytes, int, T]] = {}
        self._owned: dict[bytes, OrderedDict[bytes, None]] = {}
        self._weights: Counter[bytes] = Counter()
        self._sum = 0

    def get(self, name: bytes) -> T | None:
        entry = self._entries.get(name)
        return None if entry is None else entry[2]

    def put(self, name: bytes, owner: bytes, weight: int, value: T) -> None:
        """Takes the place of what had the same name."""
        self._drop(name)
        self._entries[name] = (owner, weight, value)
        self._owned.setdefault(owner, OrderedDict())[name] = None
        self._weights[owner] += weight
        self._sum += weight
        while self._sum > self._bound:
            ((most, _),) = self._weights.most_common(1)
            self._drop(next(iter(self._owned[most])))

    def _drop(self, name: bytes) -> None:
        if name not in self._entries:
            return
        owner, weight, _ = self._entries.pop(name)
        self._sum -= weight
        self._weights[owner] -= weight
        del self._owned[owner][name]
        if not self._owned[owner]:
            del self._owned[owner], self._weights[owner]


@dataclass(frozen=True, slots=True)
class _Origin:
    """Who has a chunk."""

    key: bytes
    """Of the sender of its group."""
    length: int
    forwarder: str


@dataclass(slots=True)
class _Pull:
    """A chunk on its way."""

    key: bytes
    done: trio.Event = field(default_factory=trio.Event)
    data: bytes | None = None


class Passing:
    """What one relay knows of references that it forwarded. `run` has to be running."""

    def __init__(self, network: BodyNetwork) -> None:
        self._network = network
        self._origins = Shares[tuple[_Origin, ...]](REMEMBERED)
        self._kept = Shares[bytes](PASSED_BYTES)
        self._pulls: dict[bytes, _Pull] = {}
        self._to_pull, self._pulled = trio.open_memory_channel[tuple[bytes, tuple[_Origin, ...], _Pull]](
            PULLS
        )

    def note(self, key: bytes, reference: Reference, forwarder: str) -> None:
        """A reference of `key` goes on that came from `forwarder`."""
        for digest, length in chunks(reference):
            others = [one for one in self._origins.get(digest) or () if one.key != key]
            origins = (*others[: ORIGINS - 1], _Origin(key, length, forwarder))
            self._origins.put(digest, origins[0].key, 1, origins)

    async def chunk(self, digest: bytes) -> bytes | None:
        """A chunk of such a reference; None where it is none, or cannot be had now."""
        kept = self._kept.get(digest)
        if kept is not None:
            return kept
        pull = self._pulls.get(digest) or self._begin(digest)
        if pull is None:
            return None
        await pull.done.wait()
        return pull.data

    def _begin(self, digest: bytes) -> _Pull | None:
        origins = self._origins.get(digest)
        if not origins or len(self._pulls) >= PULLS:
            return None
        key = origins[0].key
        if sum(pull.key == key for pull in self._pulls.values()) >= OWN_PULLS:
            return None
        pull = self._pulls[digest] = _Pull(key)
        self._to_pull.send_nowait((digest, origins, pull))
        return pull

    async def run(self) -> None:
        """Forever. A fetch goes on when whoever asked has given up: the chunk is here when it asks again."""
        async with trio.open_nursery() as nursery:
            async for digest, origins, pull in self._pulled:
                nursery.start_soon(self._pull, digest, origins, pull)

    async def _pull(self, digest: bytes, origins: tuple[_Origin, ...], pull: _Pull) -> None:
        try:
            pull.data = await self._fetched(digest, origins)
        finally:
            del self._pulls[digest]
            pull.done.set()
        if pull.data is not None:
            self._kept.put(digest, pull.key, len(pull.data), pull.data)

    async def _fetched(self, digest: bytes, origins: tuple[_Origin, ...]) -> bytes | None:
        length = max(origin.length for origin in origins)
        peers = [peer for origin in origins for peer in (origin.forwarder, peer_id(origin.key))]
        for peer in dict.fromkeys(peers):
            try:
                return await ask_chunk(self._network, peer, digest, length)
            except NousError as error:
                if isinstance(error, RemoteError) and error.code == Code.HASH_MISMATCH:
                    await self._network.refuse(peer, BAD_CHUNK)  # [CKP-7]
        return None
