"""Blobs that stand alone, such as manifests, by whoever has them: peers that stall hold nobody up.

Peers are asked one after the other. The next one is asked as soon as the one before has failed, and beside
it once that takes long; the first answer that is right is taken. Who is only slow is asked again, with more
time, when all others have failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Protocol

import trio

from nous_node.protocol.errors import NousError

from .network_errors import RequestTimeoutError
from .records import Records
from .sources import CHUNK_SECONDS, PeerSource, Requester
from .swarm_download import BAD_CHUNK

FIRST_SECONDS = 5.0
"""For an answer at first: a manifest has a megabyte at most, but for the largest models."""

BESIDE_SECONDS = 1.0
"""Without an answer after which the next peer is asked as well."""

AT_ONCE = 3
"""Peers that are asked for one blob."""


class Network(Requester, Protocol):
    """The part of the network that is needed here."""

    async def refuse(self, peer: str, fault: str) -> None: ...


async def fetch_blob(
    network: Network, records: Records, peers: Sequence[str], digest: bytes, limit: int
) -> bytes | None:
    """A blob of at most `limit` bytes with the hash `digest`; None where none of `peers` delivers it. Those
    who kept others waiting the last time are asked last."""
    now = trio.current_time()
    asked: Sequence[str] = sorted(peers, key=lambda peer: records.of(peer, now).failures)
    for seconds in (FIRST_SECONDS, CHUNK_SECONDS):
        race = _Race(network, records, digest, limit, seconds)
        await race.run(asked)
        if race.found is not None:
            return race.found
        asked = race.late
    return None


class _Race:
    """One round of questions."""

    def __init__(self, network: Network, records: Records, digest: bytes, limit: int, seconds: float) -> None:
        self.found: bytes | None = None
        self.late: list[str] = []
        """Who did not answer in time."""
        self._network, self._records = network, records
        self._digest, self._limit, self._seconds = digest, limit, seconds
        self._all_asked = trio.Event()

    async def run(self, peers: Sequence[str]) -> None:
        left = iter(peers)
        async with trio.open_nursery() as nursery:
            for number in range(AT_ONCE):
                nursery.start_soon(self._ask_in_turn, left, number * BESIDE_SECONDS, nursery)

    async def _ask_in_turn(self, left: Iterator[str], pause: float, nursery: trio.Nursery) -> None:
        with trio.move_on_after(pause):
            await self._all_asked.wait()
        for peer in left:
            if await self._ask(peer):
                nursery.cancel_scope.cancel()
                return
        self._all_asked.set()

    async def _ask(self, peer: str) -> bool:
        """Whether it is found."""
        begun = trio.current_time()
        try:
            with trio.fail_after(self._seconds):
                data = await PeerSource(self._network, peer).fetch(self._digest, self._limit)
        except (trio.TooSlowError, RequestTimeoutError):
            self.late.append(peer)
            return False
        except NousError:
            return False
        finally:  # also where another one was faster
            self._note(peer, begun)
        if sha256(data).digest() != self._digest:
            await self._network.refuse(peer, BAD_CHUNK)
            return False
        self.found = bytes(data)
        return True

    def _note(self, peer: str, begun: float) -> None:
        now = trio.current_time()
        record = self._records.of(peer, now)
        if now - begun < BESIDE_SECONDS:
            record.failures = 0
        else:
            record.failed(now)
