"""Which version a volunteer generates with: the newest that counts for its key and can be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node.config import Settings
from nous_node.node.engine import LoadError
from nous_node.node.events import Event, Note
from nous_node.node.following import Following, Head
from nous_node.node.home import Home
from nous_node.node.joined import JoinedFolder
from nous_node.node.outbox import Outbox
from nous_node.node.runfolder import RunFolder
from nous_node.node.volunteer import _Volunteer
from nous_node.node.worker_messages import Load, Loaded, Prepare
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.identity import Identity

KEY = Identity.from_seed(b"v" * 32)
TENSORS = {"w": b"w" * 32}


def head(version: int) -> Head:
    files = [file_entry("model.safetensors", [b"weights"])]
    manifest = CheckpointManifest(version, FULL, files, TENSORS, bytes(32), b"p" * 32)
    return Head(bytes([version]) * 32, manifest, b"")


class Worker:
    """Loads anything but what is damaged."""

    def __init__(self) -> None:
        self.damaged: set[bytes] = set()
        self.crowded = False
        self.asked: list[Load | Prepare] = []

    async def load(self, load: Load) -> Loaded:
        await trio.lowlevel.checkpoint()
        self.asked.append(load)
        if load.checkpoint in self.damaged:
            raise LoadError("Tensor 'w' does not have the hash it was published with.")
        return Loaded("player", "1", "float32", "cpu", crowded=self.crowded)

    async def prepare(self, prepare: Prepare) -> None:
        await trio.lowlevel.checkpoint()
        self.asked.append(prepare)


class Bench:
    def __init__(self, path: Path, run: RunFolder, outbox: Outbox) -> None:
        network: Any = object()
        folder = JoinedFolder.of(Home.open(path / "home"), run.run)
        self.following = Following.of(run.run, run.envelope)
        self.notes: list[str] = []
        outbox.note_known(0)
        settings = Settings(threads=1, memory=1 << 30)
        self.node = _Volunteer(settings, KEY, folder, network, self.following, outbox, self._hear)
        self.worker = Worker()
        self.node.engine = self.worker  # type: ignore[assignment]

    def holds(self, version: int) -> Head:
        """It is on the disk now."""
        found = head(version)
        self.following.head = found
        holdings = self.node.holdings
        holdings.newest = found
        holdings._changed.set()
        holdings._changed = trio.Event()
        return found

    def _hear(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)


@pytest.fixture
def bench(tmp_path: Path, base_run: RunFolder) -> Iterator[Bench]:
    with Outbox.open(tmp_path / "outbox.sqlite") as outbox:
        yield Bench(tmp_path, base_run, outbox)


async def test_version_that_cannot_be_loaded_is_left_out_while_the_one_before_is_fresh(bench: Bench) -> None:
    node, old = bench.node, bench.holds(1)
    assert await node._load(old, None) is old
    bad = bench.holds(2)
    bench.worker.damaged.add(bad.hash)
    assert await node._usable_head(old) is bad
    assert await node._load(bad, old) is old
    assert "Version 2 is left out: Tensor 'w'" in bench.notes[-1]
    assert node.holdings.in_use is old
    assert node.holdings._doubted is bad  # it is verified again
    assert await node._usable_head(old) is old
    mended = bench.holds(2)
    assert await node._usable_head(old) is mended
    good = bench.holds(3)
    assert await node._usable_head(old) is good
    assert await node._load(good, old) is good
    assert len(bench.notes) == 1


async def test_version_before_one_that_cannot_be_loaded_is_used_no_longer_than_the_run_allows(
    bench: Bench,
) -> None:
    node, old = bench.node, bench.holds(1)
    bad = bench.holds(2 + node.manifest.staleness)
    bench.worker.damaged.add(bad.hash)
    await node._load(bad, old)
    found: list[Head] = []

    async def look() -> None:
        found.append(await node._usable_head(old))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await wait_all_tasks_blocked()
        assert not found
        assert node.contribution.doing == "waiting for a version that can be loaded"
        good = bench.holds(bad.version + 1)
    assert found == [good]


async def test_first_version_that_cannot_be_loaded_is_an_error(bench: Bench) -> None:
    bad = bench.holds(1)
    bench.worker.damaged.add(bad.hash)
    with pytest.raises(LoadError):
        await bench.node._load(bad, None)


async def test_each_version_that_counts_is_prepared_as_soon_as_it_is_here(bench: Bench) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node._prepare_loop)
        await wait_all_tasks_blocked()
        first = bench.holds(1)
        await wait_all_tasks_blocked()
        assert bench.worker.asked == []  # there is nothing to prepare it beside
        await bench.node._load(first, None)
        second = bench.holds(2)
        await wait_all_tasks_blocked()
        folder = str(bench.node.holdings.folder(second))
        assert bench.worker.asked[1:] == [Prepare(folder, second.hash, TENSORS)]
        nursery.cancel_scope.cancel()


async def test_memory_that_is_too_small_for_two_copies_is_told_once(bench: Bench) -> None:
    bench.worker.crowded = True
    for version in (1, 2, 3):
        await bench.node._load(bench.holds(version), None)
    assert len([note for note in bench.notes if "Two copies of the model do not fit" in note]) == 1
