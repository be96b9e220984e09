"""Tells a person that the network drops messages: the first time, and then once a minute at most."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .events import Note, RelayStatus, Report, TrainerStatus, VolunteerStatus
from .network_stats import GIVEN_UP, NOT_FORWARDED, SKIPPED

NOTE_SECONDS = 60.0
"""Between notes: the figures are in every status event."""

_SENTENCES = {
    SKIPPED: "{count} messages left out a peer that reads slowly",
    NOT_FORWARDED: "{count} messages were not forwarded to a peer that reads slowly",
    GIVEN_UP: "{count} messages were given up because this node was busy",
}


class Losses:
    """Reports the status of a role, and a note beside it where the network lost something since."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._told: dict[str, int] = {}
        self._next = -math.inf

    def report(self, status: VolunteerStatus | TrainerStatus | RelayStatus) -> None:
        self._report(status)
        network, now = status.network, self._clock()
        news = {name: network.get(name, 0) - self._told.get(name, 0) for name in _SENTENCES}
        parts = [_SENTENCES[name].format(count=count) for name, count in news.items() if count > 0]
        if not parts or now < self._next:
            return
        self._told, self._next = network, now + NOTE_SECONDS
        self._report(
            Note(
                f"{'; '.join(parts)}. Rollouts that are lost so are sent again; if this goes on, a line or a "
                "machine is too slow for this run.",
                "warning",
            )
        )
