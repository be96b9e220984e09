"""Counters of the network layer, for whoever holds a `Network`; tests read them.

A fault is something a peer (or our own callback) did wrong that was survived. Names are kebab-case
and come from a fixed set of places in the code, never from the wire, so the table stays small.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SKIPPED = "publish-skipped-slow-peer"
NOT_FORWARDED = "not-forwarded-slow-peer"
GIVEN_UP = "consumer-slow"


@dataclass(frozen=True, slots=True)
class Offender:
    """What a connection peer did wrong in the transport, apart from any content. [REP-3]"""

    peer: str
    """Peer id."""
    faults: int
    refused_until_ms: int = 0
    """Unix milliseconds; in the past where it is not refused."""


@dataclass
class TopicCounters:
    """Messages of one topic since the node started."""

    published: int = 0
    accepted: int = 0
    ignored: int = 0
    rejected: int = 0
    duplicates: int = 0
    forwarded: int = 0  # copies handed to a peer's outbound queue
    not_forwarded: int = 0  # copies not queued: that peer's queue was full for too long
    consumer_slow: int = 0  # accepted, not delivered: the consumer stayed behind too long


@dataclass
class NetworkStats:
    """Live counters of one network; read them, do not write them."""

    bytes_in: int = 0  # ciphertext bytes read from sockets
    bytes_out: int = 0  # ciphertext bytes written to sockets
    connections_refused: int = 0
    publish_skipped_slow_peer: int = 0
    control_dropped: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    topics: dict[str, TopicCounters] = field(default_factory=dict)

    def fault(self, name: str) -> None:
        """Count one survived fault."""
        self.faults[name] += 1

    def topic(self, name: str) -> TopicCounters:
        """The counters of a topic of ours; only topics that we joined or published to get one."""
        counters = self.topics.get(name)
        if counters is None:
            counters = self.topics[name] = TopicCounters()
        return counters

    def losses(self) -> dict[str, int]:
        """What was dropped, by name, and the faults; only what happened."""
        topics = self.topics.values()
        dropped = {
            SKIPPED: self.publish_skipped_slow_peer,
            NOT_FORWARDED: sum(counters.not_forwarded for counters in topics),
            GIVEN_UP: sum(counters.consumer_slow for counters in topics),
            "control-dropped": self.control_dropped,
            "connections-refused": self.connections_refused,
        }
        return {name: count for name, count in (dropped | dict(self.faults)).items() if count}
