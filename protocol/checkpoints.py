"""Checkpoints: signed manifests of hashed chunks. Spec: `specs/09-checkpoints.md`.

A checkpoint's hash is SHA-256 of its manifest's bytes (the body of the `checkpoint` envelope). Files are
cut into chunks of one size; each chunk is named, fetched and checked by its own SHA-256.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from .constants import (
    CHUNK,
    DOMAIN_FILES,
    DOMAIN_WEIGHTS,
    MAX_CHAIN,
    MAX_CHECKPOINT_BYTES,
    MAX_CHUNK,
    MAX_FILES,
    MAX_MANIFEST,
    MAX_MANIFEST_VALUES,
    MAX_MAP,
    MAX_MIRRORS,
    MAX_PATH,
    MIN_CHUNK,
)
from .encoding import Value, decode, encode, shaped
from .envelope import Envelope, Hash, Kind, Uint
from .errors import Code, LocalError, RemoteError
from .runs import RunManifest

HASH_BYTES = 32
FULL = "full"
DELTA = "delta"
SUFFIXES = (".safetensors", ".json", ".jinja", ".txt")
"""What a checkpoint may consist of: tensors and text. Nothing that a loader would execute."""
MAX_URL = 1_024
_URL = re.compile(r"https?://[!-~]+\Z")
_PATH_PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_-])?\Z")


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    path: str
    """Relative, `/` between parts, each part `[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_-])?`."""
    size: Annotated[int, Meta(ge=0, le=MAX_CHECKPOINT_BYTES)]
    chunk: Annotated[int, Meta(ge=MIN_CHUNK, le=MAX_CHUNK)]
    """Bytes of every chunk but the last."""
    chunks: bytes
    """SHA-256 of each chunk, one behind the other; empty for an empty file."""

    def hashes(self) -> list[bytes]:
        return [self.chunks[i : i + HASH_BYTES] for i in range(0, len(self.chunks), HASH_BYTES)]

    def length(self, index: int) -> int:
        """Bytes of chunk number `index`."""
        return min(self.chunk, self.size - index * self.chunk)


class CheckpointManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a `checkpoint` envelope."""

    version: Uint
    """0 for the base, then one more for each."""
    kind: Annotated[str, Meta(max_length=64)]
    """`full`: what a joiner begins with. `delta`: made from its parent by `deltas`. [CKP-13]"""
    files: Annotated[list[FileEntry], Meta(min_length=1, max_length=MAX_FILES)]
    """The files of the result, for both kinds; sorted by path."""
    tensors: Annotated[dict[str, Hash], Meta(min_length=1, max_length=MAX_MAP)]
    """SHA-256 of each tensor's little-endian bytes."""
    beacon: Hash
    """32 random bytes, drawn when the checkpoint is published: tasks are derived from it."""
    parent: Hash | None = None
    """Hash of the checkpoint before; absent for version 0."""
    levels: dict[str, Uint] = {}
    """Curriculum level of each environment; absent means 0."""
    stats: dict[str, float] = {}
    """Training figures of the step that made it."""
    eval: dict[str, float] = {}
    """Held-out figures."""
    deltas: Annotated[list[FileEntry], Meta(max_length=MAX_FILES)] = []
    """Of a `delta`: for a file at `path` what makes it from the parent's file of that path. A file of
    `files` without one is the parent's where its chunks are the same, and is fetched by its chunks
    otherwise. Sorted by path."""
    chain: Annotated[list[Hash], Meta(max_length=MAX_CHAIN)] = []
    """Of a `delta`: the checkpoints that lead to it, from a `full` one to its parent."""
    mirrors: Annotated[list[Annotated[str, Meta(max_length=MAX_URL)]], Meta(max_length=MAX_MIRRORS)] = []
    """Base URLs where `GET <base>/blob/<hash in hex>` answers with a chunk. [STR-6]"""

    def to_bytes(self) -> bytes:
        return encode(self)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)

    @property
    def delta_size(self) -> int:
        """Bytes that a node which holds the parent fetches, beside files that have no delta."""
        return sum(entry.size for entry in self.deltas)


def checkpoint_hash(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).digest()


def files_hash(files: list[FileEntry]) -> bytes:
    """Names the content of a checkpoint independent of version and beacon; a run's `base`."""
    return hashlib.sha256(DOMAIN_FILES + encode(files)).digest()


def weights_hash(tensors: Mapping[str, bytes]) -> bytes:
    """Names weights by the hashes of their tensors, in whatever files they lie: what verification thresholds
    are calibrated for. [CKP-12]"""
    return hashlib.sha256(DOMAIN_WEIGHTS + encode(dict(tensors))).digest()


def file_entry(path: str, blocks: Iterable[bytes], chunk: int = CHUNK) -> FileEntry:
    """The entry of a file whose content comes as blocks of exactly `chunk` bytes (but the last)."""
    size, hashes, ended = 0, [], False
    for block in blocks:
        if ended or len(block) > chunk:
            raise LocalError(f"The blocks of {path} have to be {chunk} bytes each.")
        ended = len(block) < chunk
        if block:
            size += len(block)
            hashes.append(hashlib.sha256(block).digest())
    check_path(path)
    return FileEntry(path, size, chunk, b"".join(hashes))


def check_path(path: str) -> None:
    """Raises RemoteError(PATH) for anything that could leave the folder or surprise a file system. [CKP-3]"""
    parts = path.split("/")
    if len(path) > MAX_PATH or not all(_PATH_PART.match(part) for part in parts):
        raise RemoteError(Code.PATH, f"A checkpoint may not hold a file called {path[:MAX_PATH]!r}.")
    if not path.endswith(SUFFIXES):
        raise RemoteError(Code.PATH, f"A checkpoint holds only {', '.join(SUFFIXES)} files, not {path!r}.")


def check_chunk(data: bytes | memoryview, expected: bytes) -> None:
    """Raises RemoteError(HASH_MISMATCH) where a chunk is not what its hash says. [CKP-7]"""
    if hashlib.sha256(data).digest() != expected:
        raise RemoteError(Code.HASH_MISMATCH, f"A chunk of {len(data)} bytes has another hash.")


def open_checkpoint(envelope: Envelope, run: bytes, manifest: RunManifest) -> CheckpointManifest:
    """The checkpoint manifest in an envelope, checked down to its file list.

    Signed by a trainer key of the run; the times of the envelope are the caller's matter, since a manifest
    that is fetched later is as good as one that is gossiped. Raises RemoteError.
    """
    head = envelope.head
    if head.kind != Kind.CHECKPOINT:
        raise RemoteError(Code.WRONG_KIND, f"A checkpoint was expected, not a {head.kind}.")
    if head.run != run:
        raise RemoteError(Code.WRONG_RUN, "The checkpoint belongs to another run.")
    if head.sender not in manifest.trainers:  # [CKP-1]
        raise RemoteError(Code.WRONG_ROLE, "The checkpoint is signed by a key that may not publish here.")
    envelope.verify_signature()
    checkpoint = _read(envelope.content(MAX_MANIFEST))
    if checkpoint.version == 0 and files_hash(checkpoint.files) != manifest.base:  # [CKP-2]
        raise RemoteError(Code.HASH_MISMATCH, "Version 0 is not the base checkpoint of this run.")
    return checkpoint


def read_manifest(data: bytes, expected: bytes) -> CheckpointManifest:
    """A manifest of a chain, known by its hash from a signed one; its own signature is not needed. [CKP-14]

    Raises RemoteError(HASH_MISMATCH), or as `open_checkpoint` for its content.
    """
    if checkpoint_hash(data) != expected:
        raise RemoteError(Code.HASH_MISMATCH, "A checkpoint manifest has another hash.")
    return _read(data)


def _read(data: bytes) -> CheckpointManifest:
    """A manifest that is consistent in itself."""
    value = decode(data, MAX_MANIFEST, MAX_MANIFEST_VALUES)
    _check_kind(value)
    checkpoint = shaped(value, CheckpointManifest)
    check_manifest(checkpoint)
    return checkpoint


def _check_kind(value: Value) -> None:
    """Before anything else: a later kind may give all other keys another shape. [CKP-6]"""
    match value:
        case {"kind": str() as kind} if kind not in (FULL, DELTA):
            raise RemoteError(
                Code.UNKNOWN_KIND,
                f"This node knows no checkpoints of the kind {kind[:32]!r}: update nous-node.",
            )


def check_manifest(checkpoint: CheckpointManifest) -> None:
    """All that can be said of a manifest by itself, of a kind that is known."""
    check_files(checkpoint)
    if (checkpoint.parent is None) != (checkpoint.version == 0):  # [CKP-8]
        raise RemoteError(Code.WRONG_TYPE, "Every checkpoint but version 0 names its parent.")
    check_delta(checkpoint)
    if not all(_URL.match(mirror) for mirror in checkpoint.mirrors):  # [CKP-16]
        raise RemoteError(Code.WRONG_TYPE, "A mirror of the checkpoint is no http or https URL.")


def check_delta(checkpoint: CheckpointManifest) -> None:
    """What a `delta` says beside its files. [CKP-13]"""
    chain, deltas = checkpoint.chain, checkpoint.deltas
    if checkpoint.kind == FULL:
        if chain or deltas:
            raise RemoteError(Code.WRONG_TYPE, "A full checkpoint has no deltas and no chain.")
        return
    if not chain or chain[-1] != checkpoint.parent or len(chain) > checkpoint.version:
        raise RemoteError(Code.WRONG_TYPE, "The chain of a delta does not end at its parent.")
    if len(set(chain)) != len(chain):
        raise RemoteError(Code.WRONG_TYPE, "The chain of a delta names a checkpoint twice.")
    paths = [entry.path for entry in deltas]
    weights = {entry.path for entry in checkpoint.files if entry.path.endswith(".safetensors")}
    if paths != sorted(set(paths)) or not weights.issuperset(paths):
        raise RemoteError(Code.PATH, "The deltas are sorted by path, one for a file of tensors at most.")
    for entry in deltas:
        check_chunks(entry)
    if checkpoint.delta_size > MAX_CHECKPOINT_BYTES:
        raise RemoteError(Code.SIZE_MISMATCH, f"The deltas have {checkpoint.delta_size} bytes.")


def check_link(checkpoint: CheckpointManifest, index: int, link: CheckpointManifest) -> None:
    """`link` was fetched by the hash that stands at `index` of the chain of `checkpoint`. [CKP-14]

    Raises RemoteError(WRONG_TYPE) where it cannot stand there.
    """
    chain = checkpoint.chain
    version = checkpoint.version - len(chain) + index
    if link.version != version or (link.kind == FULL) != (index == 0) or link.chain != chain[:index]:
        raise RemoteError(Code.WRONG_TYPE, f"Version {version} does not continue the chain it stands in.")


def _check_apart(paths: list[str]) -> None:
    """No two paths meet on a file system that ignores case, and no file stands where a folder has to."""
    folded = {path.lower() for path in paths}
    folders = {path.lower()[:end] for path in paths for end in range(len(path)) if path[end] == "/"}
    if len(folded) != len(paths) or folded & folders:
        raise RemoteError(Code.PATH, "Two files of a checkpoint would stand in each other's place.")


def check_files(checkpoint: CheckpointManifest) -> None:
    """Paths, order, and that sizes and chunk counts agree. [CKP-3] [CKP-4] [CKP-5]"""
    paths = [entry.path for entry in checkpoint.files]
    for path in paths:
        check_path(path)
    if paths != sorted(set(paths)):
        raise RemoteError(
            Code.PATH, "The files of a checkpoint are sorted by path, each named once."
        )  # [CKP-4]
    _check_apart(paths)
    for entry in checkpoint.files:
        check_chunks(entry)
    if checkpoint.size > MAX_CHECKPOINT_BYTES:
        raise RemoteError(Code.SIZE_MISMATCH, f"The checkpoint has {checkpoint.size} bytes.")


def check_chunks(entry: FileEntry) -> None:
    """RemoteError(SIZE_MISMATCH) unless the number of chunks is that of the size. [CKP-5]"""
    if len(entry.chunks) != HASH_BYTES * -(-entry.size // entry.chunk):
        raise RemoteError(
            Code.SIZE_MISMATCH,
            f"{entry.path} has {entry.size} bytes, which do not make "
            f"{len(entry.chunks) / HASH_BYTES:g} chunks of {entry.chunk}.",
        )
