"""What the network dropped is seen: in each status, and as a note now and then."""

from __future__ import annotations

import itertools

from nous_node.node.events import Event, Note, RelayStatus
from nous_node.node.losses import NOTE_SECONDS, Losses
from nous_node.node.network_stats import NetworkStats


def test_losses_hold_what_happened_and_nothing_else() -> None:
    stats = NetworkStats()
    assert stats.losses() == {}
    stats.publish_skipped_slow_peer = 3
    stats.topic("a").consumer_slow = 1
    stats.topic("b").consumer_slow = 2
    stats.topic("b").not_forwarded = 4
    stats.fault("gossip-bad-id")
    assert stats.losses() == {
        "publish-skipped-slow-peer": 3,
        "not-forwarded-slow-peer": 4,
        "consumer-slow": 3,
        "gossip-bad-id": 1,
    }


def notes(figures: list[dict[str, int]]) -> list[Note]:
    """What is told of figures that come once a second."""
    heard: list[Event] = []
    seconds = itertools.count()
    losses = Losses(heard.append, lambda: float(next(seconds)))
    for network in figures:
        losses.report(RelayStatus(network=network))
    assert len([event for event in heard if isinstance(event, RelayStatus)]) == len(figures)
    return [event for event in heard if isinstance(event, Note)]


def test_nothing_is_told_of_no_loss() -> None:
    assert notes([{}, {"gossip-bad-id": 9}]) == []


def test_the_first_loss_is_told_and_the_next_ones_once_a_minute() -> None:
    told = notes([{"consumer-slow": second} for second in range(int(NOTE_SECONDS) + 3)])
    assert [note.text.split(" ")[0] for note in told] == ["1", "60"]
    assert {note.level for note in told} == {"warning"}


def test_what_stopped_is_not_told_again() -> None:
    (note,) = notes([{"publish-skipped-slow-peer": 2, "gossip-bad-id": second} for second in range(300)])
    assert note.text.startswith("2 messages left out a peer that reads slowly. ")
