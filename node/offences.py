"""Peers that break the rules of the transport: counted, and refused for a while after too many."""

from __future__ import annotations

from collections import Counter
from typing import Any

import trio

from .network_stats import NetworkStats

# Bad signatures, garbage, REJECT verdicts. Honest peers judge before they forward, so one is already
# odd; a few may come from a version skew.
MAX_OFFENCES = 20
OFFENCE_DECAY_S = 10.0  # one is forgiven per this many seconds
REFUSE_S = 300.0


class Offences:
    """One node's memory of offenders; `swarm` is the HardenedSwarm that refuses them."""

    def __init__(self, swarm: Any, stats: NetworkStats) -> None:
        self._swarm = swarm
        self._stats = stats
        self._counts: Counter[Any] = Counter()
        self._wake = trio.Event()
        self._to_close: list[Any] = []

    def add(self, peer: Any, fault: str) -> None:
        """Count one offence under the name of its fault; the peer may be disconnected soon after."""
        self._stats.fault(fault)
        self._counts[peer] += 1
        if self._counts[peer] < MAX_OFFENCES:
            return
        del self._counts[peer]
        self._stats.fault("peer-refused")
        self._swarm.refused_peers[peer] = trio.current_time() + REFUSE_S
        self._to_close.append(peer)
        self._wake.set()

    async def run(self) -> None:
        """Forever: disconnect who is to be refused, forgive with time."""
        forgive_at = trio.current_time() + OFFENCE_DECAY_S
        while True:
            with trio.move_on_at(forgive_at):
                await self._wake.wait()
            self._wake = trio.Event()
            while self._to_close:
                await self._swarm.close_peer(self._to_close.pop())
            now = trio.current_time()
            if now >= forgive_at:
                forgive_at = now + OFFENCE_DECAY_S
                self._forgive(now)

    def _forgive(self, now: float) -> None:
        self._counts = Counter({peer: n - 1 for peer, n in self._counts.items() if n > 1})
        refused = self._swarm.refused_peers
        for peer in [peer for peer, until in refused.items() if until <= now]:
            del refused[peer]
