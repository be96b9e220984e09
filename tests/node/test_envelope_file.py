"""Audits of files of envelopes, as somebody wrote them down from gossip."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.envelope_file import pieces
from nous_node.protocol.checkpoints import checkpoint_hash
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipts

from .records import AS_RECORDED, HONEST, NOW, VOLUNTEER, Record, outcomes


@dataclass
class Recording:
    """What somebody writes down who listens to a run."""

    record: Record
    root: Identity

    def receipts(self) -> bytes:
        body = Receipts(self.record.receipts).to_bytes()
        return seal(self.root, Kind.RECEIPTS, self.record.folder.run, body, seq=10**9, ts=NOW)

    def write(self, *parts: bytes) -> Path:
        """Beside the run's manifest and its checkpoints, without the journal."""
        self.record.folder.journal.unlink(missing_ok=True)
        file = self.record.path / "gossip"
        file.write_bytes(b"".join(parts))
        return file


@pytest.fixture
def recording(record: Record, root: Identity) -> Recording:
    """Its versions lie where a volunteer keeps them."""
    folder = record.path / "checkpoints"
    versions = [data for data in record.envelopes if data not in record.rollouts()]
    for version, data in enumerate(versions):
        digest = checkpoint_hash(unseal(data, MAX_MANIFEST).content(MAX_MANIFEST))
        shutil.copytree(folder / f"{version:06d}", folder / digest.hex()[:16])
    shutil.rmtree(folder / "000001")
    return Recording(record, root)


def test_recorded_gossip_is_verified_against_its_own_checkpoints_and_receipts(
    recording: Recording, audited: Any
) -> None:
    file = recording.write(*recording.record.envelopes, recording.receipts())
    status, groups, _, notes = audited(file)
    assert (status, notes) == (0, [])
    assert outcomes(groups) == AS_RECORDED


def test_recorded_gossip_may_begin_with_the_runs_manifest(
    recording: Recording, audited: Any, tmp_path: Path
) -> None:
    folder = recording.record.folder
    recording.write(folder.envelope, *recording.record.envelopes, recording.receipts())
    alone = tmp_path / "alone" / "gossip"
    alone.parent.mkdir()
    shutil.move(recording.record.path / "gossip", alone)
    status, groups, _, notes = audited(alone, folder.checkpoint(0))
    assert status == 0
    assert outcomes(groups) == AS_RECORDED[: HONEST + 2] + ["unverifiable"] * HONEST
    assert len(notes) == 1


def test_rollouts_without_receipts_have_no_verdict_to_compare(recording: Recording, audited: Any) -> None:
    status, groups, summary, _ = audited(recording.write(*recording.record.envelopes))
    assert status == 0
    assert outcomes(groups) == ["unjudged"] * len(AS_RECORDED)
    assert [group["verdict"] for group in groups].count("refused") == 1
    assert summary["unjudged"] == len(AS_RECORDED)


def test_a_trainers_journal_knows_the_checkpoints_of_recorded_gossip(
    record: Record, audited: Any, root: Identity
) -> None:
    file = record.path / "gossip"
    file.write_bytes(b"".join([*record.rollouts(), Recording(record, root).receipts()]))
    status, groups, _, _ = audited(file)
    assert status == 0
    assert outcomes(groups) == AS_RECORDED


def test_rollouts_alone_cannot_be_verified(recording: Recording, audited: Any) -> None:
    status, groups, _, _ = audited(recording.write(*recording.record.rollouts()))
    assert status == 2
    assert {group["text"] for group in groups} == {"checkpoint gone, and its manifest with it"}


def test_bytes_between_envelopes_are_passed_over_and_told(recording: Recording, audited: Any) -> None:
    first, second, *others = recording.record.envelopes
    parts = [b"noise", first, b"\x82\xa3sig\xc4\x40 no envelope", second, *others, recording.receipts()]
    tail = recording.record.rollouts()[0][:-7]
    status, groups, _, notes = audited(recording.write(*parts, tail))
    assert status == 0
    assert outcomes(groups) == AS_RECORDED
    assert len(notes) == 3
    assert all("are no envelope" in note for note in notes)


def test_envelopes_that_are_damaged_or_of_another_run_are_told(recording: Recording, audited: Any) -> None:
    record = recording.record
    other = seal(VOLUNTEER, Kind.ROLLOUT, b"x" * 32, b"body", seq=1, ts=NOW)
    forged = seal(VOLUNTEER, Kind.RECEIPTS, record.folder.run, Receipts([]).to_bytes(), seq=2, ts=NOW)
    damaged = bytearray(record.rollouts()[0])
    damaged[20] ^= 1  # in the signature
    strange = seal(VOLUNTEER, Kind.ROLLOUT, record.folder.run, b"no group", seq=3, ts=NOW)
    file = recording.write(*record.envelopes, other, forged, bytes(damaged), strange)
    _, groups, _, notes = audited(file)
    assert [note.split("(")[1].split(")")[0] for note in notes] == ["wrong-run", "wrong-role"]
    codes = [group["code"] for group in groups if group["verdict"] == "refused"]
    assert "bad-signature" in codes
    assert len(codes) == 3


@given(st.lists(st.one_of(st.binary(max_size=200), st.just("envelope"), st.just("begin"))))
def test_the_pieces_of_any_file_cover_it_and_find_its_envelopes(parts: list[bytes | str]) -> None:
    envelope = seal(VOLUNTEER, Kind.HELLO, b"r" * 32, b"hello", seq=1, ts=NOW)
    names = {"envelope": envelope, "begin": envelope[:90]}
    data = b"".join(part if isinstance(part, bytes) else names[part] for part in parts)
    found = list(pieces(io.BytesIO(data), len(data)))
    assert b"".join(data[one.place : one.place + one.size] for one in found) == data
    whole = [one for one in found if one.envelope]
    assert all(data[one.place : one.place + one.size] for one in whole)
    if set(map(type, parts)) <= {str} and "begin" not in parts:
        assert len(whole) == len(parts)
