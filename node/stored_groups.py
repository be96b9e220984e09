"""How a rollout group is stored where it is verified, now or again: in a journal.

    stored = envelope                                        of a `rollout`
           | {"envelope": envelope, "frame": bytes}          of a `reference`, with the frame that it names

Both are canonical msgpack (chapter 01), so that one is never taken for the other.
"""

from __future__ import annotations

from typing import Final

import msgspec

from nous_node.protocol.constants import MAX_ENVELOPE, MAX_REFERENCED
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.envelope import Envelope, Kind, unseal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.references import MAX_REFERENCE, open_group, read_reference, unpack
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.runs import RunManifest

MAX_STORED: Final = MAX_REFERENCED + MAX_ENVELOPE + 64
"""Bytes of a group by reference with its envelope; the rest are names and lengths."""

_BEGIN: Final = b"\x82\xa8envelope"


class _Enclosed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    envelope: bytes
    frame: bytes


def enclosed(envelope: bytes, frame: bytes) -> bytes:
    """A group by reference as it is stored."""
    return encode(_Enclosed(envelope, frame))


def envelope_of(stored: bytes, manifest: RunManifest) -> Envelope:
    """The envelope of a stored group; its signature is the caller's to check. RemoteError where it is none,
    or larger than the run allows."""
    return unseal(_parts(stored)[0], manifest.rollout_envelope_limit)


def body_of(stored: bytes, manifest: RunManifest) -> bytes:
    """The bytes of a stored group, which are what its envelope says. Raises RemoteError: UNAVAILABLE where
    there is nothing but a reference to it, or what a receiver of the message would raise."""
    return _opened(stored, manifest)[0]


def group_of(stored: bytes, manifest: RunManifest) -> tuple[bytes, RolloutGroup]:
    """The same, with the group that these bytes are."""
    body, group = _opened(stored, manifest)
    return body, group or RolloutGroup.from_bytes(body, manifest.rollout_body_limit)


def _opened(stored: bytes, manifest: RunManifest) -> tuple[bytes, RolloutGroup | None]:
    data, frame = _parts(stored)
    envelope = unseal(data, manifest.rollout_envelope_limit)
    if envelope.head.kind == Kind.ROLLOUT:
        return envelope.content(manifest.rollout_body_limit), None
    if envelope.head.kind != Kind.REFERENCE:
        raise RemoteError(Code.WRONG_KIND, f"A {envelope.head.kind} is no rollout group.")
    reference = read_reference(envelope.content(MAX_REFERENCE), manifest.referenced_limit)
    if frame is None:
        raise RemoteError(Code.UNAVAILABLE, "Only the reference to this group is here, not the group.")
    body = unpack(reference, frame)
    return body, open_group(reference, body)


def _parts(stored: bytes) -> tuple[bytes, bytes | None]:
    if not stored.startswith(_BEGIN):
        return stored, None
    both = read(stored, _Enclosed, MAX_STORED)
    return both.envelope, both.frame
