"""The pace of beacons for new keys, against whoever makes a key a second."""

from __future__ import annotations

import itertools

from nous_node.node.renewals import FIRST_PAUSE_S, MAX_PAUSE_S, Renewals


def flooded(renewals: Renewals, begin: float, end: float) -> list[float]:
    """Times of the renewals while a key waits in every second."""
    times = []
    now = begin
    while now < end:
        if renewals.due(now):
            renewals.renewed(now)
            times.append(now)
        now += 1.0
    return times


def test_the_first_renewal_comes_at_once() -> None:
    assert Renewals().due(0.0)


def test_pauses_double_up_to_a_bound() -> None:
    times = flooded(Renewals(), 0.0, 4000.0)
    pauses = [late - early for early, late in itertools.pairwise(times)]
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600, 600, 600]


def test_a_flood_of_keys_leaves_slow_groups_fresh() -> None:
    """Groups take ten minutes, nothing was learnt yet, and five versions are taken as fresh."""
    times = flooded(Renewals(), 0.0, 7200.0)
    assert sum(1 for at in times if 3600 <= at < 4200) <= 1


def test_versions_are_at_most_some_twice_as_many_as_updates() -> None:
    renewals, now, renewed = Renewals(), 0.0, 0
    renewals.renewed(now)
    for took in [30.0, 90.0, 60.0, 120.0] * 25:
        renewed += len(flooded(renewals, now + 1, now + took))
        now += took
        renewals.updated(now)
    assert 0 < renewed <= 100


def test_updates_that_come_in_time_bring_all_beacons() -> None:
    renewals = Renewals()
    renewals.renewed(0.0)
    for update in range(1, 50):
        assert flooded(renewals, 2.0 * update - 1, 2.0 * update) == []
        renewals.updated(2.0 * update)
    assert not renewals.due(98.0 + FIRST_PAUSE_S - 1)
    assert renewals.due(98.0 + FIRST_PAUSE_S)


def test_a_quick_update_among_slow_ones_halves_the_pause() -> None:
    renewals = Renewals()
    renewals.renewed(0.0)
    renewals.updated(200.0)
    renewals.updated(200.5)
    assert not renewals.due(300.0)
    assert renewals.due(300.5)


def test_a_run_that_rested_keeps_nobody_waiting_for_long() -> None:
    renewals = Renewals()
    renewals.renewed(0.0)
    renewals.updated(86_400.0)
    assert renewals.due(86_400.0 + MAX_PAUSE_S)
