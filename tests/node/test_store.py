"""The trainer's journal."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from nous_node.node import journal_trim
from nous_node.node.home import DamagedError, DiskFullError, StorageError
from nous_node.node.store import Journal, StoredCheckpoint, StoredGroup
from nous_node.protocol.constants import MAX_CHAIN, MAX_COUNTER_GAP
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.receipts import Receipt, accepted, refused

ALICE, BOB = b"A" * 32, b"B" * 32
OLD, NEW = b"0" * 32, b"1" * 32
NOW = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal.open(path) as opened:
        opened.hear(ALICE, "test/1", NOW, 0)
        opened.hear(BOB, "test/1", NOW, 0)
        yield opened


def group(
    counter: int,
    key: bytes = ALICE,
    version: int = 1,
    checkpoint: bytes = NEW,
    size: int = 100,
    salt: bytes = b"",
    seal: bytes = b"",
) -> StoredGroup:
    """`salt` is in the content, `seal` in the envelope only."""
    digest = sha256(b"%d %d" % (counter, version) + key + checkpoint + salt).digest()
    rollout = sha256(digest + seal).digest()
    return StoredGroup(rollout, key, checkpoint, version, counter, digest, NOW, bytes(size))


def checkpoint(version: int) -> StoredCheckpoint:
    digest = sha256(b"%d" % version).digest()
    return StoredCheckpoint(
        version, digest, b"manifest", f"/c/{version}", NOW, {"loss": 0.5}, {"greedy": 0.75}
    )


def codes(errors: list[RemoteError | None]) -> list[Code | None]:
    return [None if error is None else error.code for error in errors]


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


def test_publishing_uses_groups_once(journal: Journal) -> None:
    groups = [group(counter) for counter in range(3)]
    journal.add_many(groups)
    journal.decide([accepted(groups[0].id, ALICE, 1)], NOW)
    journal.publish(checkpoint(0), [groups[0].id, groups[1].id])
    assert [one.id for one in journal.unused()] == [groups[2].id]
    journal.publish(checkpoint(1), [groups[0].id, groups[2].id])
    assert journal.unused() == []
    assert journal.count_pending() == 0


def test_published_checkpoints_come_back_as_they_were(journal: Journal) -> None:
    assert journal.last_checkpoint() is None
    for version in range(4):
        journal.publish(checkpoint(version), [])
    assert journal.checkpoints(2) == [checkpoint(2), checkpoint(3)]
    assert len(journal.checkpoints()) == 4
    assert journal.last_checkpoint() == checkpoint(3)


def test_a_publication_is_on_the_disk_before_it_returns_and_other_transactions_need_not_be(
    journal: Journal,
) -> None:
    """After a power failure no version is signed again with other content. [CKP-17]"""
    connection, told = journal._database._connection, []
    connection.set_trace_callback(told.append)
    journal.publish(checkpoint(0), [])
    journal.add(group(0))
    with pytest.raises(LocalError):
        journal.publish(checkpoint(7), [])
    connection.set_trace_callback(None)
    marks = [one for one in told if one.startswith(("PRAGMA synchronous", "COMMIT", "ROLLBACK"))]
    flushed = ["PRAGMA synchronous=FULL", "COMMIT", "PRAGMA synchronous=NORMAL"]
    assert marks[:3] == flushed
    assert marks[-3:] == [flushed[0], "ROLLBACK", flushed[2]]
    assert set(marks[3:-3]) == {"COMMIT"}


def test_a_version_may_leap_above_the_last_where_that_is_wanted(journal: Journal) -> None:
    journal.publish(checkpoint(0), [])
    journal.publish(checkpoint(70), [], leap=True)
    journal.publish(checkpoint(71), [])
    with pytest.raises(LocalError, match="cannot follow version 71"):
        journal.publish(checkpoint(71), [], leap=True)
    assert [one.version for one in journal.checkpoints()] == [0, 70, 71]


def test_a_version_that_does_not_follow_changes_nothing(journal: Journal) -> None:
    journal.add(group(0))
    journal.publish(checkpoint(0), [])
    for version in (0, 2):
        with pytest.raises(LocalError, match="cannot follow version 0"):
            journal.publish(checkpoint(version), [group(0).id])
    assert len(journal.unused()) == 1
    assert journal.last_checkpoint() == checkpoint(0)


def test_nothing_journalled_is_lost_by_kill_9(path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from nous_node.node.store import Journal, StoredCheckpoint, StoredGroup\n"
        "journal = Journal.open(Path(sys.argv[1]))\n"
        "journal.hear(b'A' * 32, 'test', 1, 0)\n"
        "def group(i): return StoredGroup(bytes([i]) * 32, b'A' * 32, b'1' * 32, 1, i, b'd', 1, bytes(999))\n"
        "for i in range(0, 60, 10): journal.add_many([group(i + j) for j in range(10)])\n"
        "used = [group(i).id for i in range(15)]\n"
        "journal.publish(StoredCheckpoint(0, b'h' * 32, b'm', '/c', 1, {}, {}), used)\n"
        "print(journal.next_seq(), flush=True)\n"
        "with journal._database.transaction() as connection:\n"
        "    connection.execute('DELETE FROM groups')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    with Journal.open(path) as journal:
        assert [one.counter for one in journal.unused()] == list(range(15, 60))
        last = journal.last_checkpoint()
        assert last is not None
        assert last.version == 0
        assert journal.next_seq() > int(done.stdout)
        assert codes(journal.add_many([group(3)])) == [Code.COUNTER_REUSED]


def test_the_file_stops_growing(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_trim, "KEPT_VERSIONS", 2)
    monkeypatch.setattr(journal_trim, "KEPT_MANIFESTS", 3)
    monkeypatch.setattr(journal_trim, "KEPT_RECEIPTS", 5)
    for version in range(12):
        name = sha256(b"checkpoint %d" % version).digest()
        groups = [group(counter, version=version + 1, checkpoint=name) for counter in range(4)]
        journal.add_many(groups)
        error = RemoteError(Code.STALE, "late")
        journal.decide([refused(one.id, ALICE, error) for one in groups[:2]], NOW)
        journal.publish(checkpoint(version), [groups[2].id])
    count = journal._database.number
    assert len(journal.unused()) == 12  # one of each version is still wanted
    assert count("SELECT count(*) FROM groups WHERE state <> 'pending'") == 3 * 4
    assert count("SELECT count(*) FROM envelopes") == 12 + 3 * 4
    assert count("SELECT count(*) FROM counters") == 4
    assert count("SELECT count(*) FROM receipts") == 5
    assert [bool(one.envelope) for one in journal.checkpoints()] == [False] * 9 + [True] * 3
    assert journal.stats().refused == {"stale": 24}


def manifests(journal: Journal) -> list[int]:
    """Versions whose manifest is here."""
    return [one.version for one in journal.checkpoints() if one.envelope]


def test_manifests_before_a_leap_leave_as_all_others_do(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_trim, "KEPT_MANIFESTS", 3)
    for version in range(5):
        journal.publish(checkpoint(version), [])
    journal.publish(checkpoint(1_000), [], leap=True)
    assert manifests(journal) == [3, 4, 1_000]
    for version in (1_001, 1_002, 1_003):
        journal.publish(checkpoint(version), [])
    assert manifests(journal) == [1_001, 1_002, 1_003]


def test_manifests_of_versions_whose_files_stay_are_kept(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_trim, "KEPT_MANIFESTS", 3)
    for version in range(20):
        journal.keep_manifests({2, 3, version})
        journal.publish(checkpoint(version), [])
    assert manifests(journal) == [2, 3, 17, 18, 19]
    journal.keep_manifests({2, 18})  # what is new stays in any case
    assert manifests(journal) == [2, 17, 18, 19]
    journal.keep_manifests(())
    assert manifests(journal) == [17, 18, 19]


def test_as_many_manifests_are_kept_as_a_chain_within_the_staleness_needs() -> None:
    longest, most_stale = MAX_CHAIN, 8
    assert longest + most_stale + 2 <= journal_trim.KEPT_MANIFESTS


def test_envelopes_for_audits_have_a_limit_in_bytes(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_trim, "KEPT_BYTES", 2_500)
    groups = [group(counter, size=1_000) for counter in range(6)]
    journal.add_many(groups)
    journal.publish(checkpoint(0), [one.id for one in groups[:5]])
    count = journal._database.number
    assert count("SELECT count(*) FROM envelopes") == 3
    assert count("SELECT count(*) FROM groups") == 6
    journal.trim()
    assert count("SELECT count(*) FROM envelopes") == 3
    assert [one.id for one in journal.unused()] == [groups[5].id]


def test_a_full_disk_is_told_and_loses_nothing(journal: Journal) -> None:
    journal.add(group(0))
    connection = journal._database._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(DiskFullError, match="disk is full"):
        journal.add_many([group(counter, size=100_000) for counter in range(1, 5)])
    assert [one.counter for one in journal.unused()] == [0]
    connection.execute("PRAGMA max_page_count = 1000000")
    assert journal.add_many([group(counter) for counter in range(1, 5)]) == [None] * 4


def test_damage_inside_the_file_is_told(path: Path) -> None:
    with Journal.open(path) as journal:
        journal.hear(ALICE, "test", NOW, 0)
        journal.add_many([group(counter, size=30_000) for counter in range(50)])
    data = bytearray(path.read_bytes())
    for page in range(2, len(data) // 16_384):
        data[page * 16_384 : page * 16_384 + 64] = b"\xa5" * 64
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"journal .* is damaged .* move it"):
        Journal.open(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("content", [b"garbage" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_told_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="move it"):
        Journal.open(path)
    assert path.read_bytes() == content


def test_the_outbox_of_a_volunteer_is_no_journal(path: Path) -> None:
    from nous_node.node.outbox import Outbox

    Outbox.open(path).__exit__()
    with pytest.raises(DamagedError, match="no journal"):
        Journal.open(path)


def test_a_journal_that_another_process_is_writing_is_told(journal: Journal, path: Path) -> None:
    journal._database._connection.execute("PRAGMA busy_timeout = 1")
    with Journal.open(path) as other:
        with other._database.transaction(), pytest.raises(StorageError, match="another process"):
            journal.add(group(0))
        journal.add(group(0))


def test_it_can_be_looked_at_while_it_is_written(journal: Journal, path: Path) -> None:
    journal.add(group(0))
    with Journal.read(path) as other:
        assert other.stats().pending == 1
        with pytest.raises(StorageError):
            other.add(group(1))


def test_receipts_survive_a_restart(path: Path) -> None:
    with Journal.open(path) as journal:
        journal.hear(ALICE, "test", NOW, 0)
        journal.add(group(0))
        journal.decide([accepted(group(0).id, ALICE, 7)], NOW)
    with Journal.open(path) as journal:
        assert journal.unsent_receipts(9) == [Receipt(group(0).id, ALICE, "accepted", "", None, None, 7)]


def test_the_file_is_private(journal: Journal, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert sqlite3.sqlite_version_info >= (3, 35)  # RETURNING
