"""Whether sampled tokens were seen before. Spec: `specs/08-verification.md` [VER-7].

Two honest trajectories hardly agree in unlikely tokens: a prefix of surprisal s is drawn again with a
probability of e^-s. One that agrees with an earlier one over a prefix of more than MAX_SURPRISAL is a copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nous_node.protocol.errors import Code, RemoteError

MAX_SURPRISAL = 40.0
"""Nats of a prefix that two trajectories may share: chance does it with 4e-18 a pair."""

SHORTEST = 8
"""Sampled tokens of the first prefix that is compared; then twice as many, again and again, and all."""

PREFIXES = 1 << 18
"""Kept in each of two halves, some 40 MB each: of 8 x 96 tokens those of the last 6,500 groups at least."""

Owner = tuple[bytes, bytes, int]
"""Key, checkpoint and counter of the group that a trajectory is from."""


class Copies:
    """Prefixes of trajectories that were not refused. Those that came long ago are forgotten: `prefixes` of
    them are kept at least."""

    def __init__(self, prefixes: int = PREFIXES, *, free: bool = False) -> None:
        """`free`: in a run without seeded sampling."""
        self._prefixes, self._free = prefixes, free
        self._recent: dict[bytes, Owner] = {}
        self._older: dict[bytes, Owner] = {}

    def check(self, owner: Owner, sampled: Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """RemoteError(COPIED) where a trajectory shares a prefix with one of another group, or with one
        before it in its own. `sampled`: tokens [N] and reported log-probs [N] of each trajectory.

        It has no figures in a free run where the other one is of another key: whoever was first may have
        heard the other's tokens, and there nothing shows who drew them."""
        own: set[bytes] = set()
        for tokens, logprobs in sampled:
            surprisals = -np.cumsum(logprobs, dtype=np.float64)
            marks = list(_prefixes(tokens))
            for length, mark in marks:
                if surprisals[length - 1] <= MAX_SURPRISAL:
                    continue
                source = owner if mark in own else self._owner(mark)
                if mark in own or source not in (None, owner):
                    known = not self._free or source is None or source[0] == owner[0]
                    raise _copied(length, float(surprisals[length - 1]) if known else None)
            own.update(mark for _, mark in marks)

    def add(self, owner: Owner, sampled: Sequence[NDArray[np.int64]]) -> None:
        """The sampled tokens of each trajectory of a group that was not refused."""
        for tokens in sampled:
            for _, mark in _prefixes(tokens):
                if self._owner(mark) is None:
                    self._recent[mark] = owner
        if len(self._recent) >= self._prefixes:
            self._older, self._recent = self._recent, {}

    def _owner(self, mark: bytes) -> Owner | None:
        return self._recent.get(mark) or self._older.get(mark)


def _copied(length: int, surprisal: float | None) -> RemoteError:
    return RemoteError(
        Code.COPIED,
        f"The first {length} sampled tokens of a trajectory are those of another that came before.",
        measured=surprisal,
        threshold=None if surprisal is None else MAX_SURPRISAL,
    )


def lengths(tokens: int) -> list[int]:
    """Of the prefixes of a trajectory that are compared."""
    found, length = [], SHORTEST
    while length < tokens:
        found.append(length)
        length *= 2
    return [*found, tokens] if tokens else found


def _prefixes(tokens: NDArray[np.int64]) -> Iterator[tuple[int, bytes]]:
    """Length and digest of each prefix; one pass over the tokens."""
    digest = hashlib.blake2b(digest_size=16)
    data, done = tokens.tobytes(), 0
    for length in lengths(len(tokens)):
        digest.update(data[8 * done : 8 * length])
        done = length
        yield length, digest.digest()
