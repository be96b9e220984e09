"""A volunteer's window of groups without a receipt, and its own rate. [RCP-5] [GOS-6]"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.pacing import FIRST, HIGHEST, LOWEST, RATE_SHARE, OwnRate, Pacing
from nous_node.protocol.buckets import MAX_BURST, THROTTLE, Bucket, Rate

STALENESS = 4


def after(*receipts: tuple[int, bool]) -> float:
    pacing = Pacing(STALENESS)
    for lag, stale in receipts:
        pacing.receipt(lag, stale)
    return round(pacing.window - FIRST, 6)


def test_receipts_for_fresh_groups_widen_the_window() -> None:
    assert after((0, False), (2, False)) == 0.2


def test_receipts_for_older_groups_narrow_it_and_stale_ones_most() -> None:
    assert after((3, False)) == -0.2
    assert after((9, True)) == -1.0


def test_the_window_has_bounds() -> None:
    assert after(*[(9, True)] * 1000) == LOWEST - FIRST
    assert after(*[(0, False)] * 100_000) == HIGHEST - FIRST


def test_no_group_is_begun_while_the_window_is_full() -> None:
    pacing = Pacing(STALENESS)
    assert pacing.batch(8, int(FIRST)) == 0
    assert pacing.batch(8, int(FIRST) - 3) == 0  # too few to be worth a call of the engine
    assert pacing.batch(8, int(FIRST) - 4) == 4
    assert pacing.batch(8, 0) == 8


@given(st.integers(1, 64), st.integers(0, 5000), st.floats(LOWEST, HIGHEST))
def test_groups_in_flight_never_exceed_the_window(wanted: int, waiting: int, window: float) -> None:
    begun = Pacing(STALENESS, window).batch(wanted, waiting)
    assert 0 <= begun <= wanted
    assert begun == 0 or waiting + begun <= window


@given(st.floats(0.01, 100), st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=200))
def test_a_sender_that_waits_as_told_is_within_every_readers_rate(
    rate: float, pauses: list[tuple[int, bool]]
) -> None:
    now = 1_800_000_000_000
    own, allowed = OwnRate(rate, now), Rate.of_groups(rate)
    reader = Bucket.full(allowed, now)
    for pause, throttled in pauses:
        cost = THROTTLE if throttled else 1.0
        now += pause
        now += math.ceil(own.delay(now, cost) * 1000)
        reader.take(allowed, now, cost)  # raises where the rate is exceeded


def test_a_burst_is_a_minute_of_the_rate() -> None:
    own = OwnRate(2.0, 0)
    assert [own.delay(0) for _ in range(int(120 * RATE_SHARE))] == [0.0] * 114
    assert own.delay(0) == 1 / (2.0 * RATE_SHARE)
    assert own.delay(0) == 2 / (2.0 * RATE_SHARE)
    assert own.delay(60_000) == 0.0


@given(st.floats(0.01, 100), st.integers(0, 300), st.integers(0, 90_000))
def test_a_sender_that_starts_again_has_not_what_it_had_used(rate: float, used: int, away: int) -> None:
    now = 1_800_000_000_000
    own, allowed = OwnRate(rate, now), Rate.of_groups(rate)
    reader = Bucket.full(allowed, now)
    for _ in range(used):
        now += math.ceil(own.delay(now) * 1000)
        reader.take(allowed, now)
    now += away
    own = OwnRate(rate, now, fresh=False)
    for _ in range(300):
        now += math.ceil(own.delay(now) * 1000)
        reader.take(allowed, now)  # raises where the rate is exceeded


def test_a_burst_is_bounded_whatever_the_rate() -> None:
    assert OwnRate(1000.0, 0).level == MAX_BURST * RATE_SHARE
