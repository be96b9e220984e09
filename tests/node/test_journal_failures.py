"""Environments that fail over groups of a key: one fault a checkpoint, and soon no more of them are run."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from nous_node.node.journal_intake import MAX_FAILED
from nous_node.node.store import Journal, RunRules, StoredGroup
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import Receipt, accepted, refused

ALICE, BOB = b"A" * 32, b"B" * 32
OLD, NEW = b"0" * 32, b"1" * 32
NOW = 1_800_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal.open(path, RunRules(b"r" * 32, (1,), 2)) as opened:
        for key in (ALICE, BOB):
            opened.hear(key, "test/1", NOW, -1)
        yield opened


def group(counter: int, key: bytes = ALICE, checkpoint: bytes = NEW) -> StoredGroup:
    digest = sha256(b"%d" % counter + key + checkpoint).digest()
    return StoredGroup(digest, key, checkpoint, int(checkpoint == NEW), counter, digest, NOW, b"envelope")


def failed(one: StoredGroup) -> Receipt:
    return refused(one.id, one.key, RemoteError(Code.ENVIRONMENT_FAILED, "It hung."))


def fail(journal: Journal, count: int, checkpoint: bytes = NEW) -> None:
    groups = [group(counter, checkpoint=checkpoint) for counter in range(count)]
    journal.add_many(groups)
    journal.decide([failed(one) for one in groups], NOW)


def score(journal: Journal) -> float:
    record = journal.key(ALICE)
    assert record is not None
    return record.reputation.score


def code(journal: Journal, one: StoredGroup) -> str | None:
    receipt = journal.receipt(one.id)
    return receipt.code if receipt is not None else None


def test_it_is_half_a_fault_once_a_checkpoint(journal: Journal) -> None:
    fail(journal, 2)
    assert score(journal) == 0.5
    fail(journal, 1, OLD)
    assert score(journal) == 1.0


def test_after_some_what_has_no_verdict_is_refused_and_others_are_not(journal: Journal) -> None:
    rest = [group(MAX_FAILED), group(20)]  # the second waits for holes
    others = [group(0, BOB), group(0, checkpoint=OLD)]
    journal.add_many([group(counter) for counter in range(MAX_FAILED)] + rest + others)
    journal.decide([failed(group(counter)) for counter in range(MAX_FAILED - 1)], NOW)
    assert [code(journal, one) for one in rest] == [None, None]
    journal.decide([failed(group(MAX_FAILED - 1))], NOW)
    assert [code(journal, one) for one in rest] == [Code.ENVIRONMENT_FAILED] * 2
    assert {one.id for one in journal.unused()} == {one.id for one in others}
    assert score(journal) == 0.5
    assert journal._database.rows("SELECT value FROM numbers WHERE name LIKE 'waiting%'") == [(0,), (0,)]


def test_groups_that_come_later_are_refused_unseen_and_leave_no_holes(journal: Journal) -> None:
    fail(journal, MAX_FAILED)
    (error,) = journal.add_many([group(9)])
    assert error is not None
    assert error.code == Code.ENVIRONMENT_FAILED
    assert code(journal, group(9)) == Code.ENVIRONMENT_FAILED
    assert journal.holes(ALICE, NEW) == 0
    assert journal.add_many([group(0, checkpoint=OLD), group(0, BOB)]) == [None, None]
    assert score(journal) == 0.5


def test_groups_that_were_accepted_stay_so(journal: Journal) -> None:
    journal.add_many([group(0), group(1), group(2), group(3)])
    done = accepted(group(0).id, ALICE, 5)
    journal.decide([done, *(failed(group(counter)) for counter in (1, 2, 3))], NOW)
    assert journal.receipt(group(0).id) == done
    assert [one.id for one in journal.unused()] == [group(0).id]


def test_a_trainer_that_was_started_again_runs_some_more(journal: Journal, path: Path) -> None:
    fail(journal, MAX_FAILED)
    with Journal.open(path, RunRules(b"r" * 32, (1,), 2)) as again:
        assert again.add_many([group(9)]) == [None]
