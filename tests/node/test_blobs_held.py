"""Chunks that are held here: served, verified, and damaged on the disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nous_node.node.blobs import BlobIndex, verify_folder
from nous_node.node.create import folder_entries
from nous_node.protocol.encoding import encode
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.streams import BlobRequest, read_blob

from .swarm import CHUNK, FILES, Bench, entry


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, FILES)


@dataclass
class Served:
    """An index over FILES, and what it says about damage."""

    index: BlobIndex
    bench: Bench
    told: list[Path]

    async def ask(self, digest: bytes) -> bytes:
        return read_blob(b"".join(await self.index.answer("peer", encode(BlobRequest(digest)))))


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
    assert list(served.index.places.values()) == [[(other / "a.json", 0, 3)]]


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

    def fileno(self) -> int:
        return int(self._file.fileno())

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
        def opened(path: Path, mode: str = "r", buffering: int = -1) -> Any:
            file = real(path, mode, buffering)
            return BadSector(file, at) if path == bad and mode in {"rb", "r+b"} else file

        monkeypatch.setattr(Path, "open", opened)

    return spoil


async def test_a_part_that_cannot_be_read_in_one_place_is_fetched_there(
    bench: Bench, bad_sector: Callable[[Path, int], None]
) -> None:
    shutil.copytree(bench.source, bench.part)
    bad_sector(bench.part / "model.safetensors", 2 * CHUNK)
    peers = bench.peers()
    await bench.fetch(peers)
    bench.assert_complete()
    assert len(peers.asked) == 1


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
