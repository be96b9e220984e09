"""What a trainer publishes, takes up again after a stop, and deletes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nous_node.node.create import first_beacon, folder_entries
from nous_node.node.following import Following
from nous_node.node.home import DamagedError
from nous_node.node.publishing import base_tensors, damage
from nous_node.node.store import Journal
from nous_node.protocol.checkpoints import DELTA, FULL, open_checkpoint
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Kind, unseal
from nous_node.protocol.identity import Identity

from .press import WEIGHTS, Press, Start


@pytest.fixture
def start(start_press: Start) -> Start:
    return start_press


def test_a_new_run_publishes_its_base_as_version_0(start: Start) -> None:
    trainer = start()
    head, folder = trainer.publisher.head, trainer.folder
    assert (trainer.said, head.version, head.manifest.parent) == ("", 0, None)
    assert head.manifest.tensors == base_tensors(folder.checkpoint(0))
    assert open_checkpoint(unseal(head.envelope, MAX_MANIFEST), folder.run, folder.manifest) == head.manifest
    for entry in head.manifest.files:
        assert all(trainer.index.read(digest) is not None for digest in entry.hashes())


def test_version_0_is_the_same_whenever_it_is_made(start: Start, tmp_path: Path) -> None:
    """A copy of a new run's folder, or one whose journal was lost, must not sign another version 0."""
    trainer = start()
    first, run, root = trainer.publisher.head, trainer.folder, trainer.root
    volunteer = Following.of(run.run, run.envelope)
    volunteer.offer(first.envelope)
    trainer.journal.__exit__()
    run.journal.unlink()
    again = start(mirrors=["https://mirror.example"], full_every=3)
    second = again.publisher.head
    assert second.envelope != first.envelope  # signed at another time
    assert second.hash == first.hash
    volunteer.offer(second.envelope)
    assert volunteer.conflict is None
    assert again.publisher.renew().manifest.mirrors == ["https://mirror.example"]
    assert first.manifest.beacon == first_beacon(root, run.run)


def test_the_beacon_of_version_0_depends_on_key_and_run() -> None:
    one, other = Identity.from_seed(b"1" * 32), Identity.from_seed(b"2" * 32)
    beacons = {first_beacon(key, run) for key in (one, other) for run in (bytes(32), b"r" * 32)}
    assert len(beacons) == 4
    assert all(len(beacon) == 32 for beacon in beacons)


def test_a_version_whose_folder_stays_keeps_its_manifest(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the run may go back to, however old it is, also over a restart; others have only figures."""
    monkeypatch.setattr("nous_node.node.journal_trim.KEPT_MANIFESTS", 12)
    trainer = start()
    for _ in range(16):
        trainer.update()
        trainer.publisher.prune(2, good=3)
    trainer.journal.__exit__()
    again = start()
    for _ in range(16):
        again.publisher.renew()
    here = {int(name) for name in again.folders()}
    assert {0, 3} < here
    known = {row.version for row in again.journal.checkpoints() if row.envelope}
    assert known == here | set(range(21, 33))


def test_an_update_is_published_with_what_the_learner_says_of_it(start: Start) -> None:
    trainer = start()
    base = trainer.publisher.head
    trainer.update()
    manifest = trainer.publisher.head.manifest
    assert (manifest.version, manifest.parent) == (1, base.hash)
    assert (manifest.levels, manifest.stats, manifest.eval) == (
        {"sort-digits": 1},
        {"reward": 0.5},
        {"greedy": 0.25},
    )
    assert manifest.beacon != base.manifest.beacon
    assert trainer.following.head is trainer.publisher.head


def test_a_renewed_beacon_is_a_version_of_the_same_files(start: Start) -> None:
    trainer = start()
    trainer.update()
    before = trainer.publisher.head
    after = trainer.publisher.renew()
    assert (after.version, after.manifest.parent) == (2, before.hash)
    assert after.manifest.beacon != before.manifest.beacon
    assert (after.manifest.kind, after.manifest.deltas, after.manifest.chain) == (DELTA, [], [before.hash])
    same = {"version": 0, "parent": None, "beacon": bytes(32), "kind": FULL, "chain": []}
    old, new = (msgspec.structs.replace(head.manifest, **same) for head in (before, after))
    assert old == new
    assert trainer.publisher.folders[2] == trainer.publisher.folders[1]


def test_a_stopped_trainer_goes_on_with_the_very_envelope(start: Start) -> None:
    trainer = start()
    for _ in range(3):
        trainer.update()
    trainer.publisher.renew()
    publisher = trainer.publisher
    again = start()
    assert again.said == ""
    assert again.publisher.head == publisher.head
    assert (again.publisher.heads, again.publisher.folders) == (publisher.heads, publisher.folders)
    assert again.following.head == publisher.head


def test_versions_that_rollouts_may_still_belong_to_are_held_and_no_others(start: Start) -> None:
    trainer = start()
    held = trainer.folder.manifest.staleness + 2
    for _ in range(held + 2):
        trainer.publisher.renew()
    newest = trainer.publisher.head.version
    for publisher in (trainer.publisher, start().publisher):
        expected = list(range(newest - held + 1, newest + 1))
        assert sorted(publisher.folders) == expected
        assert sorted(head.version for head in publisher.heads.values()) == expected


def test_a_damaged_newest_version_falls_back_to_the_newest_whole_one_and_says_so(start: Start) -> None:
    trainer = start()
    for _ in range(3):
        trainer.update()
    trainer.harm(3)
    trainer.harm(2)
    head = trainer.publisher.head
    again = start()
    assert again.said == (
        "Version 3 is damaged on this disk: the run goes on from version 1, published again as version 4."
    )
    assert (again.publisher.head.version, again.publisher.head.manifest.parent) == (4, head.hash)
    assert again.publisher.head.manifest.levels == {"sort-digits": 1}
    assert again.publisher.folders[4] == trainer.folder.checkpoint(1)
    assert start().said == ""


def test_what_is_whole_waits_to_be_published_again_until_that_is_safe(start: Start) -> None:
    """The folder may be an older copy, and then peers hold another version 4."""
    press = start()
    for _ in range(3):
        press.update()
    press.harm(3)
    for _ in range(2):
        again = start(mend=False)
        assert "published again as version 4" in again.said
        assert (again.publisher.mending, again.publisher.head.version) == (True, 3)
    assert [one.head.version for one in again.publisher.holdings() if one.files] == [0, 1, 2]
    again.publisher.mend()
    again.publisher.mend()
    assert (again.publisher.mending, again.publisher.head.version) == (False, 4)
    assert again.publisher.folders[4] == again.folder.checkpoint(2)
    again.harm(2)
    last = start(mend=False)
    head = last.publisher.overtake(again.publisher.head)
    assert (last.publisher.mending, last.publisher.folders[head.version]) == (
        False,
        last.folder.checkpoint(1),
    )
    last.publisher.mend()
    assert last.publisher.head is head


def test_a_damaged_version_is_not_verified_against(start: Start) -> None:
    """A learner could not load it, or would refuse what is honest; its groups are answered as too old."""
    trainer = start()
    trainer.update()
    trainer.update()
    damaged = trainer.publisher.heads
    trainer.harm(1)
    again = start()
    assert again.said == ""
    assert sorted(again.publisher.folders) == [0, 2]
    assert again.publisher.heads == damaged
    again.harm(2)
    again = start()
    assert sorted(again.publisher.folders) == [0, 3]
    assert sorted(head.version for head in again.publisher.heads.values()) == [0, 1, 2, 3]


def test_a_version_that_is_gone_is_a_damaged_one(start: Start) -> None:
    trainer = start()
    trainer.update()
    trainer.folder.checkpoint(1).rename(trainer.folder.path / "elsewhere")
    assert "goes on from version 0" in start().said


def test_a_run_of_which_nothing_is_whole_is_told_with_what_to_do(start: Start) -> None:
    trainer = start()
    trainer.update()
    trainer.harm(0)
    trainer.harm(1)
    with pytest.raises(DamagedError, match="Restore the run's folder from a backup"):
        start()


def test_a_damaged_base_is_told_before_anything_is_published(make_folder: Any, root: Identity) -> None:
    folder = make_folder()
    os.truncate(folder.checkpoint(0) / WEIGHTS, 1000)
    with pytest.raises(DamagedError, match="not what the run began with"):
        Press(folder, root)
    with Journal.open(folder.journal) as journal:
        assert journal.checkpoints() == []


def test_half_written_folders_are_cleared_away(start: Start) -> None:
    trainer = start()
    for kind in ("checkpoints", "optimizer"):
        half = trainer.folder.path / kind / ".000001.abcd"
        half.mkdir()
        (half / WEIGHTS).write_bytes(b"half")
    again = start()
    assert again.folders() == ["000000"]
    assert again.folders("optimizer") == []


def test_pruning_keeps_the_base_the_newest_and_what_may_be_verified(start: Start) -> None:
    trainer = start()
    held = trainer.folder.manifest.staleness + 2
    for _ in range(held + 3):
        trainer.update()
    newest = trainer.publisher.head.version
    trainer.publisher.prune(2)
    kept = [0, *range(newest - held + 1, newest + 1)]
    assert trainer.folders() == [f"{version:06d}" for version in kept]
    assert trainer.folders("optimizer") == [f"{newest:06d}"]
    for version in kept:
        for entry in folder_entries(trainer.folder.checkpoint(version)):
            assert all(trainer.index.read(digest) is not None for digest in entry.hashes())


def test_pruning_keeps_the_version_that_a_collapse_goes_back_to(start: Start) -> None:
    trainer = start()
    for _ in range(trainer.folder.manifest.staleness + 9):
        trainer.update()
    newest = trainer.publisher.head.version
    trainer.publisher.prune(2, good=3)
    assert trainer.folders()[:2] == ["000000", "000003"]
    assert trainer.folders("optimizer") == ["000003", f"{newest:06d}"]
    trainer.publisher.prune(2, good=newest)
    assert "000003" not in trainer.folders() + trainer.folders("optimizer")


def test_pruning_keeps_as_many_as_the_trainer_asks_for(start: Start) -> None:
    trainer = start()
    held = trainer.folder.manifest.staleness + 2
    for _ in range(held + 5):
        trainer.update()
    trainer.publisher.prune(held + 3)
    assert len(trainer.folders()) == 1 + held + 3


def test_pruning_keeps_the_optimizer_state_of_a_version_that_was_only_renewed(start: Start) -> None:
    trainer = start()
    trainer.update()
    trainer.update()
    for _ in range(9):
        trainer.publisher.renew()
    trainer.publisher.prune(2)
    assert trainer.folders() == ["000000", "000001", "000002"]
    assert trainer.folders("optimizer") == ["000002"]
    assert start().publisher.folders[11] == trainer.folder.checkpoint(2)


def test_chunks_of_what_was_deleted_are_not_served(start: Start) -> None:
    trainer = start()
    trainer.update()
    (gone,) = {entry.hashes()[-1] for entry in trainer.publisher.head.manifest.files if entry.path == WEIGHTS}
    for _ in range(8):
        trainer.update()
    assert trainer.index.read(gone) is not None
    trainer.publisher.prune(2)
    assert trainer.index.read(gone) is None


def test_sequence_numbers_go_on_after_a_stop(start: Start) -> None:
    first = unseal(start().publisher.seal(Kind.RECEIPTS, b"one"))
    second = unseal(start().publisher.seal(Kind.RECEIPTS, b"two"))
    assert second.head.seq > first.head.seq


def test_a_person_is_told_which_file_changed() -> None:
    assert "/runs/x/model.safetensors is no longer what was published" in damage(
        Path("/runs/x/model.safetensors")
    )
