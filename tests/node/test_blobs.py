"""Chunks from many peers: nothing unverified gets a final name, and what was verified is fetched once."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node import blobs
from nous_node.node.blobs import PARALLEL, BlobIndex, FetchError, fetch_checkpoint, verify_folder
from nous_node.node.create import folder_entries
from nous_node.node.home import DiskFullError, StorageError
from nous_node.node.network_errors import NotConnectedError
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, FileEntry, file_entry
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.streams import MAX_REQUEST, BlobRequest, blob_reply, read_blob

CHUNK = 1 << 14
FILES = {
    "chat/template.jinja": b"{{ text }}",
    "config.json": b"{}",
    "empty.txt": b"",
    "model.safetensors": random.Random(1).randbytes(9 * CHUNK + 100),
}
CHUNKS = 12
"""Of FILES: ten of the model, one each of two small files."""


@dataclass
class Swarm:
    """Peers, each of which answers every request in its own way."""

    peers: dict[str, Callable[[bytes], bytes]]
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        digest = read(payload, BlobRequest, MAX_REQUEST).hash
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await trio.lowlevel.checkpoint()
        self.in_flight -= 1
        if peer in self.cut:
            raise NotConnectedError(peer)
        self.asked.append((peer, digest))
        return self.peers[peer](digest)

    async def disconnect(self, peer: str) -> None:
        self.cut.append(peer)

    def count(self) -> Counter[str]:
        return Counter(peer for peer, _ in self.asked)


def honest(index: BlobIndex) -> Callable[[bytes], bytes]:
    return lambda digest: blob_reply(index.read(digest))


def liar(digest: bytes) -> bytes:
    return blob_reply(b"not what you asked for")


def empty_handed(digest: bytes) -> bytes:
    return blob_reply(None)


def babbler(digest: bytes) -> bytes:
    return b"\xc1 no reply"


def gone(digest: bytes) -> bytes:
    raise NotConnectedError("gone")


class Bench:
    def __init__(self, path: Path, files: dict[str, bytes]) -> None:
        self.source = path / "source"
        for name, content in files.items():
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
            (self.source / name).write_bytes(content)
        self.files = [entry(name, content) for name, content in sorted(files.items())]
        self.server = BlobIndex(lambda file: None)
        self.server.add(self.source, self.files)
        self.folder = path / "here" / "checkpoint"
        self.part = path / "here" / "checkpoint.part"
        self.index = BlobIndex(lambda file: None)

    def swarm(self, **peers: Callable[[bytes], bytes]) -> Swarm:
        return Swarm(peers or {"honest": honest(self.server)})

    async def fetch(self, swarm: Swarm, seed: int = 0) -> int:
        manifest = CheckpointManifest(1, FULL, self.files, {"w": bytes(32)}, bytes(32))
        peers = [peer for peer in swarm.peers if peer not in swarm.cut]
        return await fetch_checkpoint(swarm, peers, manifest, self.folder, self.index, random.Random(seed))

    def assert_complete(self) -> None:
        verify_folder(self.folder, self.files)
        assert not self.part.exists()
        held = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
        assert held == {one.path for one in self.files}
        for one in self.files:
            assert all(self.index.read(digest) is not None for digest in one.hashes())


def entry(name: str, content: bytes) -> FileEntry:
    return file_entry(name, [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)], CHUNK)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, FILES)


def half(bench: Bench) -> Callable[[bytes], bytes]:
    """A peer that is gone after six chunks."""
    served: list[bytes] = []

    def answer(digest: bytes) -> bytes:
        if len(served) == 6:
            raise NotConnectedError("half")
        served.append(digest)
        return blob_reply(bench.server.read(digest))

    return answer


# --- fetching ------------------------------------------------------------------------------------


async def test_folders_small_files_and_empty_ones_arrive_whole(bench: Bench) -> None:
    swarm = bench.swarm()
    fetched = await bench.fetch(swarm)
    bench.assert_complete()
    assert {one.path: (bench.folder / one.path).read_bytes() for one in bench.files} == FILES
    assert fetched == sum(map(len, FILES.values()))
    assert len(swarm.asked) == len(set(swarm.asked)) == CHUNKS


async def test_several_peers_share_the_work_and_few_chunks_are_asked_for_at_once(bench: Bench) -> None:
    swarm = bench.swarm(**{f"peer {number}": honest(bench.server) for number in range(4)})
    await bench.fetch(swarm)
    bench.assert_complete()
    assert len(swarm.count()) == 4
    assert swarm.most_in_flight <= PARALLEL


@pytest.mark.parametrize("seed", range(6))
async def test_a_peer_that_lies_is_cut_off_and_its_chunk_comes_from_another(bench: Bench, seed: int) -> None:
    swarm = bench.swarm(liar=liar, honest=honest(bench.server))
    await bench.fetch(swarm, seed)
    bench.assert_complete()
    assert set(swarm.cut) <= {"liar"}
    assert swarm.count()["liar"] <= PARALLEL  # what was in flight when it was found out


@pytest.mark.parametrize("other", [empty_handed, babbler, gone])
async def test_a_peer_that_has_nothing_is_kept_and_asked_last(
    bench: Bench, other: Callable[[bytes], bytes]
) -> None:
    swarm = bench.swarm(other=other, honest=honest(bench.server))
    await bench.fetch(swarm)
    bench.assert_complete()
    assert swarm.cut == []
    assert swarm.count()["other"] <= PARALLEL


async def test_peers_that_hold_a_part_each_make_a_whole(bench: Bench) -> None:
    digests = [digest for one in bench.files for digest in one.hashes()]

    def holds(share: list[bytes]) -> Callable[[bytes], bytes]:
        return lambda digest: blob_reply(bench.server.read(digest) if digest in share else None)

    await bench.fetch(bench.swarm(even=holds(digests[::2]), odd=holds(digests[1::2])))
    bench.assert_complete()


@pytest.mark.parametrize("bad", [liar, empty_handed, babbler, gone])
async def test_nothing_unverified_gets_a_final_name(bench: Bench, bad: Callable[[bytes], bytes]) -> None:
    with pytest.raises(FetchError, match="No connected peer delivers a chunk") as error:
        await bench.fetch(bench.swarm(bad=bad))
    assert "it is tried again" in str(error.value)
    assert not bench.folder.exists()
    assert not bench.index.places


async def test_without_any_peer_that_is_said(bench: Bench) -> None:
    with pytest.raises(FetchError, match="no peer is connected"):
        await bench.fetch(Swarm({}))


async def test_a_download_that_was_cut_off_goes_on_where_it_was(bench: Bench) -> None:
    with pytest.raises(FetchError):
        await bench.fetch(bench.swarm(half=half(bench)))
    assert not bench.folder.exists()
    swarm = bench.swarm()
    await bench.fetch(swarm)
    bench.assert_complete()
    assert len(swarm.asked) == CHUNKS - 6


async def test_a_part_that_was_damaged_meanwhile_is_fetched_again(bench: Bench) -> None:
    shutil.copytree(bench.source, bench.part)
    with (bench.part / "model.safetensors").open("r+b") as file:
        file.seek(3 * CHUNK + 7)
        file.write(b"?")
    os.truncate(bench.part / "config.json", 1)
    swarm = bench.swarm()
    await bench.fetch(swarm)
    bench.assert_complete()
    assert len(swarm.asked) == 2


async def test_a_part_that_is_complete_needs_nobody(bench: Bench) -> None:
    shutil.copytree(bench.source, bench.part)
    assert await bench.fetch(Swarm({})) == 0
    bench.assert_complete()


async def test_a_chunk_that_is_held_already_is_copied(bench: Bench, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    (held / "older.safetensors").write_bytes(FILES["model.safetensors"][: 4 * CHUNK])
    bench.index.add(held, [entry("older.safetensors", FILES["model.safetensors"][: 4 * CHUNK])])
    swarm = bench.swarm()
    await bench.fetch(swarm)
    bench.assert_complete()
    assert len(swarm.asked) == CHUNKS - 4


async def test_a_chunk_that_is_held_and_damaged_is_fetched(bench: Bench, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    (held / "older.safetensors").write_bytes(FILES["model.safetensors"][:CHUNK])
    bench.index.add(held, [entry("older.safetensors", FILES["model.safetensors"][:CHUNK])])
    (held / "older.safetensors").write_bytes(bytes(CHUNK))
    swarm = bench.swarm()
    await bench.fetch(swarm)
    bench.assert_complete()
    assert len(swarm.asked) == CHUNKS


async def test_a_damaged_copy_under_the_final_name_is_replaced(bench: Bench) -> None:
    bench.folder.mkdir(parents=True)
    (bench.folder / "model.safetensors").write_bytes(b"damaged")
    (bench.folder / "leftover.txt").write_bytes(b"of the damaged copy")
    await bench.fetch(bench.swarm())
    bench.assert_complete()


async def test_a_full_disk_is_told_and_the_part_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = blobs._write, []

    def filling(path: Path, offset: int, data: bytes) -> None:
        if len(written) >= 5:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, offset, data)
        written.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(blobs, "_write", filling)
        with pytest.raises(DiskFullError, match="Make room"):
            await bench.fetch(bench.swarm())
    assert not bench.folder.exists()
    swarm = bench.swarm()
    await bench.fetch(swarm)
    bench.assert_complete()
    assert len(swarm.asked) == CHUNKS - len(written)


async def test_a_disk_that_cannot_be_written_is_told(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("a file where the folder should be")
    with pytest.raises(StorageError):
        await bench.fetch(bench.swarm())


@given(sizes=st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_any_sizes_arrive_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    entropy = random.Random(seed)
    files = {f"{number}.json": entropy.randbytes(size) for number, size in enumerate(sizes)}
    bench = Bench(tmp_path_factory.mktemp("any"), files)

    async def fetched() -> None:
        await bench.fetch(bench.swarm(liar=liar, honest=honest(bench.server)), seed)

    trio.run(fetched)
    bench.assert_complete()
    shutil.rmtree(bench.source.parent)


# --- serving -------------------------------------------------------------------------------------


@dataclass
class Served:
    """An index over FILES, and what it says about damage."""

    index: BlobIndex
    bench: Bench
    told: list[Path]

    async def ask(self, digest: bytes) -> bytes:
        return read_blob(await self.index.answer("peer", encode(BlobRequest(digest))))


@pytest.fixture
def served(bench: Bench) -> Served:
    told: list[Path] = []
    index = BlobIndex(told.append)
    index.add(bench.source, bench.files)
    return Served(index, bench, told)


def digests(served: Served, name: str) -> list[bytes]:
    return next(one for one in served.bench.files if one.path == name).hashes()


async def test_every_chunk_is_served_from_its_place(served: Served) -> None:
    for one in served.bench.files:
        parts = [await served.ask(digest) for digest in one.hashes()]
        assert b"".join(parts) == FILES[one.path]
    assert served.told == []


async def test_a_chunk_that_is_not_held_is_not_found(served: Served) -> None:
    with pytest.raises(RemoteError) as error:
        await served.ask(bytes(32))
    assert error.value.code == Code.NOT_FOUND


async def test_a_request_that_is_none_is_refused(served: Served) -> None:
    for junk in (b"", b"\xc1", encode(BlobRequest(bytes(31))), encode({"path": "/etc/passwd"})):
        with pytest.raises(RemoteError):
            await served.index.answer("peer", junk)


async def test_a_file_that_changed_on_the_disk_is_no_longer_served_and_told_once(served: Served) -> None:
    file = served.bench.source / "model.safetensors"
    data = FILES["model.safetensors"]
    file.write_bytes(data[:5] + b"?" + data[6:])
    bad, good = digests(served, "model.safetensors")[:2]
    for _ in range(2):
        with pytest.raises(RemoteError) as error:
            await served.ask(bad)
        assert error.value.code == Code.NOT_FOUND
    assert await served.ask(good) == data[CHUNK : 2 * CHUNK]
    assert served.told == [file]


async def test_a_file_that_was_cut_is_damaged_and_one_that_is_gone_is_not(served: Served) -> None:
    os.truncate(served.bench.source / "model.safetensors", CHUNK)
    (served.bench.source / "config.json").unlink()
    for digest in (digests(served, "model.safetensors")[1], *digests(served, "config.json")):
        with pytest.raises(RemoteError):
            await served.ask(digest)
    assert served.told == [served.bench.source / "model.safetensors"]


def test_a_folder_that_is_dropped_is_forgotten_and_no_other(served: Served, tmp_path: Path) -> None:
    other = tmp_path / "source-2"
    other.mkdir()
    (other / "a.json").write_bytes(b"[1]")
    served.index.add(other, [entry("a.json", b"[1]")])
    served.index.drop(served.bench.source)
    assert [path for path, _, _ in served.index.places.values()] == [other / "a.json"]


def test_verifying_a_folder_names_what_is_wrong(bench: Bench) -> None:
    verify_folder(bench.source, bench.files)
    assert [one.path for one in folder_entries(bench.source)] == [one.path for one in bench.files]
    model = bench.source / "model.safetensors"
    model.write_bytes(FILES["model.safetensors"][:-1] + b"?")
    with pytest.raises(RemoteError) as error:
        verify_folder(bench.source, bench.files)
    assert error.value.code == Code.HASH_MISMATCH
    model.write_bytes(FILES["model.safetensors"] + b"?")
    with pytest.raises(RemoteError, match="another size"):
        verify_folder(bench.source, bench.files)
    model.unlink()
    with pytest.raises(RemoteError, match="is missing"):
        verify_folder(bench.source, bench.files)


# --- bad sectors ---------------------------------------------------------------------------------


class BadSector:
    """A file of which one chunk cannot be read."""

    def __init__(self, file: Any, at: int) -> None:
        self._file, self._at = file, at

    def __enter__(self) -> BadSector:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, offset: int) -> None:
        self._file.seek(offset)

    def read(self, length: int) -> bytes:
        if self._file.tell() == self._at:
            raise OSError(errno.EIO, "Input/output error")
        return bytes(self._file.read(length))


@pytest.fixture
def bad_sector(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Makes a file unreadable at an offset."""
    real = Path.open

    def spoil(bad: Path, at: int) -> None:
        def opened(path: Path, mode: str = "r") -> Any:
            file = real(path, mode)
            return BadSector(file, at) if path == bad and mode in {"rb", "r+b"} else file

        monkeypatch.setattr(Path, "open", opened)

    return spoil


async def test_a_part_that_cannot_be_read_in_one_place_is_fetched_there(
    bench: Bench, bad_sector: Callable[[Path, int], None]
) -> None:
    shutil.copytree(bench.source, bench.part)
    bad_sector(bench.part / "model.safetensors", 2 * CHUNK)
    swarm = bench.swarm()
    await bench.fetch(swarm)
    bench.assert_complete()
    assert len(swarm.asked) == 1


def test_a_folder_that_cannot_be_read_is_a_damaged_one(
    bench: Bench, bad_sector: Callable[[Path, int], None]
) -> None:
    bad_sector(bench.source / "model.safetensors", 2 * CHUNK)
    with pytest.raises(RemoteError, match=r"cannot be read \(Input/output error\)"):
        verify_folder(bench.source, bench.files)


async def test_a_chunk_that_cannot_be_read_is_not_served(
    served: Served, bad_sector: Callable[[Path, int], None]
) -> None:
    bad_sector(served.bench.source / "model.safetensors", 2 * CHUNK)
    bad, good = digests(served, "model.safetensors")[2:4]
    with pytest.raises(RemoteError) as error:
        await served.ask(bad)
    assert error.value.code == Code.NOT_FOUND
    assert len(await served.ask(good)) == CHUNK
