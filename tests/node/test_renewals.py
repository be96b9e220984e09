"""The pace of beacons for new keys, against whoever makes a key a second."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from nous_node.node.renewals import FIRST_PAUSE_S, MAX_PAUSE_S, PATIENCE_S, Renewals, wanted
from nous_node.node.reputation import PASSED
from nous_node.node.store import Journal, RunRules, StoredCheckpoint, StoredGroup
from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import accepted

KEY = b"K" * 32
NOW = 1_800_000_000_000
LATER = NOW + int(1000 * PATIENCE_S)
STALENESS = 2


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


# --- who waits -----------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """Of a run at version 1, for which the key counts."""
    with Journal.open(tmp_path / "journal.sqlite", RunRules(b"r" * 32, (1,), STALENESS)) as opened:
        publish(opened, 0)
        opened.hear(KEY, "test/1", NOW, 0)
        publish(opened, 1)
        yield opened


def name(version: int) -> bytes:
    return sha256(b"%d" % version).digest()


def publish(journal: Journal, version: int) -> None:
    journal.publish(StoredCheckpoint(version, name(version), b"", "/c", NOW, {}, {}), [])


def group(counter: int, version: int = 1) -> StoredGroup:
    digest = sha256(b"%d %d" % (counter, version)).digest()
    return StoredGroup(digest, KEY, name(version), version, counter, digest, NOW, b"envelope")


def accept(journal: Journal, *groups: StoredGroup) -> None:
    journal.add_many(groups)
    journal.decide([accepted(one.id, KEY, 5) for one in groups], NOW)


def test_a_newcomer_waits_for_the_next_version(journal: Journal) -> None:
    assert not wanted(journal, 1, NOW)
    journal.hear(b"N" * 32, "test/1", NOW, 1)
    assert wanted(journal, 1, NOW)
    assert not wanted(journal, 2, NOW)


def test_a_key_whose_probation_lacks_a_second_version_waits_for_one(journal: Journal) -> None:
    accept(journal, *(group(counter) for counter in range(PASSED - 1)))
    assert not wanted(journal, 1, NOW)
    accept(journal, group(PASSED - 1))
    assert wanted(journal, 1, NOW)
    publish(journal, 2)
    assert not wanted(journal, 2, NOW)  # it may take part in that one
    accept(journal, group(0, 2))
    record = journal.key(KEY)
    assert record is not None
    assert record.reputation.state == "active"
    assert not wanted(journal, 1, NOW)


def test_groups_that_wait_for_holes_in_vain_end_by_renewals(journal: Journal) -> None:
    """They fill the window of a volunteer that gave up the tasks before them."""
    journal.add_many([group(counter) for counter in range(7, 39)])
    version = 1
    while wanted(journal, version, LATER):
        assert not wanted(journal, version, LATER - 1)
        version += 1
        publish(journal, version)
    assert version == 1 + STALENESS + 1
    receipt = journal.receipt(group(38).id)
    assert receipt is not None
    assert receipt.code == Code.WITHHELD


def test_nothing_is_renewed_for_them_while_others_have_their_turn(journal: Journal) -> None:
    journal.add_many([group(0), group(9)])
    assert not wanted(journal, 1, LATER)
    journal.decide([accepted(group(0).id, KEY, 5)], NOW)
    assert wanted(journal, 1, LATER)
