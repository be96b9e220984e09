"""Audits where checkpoints are gone, changed, or come from elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nous_node.protocol.envelope import Kind, seal, unseal

from .records import AS_RECORDED, HONEST, NOW, VOLUNTEER, Record, edited_reward, outcomes


def test_groups_of_a_checkpoint_that_is_gone_are_unverifiable(record: Record, audited: Any) -> None:
    shutil.rmtree(record.folder.checkpoint(1))
    status, groups, summary, _ = audited(record.path)
    assert status == 0
    assert outcomes(groups) == AS_RECORDED[: HONEST + 2] + ["unverifiable"] * HONEST
    assert {group["text"] for group in groups[-HONEST:]} == {"checkpoint gone"}
    assert {group["verdict"] for group in groups[-HONEST:]} == {"unverifiable"}
    assert summary["unverifiable"] == HONEST


def test_rewards_are_recomputed_without_weights(record: Record, audited: Any) -> None:
    """Version 0 is kept for its tokenizer, and serves groups of versions that are gone."""
    body = edited_reward(unseal(record.rollouts()[-1]).content())
    run = record.folder.run
    data = seal(VOLUNTEER, Kind.ROLLOUT, run, body, seq=10**6, ts=NOW)
    last = unseal(record.rollouts()[-1]).id
    record.change("UPDATE envelopes SET data = ? WHERE arrival = (SELECT max(arrival) FROM groups)", data)
    record.change("UPDATE receipts SET id = ? WHERE id = ?", unseal(data).id, last)
    record.change("UPDATE groups SET id = ? WHERE id = ?", unseal(data).id, last)
    shutil.rmtree(record.folder.checkpoint(1))
    status, groups, _, _ = audited(record.path)
    assert status == 1
    assert (groups[-1]["outcome"], groups[-1]["code"]) == ("differs", "reward-mismatch")


def test_a_checkpoint_from_elsewhere_is_used_where_its_files_are_right(
    record: Record, audited: Any, tmp_path: Path
) -> None:
    moved = tmp_path / "kept"
    shutil.move(record.folder.checkpoint(1), moved)
    status, groups, _, notes = audited(record.path, moved)
    assert status == 0
    assert outcomes(groups) == AS_RECORDED
    assert notes == [f"Version 1 is verified against {moved}."]


def test_another_checkpoint_is_not_taken_for_one_that_is_gone(record: Record, audited: Any) -> None:
    shutil.rmtree(record.folder.checkpoint(1))
    status, groups, _, notes = audited(record.path, record.folder.checkpoint(0))
    assert status == 0
    assert outcomes(groups)[-HONEST:] == ["unverifiable"] * HONEST
    assert "is not version 1" in groups[-1]["text"]
    assert notes == []


def test_a_checkpoint_that_changed_on_the_disk_judges_nobody(record: Record, audited: Any) -> None:
    weights = record.folder.checkpoint(1) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    _, groups, _, _ = audited(record.path)
    assert outcomes(groups)[-HONEST:] == ["unverifiable"] * HONEST
    assert "is not version 1" in groups[-1]["text"]


@pytest.mark.parametrize("envelope", [b"", b"nonsense", "text"])
def test_without_its_signed_manifest_nothing_says_what_a_checkpoint_assigned(
    record: Record, audited: Any, envelope: Any
) -> None:
    record.change("UPDATE checkpoints SET envelope = ? WHERE version = 1", envelope)
    _, groups, _, _ = audited(record.path)
    assert outcomes(groups)[-HONEST:] == ["unverifiable"] * HONEST
    assert "manifest" in groups[-1]["text"] or "damaged" in groups[-1]["text"]


def test_a_checkpoint_with_another_ones_manifest_is_damaged(record: Record, audited: Any) -> None:
    record.change(
        "UPDATE checkpoints SET envelope = (SELECT envelope FROM checkpoints WHERE version = 0) "
        "WHERE version = 1"
    )
    _, groups, _, _ = audited(record.path)
    assert outcomes(groups)[-HONEST:] == ["unverifiable"] * HONEST
    assert "another hash" in groups[-1]["text"]


def test_a_journal_from_elsewhere_reads_no_folder_outside_its_own(
    record: Record, audited: Any, tmp_path: Path
) -> None:
    shutil.move(record.folder.checkpoint(1), tmp_path / "outside")
    record.change("UPDATE checkpoints SET folder = '../outside' WHERE version = 1")
    _, groups, _, _ = audited(record.path)
    assert outcomes(groups)[-HONEST:] == ["unverifiable"] * HONEST


def test_where_nothing_could_be_verified_it_is_not_a_success(record: Record, audited: Any) -> None:
    shutil.rmtree(record.path / "checkpoints")
    status, _, summary, _ = audited(record.path)
    assert status == 2
    assert "--checkpoint DIR" in summary["text"]
