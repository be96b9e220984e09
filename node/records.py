"""How sources have served this node: their rates, and their failures over all downloads. No clock, no I/O."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

EXPECTED_RATE = 1_000_000.0
"""Bytes/s of a source that is not known."""

MEASURED_S = 0.2
"""Chunks asked for together come together: a rate is taken over at least this long."""

FORGET_S = 3.0
"""Time constant of the average of a source's rate."""

STALE_S = 60.0
"""Without a chunk for which a rate is not known any more."""

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""A source that fails is left alone where others can help; twice as long each time."""

MAX_RECORDS = 1_024


@dataclass(slots=True)
class Record:
    """One source."""

    rate: float = 0.0
    """Bytes/s while something was asked of it; 0 where it is not known."""
    failures: int = 0
    """One after the other."""
    until: float = 0.0
    """It is left alone until then where others can help."""
    proven: bool = False
    """Its last answer was a chunk."""
    _since: float = 0.0
    _bytes: int = 0
    _last: float = 0.0

    def begins(self, now: float) -> None:
        """Something is asked of it after nothing was."""
        self._since, self._bytes = now, 0

    def delivered(self, size: int, now: float, *, idle: bool) -> None:
        """A good chunk; with `idle` nothing is asked of it any more."""
        self.failures, self.until, self._last, self.proven = 0, 0.0, now, True
        self._bytes += size
        passed = now - self._since
        if passed < MEASURED_S and not (idle and not self.rate and passed > 0):
            return
        weight = 1 - math.exp(-passed / FORGET_S) if self.rate else 1.0
        self.rate += weight * (self._bytes / passed - self.rate)
        self.begins(now)

    def failed(self, now: float) -> None:
        self.until = now + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.failures, 6))
        self.failures += 1
        self.proven = False

    def fade(self, now: float) -> None:
        if now - self._last > STALE_S:
            self.rate = 0.0


@dataclass(slots=True)
class Records:
    """By name of the source; those that were not asked for longest are forgotten."""

    _known: OrderedDict[str, Record] = field(default_factory=OrderedDict)

    def of(self, name: str, now: float) -> Record:
        record = self._known.setdefault(name, Record())
        self._known.move_to_end(name)
        record.fade(now)
        if len(self._known) > MAX_RECORDS:
            self._known.popitem(last=False)
        return record
