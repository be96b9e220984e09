"""Which checkpoints a volunteer keeps on its disk, and what it does about damage there."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node.blobs import BlobIndex
from nous_node.node.equivocation import EquivocationError
from nous_node.node.home import StorageError
from nous_node.node.joined import HELD_CHECKPOINTS, TooLargeError
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import FULL
from nous_node.protocol.identity import Identity

from .lineage import CHUNK, CONFIG, WEIGHTS, Lineage, Node


@pytest.fixture
def line(tmp_path: Path, base_run: RunFolder, root: Identity) -> Lineage:
    return Lineage(tmp_path, base_run, root)


def disk(line: Lineage) -> int:
    """What the smallest node must have."""
    return HELD_CHECKPOINTS * line.heads[0].manifest.size


async def test_checkpoint_that_the_worker_reads_stays_however_many_come(line: Lineage) -> None:
    first, node = line.full(), line.node()
    async with node.at_work():
        await node.gets(first)
        node.holdings.in_use = first
        for _ in range(4):
            head = line.full()
            await node.gets(head)
        node.assert_whole(first)
        node.holdings.in_use = head
        last = line.full()
        await node.gets(last)
        assert [one.version for one in line.heads if node.here(one)] == [head.version, last.version]


async def test_peer_that_serves_a_bad_chunk_is_cut_off_and_another_serves_it(line: Lineage) -> None:
    line.net.served["liar"] = line.index
    line.net.lying.add("liar")
    node = line.node()
    await node.follows(*[line.full() for _ in range(4)])  # who is asked first is drawn
    assert set(line.net.cut) <= {"liar"}


async def test_nobody_but_a_liar_to_ask_is_said_and_tried_again(
    line: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nous_node.node.holdings.RETRY_SECONDS", 0.01)
    line.net.lying.add("trainer")
    head, node = line.full(), line.node()
    async with node.at_work():
        node.hears(head)
        while not node.notes():  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert "delivers a chunk" in node.notes()[0]
        assert node.holdings.newest is None
        line.net.served["honest"] = line.index
        await node.gets(head)


async def test_bit_that_flipped_on_our_disk_is_fetched_again_and_nothing_else(line: Lineage) -> None:
    head = line.full()
    await line.node().follows(head)
    held = line.node().folder.checkpoint(head.hash) / WEIGHTS
    data = bytearray(held.read_bytes())
    data[CHUNK] ^= 1
    held.write_bytes(data)
    line.net.asked.clear()
    again = line.node()  # the node is started again
    await again.follows(head)
    assert sum(line.net.asked.values()) == 1
    assert any("damaged" in text for text in again.notes())


async def test_bit_that_flipped_on_the_servers_disk_is_not_served(line: Lineage) -> None:
    head = line.full()
    index = BlobIndex(lambda file: None)
    index.add(line.folder(head), head.manifest.files)
    digests = head.manifest.files[1].hashes()
    file = line.folder(head) / WEIGHTS
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert index.read(digests[0]) == data[:CHUNK]
    assert index.read(digests[-1]) is None


async def test_checkpoint_that_does_not_fit_is_passed_over_before_it_is_fetched(line: Lineage) -> None:
    first = line.full()
    node = line.node(disk=disk(line))
    async with node.at_work():
        await node.gets(first)
        line.net.asked.clear()
        line.delta(config=bytes(2 * CHUNK))
        node.hears(line.heads[-1])
        while not node.notes():  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert "--disk" in node.notes()[0]
        assert not line.net.asked
        assert node.holdings.newest is not None
        assert node.holdings.newest.hash == first.hash
        await node.gets(line.delta(config=b"{}"))


async def test_first_checkpoint_that_does_not_fit_is_the_end(line: Lineage) -> None:
    head = line.full()
    node = line.node(disk=disk(line) - 1)
    node.hears(head)
    with pytest.raises(TooLargeError, match="--disk"):
        await node.holdings.fetch_loop()
    assert not line.net.asked


async def test_disk_that_refuses_is_told_and_the_end(line: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    head, node = line.full(), line.node()
    node.folder.checkpoint(head.hash).mkdir()  # without its files, so it is damaged
    monkeypatch.setattr("nous_node.node.holdings._set_aside", refuses)
    node.hears(head)
    with pytest.raises(StorageError, match="Input/output error"):
        await node.holdings.fetch_loop()
    shutil.rmtree(node.folder.checkpoints)
    node.folder.checkpoints.write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="checkpoints"):
        await node.holdings.fetch_loop()


async def test_disk_that_is_full_while_a_delta_is_applied_is_told_and_the_end(
    line: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    node = line.node()
    await node.follows(line.full())
    monkeypatch.setattr("nous_node.node.making.apply_delta", full)
    node.hears(line.delta())
    with pytest.raises(StorageError, match="disk is full"):
        await node.holdings.fetch_loop()


async def test_a_sector_that_cannot_be_read_is_done_without(
    line: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    node = line.node()
    await node.follows(line.full())
    monkeypatch.setattr("nous_node.node.making.apply_delta", unreadable)
    await node.follows(line.delta())
    assert any("its files are fetched" in text for text in node.notes())


async def test_file_system_without_hard_links_gets_copies(
    line: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    node = line.node()
    await node.follows(line.full())
    line.net.asked.clear()
    monkeypatch.setattr("os.link", refuses)
    await node.follows(line.renewal())
    assert not line.net.asked


# --- how much is kept ----------------------------------------------------------------------------


class Watched:
    """The most bytes on a node's disk at any request of its, and while deltas are applied."""

    def __init__(self, line: Lineage, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        from nous_node.node import making

        self.node, self.most = node, 0
        line.net.before = lambda digest: self.look()
        apply = making.apply_delta

        def applied(old: Path, delta: Path, out: Path, tensors: dict[str, bytes]) -> None:
            apply(old, delta, out, tensors)
            self.look()

        monkeypatch.setattr("nous_node.node.making.apply_delta", applied)

    def look(self) -> None:
        self.most = max(self.most, self.node.bytes_on_disk())


@pytest.mark.parametrize("jump", [1, 2, 5])
async def test_the_disk_allowed_is_never_exceeded(
    line: Lineage, jump: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the least that a node must have, and the worker at an old version all the time."""
    first = line.full()
    room = disk(line)
    node = line.node(disk=room)
    watched = Watched(line, node, monkeypatch)
    async with node.at_work():
        await node.gets(first)
        node.holdings.in_use = first
        for _ in range(3):
            for _ in range(jump):
                head = line.delta()
            await node.gets(head)
            assert node.bytes_on_disk() <= room
        node.assert_whole(first)
        for _ in range(2):
            await node.gets(line.full())
    assert watched.most <= room


async def test_a_node_with_little_room_goes_without_the_full_one_and_serves_the_newest(line: Lineage) -> None:
    first = line.full()
    node = line.node(disk=disk(line))
    heads = [line.delta() for _ in range(4)]
    await node.follows(first, *heads)
    assert "files" not in node.here(first)
    assert node.here(heads[-1]) == {"files", "deltas", "manifest"}
    assert node.here(heads[-2]) == {"files", "deltas", "manifest"}
    assert all("deltas" in node.here(head) for head in heads)


async def test_more_are_kept_where_that_is_asked_for(line: Lineage) -> None:
    heads = [line.full() for _ in range(6)]
    node = line.node(keep=4)
    await node.follows(*heads)
    assert [head.version for head in heads if node.here(head)] == [3, 4, 5, 6]
    fewer = line.node("fewer", keep=1)
    await fewer.follows(*heads)
    assert [head.version for head in heads if fewer.here(head)] == [5, 6]


async def test_what_was_held_before_a_restart_is_served_and_begun_from(line: Lineage) -> None:
    first, second = line.full(), line.delta()
    await line.node().follows(first, second)
    node = line.node()
    async with node.at_work():
        await wait_all_tasks_blocked()
        held = line.files_of(second) | line.deltas_of(second) | {first.hash, second.hash}
        assert all(node.holdings.index.read(digest) for digest in held)
        line.net.asked.clear()
        third = line.delta()
        await node.gets(third)
    assert set(line.net.asked) == line.deltas_of(third)


async def test_nothing_else_stays_in_the_folder(line: Lineage) -> None:
    node = line.node()
    strange = node.folder.checkpoints / "0123456789abcdef"
    for place in (strange, strange.with_suffix(".part"), strange.with_suffix(".deltas")):
        place.mkdir()
        (place / CONFIG).write_bytes(b"{}")
    strange.with_suffix(".manifest").write_bytes(b"\xc1")
    head = line.full()
    await node.follows(head)
    names = {place.name for place in node.folder.checkpoints.iterdir()}
    assert names == {node.folder.checkpoint(head.hash).name, node.folder.checkpoint_manifest(head.hash).name}


# --- which head ----------------------------------------------------------------------------------


async def test_the_newest_head_is_known_over_a_restart(line: Lineage) -> None:
    node = line.node()
    heads = [line.full() for _ in range(2)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.holdings.run)
        for head in heads:
            await node.gets(head)
        while node.folder.read_head() != heads[-1].envelope:  # noqa: ASYNC110
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_a_run_that_is_halted_stops_the_node(line: Lineage) -> None:
    node = line.node()
    head = line.full()
    with pytest.RaisesGroup(EquivocationError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.holdings.run)
            await node.gets(head)
            node.hears(line.forged(beacon=b"another".ljust(32)))
            await trio.sleep_forever()
    assert (node.folder.path / "equivocation-1.proof").is_file()


async def test_where_nobody_has_the_newest_the_one_before_has_to_do(
    line: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a trainer dies right after it has published: what others have of it is spread all the same."""
    monkeypatch.setattr("nous_node.node.holdings.RETRY_SECONDS", 0.01)
    node = line.node()
    heads = [line.full(), line.full(), line.full()]
    line.net.missing |= line.files_of(heads[2]) - line.files_of(heads[0])
    for head in heads[1:]:
        node.hears(head)
    async with node.at_work():
        await node.holdings.changed()
        assert node.holdings.newest is not None
        assert node.holdings.newest.hash == heads[1].hash
        node.assert_whole(heads[1])
        line.net.missing.clear()
        await node.gets(heads[2])


async def test_what_would_be_stale_does_not_stand_in(line: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nous_node.node.holdings.RETRY_SECONDS", 0.01)
    node = line.node()
    old = line.full()
    node.hears(old)
    for _ in range(line.run.manifest.staleness):
        line.full()
    newest = line.full()
    line.net.missing |= line.files_of(newest) - line.files_of(old)
    node.hears(newest)
    async with node.at_work():
        while len(node.notes()) < 2:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert node.holdings.newest is None
        line.net.missing.clear()
        await node.gets(newest)


async def test_a_download_is_left_for_a_head_without_which_its_rollouts_would_be_stale(line: Lineage) -> None:
    staleness = line.run.manifest.staleness
    node = line.node()
    old = line.full()
    line.net.gate = trio.Event()
    async with node.at_work():
        node.hears(old)
        await wait_all_tasks_blocked(0.05)
        for _ in range(staleness + 1):
            newer = line.full()
            node.hears(newer)
        await wait_all_tasks_blocked(0.05)
        line.net.gate.set()
        await node.gets(newer)
    assert not line.files_of(old) - line.files_of(newer) & set(line.net.asked)


async def test_a_download_goes_on_for_renewals_of_it(line: Lineage) -> None:
    """What is here of a version that is left is not fetched again for the next that has the same files."""
    node = line.node()
    head = line.full()
    line.net.gate, line.net.room = trio.Event(), 4
    async with node.at_work():
        node.hears(head)
        place = node.holdings.index.place
        with trio.fail_after(60):
            while sum(place(digest) is not None for digest in line.net.asked) < 4:  # noqa: ASYNC110
                await trio.sleep(0.01)  # threads verify and write them
        first = set(line.net.asked)
        for _ in range(2 * line.run.manifest.staleness):
            newest = line.renewal(FULL)
            node.hears(newest)
        with trio.fail_after(60):
            while "part" not in node.here(newest):  # noqa: ASYNC110
                await trio.sleep(0.01)
        line.net.asked.clear()
        line.net.gate.set()
        await node.gets(newest)
    assert len(first) >= 4
    assert set(line.net.asked) == line.files_of(head) - first
