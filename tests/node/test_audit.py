"""Recorded groups verified again: from an honest journal, and from one that was tampered with."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nous_node.node.audit import run_audit
from nous_node.node.home import DamagedError, StorageError
from nous_node.node.store import Journal
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import LocalError

from .records import AS_RECORDED, HONEST, NOW, VOLUNTEER, Record, outcomes


@pytest.mark.parametrize("name", ["", "journal.sqlite"])
def test_an_honest_journal_is_confirmed_group_by_group(record: Record, audited: Any, name: str) -> None:
    code, groups, summary, notes = audited(record.path / name)
    assert code == 0
    assert notes == []
    assert outcomes(groups) == AS_RECORDED
    assert [group["rollout"] for group in groups] == [unseal(data).id.hex() for data in record.rollouts()]
    assert {group["peer"] for group in groups} == {VOLUNTEER.key.hex()}
    assert [group["version"] for group in groups] == [0] * (HONEST + 2) + [1] * HONEST
    assert [group["counter"] for group in groups] == [*range(HONEST + 2), *range(HONEST)]
    bad = groups[HONEST]
    assert (bad["verdict"], bad["code"]) == ("refused", "reward-mismatch")
    assert bad["measured"] == pytest.approx(0.125)
    assert (summary["groups"], summary["differ"], summary["codes"]) == (
        len(groups),
        0,
        {"reward-mismatch": 1},
    )
    assert all(group["measured"] <= group["threshold"] for group in groups if group["verdict"] == "accepted")


def test_people_get_a_line_a_group_and_a_sentence(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_audit(record.path, None, None, json=False) == 0
    heading, *lines, last = capsys.readouterr().out.splitlines()
    assert heading.split() == ["rollout", "recorded", "now", "measured", "threshold"]
    assert [line.split()[0] for line in lines] == [unseal(data).id.hex()[:16] for data in record.rollouts()]
    assert re.search(r"  refused reward-mismatch +refused reward-mismatch +0\.125 +1e-06$", lines[HONEST])
    assert "no verdict" in lines[HONEST + 1]
    assert last == "8 groups: 7 verdicts confirmed, 0 differ, 1 had none."


def test_an_audit_changes_nothing_and_goes_on_beside_a_trainer(record: Record, audited: Any) -> None:
    with Journal.open(record.folder.journal) as journal:
        journal.hear(b"w" * 32, "test/1", NOW, 1)
        before = journal.stats()
        assert audited(record.path)[0] == 0
        assert journal.stats() == before


# --- a journal that was tampered with -------------------------------------------------------------

FIRST = "WHERE id = (SELECT id FROM groups ORDER BY arrival LIMIT 1)"


@pytest.mark.parametrize(
    ("statement", "code", "text"),
    [
        (f"UPDATE receipts SET verdict = 'refused', code = 'logprob-mismatch' {FIRST}", "", "journal calls"),
        (f"UPDATE receipts SET credit = credit + 1 {FIRST}", "", "trained tokens were credited"),
        (f"UPDATE receipts SET peer = zeroblob(32) {FIRST}", "", "another key"),
        (f"UPDATE groups SET state = 'refused' {FIRST}", "", "journal calls"),
        (f"UPDATE groups SET key = zeroblob(32) {FIRST}", "hash-mismatch", "another key"),
        (f"UPDATE groups SET counter = 77 {FIRST}", "hash-mismatch", "another counter"),
        (f"UPDATE groups SET version = 1 {FIRST}", "hash-mismatch", "another version"),
        (f"UPDATE groups SET state = 'trusted' {FIRST}", "malformed", "row is damaged"),
        (f"UPDATE groups SET counter = 'one' {FIRST}", "malformed", "row is damaged"),
        ("UPDATE envelopes SET data = x'00' WHERE arrival = 1", "wrong-type", ""),
        ("UPDATE envelopes SET data = x'' WHERE arrival = 1", "malformed", "no envelope"),
        ("UPDATE envelopes SET data = zeroblob(2000000) WHERE arrival = 1", "oversize", ""),
        ("UPDATE envelopes SET data = 'text' WHERE arrival = 1", "malformed", "row is damaged"),
    ],
)
def test_a_row_that_was_tampered_with_differs_alone(
    record: Record, audited: Any, statement: str, code: str, text: str
) -> None:
    record.change(statement)
    status, groups, summary, _ = audited(record.path)
    assert status == 1
    assert outcomes(groups) == ["differs", *AS_RECORDED[1:]]
    assert groups[0]["code"] == code
    assert text in groups[0]["text"]
    assert summary["differ"] == 1


def test_a_refusal_that_was_turned_into_an_acceptance_differs(record: Record, audited: Any) -> None:
    bad = unseal(record.rollouts()[HONEST]).id
    record.change("UPDATE groups SET state = 'used', used_version = 1 WHERE id = ?", bad)
    record.change("UPDATE receipts SET verdict = 'accepted', code = '', credit = 9 WHERE id = ?", bad)
    status, groups, _, _ = audited(record.path)
    assert status == 1
    assert (groups[HONEST]["outcome"], groups[HONEST]["recorded"]) == ("differs", "accepted")
    assert groups[HONEST]["code"] == "reward-mismatch"


def test_another_code_than_was_recorded_differs(record: Record, audited: Any) -> None:
    bad = unseal(record.rollouts()[HONEST]).id
    record.change("UPDATE receipts SET code = 'sampling-mismatch' WHERE id = ?", bad)
    assert audited(record.path)[0] == 1


@pytest.mark.parametrize("code", ["copied", "drift", "wrong-checkpoint", "stale"])
def test_what_rests_on_the_trainers_memory_is_told_and_not_held_against_it(
    record: Record, audited: Any, code: str
) -> None:
    record.change(f"UPDATE groups SET state = 'refused' {FIRST}")
    record.change(f"UPDATE receipts SET verdict = 'refused', code = ?, credit = 0 {FIRST}", code)
    status, groups, _, _ = audited(record.path)
    assert status == 0
    assert (groups[0]["outcome"], groups[0]["verdict"]) == ("unverifiable", "accepted")
    assert groups[0]["text"].startswith(f"{code} rests on")


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_damaged_envelope_is_refused_and_its_neighbours_stand(
    record: Record, audited: Any, place: float
) -> None:
    data = bytearray(record.rollouts()[1])
    data[int(place * len(data))] ^= 1
    record.change("UPDATE envelopes SET data = ? WHERE arrival = 2", bytes(data))
    status, groups, _, _ = audited(record.path)
    assert status == 1
    assert outcomes(groups) == [AS_RECORDED[0], "differs", *AS_RECORDED[2:]]
    assert groups[1]["verdict"] == "refused"


def test_verdicts_without_receipts_are_compared_by_their_states(record: Record, audited: Any) -> None:
    record.change("DELETE FROM receipts")
    status, groups, _, _ = audited(record.path)
    assert status == 0
    assert outcomes(groups) == AS_RECORDED


def test_a_group_that_was_accepted_unseen_and_does_not_hold_differs(record: Record, audited: Any) -> None:
    bad = unseal(record.rollouts()[HONEST]).id
    record.change("UPDATE groups SET state = 'dropped', audited = 0 WHERE id = ?", bad)
    record.change("UPDATE receipts SET verdict = 'accepted', code = '' WHERE id = ?", bad)
    status, groups, _, _ = audited(record.path)
    assert status == 1
    assert groups[HONEST]["outcome"] == "differs"
    assert groups[HONEST]["text"].endswith("It was accepted without an audit.")


def test_a_code_in_a_journal_is_foreign_text(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    record.change(f"UPDATE receipts SET code = ? {FIRST}", "\x1b[2J\u202ecode")
    run_audit(record.path, None, None, json=False)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\u202e" not in text


# --- what is no journal ---------------------------------------------------------------------------


def test_an_empty_journal_is_in_order(make_folder: Any, audited: Any) -> None:
    folder = make_folder()
    Journal.open(folder.journal).__exit__()
    status, groups, summary, _ = audited(folder.path)
    assert (status, groups) == (0, [])
    assert summary["text"] == "There is no recorded group to verify."


def test_what_is_no_journal_is_told(record: Record, tmp_path: Path) -> None:
    empty = tmp_path / "folder"
    empty.mkdir()
    with pytest.raises(LocalError, match="There is no"):
        run_audit(empty, None, None, json=False)
    text = record.path / "learning.toml"
    with pytest.raises(LocalError, match="neither a journal nor a file of envelopes"):
        run_audit(text, None, None, json=False)
    foreign = record.path / "other.sqlite"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE cookies(name)")
    with pytest.raises(DamagedError, match="another program's"):
        run_audit(foreign, None, None, json=False)
    record.folder.journal.write_bytes(record.folder.journal.read_bytes()[:20_000])
    with pytest.raises(StorageError, match="journal"):
        run_audit(record.path, None, None, json=False)


def test_the_manifest_is_needed_and_may_come_from_elsewhere(
    record: Record, audited: Any, tmp_path: Path
) -> None:
    manifest = shutil.move(record.path / "run.envelope", tmp_path / "elsewhere")
    with pytest.raises(LocalError, match="--manifest FILE"):
        run_audit(record.path, None, None, json=False)
    assert outcomes(audited(record.path, None, manifest)[1]) == AS_RECORDED
    for wrong in (record.folder.learning, tmp_path / "nowhere"):
        with pytest.raises(LocalError, match="manifest"):
            run_audit(record.path, None, wrong, json=False)
    with pytest.raises(LocalError, match="--checkpoint takes"):
        run_audit(record.path, tmp_path / "nowhere", None, json=False)
