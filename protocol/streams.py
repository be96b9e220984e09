"""Request/response messages of the stream protocols. Spec: `specs/03-transport.md`.

On a stream each side sends one frame: length as u32 big-endian, then that many bytes. Both frames are
canonical msgpack maps.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .constants import MAX_CHUNK, MAX_HAVE, MAX_MANIFEST
from .encoding import encode, read
from .envelope import Hash
from .errors import Code, RemoteError
from .runs import ADDRESS_PATTERN

HAVE_PROTOCOL = "/nous/have/1"
"""Which chunks of a checkpoint each side holds."""
HEAD_PROTOCOL = "/nous/head/1"
"""Run manifest and newest checkpoint manifest of a run."""
BLOB_PROTOCOL = "/nous/blob/1"
"""A chunk, or any other blob, by its SHA-256."""

MAX_REQUEST = 1_024
"""Both requests are a hash and a key or two."""
MAX_BLOB_REPLY = MAX_CHUNK + 1_024
MAX_HAVE_REQUEST = MAX_HAVE + 4_096
MAX_HAVE_REPLY = MAX_HAVE + 8_192
MAX_INTRODUCED = 16
"""Peers that one reply introduces."""
MAX_HEAD_REPLY = 2 * MAX_MANIFEST + 1_024


class HeadRequest(msgspec.Struct, frozen=True):
    run: Hash


class HeadReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Envelopes as they were signed; both absent with `error`."""

    run: bytes | None = None
    checkpoint: bytes | None = None
    error: Annotated[str, Meta(max_length=64)] | None = None


class BlobRequest(msgspec.Struct, frozen=True):
    hash: Hash


class BlobReply(msgspec.Struct, frozen=True, omit_defaults=True):
    data: bytes | None = None
    error: Annotated[str, Meta(max_length=64)] | None = None


Address = Annotated[str, Meta(max_length=256, pattern=ADDRESS_PATTERN)]
Bitmap = Annotated[bytes, Meta(max_length=MAX_HAVE)]
"""Chunk i of a checkpoint is bit `i % 8` (1 << i % 8) of byte `i // 8`: the chunks of `files` in their order,
then those of `deltas`. Bits behind the last chunk are 0."""
Port = Annotated[int, Meta(ge=1, le=65_535)]


class HaveRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the asking side holds of a checkpoint, and that it takes part in its swarm. [STR-4]"""

    run: Hash
    checkpoint: Hash
    have: Bitmap | None = None
    """Absent: none of it."""
    http: Port | None = None
    """TCP port at which the sender also serves chunks over plain HTTP. [STR-6]"""
    addresses: Annotated[list[Address], Meta(max_length=8)] = []
    """Where the sender can be dialled. [STR-7]"""


class HaveReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The same of the answering side, and others whom it knows to take part. With `error` the rest is
    absent."""

    have: Bitmap | None = None
    http: Port | None = None
    peers: Annotated[list[Address], Meta(max_length=MAX_INTRODUCED)] = []
    error: Annotated[str, Meta(max_length=64)] | None = None


_LARGE_REPLY = b"\x81\xa4data\xc6"
"""A map of one key, whose value has its length in 32 bits."""


LARGE = 1 << 16
"""Bytes from which on the length of data has 32 bits."""


def blob_reply(data: bytes | None) -> bytes:
    """The frame that answers a blob request; `None` is what we do not hold."""
    return b"".join(blob_reply_parts(data))


def blob_reply_parts(data: bytes | None) -> tuple[bytes, ...]:
    """The same in parts, so that a chunk is not copied."""
    if data is None:
        return (encode(BlobReply(error=Code.NOT_FOUND.value)),)
    if len(data) < LARGE:
        return (encode(BlobReply(data=data)),)
    return _LARGE_REPLY + len(data).to_bytes(4, "big"), data


def busy_reply() -> bytes:
    """The frame that answers a blob request for which there is no time."""
    return encode(BlobReply(error=Code.BUSY.value))


def read_blob(frame: bytes) -> bytes:
    """The blob in a reply; RemoteError(BUSY or NOT_FOUND) where there is none. The caller checks the hash."""
    reply = read(frame, BlobReply, MAX_BLOB_REPLY)
    if reply.data is None:
        if reply.error == Code.BUSY:
            raise RemoteError(Code.BUSY, "The peer has no time for this chunk.")
        raise RemoteError(Code.NOT_FOUND, "The peer does not hold this chunk.")
    return reply.data


def view_blob(frame: bytes) -> bytes | memoryview:
    """As `read_blob`, without a copy of a chunk that comes in a map of its own."""
    start = len(_LARGE_REPLY) + 4
    size = len(frame) - start
    if LARGE <= size <= MAX_CHUNK and frame[:start] == _LARGE_REPLY + size.to_bytes(4, "big"):
        return memoryview(frame)[start:]
    return read_blob(frame)


def bitmap(chunks: int, count: int) -> bytes:
    """A set of chunks, given as the bits of an integer, as it is sent; `count`: how many chunks there are."""
    return chunks.to_bytes(-(-count // 8), "little")


def read_bitmap(data: bytes, count: int) -> int:
    """The set of chunks in a bitmap. Raises RemoteError(SIZE_MISMATCH) where its length is not that of
    `count` chunks, or it names chunks behind the last. [STR-4]"""
    chunks = int.from_bytes(data, "little")
    if len(data) != -(-count // 8) or chunks.bit_length() > count:
        raise RemoteError(Code.SIZE_MISMATCH, f"A bitmap of {len(data)} bytes is none of {count} chunks.")
    return chunks
