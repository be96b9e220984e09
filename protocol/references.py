"""A rollout group by reference: packed, named, and opened again. Spec: `specs/07-rollouts.md`.

    group -> one zstd frame -> chunks -> Reference -> `reference` envelope
    chunks, each with its hash -> frame -> group of the size and hash that the reference names

What a sender signs is all of it: a frame whose chunks fit and whose content does not is its own fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import zstandard

from .checkpoints import HASH_BYTES
from .constants import CHUNK, MAX_CHUNK, MAX_REFERENCED, MIN_CHUNK, ZSTD_LEVEL
from .encoding import read
from .envelope import decompressed
from .errors import Code, RemoteError, TooLargeError
from .rollouts import Reference, RolloutGroup

MAX_REFERENCE = HASH_BYTES * (MAX_REFERENCED // MIN_CHUNK) + 4_096
"""Bytes of a reference: the hashes of the smallest chunks of the largest frame, and the rest."""


def pack(checkpoint: bytes, counter: int, body: bytes, room: int) -> tuple[Reference, bytes]:
    """The reference to a group whose bytes are `body`, and the frame that is served in its chunks.

    Chunks are larger than usual where the hashes would take more than a quarter of `room`, the bytes of an
    envelope. Raises TooLargeError where the group is larger than any receiver takes. [ROL-16]
    """
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(body)
    if max(len(body), len(packed)) > MAX_REFERENCED:
        raise TooLargeError(f"The group has {len(body)} bytes; at most {MAX_REFERENCED} can be sent.")
    chunk = CHUNK
    while chunk < MAX_CHUNK and 4 * HASH_BYTES * -(-len(packed) // chunk) > room:
        chunk *= 2
    hashes = b"".join(hashlib.sha256(piece).digest() for piece in _cut(packed, chunk))
    digest = hashlib.sha256(body).digest()
    return Reference(checkpoint, counter, digest, len(body), len(packed), chunk, hashes), packed


def read_reference(data: bytes, limit: int) -> Reference:
    """The content of a `reference` envelope; `limit`: bytes of a group in this run, packed or not.

    Raises RemoteError: OVERSIZE, SIZE_MISMATCH, or as `read`. [ROL-14] [ROL-15]
    """
    reference = read(data, Reference, MAX_REFERENCE)
    largest = max(reference.size, reference.packed)
    if largest > limit:
        raise RemoteError(
            Code.OVERSIZE,
            f"The group has {largest} bytes; at most {limit} are allowed.",
            measured=largest,
            threshold=limit,
        )
    if len(reference.chunks) != HASH_BYTES * -(-reference.packed // reference.chunk):
        raise RemoteError(
            Code.SIZE_MISMATCH,
            f"{reference.packed} bytes do not make {len(reference.chunks) / HASH_BYTES:g} chunks of "
            f"{reference.chunk}.",
        )
    return reference


def chunks(reference: Reference) -> list[tuple[bytes, int]]:
    """Hash and bytes of each chunk, in their order."""
    hashes, size, chunk = reference.chunks, reference.packed, reference.chunk
    starts = range(0, size, chunk)
    return [
        (hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)], min(chunk, size - start))
        for number, start in enumerate(starts)
    ]


def cut(reference: Reference, packed: bytes) -> list[tuple[bytes, bytes]]:
    """Hash and content of each chunk of a frame of ours."""
    pieces = _cut(packed, reference.chunk)
    return [(digest, piece) for (digest, _), piece in zip(chunks(reference), pieces, strict=True)]


def unpack(reference: Reference, packed: bytes) -> bytes:
    """The bytes of the group in a frame. Never more than the reference says are written.

    Raises RemoteError: SIZE_MISMATCH, BAD_COMPRESSION, HASH_MISMATCH. [ROL-17]
    """
    if len(packed) != reference.packed:
        raise RemoteError(
            Code.SIZE_MISMATCH,
            f"The frame has {len(packed)} bytes; the reference says {reference.packed}.",
            measured=len(packed),
            threshold=reference.packed,
        )
    body = decompressed(packed, reference.size)
    if hashlib.sha256(body).digest() != reference.hash:
        raise RemoteError(Code.HASH_MISMATCH, "The group has another hash than its reference says.")
    return body


def open_group(reference: Reference, body: bytes) -> RolloutGroup:
    """The group that a reference names, from its bytes. RemoteError(HASH_MISMATCH) where it is another one,
    or as `RolloutGroup.from_bytes`. [ROL-17]"""
    group = RolloutGroup.from_bytes(body, MAX_REFERENCED)
    if (group.checkpoint, group.counter) != (reference.checkpoint, reference.counter):
        raise RemoteError(Code.HASH_MISMATCH, "The reference names another checkpoint or counter.")
    return group


def _cut(packed: bytes, chunk: int) -> Iterator[bytes]:
    for start in range(0, len(packed), chunk):
        yield packed[start : start + chunk]
