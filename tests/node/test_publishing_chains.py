"""Full checkpoints, deltas and what leads to the newest one: published, held, taken up again, given up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nous_node.node.create import folder_entries
from nous_node.node.following import Following
from nous_node.node.home import StorageError
from nous_node.node.publishing import LEAP
from nous_node.protocol.checkpoints import (
    DELTA,
    FULL,
    CheckpointManifest,
    check_manifest,
    open_checkpoint,
    read_manifest,
)
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import LocalError

from .press import WEIGHTS, Press, Start


@pytest.fixture
def start(start_press: Start) -> Start:
    return start_press


def manifest(press: Press) -> CheckpointManifest:
    return press.publisher.head.manifest


def chain(press: Press) -> list[CheckpointManifest]:
    """As a joiner fetches it, by hashes."""
    found = []
    for digest in manifest(press).chain:
        data = press.index.read(digest)
        assert data is not None
        found.append(read_manifest(data, digest))
    return found


def half(press: Press) -> int:
    """The most bytes that deltas may have."""
    return manifest(press).size // 2


def served(press: Press, entries: list) -> bool:
    return all(press.index.read(digest) is not None for entry in entries for digest in entry.hashes())


# --- full or delta -------------------------------------------------------------------------------


def test_a_delta_is_published_with_what_leads_to_it(start: Start) -> None:
    press = start()
    for _ in range(3):
        press.update(delta=100)
    head = press.publisher.head
    assert (head.manifest.kind, head.manifest.delta_size) == (DELTA, 100)
    assert [one.version for one in chain(press)] == [0, 1, 2]
    assert [one.kind for one in chain(press)] == [FULL, DELTA, DELTA]
    assert [one.chain for one in chain(press)] == [head.manifest.chain[:count] for count in range(3)]
    envelope = unseal(head.envelope, MAX_MANIFEST)
    assert open_checkpoint(envelope, press.folder.run, press.folder.manifest) == head.manifest
    assert head.manifest.files == folder_entries(press.folder.checkpoint(3))
    for version in (1, 2, 3):
        assert served(press, folder_entries(press.folder.deltas(version)))


def test_a_version_without_a_delta_or_with_a_large_one_is_full(start: Start) -> None:
    press = start()
    press.update(delta=100)
    press.update()
    assert (manifest(press).kind, manifest(press).chain, manifest(press).deltas) == (FULL, [], [])
    press.update(delta=half(press) + 1)
    assert manifest(press).kind == FULL
    press.update(delta=half(press))
    assert manifest(press).kind == DELTA
    assert len(manifest(press).chain) == 1


def test_deltas_that_add_up_to_half_are_followed_by_a_full_one(start: Start) -> None:
    press = start()
    kinds = []
    for _ in range(5):
        press.update(delta=half(press) // 3 + 1)
        kinds.append(manifest(press).kind)
    assert kinds == [DELTA, DELTA, FULL, DELTA, DELTA]


def test_every_so_many_versions_one_is_full_also_over_stops(start: Start) -> None:
    fulls = []
    for _ in range(12):
        press = start(full_every=4)
        press.update(delta=10)
        if manifest(press).kind == FULL:
            fulls.append(manifest(press).version)
    assert fulls == [4, 8, 12]


def test_renewals_lengthen_a_chain_as_deltas_of_nothing(start: Start) -> None:
    press = start(full_every=4)
    press.update(delta=100)
    kinds = []
    for _ in range(4):
        press.publisher.renew()
        kinds.append(manifest(press).kind)
        assert manifest(press).deltas == []
    assert kinds == [DELTA, DELTA, FULL, DELTA]
    assert manifest(press).files == folder_entries(press.folder.checkpoint(1))


def test_mirrors_are_named_by_every_version_but_the_first(start: Start) -> None:
    press = start(mirrors=["https://mirror.example/nous/", "http://other.example"])
    press.update(delta=100)
    press.publisher.renew()
    press.update()
    named = ["https://mirror.example/nous", "http://other.example"]
    assert [head.manifest.mirrors for head in press.publisher.heads.values()] == [[], *[named] * 3]
    again = start()
    again.publisher.renew()
    assert manifest(again).mirrors == []


@pytest.mark.parametrize(
    "mirror",
    [
        "http://with space",
        "ftp://mirror",
        "http://" + 1025 * "a",
        "http://mirror:99999",
        "https://me:pw@mirror",
    ],
)
def test_what_is_no_mirror_is_told_before_anything_is_published(start: Start, mirror: str) -> None:
    with pytest.raises(LocalError, match="cannot be published"):
        start(mirrors=[mirror])
    with pytest.raises(LocalError, match="There may be 16"):
        start(mirrors=["http://mirror"] * 17)


# --- after a stop --------------------------------------------------------------------------------


def test_a_chain_goes_on_after_a_stop(start: Start) -> None:
    press = start()
    held = press.folder.manifest.staleness + 2
    for _ in range(held + 3):
        press.update(delta=100)
        press.publisher.prune(2)
    again = start()
    assert again.said == ""
    again.update(delta=100)
    assert [one.version for one in chain(again)] == list(range(held + 4))
    for one in chain(again):
        assert served(again, one.deltas)
    assert served(again, chain(again)[0].files)


def test_spent_bytes_are_counted_over_a_stop(start: Start) -> None:
    for _ in range(2):
        press = start()
        press.update(delta=half(press) // 2)
        assert manifest(press).kind == DELTA
    again = start()
    again.update(delta=1000)
    assert manifest(again).kind == FULL


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_a_damaged_delta_ends_its_chain_and_is_told(start: Start, harm: str) -> None:
    press = start()
    for _ in range(4):
        press.update(delta=100)
    (lost,) = folder_entries(press.folder.deltas(2))
    if harm == "gone":
        shutil.rmtree(press.folder.deltas(2))
    else:
        (press.folder.deltas(2) / WEIGHTS).write_bytes(bytes(100))
    again = start()
    assert again.said == (
        "What leads to version 4 is damaged at the deltas of version 2 on this disk: the next version is "
        "published in full, and until then those who join fetch the newest one whole."
    )
    assert again.publisher.head.version == 4
    assert not served(again, [lost])
    assert [one.head.version for one in again.publisher.holdings() if one.deltas] == [1, 3, 4]
    again.update(delta=100)
    again.update(delta=100)
    assert [one.version for one in chain(again)] == [5]
    assert start().said == ""


def test_a_damaged_full_ends_its_chain(start: Start) -> None:
    press = start()
    press.update()
    for _ in range(8):
        press.update(delta=100)
    press.harm(1)
    again = start()
    assert "is damaged at version 1" in again.said
    again.publisher.renew()
    assert manifest(again).kind == FULL


def test_damage_that_shows_later_ends_the_chain_as_well(start: Start) -> None:
    press = start()
    press.update(delta=100)
    press.update(delta=100)
    press.publisher.damaged(press.folder.deltas(1) / WEIGHTS)
    press.publisher.damaged(press.folder.path / "elsewhere")
    assert [one.head.version for one in press.publisher.holdings() if one.deltas] == [2]
    press.update(delta=100)
    assert manifest(press).kind == FULL
    press.update(delta=100)
    press.publisher.damaged(press.folder.checkpoint(3) / WEIGHTS)
    press.update(delta=100)
    assert manifest(press).kind == FULL


def test_after_a_damaged_newest_version_the_run_goes_on_in_full(start: Start) -> None:
    press = start()
    for _ in range(3):
        press.update(delta=100)
    press.harm(3)
    again = start()
    assert "published again as version 4" in again.said
    assert (manifest(again).kind, manifest(again).chain) == (FULL, [])
    again.update(delta=100)
    assert [one.version for one in chain(again)] == [4]


def test_a_half_written_delta_is_cleared_away(start: Start) -> None:
    press = start()
    press.update(delta=100)
    half = press.folder.path / "deltas" / ".000002.abcd"
    half.mkdir()
    assert start().folders("deltas") == ["000001"]


def test_what_could_not_be_journalled_is_told_to_nobody(start: Start) -> None:
    """A version that was not recorded may be signed again, so nobody may have seen it."""
    press = start()
    press.update(delta=100)
    before = press.publisher.head
    made = press.made(2, [], delta=100)
    connection = press.journal._database._connection
    connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StorageError):
        press.publisher.update(made)
    assert press.following.head is press.publisher.head is before
    assert [one.head.version for one in press.publisher.holdings()] == [0, 1]
    connection.execute("PRAGMA query_only = OFF")
    press.publisher.update(made)
    assert [one.version for one in chain(press)] == [0, 1]


# --- what is kept --------------------------------------------------------------------------------


def test_what_leads_to_the_newest_is_kept_however_little_room_there_is(start: Start) -> None:
    press = start()
    press.update()
    last = 1 + press.folder.manifest.staleness + 6
    while manifest(press).version < last:
        press.update(delta=100)
    press.publisher.prune(1, room=1)
    held = range(last - press.folder.manifest.staleness - 1, last + 1)
    assert press.folders() == [f"{version:06d}" for version in (0, 1, *held)]
    assert press.folders("deltas") == [f"{version:06d}" for version in range(2, last + 1)]
    assert [one.version for one in chain(press)] == list(range(1, last))
    assert served(press, chain(press)[0].files)
    assert served(press, [entry for one in chain(press) for entry in one.deltas])
    told = {one.head.version: (one.files, one.deltas) for one in press.publisher.holdings()}
    assert told[1] == (True, False)
    assert told[2] == (False, True)
    assert told[last] == (True, True)
    assert start().said == ""


def test_a_chain_that_nobody_begins_with_any_more_is_deleted(start: Start) -> None:
    press = start()
    for _ in range(3):
        press.update(delta=100)
    old = [press.publisher.head.hash, *manifest(press).chain]
    lost = folder_entries(press.folder.deltas(3))
    press.update()
    press.publisher.prune(2)
    assert press.folders("deltas") == ["000001", "000002", "000003"]  # rollouts of version 3 still count
    for _ in range(press.folder.manifest.staleness + 2):
        press.update(delta=100)
    press.publisher.prune(2)
    assert press.folders("deltas")[0] == "000005"
    assert "000003" not in press.folders()
    assert [press.index.read(digest) for digest in old] == [None] * 4
    assert not served(press, lost)


def test_a_delta_that_was_not_published_is_deleted(start: Start) -> None:
    press = start(full_every=2)
    for _ in range(4):
        press.update(delta=10)
    press.publisher.prune(2)
    assert press.folders("deltas") == ["000001", "000003"]


def test_bytes_bound_what_is_kept_beyond_what_is_needed(start: Start) -> None:
    press = start()
    held = press.folder.manifest.staleness + 2
    for _ in range(held + 6):
        press.update()
    everything = press.publisher.prune(100)
    assert everything == sum(
        file.stat().st_size
        for kind in ("checkpoints", "deltas", "optimizer")
        for file in (press.folder.path / kind).rglob("*")
        if file.is_file()
    )
    one = sum(entry.size for entry in manifest(press).files)
    assert press.publisher.prune(100, room=everything) == everything
    left = press.publisher.prune(100, room=everything - one - 1)
    assert everything - left == 2 * one
    assert press.folders()[:2] == ["000000", "000003"]
    assert press.publisher.prune(100, room=1) > 1
    assert len(press.folders()) == 1 + held


def test_versions_that_the_learner_has_written_ahead_are_not_deleted(start: Start) -> None:
    press = start()
    ahead = [press.made(version, [], delta=10) for version in range(1, 6)]
    press.publisher.update(ahead[0])
    press.publisher.prune(1, room=1)
    for made in ahead[1:]:
        press.publisher.update(made)
    assert manifest(press).files == folder_entries(Path(ahead[-1].folder))
    assert manifest(press).kind == DELTA


def test_a_chunk_that_a_deleted_version_shared_is_still_served(start: Start) -> None:
    """The full one of a chain and the version after it had a part in common, which the others have not."""
    press = start()
    press.update()
    shared = press.made(2, [], delta=10)
    shutil.copyfile(press.folder.checkpoint(1) / WEIGHTS, press.folder.checkpoint(2) / WEIGHTS)
    shared.files = folder_entries(press.folder.checkpoint(2))
    press.publisher.update(shared)
    while "000002" in press.folders():
        press.update(delta=10)
        press.publisher.prune(1)
    assert "000001" in press.folders()
    assert served(press, chain(press)[0].files)


# --- above what others hold ----------------------------------------------------------------------


def test_a_run_is_taken_over_above_the_versions_that_only_others_have(start: Start) -> None:
    press = start()
    press.update(delta=100)
    copy = shutil.copytree(press.folder.path, press.folder.path.with_name("copy"))
    press.update(delta=100)
    newest = press.publisher.head
    press.journal.__exit__()
    shutil.rmtree(press.folder.path)
    copy.rename(press.folder.path)
    again = start()
    assert again.publisher.head.version == 1
    head = again.publisher.overtake(newest)
    check_manifest(head.manifest)
    assert (head.version, head.manifest.parent, head.manifest.kind) == (2 + LEAP, newest.hash, FULL)
    assert head.manifest.files == folder_entries(again.folder.checkpoint(1))
    follower = Following.of(again.folder.run, again.folder.envelope)
    follower.offer(newest.envelope)
    follower.offer(head.envelope)
    assert follower.head == head
    assert sorted(again.publisher.folders) == [head.version]
    again.update(delta=100)
    assert manifest(again).chain == [head.hash]
    last = start()
    assert (last.said, last.publisher.head.version) == ("", 3 + LEAP)
    assert len(chain(last)) == 1
