"""Recorded groups verified again: by a journal that was tampered with, by files of envelopes, and with
checkpoints that are gone."""

from __future__ import annotations

import io
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.audit import run_audit
from nous_node.node.create import base_tensors, folder_entries
from nous_node.node.envelope_file import pieces
from nous_node.node.home import DamagedError, StorageError
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal, StoredCheckpoint, StoredGroup
from nous_node.node.worker_messages import Generate, Load, Order
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, checkpoint_hash
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipt, Receipts, accepted, refused
from nous_node.protocol.rollouts import RolloutGroup, trained_tokens
from nous_node.protocol.tasks import task_seed

VOLUNTEER = Identity.from_seed(b"v" * 32)
NOW = 1_750_000_000_000
HONEST = 3
"""Accepted groups of each version."""


@dataclass
class Record:
    """A run's folder with a journal: HONEST accepted groups of version 0, one refused for its reward and one
    pending, and HONEST accepted ones of version 1, which has other weights."""

    folder: RunFolder
    envelopes: list[bytes] = field(default_factory=list)
    """In their order, as gossiped: each version, then its groups."""
    receipts: list[Receipt] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder.path

    def change(self, statement: str, *values: Any) -> None:
        """What somebody does to a journal with an editor."""
        with closing(sqlite3.connect(self.folder.journal)) as connection, connection:
            assert connection.execute(statement, values).rowcount > 0

    def rollouts(self) -> list[bytes]:
        return [data for data in self.envelopes if unseal(data, MAX_MANIFEST).head.kind == Kind.ROLLOUT]


def edited_reward(body: bytes) -> bytes:
    group = RolloutGroup.from_bytes(body)
    first, *others = group.trajectories
    false = msgspec.structs.replace(first, reward=first.reward + 0.125)
    return msgspec.structs.replace(group, trajectories=[false, *others]).to_bytes()


class Recorder:
    """Makes a Record as a trainer would have."""

    def __init__(self, path: Path, root: Identity, worked: Callable[..., list[Any]]) -> None:
        self.record, self.root, self.worked = Record(RunFolder.open(path)), root, worked
        self.seq = 0

    def seal(self, identity: Identity, kind: Kind, body: bytes) -> bytes:
        self.seq += 1
        run = self.record.folder.run
        return seal(identity, kind, run, body, seq=self.seq, ts=NOW, limit=MAX_MANIFEST)

    def publish(self, journal: Journal, version: int, parent: bytes | None) -> tuple[bytes, bytes]:
        folder = self.record.folder.checkpoint(version)
        beacon = bytes([version + 1]) * 32
        manifest = CheckpointManifest(
            version, FULL, folder_entries(folder), base_tensors(folder), beacon, parent
        )
        data, digest = self.seal(self.root, Kind.CHECKPOINT, manifest.to_bytes()), b""
        digest = checkpoint_hash(manifest.to_bytes())
        place = f"checkpoints/{version:06d}"
        journal.publish(StoredCheckpoint(version, digest, data, place, NOW, {}, {}), [])
        self.record.envelopes.append(data)
        return digest, beacon

    def groups(self, version: int, digest: bytes, beacon: bytes, count: int) -> list[StoredGroup]:
        folder = self.record.folder
        place = str(folder.checkpoint(version))
        orders = [
            Order(counter, task_seed(folder.run, digest, beacon, VOLUNTEER.key, counter), {})
            for counter in range(count)
        ]
        load = Load(place, digest, "cpu", 1, folder.manifest.to_bytes())
        made = self.worked(load, Generate(orders))[-1].groups
        stored = []
        for number, group in enumerate(made):
            body = edited_reward(group.body) if number == HONEST else group.body
            data = self.seal(VOLUNTEER, Kind.ROLLOUT, body)
            envelope = unseal(data)
            place_of = (envelope.id, VOLUNTEER.key, digest, version, group.counter)
            stored.append(StoredGroup(*place_of, bytes(31) + bytes([self.seq]), NOW, data))
            self.record.envelopes.append(data)
        return stored

    def decide(self, journal: Journal, groups: Sequence[StoredGroup]) -> None:
        for number, group in enumerate(groups):
            if number < HONEST:
                body = RolloutGroup.from_bytes(unseal(group.envelope).content())
                credit = sum(map(trained_tokens, body.trajectories))
                self.record.receipts.append(accepted(group.id, group.key, credit))
            elif number == HONEST:
                error = RemoteError(Code.REWARD_MISMATCH, "", measured=0.125, threshold=1e-6)
                self.record.receipts.append(refused(group.id, group.key, error))
        journal.decide(self.record.receipts, NOW)


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory,
    base_run: RunFolder,
    other_weights: Path,
    root: Identity,
    worked: Any,
) -> Record:
    """To be copied."""
    path = shutil.copytree(base_run.path, tmp_path_factory.mktemp("recorded") / "run")
    shutil.copytree(other_weights, path / "checkpoints" / "000001")
    recorder = Recorder(path, root, worked)
    with Journal.open(recorder.record.folder.journal) as journal:
        journal.hear(VOLUNTEER.key, "test/1", NOW, -1)
        parent = None
        for version, count in ((0, HONEST + 2), (1, HONEST)):
            parent, beacon = recorder.publish(journal, version, parent)
            groups = recorder.groups(version, parent, beacon, count)
            assert journal.add_many(groups) == [None] * count
            recorder.decide(journal, groups)
    return recorder.record


@pytest.fixture
def record(recorded: Record, tmp_path: Path) -> Record:
    path = shutil.copytree(recorded.path, tmp_path / "run")
    return Record(RunFolder.open(path), recorded.envelopes, recorded.receipts)


@pytest.fixture
def audited(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs an audit; its exit code, its groups, its last line, and what else it said."""

    def run(path: Path, checkpoint: Path | None = None, manifest: Path | None = None) -> Any:
        code = run_audit(path, checkpoint, manifest, json=True)
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        groups = [event for event in events if event["event"] == "group"]
        notes = [event["text"] for event in events if event["event"] == "note"]
        assert events[-1]["event"] == "audit"
        return code, groups, events[-1], notes

    return run


def outcomes(groups: Sequence[dict[str, Any]]) -> list[str]:
    return [group["outcome"] for group in groups]


AS_RECORDED = ["confirmed"] * (HONEST + 1) + ["unjudged"] + ["confirmed"] * HONEST


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


# --- checkpoints that are gone --------------------------------------------------------------------


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


# --- files of envelopes ---------------------------------------------------------------------------


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
