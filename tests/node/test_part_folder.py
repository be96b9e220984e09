"""A folder on its way: what is in it is kept, holes are not read, its chunks are served from the start."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nous_node.node import chunk_files
from nous_node.node.blobs import BlobIndex, verify_folder
from nous_node.node.part_folder import PartFolder
from nous_node.protocol.checkpoints import check_chunk, file_entry
from nous_node.protocol.errors import RemoteError

CHUNK = 1 << 16
DATA = random.Random(5).randbytes(16 * CHUNK)
PIECES = [DATA[at : at + CHUNK] for at in range(0, len(DATA), CHUNK)]
FILES = [file_entry("model.safetensors", PIECES, CHUNK)]
DIGESTS = FILES[0].hashes()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of what was hashed to look through a folder."""
    found: list[int] = []

    def counted(data: bytes, digest: bytes) -> None:
        found.append(len(data))
        check_chunk(data, digest)

    monkeypatch.setattr(chunk_files, "check_chunk", counted)
    return found


def begun(path: Path) -> tuple[PartFolder, BlobIndex]:
    index = BlobIndex(lambda file: None)
    return PartFolder(path / "v1", FILES, index), index


def test_a_new_folder_is_laid_out_without_hashing_anything(tmp_path: Path, hashed: list[int]) -> None:
    part, index = begun(tmp_path)
    assert part.prepare() == dict.fromkeys(DIGESTS, CHUNK)
    assert hashed == []
    assert (tmp_path / "v1.part" / "model.safetensors").stat().st_size == len(DATA)
    assert not index.places


def test_what_was_put_stays_over_a_restart_and_holes_are_not_read(tmp_path: Path, hashed: list[int]) -> None:
    part, _ = begun(tmp_path)
    part.prepare()
    for number in (0, 7, 8):
        part.put(DIGESTS[number], PIECES[number])
    hashed.clear()
    again, index = begun(tmp_path)
    missing = again.prepare()
    assert set(missing) == set(DIGESTS) - {DIGESTS[0], DIGESTS[7], DIGESTS[8]}
    assert set(index.places) == {DIGESTS[0], DIGESTS[7], DIGESTS[8]}
    if hasattr(os, "SEEK_DATA"):
        assert len(hashed) <= 8


def test_on_a_file_system_that_knows_no_holes_everything_is_looked_at(
    tmp_path: Path, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    part, _ = begun(tmp_path)
    part.prepare()
    part.put(DIGESTS[3], PIECES[3])
    hashed.clear()
    monkeypatch.delattr(os, "SEEK_DATA", raising=False)
    again, _ = begun(tmp_path)
    assert set(again.prepare()) == set(DIGESTS) - {DIGESTS[3]}
    assert len(hashed) == len(DIGESTS)


def test_a_wrong_chunk_is_not_written(tmp_path: Path) -> None:
    part, index = begun(tmp_path)
    part.prepare()
    with pytest.raises(RemoteError):
        part.put(DIGESTS[0], PIECES[1])
    assert (tmp_path / "v1.part" / "model.safetensors").read_bytes() == bytes(len(DATA))
    assert not index.places


def test_chunks_are_read_from_the_part_and_then_from_the_folder(tmp_path: Path) -> None:
    part, index = begun(tmp_path)
    part.prepare()
    for digest, piece in zip(DIGESTS, PIECES, strict=True):
        part.put(digest, piece)
        assert index.read(digest) == piece
    part.complete()
    verify_folder(tmp_path / "v1", FILES)
    for digest, piece in zip(DIGESTS, PIECES, strict=True):
        place = index.place(digest)
        assert place is not None
        assert place[0].parent == tmp_path / "v1"
        assert index.read(digest) == piece


def test_no_entries_make_an_empty_folder(tmp_path: Path) -> None:
    part = PartFolder(tmp_path / "v1", [], BlobIndex(lambda file: None))
    assert part.prepare() == {}
    part.complete()
    assert list((tmp_path / "v1").iterdir()) == []


# --- the index behind it -------------------------------------------------------------------------


@pytest.fixture
def twice(tmp_path: Path) -> tuple[BlobIndex, list[Path], list[Path]]:
    """A file in two folders, and what is told of damage."""
    told: list[Path] = []
    index = BlobIndex(told.append)
    files = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "model.safetensors")
        files[-1].write_bytes(DATA)
        index.add(tmp_path / name, FILES)
    return index, files, told


Spoil = Callable[[Path], None]


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(bytes(len(DATA)))])
def test_where_one_place_is_damaged_the_other_serves(
    twice: tuple[BlobIndex, list[Path], list[Path]], spoil: Spoil
) -> None:
    index, (old, new), _ = twice
    spoil(new)
    assert index.read(DIGESTS[2]) == PIECES[2]
    assert index.place(DIGESTS[2]) == (old, 2 * CHUNK, CHUNK)
    spoil(old)
    assert index.read(DIGESTS[2]) is None
    assert index.place(DIGESTS[2]) is None


def test_dropping_one_folder_leaves_the_other(
    twice: tuple[BlobIndex, list[Path], list[Path]],
) -> None:
    index, (old, new), _ = twice
    index.drop(new.parent)
    assert index.place(DIGESTS[0]) == (old, 0, CHUNK)
    index.drop(old.parent)
    assert not index.places


def test_a_chunk_is_hashed_once_as_long_as_its_file_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nous_node.node import blobs

    hashed: list[bytes] = []

    def counted(data: bytes, digest: bytes) -> None:
        hashed.append(digest)
        check_chunk(data, digest)

    monkeypatch.setattr(blobs, "check_chunk", counted)
    file = tmp_path / "model.safetensors"
    file.write_bytes(DATA)
    long_ago = file.stat().st_mtime_ns - 3600 * 10**9
    os.utime(file, ns=(long_ago, long_ago))
    told: list[Path] = []
    index = BlobIndex(told.append)
    index.add(tmp_path, FILES)
    for _ in range(5):
        assert index.read(DIGESTS[0]) == PIECES[0]
    assert len(hashed) == 1
    with file.open("r+b") as changed:
        changed.write(b"changed")
    assert index.read(DIGESTS[0]) is None
    assert len(hashed) == 2
