"""Request/response messages of the stream protocols. Spec: `specs/03-transport.md`.

On a stream each side sends one frame: length as u32 big-endian, then that many bytes. Both frames are
canonical msgpack maps.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .constants import MAX_CHUNK, MAX_MANIFEST
from .encoding import encode, read
from .envelope import Hash
from .errors import Code, RemoteError

HEAD_PROTOCOL = "/nous/head/1"
"""Run manifest and newest checkpoint manifest of a run."""
BLOB_PROTOCOL = "/nous/blob/1"
"""A chunk, or any other blob, by its SHA-256."""

MAX_REQUEST = 1_024
"""Both requests are a hash and a key or two."""
MAX_BLOB_REPLY = MAX_CHUNK + 1_024
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


def blob_reply(data: bytes | None) -> bytes:
    """The frame that answers a blob request; `None` is what we do not hold."""
    return encode(BlobReply(data=data) if data is not None else BlobReply(error=Code.NOT_FOUND.value))


def read_blob(frame: bytes) -> bytes:
    """The blob in a reply; RemoteError(NOT_FOUND) where the peer has none. The caller checks the hash."""
    reply = read(frame, BlobReply, MAX_BLOB_REPLY)
    if reply.data is None:
        raise RemoteError(Code.NOT_FOUND, "The peer does not hold this chunk.")
    return reply.data
