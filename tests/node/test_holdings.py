"""Which checkpoints a volunteer keeps on its disk, and what it does about damage there."""

from __future__ import annotations

import errno
import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from nous_node.node.blobs import BlobIndex
from nous_node.node.events import Event, Note
from nous_node.node.following import Following, Head
from nous_node.node.holdings import Holdings
from nous_node.node.home import Home, StorageError
from nous_node.node.joined import JoinedFolder, TooLargeError
from nous_node.node.network_errors import NotConnectedError
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, FileEntry, file_entry

CHUNK = 1 << 14
DISK = 9 * CHUNK
"""Three checkpoints."""


@dataclass
class Peer:
    peer_id: str


@dataclass
class Net:
    """A network of peers that each hold chunks; `liars` turn a bit of every one."""

    served: dict[str, BlobIndex]
    liars: set[str] = field(default_factory=set)
    cut: list[str] = field(default_factory=list)
    asked: int = 0

    def peers(self) -> list[Peer]:
        return [Peer(name) for name in self.served if name not in self.cut]

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        await trio.lowlevel.checkpoint()
        if peer in self.cut:
            raise NotConnectedError(peer)
        self.asked += 1
        reply = await self.served[peer].answer("us", payload)
        return reply[:-1] + bytes([reply[-1] ^ 1]) if peer in self.liars else reply

    async def disconnect(self, peer: str) -> None:
        self.cut.append(peer)


def published(folder: Path, version: int, chunks: int = 3) -> tuple[Head, list[FileEntry]]:
    """A checkpoint of some chunks in a folder."""
    folder.mkdir()
    data = hashlib.shake_256(bytes([version])).digest(chunks * CHUNK)
    (folder / "model.safetensors").write_bytes(data)
    blocks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    files = [file_entry("model.safetensors", blocks, CHUNK)]
    manifest = CheckpointManifest(version, FULL, files, {"w": bytes(32)}, bytes(32))
    return Head(hashlib.sha256(bytes([version])).digest(), manifest, b""), files


class Bench:
    def __init__(self, path: Path, following: Following) -> None:
        self.path, self.following = path, following
        self.net = Net({"honest": BlobIndex(lambda file: None)})
        self.events: list[Event] = []
        self.folder = JoinedFolder.of(Home.open(path / "home"), following.run)
        network: Any = self.net
        self.holdings = Holdings(network, following, self.folder, DISK, self.events.append)

    def publish(self, version: int, chunks: int = 3) -> Head:
        head, files = published(self.path / f"v{version}", version, chunks)
        for index in self.net.served.values():
            index.add(self.path / f"v{version}", files)
        self.following.take(head)
        return head

    async def holds(self, head: Head) -> None:
        while self.holdings.newest is not head:
            await self.holdings.changed()

    def content(self, head: Head) -> bytes:
        return (self.holdings.folder(head) / "model.safetensors").read_bytes()

    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]


@pytest.fixture
def bench(tmp_path: Path, base_run: RunFolder) -> Bench:
    view: Any = _View()
    return Bench(tmp_path, Following(bytes(32), b"", base_run.manifest, view))


class _View:
    def learn(self, checkpoint: bytes, version: int) -> None:
        pass


async def test_checkpoint_that_the_worker_reads_stays_however_many_come(bench: Bench) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.holdings.fetch_loop)
        first = bench.publish(0)
        await bench.holds(first)
        bench.holdings.in_use = first
        for version in range(1, 5):
            head = bench.publish(version)
            await bench.holds(head)
        assert bench.content(first)
        bench.holdings.in_use = head
        last = bench.publish(5)
        await bench.holds(last)
        assert sorted(bench.folder.checkpoints.iterdir()) == sorted(map(bench.holdings.folder, (head, last)))
        nursery.cancel_scope.cancel()


async def test_peer_that_serves_a_bad_chunk_is_cut_off_and_another_serves_it(bench: Bench) -> None:
    bench.net.served["liar"] = BlobIndex(lambda file: None)
    bench.net.liars.add("liar")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.holdings.fetch_loop)
        for version in range(4):  # who is asked first is drawn
            head = bench.publish(version)
            await bench.holds(head)
            assert bench.content(head) == (bench.path / f"v{version}" / "model.safetensors").read_bytes()
        nursery.cancel_scope.cancel()
    assert set(bench.net.cut) <= {"liar"}


async def test_nobody_but_a_liar_to_ask_is_said_and_tried_again(bench: Bench, autojump_clock: object) -> None:
    bench.net.liars.add("honest")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.holdings.fetch_loop)
        head = bench.publish(0)
        while not bench.notes():  # noqa: ASYNC110
            await trio.sleep(0.1)
        assert "another hash" in bench.notes()[0]
        assert bench.holdings.newest is None
        bench.net.liars.clear()
        bench.net.cut.clear()
        await bench.holds(head)
        nursery.cancel_scope.cancel()


async def test_bit_that_flipped_on_our_disk_is_fetched_again_and_nothing_else(bench: Bench) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.holdings.fetch_loop)
        head = bench.publish(0)
        await bench.holds(head)
        nursery.cancel_scope.cancel()
    whole = bench.content(head)
    (bench.holdings.folder(head) / "model.safetensors").write_bytes(
        whole[:CHUNK] + bytes([whole[CHUNK] ^ 1]) + whole[CHUNK + 1 :]
    )
    asked = bench.net.asked
    again = Bench(bench.path, bench.following)  # the node is started again
    again.net = bench.net
    network: Any = bench.net
    again.holdings = Holdings(network, again.following, again.folder, DISK, again.events.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(again.holdings.fetch_loop)
        await again.holds(head)
        nursery.cancel_scope.cancel()
    assert again.content(head) == whole
    assert bench.net.asked == asked + 1
    assert any("damaged" in text for text in again.notes())


async def test_bit_that_flipped_on_the_servers_disk_is_not_served(bench: Bench) -> None:
    head, files = published(bench.path / "v9", 9)
    index = BlobIndex(lambda file: None)
    index.add(bench.path / "v9", files)
    digests = files[0].hashes()
    file = bench.path / "v9" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert index.read(digests[0]) == data[:CHUNK]
    assert index.read(digests[-1]) is None
    assert head.manifest.files == files


async def test_checkpoint_that_does_not_fit_is_passed_over_before_it_is_fetched(bench: Bench) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.holdings.fetch_loop)
        head = bench.publish(0)
        await bench.holds(head)
        asked = bench.net.asked
        bench.publish(1, chunks=4)
        while not bench.notes():  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert "--disk" in bench.notes()[0]
        assert bench.net.asked == asked
        assert bench.holdings.newest is head
        head = bench.publish(2)
        await bench.holds(head)
        nursery.cancel_scope.cancel()


async def test_first_checkpoint_that_does_not_fit_is_the_end(bench: Bench) -> None:
    bench.publish(0, chunks=4)
    with pytest.raises(TooLargeError, match="--disk"):
        await bench.holdings.fetch_loop()
    assert bench.net.asked == 0


async def test_disk_that_refuses_is_told_and_the_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    head = bench.publish(0)
    bench.holdings.folder(head).mkdir(parents=True)  # without its files, so it is damaged
    monkeypatch.setattr("nous_node.node.holdings._set_aside", refuses)
    with pytest.raises(StorageError, match="Input/output error"):
        await bench.holdings.fetch_loop()
    shutil.rmtree(bench.folder.checkpoints)
    bench.folder.checkpoints.write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="checkpoints"):
        await bench.holdings.fetch_loop()
