"""Attention as a tree of segments: which tokens of a sequence see which others. Spec: `specs/07` [ROL-9].

A token sees its own segment up to itself and all segments that its own goes on from, and nothing else. Its
position is how many tokens it sees beside itself. Shape suffixes: S segments, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tree:
    """`lengths_S` int64: tokens of each segment, 1 at least, in the order in which they stand. `parents_S`
    int64: the segment that each goes on from, which stands before it; -1 where nothing is before it."""

    lengths_S: Ints
    parents_S: Ints

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int]) -> Tree:
        return cls(np.array(lengths, np.int64), np.array(parents, np.int64))

    @property
    def is_chain(self) -> bool:
        """Whether each segment goes on from the one before it: plain causal attention."""
        return bool((self.parents_S == np.arange(len(self.parents_S)) - 1).all())

    @property
    def segment_of(self) -> Ints:
        """The segment of each token."""
        return np.repeat(np.arange(len(self.lengths_S)), self.lengths_S)

    @property
    def before(self) -> Ints:
        """The place of the token that each token follows, whose logits predict it; -1 where none is."""
        ends_S = np.cumsum(self.lengths_S)
        before_T = np.arange(int(self.lengths_S.sum())) - 1
        before_T[ends_S - self.lengths_S] = np.where(self.parents_S < 0, -1, ends_S[self.parents_S] - 1)
        return before_T

    @property
    def positions(self) -> Ints:
        """How many tokens stand before each one on its path."""
        first_S = np.zeros(len(self.lengths_S), np.int64)
        for segment, parent in enumerate(self.parents_S.tolist()):
            if parent >= 0:
                first_S[segment] = first_S[parent] + self.lengths_S[parent]
        starts_S = np.cumsum(self.lengths_S) - self.lengths_S
        positions_T: Ints = np.arange(int(self.lengths_S.sum())) + np.repeat(
            first_S - starts_S, self.lengths_S
        )
        return positions_T

    def leading(self, trained_T: NDArray[np.bool_]) -> int:
        """How many segments at the beginning are one chain in which nothing is trained."""
        starts_S = np.cumsum(self.lengths_S) - self.lengths_S
        single_S = (self.parents_S == np.arange(len(self.parents_S)) - 1) & ~trained_T[starts_S]
        return len(single_S) if single_S.all() else int(single_S.argmin())

    def paths(self, trained_T: NDArray[np.bool_]) -> list[tuple[Ints, NDArray[np.bool_]]]:
        """Plain sequences in which every trained token stands once behind what it sees: the places of each
        one's tokens, and which of these are the trained ones that no path before it had."""
        starts_S = np.cumsum(self.lengths_S) - self.lengths_S
        waiting = set(np.flatnonzero(trained_T[starts_S]).tolist())
        found = []
        for leaf in sorted(waiting, reverse=True):
            if leaf not in waiting:
                continue
            path = self._path(leaf)
            places = np.concatenate([starts_S[one] + np.arange(self.lengths_S[one]) for one in path])
            fresh = np.repeat([one in waiting for one in path], self.lengths_S[path])
            waiting.difference_update(path)
            found.append((places, fresh))
        return found

    def _path(self, segment: int) -> list[int]:
        """From the root down to `segment`."""
        path = []
        while segment >= 0:
            path.append(segment)
            segment = int(self.parents_S[segment])
        return path[::-1]


def sees(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[S, S]: whether segment i sees segment j: itself, its parent, and so on."""
    seen_SS = np.eye(len(parents), dtype=np.bool_)
    for segment, parent in enumerate(parents):
        if parent >= 0:
            seen_SS[segment] |= seen_SS[parent]
    return seen_SS
