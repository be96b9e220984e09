"""What a relay passes on of groups by reference: chunks, asked for when somebody asks for them. [ROL-18]

    accepted reference -> who has its chunks -> one is asked for -> fetched, checked, kept a while

A volunteer that can only reach a relay is reached through it in turn. Nothing is fetched that nobody asked
for, and nothing that no accepted reference names. What is remembered and kept is bounded; where it is full,
that of the key with most goes first.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import trio

from nous_node.protocol.errors import Code, NousError, RemoteError
from nous_node.protocol.identity import peer_id
from nous_node.protocol.references import chunks
from nous_node.protocol.rollouts import Reference

from .body_chunks import BodyNetwork, ask_chunk
from .swarm_download import BAD_CHUNK

REMEMBERED: Final = 65_536
"""Chunks of which it is known who has them: 64 GiB of groups in chunks of 1 MiB."""

PASSED_BYTES: Final = 64 << 20
"""Of chunks that were passed on and are kept: several trainers ask for the same ones."""

PULLS: Final = 32
OWN_PULLS: Final = 4
FORWARDER_PULLS: Final = 16
"""Chunks fetched at once, of one key, and of what one peer forwarded."""

OTHERS_PULLS: Final = 8
ASKER_PULLS: Final = 2
"""Of those that are fetched at once, asked for by peers that are no trainers, and by one of these."""

PULL_SECONDS: Final = 60.0
"""For which a chunk is asked for, of all who should have it."""

NAMED: Final = 256
"""Chunks of one reference that are passed on: the 64 MiB of the largest group in chunks of 256 KiB. Who cuts
a large group smaller has to be reached otherwise."""

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
        self._heaviest: list[tuple[int, bytes]] = []
        """A heap of owners' weights, as they are or were: -weight, owner."""
        self._sum = 0

    def get(self, name: bytes) -> T | None:
        entry = self._entries.get(name)
        return None if entry is None else entry[2]

    def put(self, name: bytes, owner: bytes, weight: int, value: T) -> None:
        """Takes the place of what had the same name."""
        self._drop(name)
        self._entries[name] = (owner, weight, value)
        self._owned.setdefault(owner, OrderedDict())[name] = None
        self._weigh(owner, weight)
        while self._sum > self._bound:
            self._drop(next(iter(self._owned[self._most()])))

    def _weigh(self, owner: bytes, change: int) -> None:
        self._sum += change
        self._weights[owner] += change
        heapq.heappush(self._heaviest, (-self._weights[owner], owner))
        if len(self._heaviest) > 2 * len(self._weights):
            self._heaviest = [(-weight, one) for one, weight in self._weights.items()]
            heapq.heapify(self._heaviest)

    def _most(self) -> bytes:
        """The owner that has most."""
        while True:
            weight, owner = self._heaviest[0]
            if self._weights.get(owner) == -weight:
                return owner
            heapq.heappop(self._heaviest)

    def _drop(self, name: bytes) -> None:
        if name not in self._entries:
            return
        owner, weight, _ = self._entries.pop(name)
        self._weigh(owner, -weight)
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
    forwarder: str
    first: str
    """Who asked first."""
    askers: set[str] = field(default_factory=set)
    """Who waits for it."""
    done: trio.Event = field(default_factory=trio.Event)
    data: bytes | None = None


class Passing:
    """What one relay knows of references that it forwarded. `run` has to be running."""

    def __init__(self, network: BodyNetwork, trainers: Collection[bytes]) -> None:
        """`trainers`: their keys."""
        self._network = network
        self._trainers = {peer_id(key) for key in trainers}
        self._origins = Shares[tuple[_Origin, ...]](REMEMBERED)
        self._kept = Shares[bytes](PASSED_BYTES)
        self._pulls: dict[bytes, _Pull] = {}
        self._to_pull, self._pulled = trio.open_memory_channel[tuple[bytes, tuple[_Origin, ...], _Pull]](
            PULLS
        )

    def note(self, key: bytes, reference: Reference, forwarder: str) -> None:
        """A reference of `key` goes on that came from `forwarder`."""
        for digest, length in chunks(reference)[:NAMED]:
            others = [one for one in self._origins.get(digest) or () if one.key != key]
            origins = (*others[: ORIGINS - 1], _Origin(key, length, forwarder))
            self._origins.put(digest, origins[0].key, 1, origins)

    async def chunk(self, asker: str, digest: bytes) -> bytes | None:
        """A chunk of such a reference; None where it is none, or nobody has it now. RemoteError(BUSY) where
        there is no time for it, or this peer waits for it already."""
        kept = self._kept.get(digest)
        if kept is not None:
            return kept
        origins = self._origins.get(digest)
        if not origins:
            return None
        pull = self._pulls.get(digest) or self._begin(asker, digest, origins)
        if asker in pull.askers:
            raise _busy()
        pull.askers.add(asker)
        try:
            await pull.done.wait()
        finally:
            pull.askers.remove(asker)
        return pull.data

    def _begin(self, asker: str, digest: bytes, origins: tuple[_Origin, ...]) -> _Pull:
        pull = _Pull(origins[0].key, origins[0].forwarder, asker)
        if not self._may(pull):
            raise _busy()
        self._pulls[digest] = pull
        self._to_pull.send_nowait((digest, origins, pull))
        return pull

    def _may(self, pull: _Pull) -> bool:
        """Whether there is room for one more: trainers have most of it, whoever else asks."""
        under_way = self._pulls.values()
        if (
            len(under_way) >= PULLS
            or sum(one.key == pull.key for one in under_way) >= OWN_PULLS
            or sum(one.forwarder == pull.forwarder for one in under_way) >= FORWARDER_PULLS
        ):
            return False
        others = [one.first for one in under_way if one.first not in self._trainers]
        if pull.first in self._trainers:
            return True
        return len(others) < OTHERS_PULLS and others.count(pull.first) < ASKER_PULLS

    async def run(self) -> None:
        """Forever. A fetch goes on when whoever asked has given up: the chunk is here when it asks again."""
        async with trio.open_nursery() as nursery:
            async for digest, origins, pull in self._pulled:
                nursery.start_soon(self._pull, digest, origins, pull)

    async def _pull(self, digest: bytes, origins: tuple[_Origin, ...], pull: _Pull) -> None:
        try:
            with trio.move_on_after(PULL_SECONDS):
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


def _busy() -> RemoteError:
    return RemoteError(Code.BUSY, "There is no time for this chunk now.")
