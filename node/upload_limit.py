"""The upload limit of a node: one token bucket that all its connections share."""

from __future__ import annotations

import trio

# A frame up to this size never waits: pings, window updates and subscriptions must get through a
# saturated uplink, or the peers would take us for dead.
SMALL_FRAME = 1024

# Seconds of rate that may go out at once after a pause.
BURST_S = 0.25


class UploadLimit:
    """Delays writers so that their sum stays under `bytes_per_s` (None: never delays)."""

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"the upload limit must be above 0 bytes/s, not {bytes_per_s}")
        self._rate = bytes_per_s
        self._free_at = 0.0  # trio time at which all that was granted so far has gone out

    @property
    def rate(self) -> float | None:
        """Bytes a second; None is no limit."""
        return self._rate

    async def take(self, size: int) -> None:
        """Wait until `size` more bytes may go out. Cancellation gives nothing back: safe, if late."""
        if self._rate is None:
            return
        now = trio.current_time()
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + size / self._rate
        if size > SMALL_FRAME and start > now:
            await trio.sleep_until(start)
