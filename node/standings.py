"""How keys stand, kept in step in three places: the gossip path, the learner, and what volunteers are told.

journal (a verdict, the end of a quarantine) -> gossip view     who is taken, and how fast     [GOS-10]
                                             -> distrusted      whose groups are not trained on [REP-2]
                                             -> standings       told beside receipts            [RCP-6]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from nous_node.protocol.gossip import GossipView
from nous_node.protocol.receipts import Receipt, Standing

from .reputation import Reputation
from .store import Journal

TOLD_MS: Final = 2_000
"""Between two standings of a key whose state is the same. [RCP-6]"""

TOLD_AT_ONCE: Final = 1_024
"""Standings of one message: 100 KB."""

MAX_TOLD: Final = 65_536
"""Keys of which it is known when they were told: as many as may send at once."""

ANSWER_MS: Final = 1_000
"""A key that is not taken is answered once in so long. [RCP-7]"""

MAX_ANSWERED: Final = 4_096
"""Such keys answered in that time: keys cost nothing, but each of these was once taken."""


class Standings:
    """`distrusted` collects keys whose groups are not to be trained on; whoever tells the learner empties it.

    Times are Unix milliseconds.
    """

    def __init__(self, journal: Journal, view: GossipView) -> None:
        self.distrusted: set[bytes] = set()
        self._journal, self._view = journal, view
        self._told: dict[bytes, int] = {}
        """Key -> when its standing was last told; in this order."""
        self._due: dict[bytes, int] = {}
        """Key -> from when on its standing is to be told."""
        self._answered: set[bytes] = set()
        self._answered_ms = 0
        for key, reputation in journal.restrained().items():
            self._show(key, reputation)

    def sync(self, now: int) -> None:
        """After anything that may have changed how keys stand."""
        for key, reputation in self._journal.take_moved().items():
            self._show(key, reputation)
            self._due[key] = now
            if not reputation.trusted:
                self.distrusted.add(key)

    def pass_time(self, now: int) -> None:
        """Quarantines end."""
        over = [key for key, until in self._view.quarantined.items() if until <= now]
        if over:
            self._journal.release(over, now)
            self.sync(now)

    # --- what is told ----------------------------------------------------------------------------

    def note(self, receipts: Iterable[Receipt], now: int) -> None:
        """Receipts that are being sent: the standings of their keys are to follow."""
        for receipt in receipts:
            if receipt.peer not in self._due and len(self._due) < MAX_TOLD:
                told = self._told.get(receipt.peer)
                self._due[receipt.peer] = now if told is None else told + TOLD_MS

    def due(self, now: int, *, parting: bool = False) -> list[Standing]:
        """What is to be told now; with `parting` also what would have had some more seconds."""
        keys = [key for key, due in self._due.items() if due <= now or parting]
        if not keys:
            return []
        standings = self._journal.standings(keys[:TOLD_AT_ONCE])
        for unknown in set(keys[:TOLD_AT_ONCE]) - {standing.peer for standing in standings}:
            del self._due[unknown]
        return standings

    def told(self, standings: Sequence[Standing], now: int) -> None:
        """They were published."""
        for standing in standings:
            self._due.pop(standing.peer, None)
            self._told.pop(standing.peer, None)
            self._told[standing.peer] = now
        while self._told:
            oldest, told = next(iter(self._told.items()))
            if told + TOLD_MS > now and len(self._told) <= MAX_TOLD:
                return
            del self._told[oldest]

    def answers(self, key: bytes, now: int) -> bool:
        """Whether a group of a key that is not taken is answered now. [RCP-7]"""
        if now - self._answered_ms >= ANSWER_MS:
            self._answered.clear()
            self._answered_ms = now
        if key in self._answered or len(self._answered) >= MAX_ANSWERED:
            return False
        self._answered.add(key)
        return True

    def _show(self, key: bytes, reputation: Reputation) -> None:
        """To the gossip path."""
        view = self._view
        view.quarantined.pop(key, None)
        view.throttled.discard(key)
        match reputation.state:
            case "quarantine":
                view.quarantined[key] = reputation.until_ms
            case "banned":
                view.banned.add(key)
            case "throttled":
                view.throttled.add(key)
