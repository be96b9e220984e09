"""Ops of chapter 09: checkpoint manifests, chunks, files, chains, deltas."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nous_node.protocol import checkpoints
from nous_node.protocol.constants import MAX_MANIFEST_VALUES
from nous_node.protocol.encoding import decode, encode, read
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import Code, RemoteError

from .adapter_question import ROOM, Answer, Ask, Ops, Raw, run_manifest, tagged
from .delta_files import apply_delta, write_delta

UNBOUNDED: Final = 1 << 40
"""Most bytes of a delta that is made: whether it pays is another question."""


class Signed(Ask, frozen=True):
    run: Raw
    manifest: Raw
    envelope: Raw
    contents: tuple[Raw, ...] = ()


def checkpoint(ask: Signed) -> Answer:
    envelope = unseal(ask.envelope)
    opened = checkpoints.open_checkpoint(envelope, ask.run, run_manifest(ask.manifest))
    for entry, data in zip(opened.files, ask.contents, strict=bool(ask.contents)):
        _check_content(entry, data)
    content = envelope.content()
    return {
        "manifest": content.hex(),
        "value": tagged(decode(content, ROOM, MAX_MANIFEST_VALUES)),
        "hash": checkpoints.checkpoint_hash(content).hex(),
        "files_hash": checkpoints.files_hash(opened.files).hex(),
        "weights_hash": checkpoints.weights_hash(opened.tensors).hex(),
    }


def _check_content(entry: checkpoints.FileEntry, content: bytes) -> list[bytes]:
    """The chunks of a file. Raises RemoteError where they are not those of its entry."""
    if len(content) != entry.size:
        raise RemoteError(Code.SIZE_MISMATCH, f"The file has {len(content)} bytes, not {entry.size}.")
    pieces = [content[start : start + entry.chunk] for start in range(0, len(content), entry.chunk)]
    for number, (piece, digest) in enumerate(zip(pieces, entry.hashes(), strict=True)):
        if len(piece) != entry.length(number):
            raise RemoteError(Code.SIZE_MISMATCH, f"Chunk {number} has {len(piece)} bytes.")
        checkpoints.check_chunk(piece, digest)
    return pieces


class Chunk(Ask, frozen=True):
    data: Raw
    hash: Raw


def chunk(ask: Chunk) -> Answer:
    checkpoints.check_chunk(ask.data, ask.hash)
    return {"data": ask.data.hex()}


class Tree(Ask, frozen=True):
    entry: Raw
    data: Raw


def tree(ask: Tree) -> Answer:
    entry = read(ask.entry, checkpoints.FileEntry, ROOM)
    checkpoints.check_chunks(entry)
    pieces = _check_content(entry, ask.data)
    made = checkpoints.file_entry(entry.path, pieces, entry.chunk)
    return {"entry": encode(made).hex()}


class Chain(Ask, frozen=True):
    manifest: Raw
    chain: list[Raw]


def chain(ask: Chain) -> Answer:
    last = checkpoints.read_manifest(ask.manifest, checkpoints.checkpoint_hash(ask.manifest))
    if len(last.chain) != len(ask.chain):
        raise RemoteError(Code.SIZE_MISMATCH, f"The chain has {len(last.chain)} manifests.")
    for index, (digest, link) in enumerate(zip(last.chain, ask.chain, strict=True)):
        checkpoints.check_link(last, index, checkpoints.read_manifest(link, digest))
    return {}


class Delta(Ask, frozen=True):
    parent: Raw
    delta: Raw
    tensors: dict[str, Raw]


def delta(ask: Delta) -> Answer:
    with _folder({"parent": ask.parent, "delta": ask.delta}) as folder:
        apply_delta(folder / "parent", folder / "delta", folder / "result", ask.tensors)
        return {"result": (folder / "result").read_bytes().hex()}


class Change(Ask, frozen=True):
    parent: Raw
    result: Raw


def delta_made(ask: Change) -> Answer:
    with _folder({"parent": ask.parent, "result": ask.result}) as folder:
        size = write_delta(folder / "parent", folder / "result", folder / "delta", most=UNBOUNDED)
        return {"made": size is not None}


@contextmanager
def _folder(files: dict[str, bytes]) -> Iterator[Path]:
    """Files for the while of one question: deltas are read and written piece by piece."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        yield folder


OPS: Final[Ops] = {
    "checkpoints": checkpoint,
    "chunks": chunk,
    "trees": tree,
    "chains": chain,
    "deltas": delta,
    "deltas-made": delta_made,
}
