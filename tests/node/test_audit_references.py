"""Audits of groups by reference: with their content in a journal, without it in recorded gossip."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from nous_node.node.stored_groups import enclosed
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.references import pack
from nous_node.protocol.rollouts import RolloutGroup

from .records import AS_RECORDED, NOW, VOLUNTEER, Record, edited_reward, outcomes


def referred(record: Record, number: int, body: bytes | None = None) -> tuple[bytes, bytes]:
    """Envelope and frame of the rollout of that number, had it been published by reference."""
    content = unseal(record.rollouts()[number]).content() if body is None else body
    group = RolloutGroup.from_bytes(content)
    reference, frame = pack(group.checkpoint, group.counter, content, 1_000)
    run = record.folder.run
    data = seal(VOLUNTEER, Kind.REFERENCE, run, reference.to_bytes(), seq=10**6 + number, ts=NOW)
    return data, frame


def replace(record: Record, number: int, data: bytes, stored: bytes) -> None:
    """In the journal, with its receipt."""
    before, after = unseal(record.rollouts()[number]).id, unseal(data).id
    record.change("UPDATE receipts SET id = ? WHERE id = ?", after, before)
    record.change(
        "UPDATE envelopes SET data = ? WHERE arrival = (SELECT arrival FROM groups WHERE id = ?)",
        stored,
        before,
    )
    record.change("UPDATE groups SET id = ? WHERE id = ?", after, before)


def test_a_group_by_reference_is_verified_again_as_any_other(record: Record, audited: Any) -> None:
    data, frame = referred(record, 0)
    replace(record, 0, data, enclosed(data, frame))
    status, groups, _, notes = audited(record.path)
    assert (status, notes) == (0, [])
    assert outcomes(groups) == AS_RECORDED
    assert groups[0]["rollout"] == unseal(data).id.hex()


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda data, frame: enclosed(data, frame[:-1]), "size-mismatch"),
        (lambda data, frame: enclosed(data, bytes(len(frame))), "bad-compression"),
        (lambda data, frame: enclosed(data[:10] + bytes([data[10] ^ 1]) + data[11:], frame), "bad-signature"),
        (lambda data, frame: b"\x82\xa8envelope\xc4", "malformed"),
    ],
)
def test_content_that_is_not_what_was_signed_differs_alone(
    record: Record, audited: Any, damage: Any, code: str
) -> None:
    data, frame = referred(record, 0)
    replace(record, 0, data, damage(data, frame))
    status, groups, _, _ = audited(record.path)
    assert status == 1
    assert outcomes(groups) == ["differs", *AS_RECORDED[1:]]
    assert groups[0]["code"] == code


def test_a_lie_in_a_group_by_reference_is_found(record: Record, audited: Any) -> None:
    body = edited_reward(unseal(record.rollouts()[0]).content())
    data, frame = referred(record, 0, body)
    replace(record, 0, data, enclosed(data, frame))
    status, groups, _, _ = audited(record.path)
    assert status == 1
    assert (groups[0]["outcome"], groups[0]["code"]) == ("differs", "reward-mismatch")


def test_a_reference_without_its_content_cannot_be_verified_and_nothing_is_held_against_it(
    record: Record, audited: Any
) -> None:
    data, _ = referred(record, 0)
    replace(record, 0, data, data)
    status, groups, _, _ = audited(record.path)
    assert status == 0
    assert outcomes(groups) == ["unverifiable", *AS_RECORDED[1:]]
    assert groups[0]["verdict"] == "unverifiable"


def test_recorded_gossip_has_references_only(record: Record, audited: Any) -> None:
    versions = [one for one in record.envelopes if unseal(one, MAX_MANIFEST).head.kind == Kind.CHECKPOINT]
    data, _ = referred(record, 0)
    file = record.path / "gossip"
    file.write_bytes(versions[0] + data + record.rollouts()[1])
    record.folder.journal.unlink()
    shutil.rmtree(record.path / "checkpoints" / "000001")
    status, groups, _, _ = audited(file, record.folder.checkpoint(0))
    assert status == 0
    assert outcomes(groups) == ["unverifiable", "unjudged"]
    assert "Only the reference" in groups[0]["text"]
