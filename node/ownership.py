"""Sets of chunks as the bits of an integer, and whom a chunk falls to that nobody has yet.

Those who download at the same time need not speak about who fetches what from a source that all of them have:
the number of a chunk and the names of the others decide it, and all come to about the same result. No clock
and no I/O.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256

TRIED = 64
"""Chunks that are looked at for one that falls to us: where there are many more, two hardly draw the same."""

_MIX = 0x9E3779B97F4A7C15
_MIX_AGAIN = 0xBF58476D1CE4E5B9
_WORD = (1 << 64) - 1


class Ownership:
    """Of the chunks of one download, among `us` and others."""

    def __init__(self, us: str) -> None:
        self._ours = _number(us)
        self._peers: frozenset[str] = frozenset()
        self._others: list[int] = []
        self._known: dict[int, bool] = {}

    def share(self, others: Iterable[str]) -> None:
        """Those who are to fetch, beside us."""
        peers = frozenset(others)
        if peers != self._peers:
            self._peers = peers
            self._others = [_number(peer) for peer in peers]
            self._known.clear()

    def draw(self, chunks: int, entropy: random.Random) -> int | None:
        """One of them that falls to us, by lot; None where there is none, or it is not found soon."""
        if not self._others:
            return draw(chunks, entropy) if chunks else None
        start = entropy.randrange(max(1, chunks.bit_length()))
        for number, chunk in enumerate(_from(chunks, start)):
            if self._falls_to_us(chunk):
                return chunk
            if number >= TRIED:
                return draw(chunks, entropy)
        return None

    def _falls_to_us(self, chunk: int) -> bool:
        known = self._known.get(chunk)
        if known is None:
            weight = _weight(chunk, self._ours)
            known = self._known[chunk] = all(_weight(chunk, other) < weight for other in self._others)
        return known


def draw(chunks: int, entropy: random.Random) -> int:
    """One of them, by lot: the next behind a place that is drawn."""
    return next(_from(chunks, entropy.randrange(chunks.bit_length())))


def _from(chunks: int, start: int) -> Iterator[int]:
    """The chunks from a place on, then those before it."""
    below = chunks & ((1 << start) - 1)
    for part in (chunks ^ below, below):
        while part:
            lowest = part & -part
            yield lowest.bit_length() - 1
            part ^= lowest


def mask(chunks: Mapping[int, int]) -> int:
    """The set of some chunks. Built as bytes: bit by bit it would take the square of their number."""
    if not chunks:
        return 0
    bits = bytearray(max(chunks) // 8 + 1)
    for chunk in chunks:
        bits[chunk // 8] |= 1 << chunk % 8
    return int.from_bytes(bits, "little")


def _number(peer: str) -> int:
    return int.from_bytes(sha256(peer.encode()).digest()[:8], "big")


def _weight(chunk: int, peer: int) -> int:
    """The highest weight has it."""
    mixed = ((chunk + 1) * _MIX & _WORD ^ peer) * _MIX_AGAIN & _WORD
    return (mixed ^ mixed >> 31) * _MIX & _WORD
