"""`nous-node peers`: a trainer's keys as its journal has them, for people and for programs."""

from __future__ import annotations

import re
import shutil
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from nous_node.node.network_stats import Offender
from nous_node.node.peers import KeyStatus, chosen, lines, participants, print_peers
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal, StoredGroup
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.identity import Identity, peer_id
from nous_node.protocol.receipts import accepted, refused

NOW = 1_800_000_000_000
GOOD, BAD, NEW = (Identity.from_seed(seed * 32).key for seed in (b"g", b"b", b"n"))
STRANGER = Identity.from_seed(b"s" * 32).peer_id
HOSTILE = "evil\x1b[2J\u202e client"


@pytest.fixture
def home(tmp_path: Path, base_run: RunFolder) -> Path:
    (tmp_path / "runs" / "tea").mkdir(parents=True)
    shutil.copy(base_run.path / "run.envelope", tmp_path / "runs" / "tea")
    return tmp_path


@pytest.fixture
def folder(home: Path) -> RunFolder:
    return RunFolder.open(home / "runs" / "tea")


def fill(journal: Journal) -> None:
    """An honest key, one in quarantine, and one that has sent nothing."""
    for key, agent in ((GOOD, "nous-node/1"), (BAD, HOSTILE), (NEW, "")):
        journal.hear(key, agent, NOW, -1)
    for number in range(8):
        key = GOOD if number % 2 else BAD
        digest = sha256(b"%d" % number).digest()
        journal.add(StoredGroup(digest, key, bytes(32), 0, number // 2, digest, NOW, b"data"))
        error = RemoteError(Code.REWARD_MISMATCH, "no") if number else RemoteError(Code.STALE, "late")
        receipt = accepted(digest, key, 50) if key == GOOD else refused(digest, key, error)
        journal.decide([receipt], NOW)
    journal.decide([refused(bytes(32), BAD, RemoteError(Code.DRIFT, "no"))], NOW)  # of no group: ignored
    digest = sha256(b"last").digest()
    journal.add(StoredGroup(digest, BAD, bytes(32), 0, 4, digest, NOW, b"data"))
    journal.decide([refused(digest, BAD, RemoteError(Code.DRIFT, "no"))], NOW)
    journal.offended([Offender(peer_id(BAD), 20, NOW + 300_000), Offender(STRANGER, 3)], NOW)


@pytest.fixture
def told(folder: RunFolder) -> tuple[list[str], dict[str, KeyStatus]]:
    """Half a minute later."""
    with Journal.open(folder.journal) as journal:
        fill(journal)
    keys, others = participants(folder, NOW / 1000 + 30)
    return lines("tea", keys, others, NOW / 1000 + 30), {one.key: one for one in keys}


def test_each_key_has_its_state_its_counts_and_its_faults(
    told: tuple[list[str], dict[str, KeyStatus]],
) -> None:
    _, keys = told
    good, bad, new = (keys[key.hex()] for key in (GOOD, BAD, NEW))
    assert next(iter(keys)) == GOOD.hex()
    assert (good.state, good.accepted, good.credit, good.rank, good.of) == ("probation", 4, 200, 1, 1)
    assert (bad.state, bad.until, bad.quarantines) == ("quarantine", NOW / 1000 + 60, 1)
    assert bad.refused == {"reward-mismatch": 3, "drift": 1, "stale": 1}
    assert next(iter(bad.refused)) == "reward-mismatch"
    assert (bad.score, bad.rank, bad.faults, bad.refused_until) == (4.0, 0, 20, NOW / 1000 + 300)
    assert (new.state, new.accepted, new.refused, new.rank) == ("probation", 0, {}, 0)


def test_the_table_says_until_when_and_escapes_what_others_wrote(
    told: tuple[list[str], dict[str, KeyStatus]],
) -> None:
    (head, *rows, faults), _ = told
    assert head.split() == [
        "key",
        "state",
        "accepted",
        "refused",
        "credit",
        "debit",
        "rank",
        "score",
        "faults",
        "seen",
        "agent",
    ]
    bad = next(row for row in rows if row.startswith(BAD.hex()[:16]))
    assert re.search(r"quarantine until (\d{4}-\d\d-\d\d )?\d\d:\d\d", bad)
    assert "5 (reward-mismatch 3, drift 1, stale 1)" in bad
    assert "20 (refused)" in bad
    assert "30 s ago" in bad
    assert r"evil\x1b[2J" in bad
    assert faults == f"faults of peers without a key here: {STRANGER} 3"
    assert not any("\x1b" in row or "\u202e" in row for row in rows)


def test_a_quarantine_that_is_over_is_told_as_over(folder: RunFolder) -> None:
    """Also where no trainer has run since."""
    with Journal.open(folder.journal) as journal:
        fill(journal)
    keys, _ = participants(folder, NOW / 1000 + 60)
    assert {one.state for one in keys} == {"probation"}


def test_it_reads_while_a_trainer_writes(
    home: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal.open(folder.journal) as journal:
        fill(journal)
        print_peers(None, home, json=True)
        journal.hear(b"x" * 32, "later", NOW, 0)
    found = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["kind"] for one in found] == ["key"] * 3 + ["connection"]
    assert {one["agent"] for one in found[:3]} == {"nous-node/1", HOSTILE, ""}


def test_json_lines_hold_no_raw_control_characters(
    home: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal.open(folder.journal) as journal:
        fill(journal)
    print_peers("tea", home, json=True)
    assert "\x1b" not in capsys.readouterr().out


def test_a_run_that_was_never_trained_has_nobody(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_peers("tea", home, json=False)
    assert capsys.readouterr().out == "Nobody has taken part in run yet.\n"


def test_which_run_is_said_where_it_is_not_clear(tmp_path: Path, home: Path) -> None:
    with pytest.raises(LocalError, match=r"No run is trained in .*nous-node init NAME --home X"):
        chosen(tmp_path / "empty", None, " --home X")
    assert chosen(home, None).path.name == "tea"
    (home / "runs" / "oats").mkdir()
    (home / "runs" / "oats" / "run.envelope").write_bytes(b"")
    with pytest.raises(LocalError, match=r"Several runs are trained in .*: oats, tea"):
        chosen(home, None)
    with pytest.raises(LocalError, match="There is no run in"):
        chosen(home, "coffee")
    with pytest.raises(LocalError, match="cannot be called"):
        chosen(home, "../tea")
