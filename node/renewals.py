"""When a run without an update draws a new beacon for keys that wait. [TSK-6]

Besides keys that count for no version yet, two kinds wait for one that may never come by itself: a key whose
probation needs a second version, beside others that are too slow for an update; and a key whose groups wait
for tasks that it gave up for good, until its window is full of them and nothing else is learnt from. [TSK-7]

Each renewal is a version, and rollouts age by versions: keys cost nothing, so without a pace somebody who
makes one a second would make every honest group stale. A renewal waits for twice as long as the one before
it, and never less than an update takes: then versions are at most some twice as many as updates, and where
updates are hours apart the staleness of the run still spans most of an hour.
"""

from __future__ import annotations

import math

from .store import Journal

IDLE_SECONDS = 1.0
"""Between looks for keys that wait for a beacon: those that come together get one together."""

FIRST_PAUSE_S = 5.0
"""From a version to a renewal, at first: volunteers who start together share one beacon."""

MAX_PAUSE_S = 600.0
"""Longest pause: a newcomer is never kept waiting for longer, whatever others do."""

PATIENCE_S = 60.0
"""For which groups have waited for others: a message that was lost is repeated after 10 s, 20 s, and 40 s."""


def wanted(journal: Journal, version: int, now: int) -> bool:
    """Whether anybody waits for a version after the newest, which is `version`. `now`: Unix milliseconds."""
    if journal.newcomers(version) or journal.kept_on_probation(version):
        return True
    return not journal.count_pending() and journal.waiting_since(now - int(1000 * PATIENCE_S))


class Renewals:
    """Paces renewals by a clock of the caller's, in seconds. The first one of a session is due at once."""

    def __init__(
        self, first: float = FIRST_PAUSE_S, longest: float = MAX_PAUSE_S, idle: float = IDLE_SECONDS
    ) -> None:
        self.idle = idle
        """Seconds between looks for keys that wait."""
        self._first, self._longest = first, longest
        self._pause = 0.0
        self._last = -math.inf

    def due(self, now: float) -> bool:
        """Whether keys that wait get a beacon now."""
        return now - self._last >= self._pause

    def renewed(self, now: float) -> None:
        """A version without new weights was published."""
        self._pause = self._bounded(2 * self._pause)
        self._last = now

    def updated(self, now: float) -> None:
        """A version with new weights was published: what it took is what the next one may take. One quick
        update among slow ones, as at the end of a backlog, shortens the pause to half at most."""
        took = now - self._last if math.isfinite(self._last) else 0.0
        self._pause = self._bounded(max(took, self._pause / 2))
        self._last = now

    def _bounded(self, pause: float) -> float:
        return min(self._longest, max(self._first, pause))
