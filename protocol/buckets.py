"""How much each key may send: token buckets, in a bounded table. Spec: `specs/04-gossip.md`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .constants import MAX_SENDERS
from .errors import Code, RemoteError

BURST_SECONDS = 60.0
"""How many seconds' worth of its rate a key may send at once: a node that was cut off catches up."""

MAX_BURST = 4_096.0
"""And never more than this many groups at once, whatever rate the run allows."""

HELLO_RATE = 0.2
"""Hellos a second of one key: an honest node sends one every ten seconds until its key counts."""

HELLO_BURST = 4.0
"""Hellos at once: a node that is started again and again."""

THROTTLE = 8.0
"""What one group of a throttled key counts for: it may send an eighth of what others may. [GOS-6]"""

_SWEEP_MS = 1_000
"""Looking through MAX_SENDERS buckets takes some 5 ms; once a second it does not show."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What one key may send."""

    per_second: float
    burst: float
    """Messages at once."""

    @classmethod
    def of_groups(cls, per_second: float) -> Rate:
        """For a run that allows `per_second` groups a second. [GOS-6]"""
        return cls(per_second, max(1.0, min(per_second * BURST_SECONDS, MAX_BURST)))


HELLOS = Rate(HELLO_RATE, HELLO_BURST)


@dataclass(slots=True)
class Bucket:
    """A token bucket: `level` messages may still be sent at `at` (Unix milliseconds)."""

    level: float
    at: int

    @classmethod
    def full(cls, rate: Rate, now: int) -> Bucket:
        return cls(rate.burst, now)

    def take(self, rate: Rate, now: int, cost: float = 1.0) -> None:
        """Takes `cost`, or raises RemoteError(RATE). [GOS-6]"""
        self.level = min(rate.burst, self.level + rate.per_second * max(0, now - self.at) / 1000)
        self.at = max(self.at, now)
        if self.level < min(cost, rate.burst):
            raise RemoteError(
                Code.RATE,
                f"The sender exceeds {rate.per_second} messages a second.",
                measured=rate.per_second,
                threshold=rate.per_second,
            )
        self.level -= min(cost, rate.burst)


@dataclass(slots=True)
class Buckets:
    """The buckets of all senders heard of lately. A bucket that is full again is as good as none."""

    rate: Rate
    """Of one key."""
    by_key: dict[bytes, Bucket] = field(default_factory=dict)
    swept: int = 0
    """Unix milliseconds of the last sweep."""
    room: int = MAX_SENDERS
    """Buckets that are kept at most."""

    def take(self, key: bytes, now: int, cost: float = 1.0) -> None:
        """Takes `cost` of `key`'s, or raises RemoteError(RATE | BUSY). [GOS-6] [GOS-9]"""
        bucket = self.by_key.get(key)
        if bucket is None:
            self._make_room(now)
            bucket = self.by_key[key] = Bucket.full(self.rate, now)
        bucket.take(self.rate, now, cost)

    def _make_room(self, now: int) -> None:
        if len(self.by_key) < self.room:
            return
        if now - self.swept >= _SWEEP_MS:
            self.swept = now
            refilled = now - 1000 * self.rate.burst / self.rate.per_second
            self.by_key = {key: bucket for key, bucket in self.by_key.items() if bucket.at > refilled}
        if len(self.by_key) >= self.room:
            raise RemoteError(
                Code.BUSY,
                "Too many senders are followed; new ones wait.",
                measured=len(self.by_key),
                threshold=self.room,
            )
