"""The trainer's journal: groups, their receipts, and those that come again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nous_node.node import journal_trim
from nous_node.node.store import Journal
from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import accepted, refused

from .journals import ALICE, BOB, NEW, NOW, OLD, checkpoint, codes, group


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal.open(path) as opened:
        opened.hear(ALICE, "test/1", NOW, 0)
        opened.hear(BOB, "test/1", NOW, 0)
        yield opened


def test_groups_are_handed_out_in_order_of_arrival(journal: Journal) -> None:
    groups = [group(2), group(0), group(1, BOB), group(1)]
    assert journal.add_many(groups) == [None] * 4
    assert journal.count_pending() == 4
    stored = journal.unused()
    assert [one.id for one in stored] == [one.id for one in groups]
    assert [one.arrival for one in stored] == [1, 2, 3, 4]
    assert stored[0].envelope == groups[0].envelope
    assert [one.id for one in journal.unused(2, after=1)] == [groups[1].id, groups[2].id]


def test_groups_are_handed_out_by_their_bytes_and_one_at_least(journal: Journal) -> None:
    journal.add_many([group(counter, size=size) for counter, size in enumerate((100, 100, 500, 100))])
    assert [one.counter for one in journal.unused(size=250)] == [0, 1]
    assert [one.counter for one in journal.unused(after=2, size=250)] == [2]
    assert [one.counter for one in journal.unused(after=3, size=250)] == [3]
    assert journal.unused(after=4, size=250) == []


def test_a_group_that_comes_again_is_a_duplicate_and_harms_nothing(journal: Journal) -> None:
    assert codes(journal.add_many([group(0), group(0)])) == [None, Code.DUPLICATE]
    with pytest.raises(RemoteError) as caught:
        journal.add(group(0))
    assert caught.value.code is Code.DUPLICATE
    assert len(journal.unused()) == 1


def test_another_group_with_the_same_counter_is_refused(journal: Journal) -> None:
    journal.add(group(0))
    other = group(0, salt=b"another")
    with pytest.raises(RemoteError) as caught:
        journal.add(other)
    assert caught.value.code is Code.COUNTER_REUSED
    receipt = journal.receipt(other.id)
    assert receipt is not None
    assert (receipt.verdict, receipt.code, receipt.peer) == ("refused", "counter-reused", ALICE)
    assert journal.add_many([group(0, BOB), group(0, checkpoint=OLD)]) == [None, None]


def test_a_counter_far_above_the_smallest_unseen_one_is_refused(journal: Journal) -> None:
    farthest = group(MAX_COUNTER_GAP)
    beyond = group(MAX_COUNTER_GAP + 1)
    assert codes(journal.add_many([beyond, farthest])) == [Code.COUNTER_GAP, None]
    journal.add(group(0))
    journal.add(group(MAX_COUNTER_GAP + 1, salt=b"again"))


def test_holes_are_the_counters_that_were_skipped(journal: Journal) -> None:
    assert journal.holes(ALICE, NEW) == 0
    journal.add_many([group(0), group(3)])
    assert journal.holes(ALICE, NEW) == 2
    journal.add_many([group(2), group(1)])
    assert journal.holes(ALICE, NEW) == 0
    with pytest.raises(RemoteError) as caught:
        journal.add(group(2, salt=b"another"))
    assert (caught.value.code, caught.value.threshold) == (Code.COUNTER_REUSED, 4)


def test_verdicts_become_receipts_that_wait_to_be_sent(journal: Journal) -> None:
    groups = [group(counter) for counter in range(3)]
    journal.add_many(groups)
    error = RemoteError(Code.REWARD_MISMATCH, "no", measured=0.5, threshold=0.1)
    verdicts = [accepted(groups[0].id, ALICE, 40), refused(groups[1].id, ALICE, error)]
    journal.decide(verdicts, NOW)
    assert journal.unsent_receipts(10) == verdicts
    assert journal.unsent_receipts(1) == verdicts[:1]
    journal.receipts_sent(verdicts)
    assert journal.unsent_receipts(10) == []
    assert [one.state for one in journal.unused()] == ["accepted", "pending"]
    stats = journal.stats()
    assert (stats.pending, stats.unused, stats.accepted, stats.credit) == (1, 1, 1, 40)
    assert stats.refused == {"reward-mismatch": 1}
    record = journal.key(ALICE)
    assert record is not None
    assert (record.accepted, record.refused, record.credit) == (1, 1, 40)


def test_the_first_verdict_stays(journal: Journal) -> None:
    journal.add(group(0))
    first = accepted(group(0).id, ALICE, 40)
    journal.decide([first, first], NOW)
    journal.decide([refused(group(0).id, ALICE, RemoteError(Code.STALE, "late"))], NOW)
    journal.decide([accepted(b"x" * 32, ALICE, 1)], NOW)
    assert journal.unsent_receipts(10) == [first]
    assert journal.stats().credit == 40


def test_a_group_that_comes_again_has_its_receipt_sent_again(journal: Journal) -> None:
    journal.add(group(0))
    receipt = accepted(group(0).id, ALICE, 40)
    journal.decide([receipt], NOW)
    journal.receipts_sent([receipt])
    assert codes(journal.add_many([group(0)])) == [Code.DUPLICATE]
    assert journal.unsent_receipts(10) == [receipt]


def test_a_group_sealed_anew_gets_a_receipt_of_its_own_and_no_credit(journal: Journal) -> None:
    """[GOS-12]"""
    first, early, late = group(0), group(0, seal=b"1"), group(0, seal=b"2")
    assert codes(journal.add_many([first, early])) == [None, Code.DUPLICATE]
    assert [one.id for one in journal.unused()] == [first.id]
    journal.decide([accepted(first.id, ALICE, 40)], NOW)
    receipts = [accepted(first.id, ALICE, 40), accepted(early.id, ALICE, 40)]
    assert journal.unsent_receipts(9) == receipts
    journal.receipts_sent(receipts)
    assert codes(journal.add_many([late])) == [Code.DUPLICATE]
    assert journal.unsent_receipts(9) == [accepted(late.id, ALICE, 40)]
    assert codes(journal.add_many([early, late])) == [Code.DUPLICATE] * 2
    assert len(journal.unsent_receipts(9)) == 2
    record, stats = journal.key(ALICE), journal.stats()
    assert record is not None
    assert (record.accepted, record.credit, stats.accepted, stats.credit) == (1, 40, 1, 40)
    assert (stats.unused, journal.holes(ALICE, NEW)) == (1, 0)


def test_a_refused_group_sealed_anew_stays_refused(journal: Journal) -> None:
    journal.add(group(0))
    error = RemoteError(Code.REWARD_MISMATCH, "no", measured=0.5, threshold=0.1)
    journal.decide([refused(group(0).id, ALICE, error)], NOW)
    assert codes(journal.add_many([group(0, seal=b"1")])) == [Code.DUPLICATE]
    receipt = journal.receipt(group(0, seal=b"1").id)
    assert receipt is not None
    assert (receipt.code, receipt.measured) == ("reward-mismatch", 0.5)
    assert journal.stats().refused == {"reward-mismatch": 1}


def test_a_repeat_is_known_after_a_restart_and_when_its_group_was_used(path: Path) -> None:
    with Journal.open(path) as journal:
        journal.hear(ALICE, "test", NOW, 0)
        assert codes(journal.add_many([group(0), group(0, seal=b"1")])) == [None, Code.DUPLICATE]
    with Journal.open(path) as journal:
        journal.decide([accepted(group(0).id, ALICE, 7)], NOW)
        assert journal.receipt(group(0, seal=b"1").id) == accepted(group(0, seal=b"1").id, ALICE, 7)
        journal.publish(checkpoint(0), [group(0).id])
        assert codes(journal.add_many([group(0, seal=b"2")])) == [Code.DUPLICATE]
        assert journal.receipt(group(0, seal=b"2").id) == accepted(group(0, seal=b"2").id, ALICE, 7)


def test_a_repeat_that_the_gossip_path_turned_away_is_answered_if_its_group_is_here(journal: Journal) -> None:
    journal.add(group(0))
    journal.decide([accepted(group(0).id, ALICE, 7)], NOW)
    assert journal.repeated(group(0, seal=b"1"))
    assert journal.receipt(group(0, seal=b"1").id) == accepted(group(0, seal=b"1").id, ALICE, 7)
    assert not journal.repeated(group(0, salt=b"another"))
    assert not journal.repeated(group(1))
    assert not journal.repeated(group(0, BOB))


def test_repeats_of_groups_that_are_forgotten_are_forgotten(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was too old to judge has no verdict that would have answered its repeats."""
    monkeypatch.setattr(journal_trim, "KEPT_VERSIONS", -10)
    journal.add_many([group(0), group(0, seal=b"1"), group(1), group(1, seal=b"1")])
    count = journal._database.number
    journal.trim()
    assert count("SELECT count(*) FROM repeats") == 2
    journal.publish(checkpoint(0), [group(0).id])
    assert count("SELECT count(*) FROM repeats") == 1
