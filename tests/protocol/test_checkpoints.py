"""Checkpoint manifests: files cut into chunks, paths, and bytes that are no manifest."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.checkpoints import (
    CheckpointManifest,
    FileEntry,
    check_chunk,
    check_files,
    check_path,
    checkpoint_hash,
    file_entry,
    files_hash,
    open_checkpoint,
)
from nous_node.protocol.constants import MAX_CHECKPOINT_BYTES, MAX_CHUNK, MIN_CHUNK
from nous_node.protocol.envelope import Kind
from nous_node.protocol.errors import Code, LocalError, RemoteError


def pieces(content: bytes, chunk: int) -> list[bytes]:
    return [content[start : start + chunk] for start in range(0, len(content), chunk)]


@given(st.binary(max_size=5 * MIN_CHUNK))
def test_a_file_entry_describes_its_content(content: bytes) -> None:
    entry = file_entry("model.safetensors", pieces(content, MIN_CHUNK), MIN_CHUNK)
    assert entry.size == len(content)
    assert len(entry.hashes()) == -(-len(content) // MIN_CHUNK)
    at = 0
    for index, digest in enumerate(entry.hashes()):
        piece = content[at : at + entry.length(index)]
        check_chunk(piece, digest)
        at += len(piece)
    assert at == len(content)


@pytest.mark.parametrize("blocks", [[b"a", b"b"], [bytes(MIN_CHUNK + 1)], [bytes(MIN_CHUNK), b"a", b"b"]])
def test_blocks_of_another_size_are_an_error(blocks: list[bytes]) -> None:
    with pytest.raises(LocalError):
        file_entry("model.safetensors", blocks, MIN_CHUNK)


def test_a_block_of_nothing_ends_a_file() -> None:
    assert file_entry("a.json", [b""]) == FileEntry("a.json", 0, 1 << 20, b"")


@pytest.mark.parametrize(
    "path", ["config.json", "a/b/model-00001-of-00002.safetensors", "_x.txt", "chat.jinja"]
)
def test_ordinary_paths_pass(path: str) -> None:
    check_path(path)


@given(st.text(max_size=300) | st.text("./\\a~:0-_ ", max_size=30).map(lambda text: text + ".json"))
def test_a_path_that_passes_stays_in_its_folder(path: str) -> None:
    try:
        check_path(path)
    except RemoteError:
        return
    parts = path.split("/")
    assert path.isascii()
    assert not any(part in ("", ".", "..") or part.startswith((".", "-")) for part in parts)


def test_only_data_files_pass() -> None:
    for suffix in ("bin", "pt", "pkl", "py", "so", "pth", "gguf", "safetensors.py", "JSON"):
        with pytest.raises(RemoteError) as caught:
            check_path(f"model.{suffix}")
        assert caught.value.code is Code.PATH


def test_the_sum_of_sizes_is_bounded(world: Any, replaced: Any) -> None:
    chunks = hashlib.sha256(b"").digest() * (MAX_CHECKPOINT_BYTES // MAX_CHUNK // 1024)
    size = MAX_CHECKPOINT_BYTES // 1024
    files = [FileEntry(f"{number:04}.json", size, MAX_CHUNK, chunks) for number in range(1025)]
    check_files(replaced(world.base, files=files[:1024]))
    with pytest.raises(RemoteError) as caught:
        check_files(replaced(world.base, files=files))
    assert caught.value.code is Code.SIZE_MISMATCH


def test_the_files_hash_does_not_depend_on_version_or_beacon(world: Any, replaced: Any) -> None:
    other = replaced(world.base, version=5, beacon=bytes([1]) * 32)
    assert files_hash(other.files) == files_hash(world.base.files) == world.manifest.base
    assert checkpoint_hash(other.to_bytes()) != checkpoint_hash(world.base.to_bytes())


def test_a_checkpoint_opens(world: Any) -> None:
    envelope = world.opened(Kind.CHECKPOINT, world.base.to_bytes(), world.trainer)
    assert open_checkpoint(envelope, world.run, world.manifest) == world.base
    assert world.base.size == 9


@given(st.binary(max_size=200))
def test_a_trainers_envelope_around_any_bytes_is_refused(world: Any, body: bytes) -> None:
    with pytest.raises(RemoteError):
        open_checkpoint(world.opened(Kind.CHECKPOINT, body, world.trainer), world.run, world.manifest)


@given(st.data())
def test_a_mutated_manifest_is_a_manifest_or_refused(world: Any, data: st.DataObject) -> None:
    wire = bytearray(world.base.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        opened = open_checkpoint(
            world.opened(Kind.CHECKPOINT, bytes(wire), world.trainer), world.run, world.manifest
        )
    except RemoteError:
        return
    assert isinstance(opened, CheckpointManifest)


def test_a_manifest_of_many_tensors_is_taken(world: Any, replaced: Any) -> None:
    tensors = {f"model.layers.{number}.weight": bytes(32) for number in range(20_000)}
    body = replaced(world.base, tensors=tensors).to_bytes()
    opened = open_checkpoint(world.opened(Kind.CHECKPOINT, body, world.trainer), world.run, world.manifest)
    assert len(opened.tensors) == 20_000
