"""Holes in the counters of a key: groups wait for them, and what never comes is owed. [TSK-7]"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node import journal_counters
from nous_node.node.journal_counters import DERIVED_AT_ONCE, Counters
from nous_node.node.store import Journal, RunRules, StoredCheckpoint, StoredGroup
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, FileEntry
from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import accepted, refused
from nous_node.protocol.tasks import assign, task_seed

RUN, KEY, OTHER, CHECKPOINT = b"r" * 32, b"K" * 32, b"O" * 32, b"1" * 32
NOW = 1_800_000_000_000
STALENESS = 2
VERSION = 1
"""Of CHECKPOINT: stale from version 4 on."""

Open = Callable[..., Journal]


@pytest.fixture
def open_journal(tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_it(*weights: int) -> Journal:
            rules = RunRules(RUN, weights or (1,), STALENESS)
            journal = stack.enter_context(Journal.open(tmp_path / "journal.sqlite", rules))
            for key in (KEY, OTHER):
                journal.hear(key, "test", NOW, 0)
            return journal

        yield open_it


@pytest.fixture
def journal(open_journal: Open) -> Journal:
    """Of a run with one environment, which has published versions 0 to 2."""
    journal = open_journal()
    publish(journal, 0, 1, 2)
    return journal


def group(counter: int, key: bytes = KEY, checkpoint: bytes = CHECKPOINT, salt: bytes = b"") -> StoredGroup:
    """`salt` is in the envelope only."""
    digest = sha256(b"%d" % counter + key + checkpoint).digest()
    return StoredGroup(
        sha256(digest + salt).digest(), key, checkpoint, VERSION, counter, digest, NOW, b"envelope"
    )


def publish(journal: Journal, *versions: int) -> None:
    for version in versions:
        name = CHECKPOINT if version == VERSION else sha256(b"%d" % version).digest()
        journal.publish(StoredCheckpoint(version, name, b"", "/c", NOW, {}, {}), [])


def take(journal: Journal, *counters: int) -> list[RemoteError | None]:
    return journal.add_many([group(counter) for counter in counters])


def turns(journal: Journal) -> list[int]:
    """Counters in the order in which they are judged."""
    return [one.counter for one in journal.unused()]


def state(journal: Journal, counter: int) -> str:
    row = journal._database.one("SELECT state FROM groups WHERE counter = ? AND key = ?", (counter, KEY))
    assert row is not None
    return str(row[0])


# --- one environment -----------------------------------------------------------------------------


def test_groups_behind_too_many_holes_wait_and_nobody_sees_them(journal: Journal) -> None:
    assert take(journal, 0, 1, 5) == [None] * 3
    assert (turns(journal), journal.count_pending(), journal.holes(KEY, CHECKPOINT)) == ([0, 1], 2, 3)
    assert state(journal, 5) == "waiting"
    take(journal, 6)
    assert turns(journal) == [0, 1]
    assert journal.stats().pending == 2


def test_they_are_judged_in_order_once_repeats_have_filled_the_holes(journal: Journal) -> None:
    take(journal, 0, 9, 7)
    journal.add(group(0, OTHER))
    first = journal.unused()[-1].arrival
    take(journal, 5, 1, 2)
    assert turns(journal) == [0, 0]
    take(journal, 3)
    assert turns(journal) == [0, 0, 1, 2, 3, 5, 7, 9]
    assert [one.counter for one in journal.unused(after=first)] == [1, 2, 3, 5, 7, 9]
    take(journal, 6)
    assert turns(journal)[-1] == 6


def test_what_waited_is_judged_after_a_restart_as_well(open_journal: Open) -> None:
    take(open_journal(), 0, 4, 5)
    journal = open_journal()
    assert turns(journal) == [0]
    take(journal, 2, 1)
    assert turns(journal) == [0, 2, 4, 5, 1]


def test_without_rules_nothing_waits(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "plain.sqlite") as journal:
        journal.hear(KEY, "test", NOW, 0)
        take(journal, 0, 100)
        assert turns(journal) == [0, 100]


def test_what_still_waits_when_its_checkpoint_is_stale_is_refused(journal: Journal) -> None:
    take(journal, 0, 9, 8)
    publish(journal, 3)
    assert state(journal, 9) == "waiting"
    publish(journal, 4)
    for counter in (8, 9):
        receipt = journal.receipt(group(counter).id)
        assert receipt is not None
        assert (receipt.code, receipt.measured, receipt.threshold) == ("withheld", 7, 2 + 10 / 8)
    assert state(journal, 0) == "pending"
    record = journal.key(KEY)
    assert record is not None
    assert (record.reputation.score, record.refused) == (0.0, 2)


def test_a_leap_of_versions_makes_all_stale_that_it_passes(journal: Journal) -> None:
    take(journal, 0, 9)
    journal.publish(StoredCheckpoint(20, b"L" * 32, b"", "/c", NOW, {}, {}), [], leap=True)
    assert state(journal, 9) == "refused"


def test_a_group_that_would_wait_for_a_stale_checkpoint_is_refused_at_once(journal: Journal) -> None:
    publish(journal, 3, 4)
    (first, error) = take(journal, 0, 50)
    assert first is None
    assert error is not None
    assert error.code == Code.WITHHELD
    receipt = journal.receipt(group(50).id)
    assert receipt is not None
    assert receipt.code == "withheld"


def test_groups_that_come_when_the_accounts_are_closed_are_refused_and_no_faults(journal: Journal) -> None:
    take(journal, 0, 9)
    publish(journal, 3, 4)  # while a dozen more were on their way through the trainer's inbox
    errors = take(journal, *range(20, 32))
    assert {error.code for error in errors if error is not None} == {Code.WITHHELD}
    assert len(errors) == 12
    record = journal.key(KEY)
    assert record is not None
    assert (record.reputation.score, record.reputation.state, record.refused) == (0.0, "probation", 13)


def test_a_repeat_of_a_group_that_waits_gets_the_same_verdict(journal: Journal) -> None:
    take(journal, 0, 9)
    errors = journal.add_many([group(9, salt=b"again")])
    assert [error.code for error in errors if error is not None] == [Code.DUPLICATE]
    publish(journal, 3, 4)
    receipt = journal.receipt(group(9, salt=b"again").id)
    assert receipt is not None
    assert receipt.code == "withheld"


def test_holes_cost_what_groups_of_the_key_brought(journal: Journal) -> None:
    take(journal, 0, 1, 3)
    journal.decide([accepted(group(0).id, KEY, 30), accepted(group(1).id, KEY, 50)], NOW)
    publish(journal, 3)
    record = journal.key(KEY)
    assert record is not None
    assert record.debit == 0
    publish(journal, 4, 5)
    record = journal.key(KEY)
    assert record is not None
    assert (record.credit, record.debit) == (80, 40)
    (standing,) = journal.standings([KEY])
    assert (standing.credit, standing.debit, standing.rank, standing.of) == (80, 40, 1, 1)


def test_a_key_without_an_accepted_group_owes_nothing(journal: Journal) -> None:
    take(journal, 2)
    publish(journal, 3, 4)
    record = journal.key(KEY)
    assert record is not None
    assert record.debit == 0


# --- bounds --------------------------------------------------------------------------------------


def test_as_many_groups_of_a_key_wait_as_may_and_those_that_fill_holes_are_taken(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_counters, "MAX_WAITING", 3)
    assert take(journal, 0, 10, 11, 12) == [None] * 4
    (busy,) = take(journal, 13)
    assert busy is not None
    assert busy.code == Code.BUSY
    assert journal.receipt(group(13).id) is None
    assert take(journal, *range(1, 8)) == [None] * 7
    assert turns(journal) == [0, *range(1, 7), 10, 11, 12, 7]
    assert take(journal, 13) == [None]


@pytest.mark.parametrize(("limit", "value"), [("MAX_WAITING_GROUPS", 2), ("MAX_WAITING_BYTES", 20)])
def test_what_waits_of_all_keys_is_bounded_and_honest_keys_go_on(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(journal_counters, limit, value)
    assert take(journal, 10, 11) == [None] * 2
    (busy,) = journal.add_many([group(10, OTHER)])
    assert busy is not None
    assert busy.code == Code.BUSY
    assert journal.add_many([group(counter, OTHER) for counter in range(3)]) == [None] * 3


def test_room_is_free_again_once_nothing_waits(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_counters, "MAX_WAITING_GROUPS", 4)

    def room() -> Sequence[tuple[object, ...]]:
        return journal._database.rows("SELECT value FROM numbers WHERE name LIKE 'waiting%' ORDER BY name")

    assert take(journal, 0, 5, 6) == [None] * 3
    assert room() == [(2 * len(b"envelope"),), (2,)]
    take(journal, 1, 2)
    assert room() == [(0,), (0,)]
    assert journal.add_many([group(10, OTHER), group(11, OTHER)]) == [None] * 2
    publish(journal, 3, 4)
    assert room() == [(0,), (0,)]


# --- several environments ------------------------------------------------------------------------


def environments(weights: tuple[int, ...], beacon: bytes, count: int) -> list[int]:
    return [
        assign(task_seed(RUN, CHECKPOINT, beacon, KEY, counter), weights, 0).environment
        for counter in range(count)
    ]


def with_beacon(journal: Journal, beacon: bytes) -> None:
    """Publishes versions 0 and 1, of which the second is CHECKPOINT with this beacon."""
    files = [FileEntry("model.safetensors", 1, 1 << 20, bytes(32))]
    manifest = CheckpointManifest(VERSION, FULL, files, {"w": bytes(32)}, beacon)
    data = seal(Identity.from_seed(bytes(32)), Kind.CHECKPOINT, RUN, manifest.to_bytes(), seq=1, ts=NOW)
    publish(journal, 0)
    journal.publish(StoredCheckpoint(VERSION, CHECKPOINT, data, "/c", NOW, {}, {}), [])


def test_tasks_of_an_environment_that_the_key_does_not_play_are_no_holes(open_journal: Open) -> None:
    journal, beacon = open_journal(1, 3), b"b" * 32
    with_beacon(journal, beacon)
    drawn = environments((1, 3), beacon, 200)
    played = [counter for counter, environment in enumerate(drawn) if environment == 0]
    assert take(journal, *played) == [None] * len(played)
    assert turns(journal) == played
    assert journal.holes(KEY, CHECKPOINT) == 0
    skipped = next(counter for counter, environment in enumerate(drawn) if environment == 1)
    take(journal, skipped)
    assert journal.holes(KEY, CHECKPOINT) == drawn[: played[-1]].count(1) - 1


def test_of_the_environment_that_it_plays_it_may_leave_out_only_a_few(open_journal: Open) -> None:
    journal, beacon = open_journal(1, 1), b"b" * 32
    with_beacon(journal, beacon)
    played = [counter for counter, drawn in enumerate(environments((1, 1), beacon, 400)) if drawn == 0]
    take(journal, *played[::2])
    assert journal.holes(KEY, CHECKPOINT) == sum(counter < played[::2][-1] for counter in played[1::2])
    assert len(turns(journal)) < len(played[::2])


def test_who_plays_an_environment_that_seldom_comes_up_may_leave_out_no_more_than_others() -> None:
    weights, beacon = (1, 9), b"b" * 32
    drawn = environments(weights, beacon, 2_000)
    played = [counter for counter, environment in enumerate(drawn) if environment == 0]
    lucky, honest = Counters(), Counters()
    for counter in played[::10]:
        lucky.take(counter, drawn.__getitem__, weights)
    assert lucky.held_up
    waits = []
    for counter in [one for place, one in enumerate(played) if place % 10]:  # one in ten was lost
        honest.take(counter, drawn.__getitem__, weights)
        waits.append(honest.held_up)
    assert not any(waits)


@given(
    st.integers(1, 4).flatmap(
        lambda kinds: st.tuples(st.just(kinds), st.lists(st.integers(0, kinds - 1), min_size=1, max_size=60))
    ),
    st.randoms(use_true_random=False),
)
def test_counted_one_by_one_the_holes_are_those_of_the_definition(
    scene: tuple[int, list[int]], shuffle: random.Random
) -> None:
    kinds, drawn = scene
    order = shuffle.sample(range(len(drawn)), len(drawn))
    counters, taken = Counters(), set[int]()
    for counter in order:
        counters.take(counter, drawn.__getitem__, (1,) * kinds)
        taken.add(counter)
        played = {drawn[one] for one in taken}
        missing = [one for one in range(max(taken)) if one not in taken and drawn[one] in played]
        assert counters.holes == len(missing)
        assert counters.held_up == (len(missing) > 2 + (len(missing) + len(taken)) / 8)


def test_one_message_makes_only_so_many_tasks_be_derived() -> None:
    calls: list[int] = []

    def environment(counter: int) -> int:
        calls.append(counter)
        return counter % 2

    counters = Counters()
    counters.take(MAX_COUNTER_GAP, environment, (1, 1))
    assert len(calls) == DERIVED_AT_ONCE + 1
    assert counters.held_up
    assert abs(counters.holes - MAX_COUNTER_GAP / 2) <= 2  # by their weights
    for counter in range(0, 20, 2):
        counters.take(counter, environment, (1, 1))
    assert counters.derived == MAX_COUNTER_GAP + 1
    assert counters.holes == MAX_COUNTER_GAP / 2 - 10
    assert len(calls) < MAX_COUNTER_GAP + 20


# --- what a refusal leaves -----------------------------------------------------------------------


def test_groups_that_wait_for_holes_outlast_a_quarantine(journal: Journal) -> None:
    take(journal, 0, 9)
    journal.decide([refused(group(0).id, KEY, RemoteError(Code.DRIFT, "no"))], NOW)
    assert state(journal, 9) == "waiting"
    publish(journal, 3, 4)
    assert state(journal, 9) == "refused"
    record = journal.key(KEY)
    assert record is not None
    assert record.reputation.quarantines == 1
