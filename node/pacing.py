"""How many groups a volunteer may have without a receipt, so that they are fresh when they are learnt from.

Everything between a volunteer and the learner is a queue: sockets, the trainer's inbox, its journal. Like a
congestion window, this one grows while receipts come for groups of recent versions, and shrinks when they
come late; a trainer that is slower than its volunteers then has idle volunteers rather than stale rollouts.
The signal is age, as in delay-based congestion control (Brakmo and Peterson, TCP Vegas, 1995).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nous_node.protocol.buckets import Rate

FIRST = 32.0
"""Groups at the start: a batch in work and one on its way."""
LOWEST = 4.0
HIGHEST = 4096.0
GROWTH = 0.1
"""Groups more for a receipt that came early, so that the window doubles in ten windows."""
DECAY = 0.2
"""Groups fewer for one that came late: down is twice as fast as up."""
STALE_DECAY = 1.0
"""Groups fewer for one that came too late to be used."""

RATE_SHARE = 0.95
"""Of the run's rate that a sender uses: relays have clocks of their own."""


@dataclass(slots=True)
class Pacing:
    """The window of one volunteer. `staleness`: versions that the run allows a rollout to be behind."""

    staleness: int
    window: float = FIRST

    def receipt(self, lag: int, stale: bool) -> None:
        """A receipt for a group that is `lag` versions behind the newest one by now."""
        if stale:
            change = -STALE_DECAY
        elif lag > self.staleness / 2:
            change = -DECAY
        else:
            change = GROWTH
        self.window = min(HIGHEST, max(LOWEST, self.window + change))

    def batch(self, wanted: int, waiting: int) -> int:
        """How many of `wanted` groups may be begun while `waiting` have no receipt; 0 is to wait for one.

        At least half of what is wanted, or half of the window: smaller batches cost the engine more than
        they bring.
        """
        room = int(self.window) - waiting
        return min(wanted, room) if 2 * room >= min(wanted, int(self.window)) and room > 0 else 0


@dataclass(slots=True)
class OwnRate:
    """The run's limit of messages of one key, kept by the sender: beyond it they would be ignored. [GOS-6]"""

    groups_per_second: float
    """Of the run."""
    at: int
    """Unix milliseconds of the last message."""
    fresh: bool = True
    """Whether the key has sent nothing in the run so far. Else it begins with none: others still count what
    it used before it was started again."""
    level: float = field(init=False)
    """Messages that may go out at once; below 0: that many are waiting for their turn."""

    def __post_init__(self) -> None:
        self.level = self._capacity if self.fresh else 0.0

    @property
    def _rate(self) -> float:
        return self.groups_per_second * RATE_SHARE

    @property
    def _capacity(self) -> float:
        return max(1.0, Rate.of_groups(self.groups_per_second).burst * RATE_SHARE)

    def delay(self, now: int, cost: float = 1.0) -> float:
        """Takes the turn of a message that counts for `cost`; seconds until it comes."""
        cost = min(cost, self._capacity)
        self.level = min(self._capacity, self.level + self._rate * max(0, now - self.at) / 1000) - cost
        self.at = max(self.at, now)
        return max(0.0, -self.level) / self._rate
