"""The envelope: what every application message travels in. Spec: `specs/02-identity-and-envelopes.md`.

    envelope = {"sig": 64 bytes, "signed": bytes}
    signed   = canonical map {v, kind, run, from, seq, ts, exp, body, enc?, size?}
    sig      = Ed25519(from, "nous/envelope/1\\0" || signed)
    id       = SHA-256(signed)

The signed part is carried as bytes: a reader verifies and hashes what it received and never encodes
anything again to check a signature. `ts` and `exp` are Unix times in milliseconds; the caller brings the
clock.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated

import msgspec
import zstandard
from msgspec import Meta

from .absence import NIL_IS_ABSENT
from .constants import (
    DOMAIN_ENVELOPE,
    MAX_BODY,
    MAX_ENVELOPE,
    MAX_INT,
    MAX_LIFETIME_MS,
    MAX_MANIFEST,
    MAX_SKEW_MS,
    MAX_WINDOW,
    PROTOCOL,
    ZSTD_LEVEL,
)
from .encoding import Value, decode, encode, read, shaped
from .errors import Code, RemoteError, TooLargeError
from .frames import check_blocks
from .identity import SIGNATURE_BYTES, Identity, verify

Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""32 bytes: a SHA-256 or an Ed25519 public key."""
Uint = Annotated[int, Meta(ge=0, le=MAX_INT)]
Millis = Uint
"""Unix time in milliseconds."""


ZSTD_MAGIC = bytes.fromhex("28b52ffd")
"""Skippable frames begin otherwise."""


class Kind(StrEnum):
    """What an envelope's body is. Assigned in `specs/assigned.md`."""

    RUN = "run"
    CHECKPOINT = "checkpoint"
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    RECEIPTS = "receipts"
    HELLO = "hello"


class Signed(msgspec.Struct, frozen=True, rename={"sender": "from"}, omit_defaults=True):
    """The signed part."""

    v: int
    """Protocol ordinal."""
    kind: str
    run: Hash
    """Run id."""
    sender: Hash
    """`from`: the sender's Ed25519 key."""
    seq: Uint
    """Counts the sender's messages of this run; one number is used for one message only."""
    ts: Millis
    exp: Millis
    body: bytes
    enc: Annotated[str | None, NIL_IS_ABSENT] = None
    """`zstd` where the body is compressed."""
    size: Annotated[Uint | None, NIL_IS_ABSENT] = None
    """Bytes of the decompressed body; present exactly with `enc`."""


class _Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing beside the two: what is not signed, anybody on the way could add."""

    sig: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    signed: bytes


class Envelope(msgspec.Struct, frozen=True):
    """An envelope that was decoded; `verify_signature` says whether it is genuine."""

    head: Signed
    sig: bytes
    signed: bytes
    id: bytes
    """SHA-256 of `signed`: names the message in journals and receipts."""

    def verify_signature(self) -> None:
        """Raises RemoteError(BAD_SIGNATURE). [ENV-5]"""
        verify(self.head.sender, self.sig, DOMAIN_ENVELOPE + self.signed)

    def check_time(self, now: int) -> None:
        """Raises RemoteError(LIFETIME | FUTURE_DATED | EXPIRED); `now` in Unix milliseconds. [ENV-7]"""
        head = self.head
        if not 0 < head.exp - head.ts <= MAX_LIFETIME_MS:
            raise RemoteError(
                Code.LIFETIME,
                f"The message lives {head.exp - head.ts} ms; 1 to {MAX_LIFETIME_MS} are allowed.",
                measured=head.exp - head.ts,
                threshold=MAX_LIFETIME_MS,
            )
        if head.ts > now + MAX_SKEW_MS:
            raise RemoteError(
                Code.FUTURE_DATED,
                f"The message is dated {head.ts - now} ms ahead; set the sender's clock (NTP).",
                measured=head.ts - now,
                threshold=MAX_SKEW_MS,
            )
        if head.exp <= now:
            raise RemoteError(
                Code.EXPIRED,
                f"The message expired {now - head.exp} ms ago.",
                measured=now - head.exp,
                threshold=0,
            )

    def content(self, limit: int = MAX_BODY) -> bytes:
        """The body, decompressed where it says so and never beyond `limit` or the declared size. [ENV-8]"""
        head = self.head
        if head.enc is None and head.size is None:
            return _capped(head.body, limit)
        if head.enc != "zstd" or head.size is None:
            raise RemoteError(Code.BAD_COMPRESSION, "A compressed body needs enc `zstd` and its size.")
        if head.size > limit:
            raise RemoteError(
                Code.OVERSIZE,
                f"The body declares {head.size} bytes; at most {limit} are allowed.",
                measured=head.size,
                threshold=limit,
            )
        return decompressed(head.body, head.size)


def seal(
    identity: Identity,
    kind: Kind,
    run: bytes,
    body: bytes,
    *,
    seq: int,
    ts: int,
    lifetime: int = MAX_LIFETIME_MS,
    limit: int = MAX_ENVELOPE,
    body_limit: int = MAX_BODY,
) -> bytes:
    """A signed envelope around `body`, compressed where that makes it smaller.

    Raises TooLargeError with both figures where the body or the result is larger than a receiver takes.
    """
    most = MAX_MANIFEST if kind in (Kind.RUN, Kind.CHECKPOINT) else body_limit
    if len(body) > most:
        raise TooLargeError(
            f"The body of a {kind} message has {len(body)} bytes; at most {most} can be sent."
        )
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(body) if len(body) > 256 else body
    smaller = len(packed) < len(body)
    signed = encode(
        Signed(
            v=PROTOCOL,
            kind=kind.value,
            run=run,
            sender=identity.key,
            seq=seq,
            ts=ts,
            exp=ts + lifetime,
            body=packed if smaller else body,
            enc="zstd" if smaller else None,
            size=len(body) if smaller else None,
        )
    )
    data = encode(_Outer(sig=identity.sign(DOMAIN_ENVELOPE + signed), signed=signed))
    if len(data) > limit:
        raise TooLargeError(f"A {kind} message has {len(data)} bytes; at most {limit} can be sent.")
    return data


def unseal(data: bytes, limit: int = MAX_ENVELOPE) -> Envelope:
    """Decodes an envelope; neither its signature nor its times are checked yet. [ENV-1] [ENV-2]"""
    outer = read(data, _Outer, limit)
    value = decode(outer.signed, limit)
    _check_version(value)
    head = shaped(value, Signed)
    if head.kind not in Kind._value2member_map_:  # [ENV-4]
        raise RemoteError(Code.UNKNOWN_KIND, f"The message kind {head.kind[:32]!r} is not known here.")
    return Envelope(head, outer.sig, outer.signed, hashlib.sha256(outer.signed).digest())


def _check_version(value: Value) -> None:
    """Before anything else: another protocol may give all other keys another shape. [ENV-3]"""
    version = value.get("v") if isinstance(value, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version != PROTOCOL:
        raise RemoteError(
            Code.UNSUPPORTED_VERSION,
            f"The message speaks protocol {version}; this node speaks {PROTOCOL}. Update the older one.",
            measured=version,
            threshold=PROTOCOL,
        )


def _capped(body: bytes, limit: int) -> bytes:
    if len(body) > limit:
        raise RemoteError(
            Code.OVERSIZE,
            f"The body has {len(body)} bytes; at most {limit} are allowed.",
            measured=len(body),
            threshold=limit,
        )
    return body


def decompressed(data: bytes, size: int) -> bytes:
    """One zstd frame of exactly `size` bytes and nothing behind it.

    The frame's header has to say the same size: the output buffer is made of it, and a frame whose blocks
    hold more fails at the buffer's end. Raises RemoteError(BAD_COMPRESSION).
    """
    try:
        header = zstandard.get_frame_parameters(data)
        if not data.startswith(ZSTD_MAGIC) or header.content_size != size or size == 0:
            raise RemoteError(
                Code.BAD_COMPRESSION,
                f"The zstd frame says it holds {header.content_size} bytes; {size} were declared.",
            )
        if header.window_size > MAX_WINDOW:
            raise RemoteError(
                Code.BAD_COMPRESSION,
                f"The zstd frame needs a window of {header.window_size} bytes; {MAX_WINDOW} are allowed.",
            )
        check_blocks(data)
        return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompress(
            data, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise RemoteError(Code.BAD_COMPRESSION, f"The body is no single zstd frame: {error}.") from error
