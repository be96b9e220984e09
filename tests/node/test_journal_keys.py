"""Keys in the trainer's journal: from when they count, and which are forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from nous_node.node import journal_trim
from nous_node.node.store import Journal, StoredCheckpoint, StoredGroup
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import accepted

ALICE, BOB = b"A" * 32, b"B" * 32
OLD, NEW = b"0" * 32, b"1" * 32
NOW = 1_000_000


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.sqlite") as opened:
        opened.hear(ALICE, "test/1", NOW, 0)
        opened.hear(BOB, "test/1", NOW, 0)
        yield opened


def group(counter: int, key: bytes = ALICE, version: int = 1, checkpoint: bytes = NEW) -> StoredGroup:
    digest = sha256(b"%d %d" % (counter, version) + key + checkpoint).digest()
    return StoredGroup(digest, key, checkpoint, version, counter, digest, NOW, bytes(100))


def codes(errors: list[RemoteError | None]) -> list[Code | None]:
    return [None if error is None else error.code for error in errors]


def test_a_key_counts_for_versions_after_it_was_heard_of(journal: Journal) -> None:
    carol = b"C" * 32
    assert codes(journal.add_many([group(0, carol)])) == [Code.KEY_TOO_NEW]
    assert journal.hear(carol, "test/1", NOW, 1) == 1
    assert journal.hear(carol, "test/2", NOW + 5, 7) == 1
    assert journal.newcomers(1) == 1
    assert journal.newcomers(2) == 0
    errors = journal.add_many([group(1, carol, version=1), group(1, carol, version=2, checkpoint=OLD)])
    assert codes(errors) == [Code.KEY_TOO_NEW, None]
    record = journal.key(carol)
    assert record is not None
    assert (record.heard_ms, record.heard_version, record.seen_ms) == (NOW, 1, NOW + 5)
    assert (record.agent, record.refused) == ("test/2", 1)  # the group before its greeting is nobody's


def test_greetings_are_noted_together(journal: Journal) -> None:
    new = bytes([7]) * 32
    assert journal.hear_many({ALICE: "test/2", new: "test/1"}, NOW + 9, 3) == {ALICE: 0, new: 3}
    known, record = journal.key(ALICE), journal.key(new)
    assert known is not None
    assert record is not None
    assert (known.agent, known.heard_version, known.seen_ms) == ("test/2", 0, NOW + 9)
    assert (record.agent, record.heard_version, record.heard_ms) == ("test/1", 3, NOW + 9)


def test_keys_without_merit_are_forgotten_first(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.add(group(0))
    journal.decide([accepted(group(0).id, ALICE, 1)], NOW)
    for number in range(5):
        journal.hear(bytes([number]) * 32, "flood", NOW + number, 0)
    monkeypatch.setattr(journal_trim, "KEPT_KEYS", 2)
    monkeypatch.setattr(journal_trim, "FORGOTTEN_KEYS", 0)
    journal.trim()
    assert journal.stats().keys == 2
    assert journal.key(ALICE) is not None
    assert journal.key(bytes([4]) * 32) is not None


def test_many_keys_are_forgotten_at_once_and_then_none_for_a_while(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_trim, "KEPT_KEYS", 8)
    monkeypatch.setattr(journal_trim, "FORGOTTEN_KEYS", 3)
    known = []
    for version in range(2 * journal_trim.COUNTED_EVERY + 1):
        if version % 2 == 0:
            journal.hear(bytes([version]) * 32, "flood", NOW + version, 0)
        journal.publish(StoredCheckpoint(version, bytes([version]) * 32, b"", "", NOW, {}, {}), [])
        known.append(journal.stats().keys)
    start = known[0]
    assert known[journal_trim.COUNTED_EVERY] == 5  # where they are counted
    assert known[journal_trim.COUNTED_EVERY - 1] == start + 7
    assert known[-1] == 5
    assert journal.key(bytes([2 * journal_trim.COUNTED_EVERY]) * 32) is not None


def test_answers_to_keys_that_nobody_knows_are_bounded_also_between_publications(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_trim, "KEPT_RECEIPTS", 8)
    for number in range(20):
        journal.add_many([group(number, b"N" * 32), group(number, b"M" * 32)])
    unsent = journal.unsent_receipts(100)
    assert [receipt.rollout for receipt in unsent[-2:]] == [
        group(19, key).id for key in (b"N" * 32, b"M" * 32)
    ]
    assert len(unsent) == 8
