"""Which of the groups that wait go into the next update: the oldest, and of nobody more than its share.

A share that cannot be kept makes the update wait for somebody else's groups; it is never broken. What waits
stays below one update all the same, or the trainer would stop reading before those groups came: as soon as
there is more, the oldest groups of whoever is over its share leave. They were accepted and are credited, and
are not trained on. Spec: [VER-14].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from nous_node.protocol.receipts import State

FEW_KEYS = 5
"""Below so many keys a share would make the fast wait for the slow, and two volunteers for each other."""

PRESENT_SECONDS = 60.0
"""A key takes part for so long after a group of it was accepted."""

LONGEST_PRESENT_SECONDS = 600.0
"""Where updates take longer than a minute it takes part for as long as the last one took, and for so long at
most: an update may wait in vain for a key that has left."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A group that waits."""

    key: bytes
    tokens: int
    """Trained tokens, 1 at least."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The trainer's settings: groups of an update, and the shares of it that a key, and keys that are not
    active together, have at most."""

    groups: int
    peer: float
    probation: float


@dataclass(frozen=True, slots=True)
class Selection:
    """Places in what waits, in its order."""

    chosen: list[int] = field(default_factory=list)
    """As many as an update has, or none: it waits."""
    surplus: list[int] = field(default_factory=list)
    """Those that leave, so that the update can wait on."""


def select(
    held: Sequence[Waiting], present: Collection[bytes], active: Collection[bytes], shares: Shares
) -> Selection:
    """The groups of the next update. `held`: in order of arrival; `present`: keys that take part, which are
    worth waiting for; `active`: keys that are past probation. Deterministic."""
    if len(held) < shares.groups:
        return Selection()
    limits = _Limits.of(held, present, active, shares)
    barred: set[int] = set()
    while len(chosen := limits.fill(held, barred)) == shares.groups:
        over = limits.over_tokens(held, chosen)
        if over is None:
            return Selection(chosen)
        barred.add(over)
    taken = set(chosen)
    left_out = Counter(one.key for place, one in enumerate(held) if place not in taken)
    return Selection(surplus=_surplus(held, left_out, len(held) - shares.groups + 1))


@dataclass(frozen=True, slots=True)
class _Limits:
    shares: Shares
    bounded: bool
    """Whether a key has a share at all."""
    strangers: frozenset[bytes]
    """Keys that have a share together."""

    @classmethod
    def of(
        cls, held: Sequence[Waiting], present: Collection[bytes], active: Collection[bytes], shares: Shares
    ) -> _Limits:
        """Strangers cost nothing to make: where others take part, they do not count for the number of keys
        from which on each has a share."""
        known = [key for key in present if key in active]
        strangers = frozenset(one.key for one in held if one.key not in active) if known else frozenset()
        enough = max(FEW_KEYS, math.ceil(shares.groups / _per_key(shares)))
        return cls(shares, len(known or present) >= enough, strangers)

    def fill(self, held: Sequence[Waiting], barred: Collection[int]) -> list[int]:
        """The oldest that keep the shares of groups, as many as an update has where there are."""
        most = _per_key(self.shares) if self.bounded else self.shares.groups
        room = math.floor(self.shares.probation * self.shares.groups)
        chosen: list[int] = []
        counts: Counter[bytes] = Counter()
        for place, one in enumerate(held):
            strange = one.key in self.strangers
            if place in barred or counts[one.key] >= most or (strange and not room):
                continue
            chosen.append(place)
            counts[one.key] += 1
            room -= strange
            if len(chosen) == self.shares.groups:
                break
        return chosen

    def over_tokens(self, held: Sequence[Waiting], chosen: Sequence[int]) -> int | None:
        """The newest of `chosen` that makes somebody's share of the trained tokens too large; None if it is
        none. A single group is never too large for its key: it cannot be divided."""
        tokens: Counter[bytes] = Counter()
        for place in chosen:
            tokens[held[place].key] += held[place].tokens
        total = tokens.total()
        if sum(tokens[key] for key in self.strangers) > self.shares.probation * total:
            return max(place for place in chosen if held[place].key in self.strangers)
        if not self.bounded:
            return None
        counts = Counter(held[place].key for place in chosen)
        over = [k for k in tokens if counts[k] > 1 and tokens[k] > self.shares.peer * total]
        if not over:
            return None
        largest = max(over, key=lambda key: tokens[key])
        return max(place for place in chosen if held[place].key == largest)


def _per_key(shares: Shares) -> int:
    """Groups of one key: one at least, or updates of one group could not be made."""
    return max(1, math.floor(shares.peer * shares.groups))


def _surplus(held: Sequence[Waiting], left_out: Counter[bytes], excess: int) -> list[int]:
    """So many of the oldest groups of the keys that had to leave out the most: newer ones teach more."""
    dropped: Counter[bytes] = Counter()
    for _ in range(excess):
        key = max(left_out, key=lambda one: left_out[one])
        left_out[key] -= 1
        dropped[key] += 1
    places = []
    for place, one in enumerate(held):
        if dropped[one.key]:
            dropped[one.key] -= 1
            places.append(place)
    return places


@dataclass(slots=True)
class _Peer:
    state: State
    accepted: float
    """When a group was accepted last."""


class Participants:
    """Who takes part, and how each stands. `clock`: seconds of a clock that never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._peers: dict[bytes, _Peer] = {}
        self._updated = clock()
        self._seconds = PRESENT_SECONDS

    def stands(self, key: bytes, state: State) -> None:
        """How a key stands now."""
        if key in self._peers:
            self._peers[key].state = state

    def accepted(self, key: bytes, state: State) -> None:
        """A group of it was."""
        self._peers[key] = _Peer(state, self._clock())

    def updated(self) -> None:
        """An update begins."""
        now = self._clock()
        self._seconds = min(max(PRESENT_SECONDS, now - self._updated), LONGEST_PRESENT_SECONDS)
        self._updated = now

    def select(self, held: Sequence[Waiting], shares: Shares) -> Selection:
        """As above, at this moment. Forgets who has left."""
        since = self._clock() - self._seconds
        waiting = {one.key for one in held}
        self._peers = {k: p for k, p in self._peers.items() if p.accepted >= since or k in waiting}
        present = {key for key, peer in self._peers.items() if peer.accepted >= since}
        active = {key for key, peer in self._peers.items() if peer.state == "active"}
        return select(held, present, active, shares)
