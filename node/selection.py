"""Which of the groups that wait go into the next update: the oldest, and of nobody more than its share.

Where a share cannot be kept the update waits for somebody else's groups, but not for long: the share of a key
may cost learning half of its pace at most, and only where the others are likely to fill theirs. Then it is
filled beyond the share, and what the others have goes first. The share of strangers is kept for longer, by
the pace that updates have had; see `Participants`. Meanwhile no more waits than one update takes, or the
trainer would stop reading before those groups came: the oldest of whoever is over its share leave. They were
accepted and are credited, and are not trained on. Spec: [VER-14].
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from nous_node.protocol.receipts import State

FEW_KEYS = 5
"""Below so many keys a share would make the fast wait for the slow, and two volunteers for each other."""

PRESENT_SECONDS = 60.0
"""A key takes part for so long after a group of it was accepted."""

LONGEST_PRESENT_SECONDS = 600.0
"""Where updates take longer than a minute it takes part for as long as the last one took, and for so long at
most: an update may wait in vain for a key that has left."""


STRANGERS_PATIENCE = 4
"""Times what updates have taken, for which one waits before strangers have more than their share: active keys
that bring a fourth of what they brought still keep it."""

LONGEST_PATIENCE_SECONDS = 600.0
"""A run whose active keys need longer for an update goes on with strangers, all of whose groups are verified:
to stand still is the worse harm."""

PATIENCE = 2
"""Updates' worth of groups that come between two updates at most, where the share of a key is what one waits
for."""

PACE = 0.25
"""Weight of the last update in the mean time that they take."""


class Kept(IntEnum):
    """Which shares an update keeps."""

    NONE = 0
    STRANGERS = 1
    """That of keys that are not active."""
    ALL = 2


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
    held: Sequence[Waiting],
    present: Collection[bytes],
    active: Collection[bytes],
    shares: Shares,
    kept: Kept = Kept.ALL,
) -> Selection:
    """The groups of the next update. `held`: in order of arrival; `present`: keys that take part, which are
    worth waiting for; `active`: keys that are past probation; `kept`: shares that it must keep. It keeps the
    others, too, where it can. Deterministic."""
    if len(held) < shares.groups:
        return Selection()
    limits, chosen = _Limits.of(held, present, active, shares), list[int]()
    for less in sorted(Kept, reverse=True):
        limits = limits.keeping(less)
        chosen = limits.choose(held, chosen)
        if less >= kept and len(chosen) == shares.groups:
            return Selection(sorted(chosen))
        if less == Kept.STRANGERS:
            taken = set(chosen)
    left_out = Counter(one.key for place, one in enumerate(held) if place not in taken)
    return Selection(surplus=_surplus(held, left_out, len(held) - shares.groups))


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

    def keeping(self, kept: Kept) -> _Limits:
        """These, without those that need not be kept."""
        strangers = self.strangers if kept >= Kept.STRANGERS else frozenset[bytes]()
        return replace(self, bounded=self.bounded and kept == Kept.ALL, strangers=strangers)

    def choose(self, held: Sequence[Waiting], first: Sequence[int]) -> list[int]:
        """Places of groups that keep the shares, as many as an update has where there are; those of `first`
        before others, then the oldest."""
        before = set(first)
        order = [*first, *(place for place in range(len(held)) if place not in before)]
        barred: set[int] = set()
        while True:
            chosen = self._fill(held, order, barred)
            over = self._over_tokens(held, chosen)
            if over is None:
                return chosen
            barred.add(over)

    def _fill(self, held: Sequence[Waiting], order: Sequence[int], barred: Collection[int]) -> list[int]:
        """The first that keep the shares of groups."""
        most = _per_key(self.shares) if self.bounded else self.shares.groups
        room = math.floor(self.shares.probation * self.shares.groups)
        chosen: list[int] = []
        counts: Counter[bytes] = Counter()
        for place in order:
            key = held[place].key
            strange = key in self.strangers
            if place in barred or counts[key] >= most or (strange and not room):
                continue
            chosen.append(place)
            counts[key] += 1
            room -= strange
            if len(chosen) == self.shares.groups:
                break
        return chosen

    def _over_tokens(self, held: Sequence[Waiting], chosen: Sequence[int]) -> int | None:
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
    """Who takes part, how each stands, and for whom the next update has waited long enough.

    An update that could be made without the share of single keys waits until PATIENCE times as many groups as
    it has were accepted since the one before, and only if it could be made within the share were the last
    ones that came, as many as are still to come by then, to come once more. The share of strangers is kept
    for STRANGERS_PATIENCE times as long as updates take that have to keep it, or as the groups of this one
    took to come if that was longer, from when there were enough of them.

    `clock`: seconds of a clock that never goes back."""

    def __init__(self, clock: Callable[[], float], shares: Shares) -> None:
        self._clock, self._shares = clock, shares
        self._peers: dict[bytes, _Peer] = {}
        self._seconds = PRESENT_SECONDS
        self._recent: deque[Waiting] = deque(maxlen=PATIENCE * shares.groups)
        self._accepted = 0
        """Groups since the last update."""
        self._updated = clock()
        self._enough: float | None = None
        """When there were as many groups as the next update has."""
        self._waits: bool | None = None
        """Whether the next update waits for the share of single keys; None: that is not seen yet."""
        self._pace = PRESENT_SECONDS
        """Seconds that updates take of which strangers have no more than their share."""
        self._paced = False
        """Whether the update that was selected last is such a one."""

    def stands(self, key: bytes, state: State) -> None:
        """How a key stands now."""
        if key in self._peers:
            self._peers[key].state = state

    def accepted(self, key: bytes, tokens: int, state: State) -> None:
        """A group of it was, with so many trained tokens."""
        self._peers[key] = _Peer(state, self._clock())
        self._recent.append(Waiting(key, tokens))
        self._accepted += 1

    def updated(self) -> None:
        """The update that was selected last begins."""
        now = self._clock()
        took = now - self._updated
        self._seconds = min(max(PRESENT_SECONDS, took), LONGEST_PRESENT_SECONDS)
        if self._paced:
            took = min(took, LONGEST_PATIENCE_SECONDS / STRANGERS_PATIENCE)
            self._pace += PACE * (took - self._pace)
        self._updated, self._accepted, self._enough, self._waits = now, 0, None, None

    def select(self, held: Sequence[Waiting]) -> Selection:
        """As above, at this moment. Forgets who has left."""
        if len(held) < self._shares.groups:
            return Selection()
        now = self._clock()
        since = now - self._seconds
        waiting = {one.key for one in held}
        self._peers = {k: p for k, p in self._peers.items() if p.accepted >= since or k in waiting}
        present = {key for key, peer in self._peers.items() if peer.accepted >= since}
        active = {key for key, peer in self._peers.items() if peer.state == "active"}
        if self._enough is None:
            self._enough = now

        def keeping(kept: Kept, more: Sequence[Waiting] = ()) -> Selection:
            return select([*held, *more], present, active, self._shares, kept)

        self._paced = bool(present & active)
        selection = keeping(Kept.ALL)
        if selection.chosen:
            return selection
        wider = keeping(Kept.STRANGERS)
        if wider.chosen:
            coming = PATIENCE * self._shares.groups - self._accepted
            if self._waits is None and coming > 0:
                self._waits = bool(keeping(Kept.ALL, list(self._recent)[-coming:]).chosen)
            if coming <= 0 or not self._waits:
                return wider
        elif now - self._enough >= self._patience():
            self._paced = False
            return keeping(Kept.NONE)
        return selection

    def _patience(self) -> float:
        """Seconds for which the share of strangers is kept where there are enough groups."""
        assert self._enough is not None
        took = max(self._enough - self._updated, self._pace)
        return min(STRANGERS_PATIENCE * took, LONGEST_PATIENCE_SECONDS)
