"""Peers that break the rules of the transport: counted, and refused for a while after too many.

They are known by their peer ids, so that to connect anew washes nothing. What they did is handed out for
somebody to keep, and taken up again from there after a restart. [REP-3]
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import trio
from libp2p.peer.id import ID

from .network_stats import NetworkStats, Offender

# Bad signatures, garbage, REJECT verdicts. Honest peers judge before they forward, so one is already
# odd; a few may come from a version skew.
MAX_OFFENCES = 20
OFFENCE_DECAY_S = 10.0  # one is forgiven per this many seconds
REFUSE_S = 300.0
# Peers whose faults are kept until somebody asks for them: a role that never asks keeps no more.
MAX_NOTED = 4_096


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Offences:
    """One node's memory of offenders; `swarm` is the HardenedSwarm that refuses them. `clock` gives Unix
    milliseconds."""

    def __init__(self, swarm: Any, stats: NetworkStats, clock: Callable[[], int] = _now_ms) -> None:
        self._swarm = swarm
        self._stats = stats
        self._clock = clock
        self._counts: Counter[Any] = Counter()
        self._wake = trio.Event()
        self._to_close: list[Any] = []
        self._noted: dict[Any, Offender] = {}

    def add(self, peer: Any, fault: str) -> None:
        """Count one offence under the name of its fault; the peer may be disconnected soon after."""
        self._stats.fault(fault)
        self._counts[peer] += 1
        refused = self._counts[peer] >= MAX_OFFENCES
        if not refused:
            self._note(peer, 0)
            return
        self._refuse(peer)
        self._to_close.append(peer)
        self._wake.set()

    def refuse(self, peer: Any, fault: str) -> None:
        """One offence that no honest peer commits; the caller disconnects."""
        self._stats.fault(fault)
        self._refuse(peer)

    def _refuse(self, peer: Any) -> None:
        self._note(peer, self._clock() + int(1000 * REFUSE_S))
        self._counts.pop(peer, None)
        self._stats.fault("peer-refused")
        self._swarm.refused_peers[peer] = trio.current_time() + REFUSE_S

    def take(self) -> list[Offender]:
        """What was done wrong since this was last asked."""
        noted, self._noted = self._noted, {}
        return list(noted.values())

    def resume(self, offenders: Iterable[Offender]) -> None:
        """Goes on refusing those of an earlier life of this node, for as long as they were to be."""
        now = self._clock()
        for offender in offenders:
            seconds = min((offender.refused_until_ms - now) / 1000, REFUSE_S)
            if seconds > 0:
                peer = ID.from_base58(offender.peer)
                self._swarm.refused_peers[peer] = trio.current_time() + seconds

    def _note(self, peer: Any, until_ms: int) -> None:
        before = self._noted.get(peer)
        if before is None and len(self._noted) >= MAX_NOTED:
            return
        faults = 1 if before is None else before.faults + 1
        until = until_ms if before is None else max(until_ms, before.refused_until_ms)
        self._noted[peer] = Offender(str(peer), faults, until)

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
