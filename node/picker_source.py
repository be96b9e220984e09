"""What a download knows of one source. No clock and no I/O: times are arguments, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from .records import EXPECTED_RATE, Record

MAX_WINDOW = 8
"""Chunks asked of one source at once: as many as it serves to one peer."""

FIRST_WINDOW = 2
"""The same before its rate is known."""

WINDOW_SECONDS = 1.0
"""Of a source's rate that are asked for at once: well above a round trip."""

SPARED_SECONDS = 2.0
"""A complete source is spared while those who still download can deliver what they have in this time, or
faster than it."""


@dataclass(slots=True)
class PickerSource:
    """One source."""

    record: Record
    peer: str
    claims: int = 0
    """Chunks that it says it has, and has not failed to deliver."""
    failed: int = 0
    """Chunks that it did not deliver."""
    whole: bool = False
    """It has all that this download was for."""
    assumed: bool = False
    """It has said nothing: it is taken to have everything."""
    doubtful: bool = False
    """Its last answer was that it has not got what it was assumed to have."""
    failures: int = 0
    """One after the other, in this download."""
    busy: int = 0
    busy_until: float = 0.0
    asked: dict[int, float] = field(default_factory=dict)
    """Chunks in flight: when they were asked for."""
    here: set[int] = field(default_factory=set)
    """Those of them that have come and are being verified: of a source that has delivered good ones before
    they take no place in the window."""
    flying: int = 0
    """Bytes in flight."""

    def wait(self, size: float) -> float:
        """Seconds in which `size` more bytes are to be expected. Those that say nothing of what they have
        count alike: small downloads are to be spread over all peers."""
        rate = EXPECTED_RATE if self.assumed else self.record.rate or EXPECTED_RATE
        return (self.flying + size) / rate

    def window(self, typical: float) -> int:
        """Chunks of `typical` bytes that may be asked of it at once."""
        if not self.record.rate:
            return FIRST_WINDOW
        return max(1, min(MAX_WINDOW, -int(-self.record.rate * WINDOW_SECONDS // max(1.0, typical))))

    def overdue(self, now: float) -> bool:
        """Whether something is asked of it that should have come: what it says it has keeps nobody from
        asking others."""
        patience = max(SPARED_SECONDS, 2 * self.wait(0))
        return any(now - since > patience for chunk, since in self.asked.items() if chunk not in self.here)
