"""The trainer's journal: what is published, what is forgotten, and what becomes of its file."""

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
from nous_node.node.store import Journal
from nous_node.protocol.constants import MAX_CHAIN
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.receipts import Receipt, accepted, refused

from .journals import ALICE, BOB, NOW, checkpoint, codes, group


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal.open(path) as opened:
        opened.hear(ALICE, "test/1", NOW, 0)
        opened.hear(BOB, "test/1", NOW, 0)
        yield opened


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
