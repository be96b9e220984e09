"""Portable proof of contribution: what trainers signed about one key, in a file that anybody can check.

    file   = {"sig": 64 bytes, "signed": bytes}
    signed = {v, key, made, run, standing, receipts}       sig by `key`, over a domain and `signed`

`run`, `standing` and `receipts` are envelopes as their senders signed them, so nothing in the file has to be
believed: the run id is the hash of the manifest, the manifest names the trainers, and their signatures hold
or do not. The outer signature shows that whoever made the file has the key that it is about. [RCP-8] [RCP-9]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.envelope import Envelope, Hash, Millis, unseal
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.identity import SIGNATURE_BYTES, Identity, peer_id, verify
from nous_node.protocol.receipts import Receipts, Standing, open_receipts
from nous_node.protocol.runs import RunManifest, open_manifest

DOMAIN: Final = b"nous/proof/1\0"
"""In front of what is signed: no signature of an envelope is one of a file."""

MAX_FILE: Final = 128 << 20
"""Bytes of a file: all that an outbox keeps at its usual size, twice over."""

MAX_MESSAGES: Final = 512
"""Receipts messages in a file, which is what an outbox keeps; reading one costs up to 40 ms."""

BESIDE: Final = 1_024
"""Bytes of a file around its messages, and more than one takes beside its own."""


class _Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sig: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    signed: bytes


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    v: Literal[1]
    """Of this format."""
    key: Hash
    """That the file is about, and that signed it."""
    made: Millis
    """By the clock of whoever made it."""
    run: bytes
    """Envelope of the run manifest."""
    standing: bytes | None
    """Newest receipts envelope with a standing of the key."""
    receipts: Annotated[list[bytes], Meta(max_length=MAX_MESSAGES)]
    """Receipts envelopes that name groups of the key, oldest first."""


class ProofError(LocalError):
    """The file proves nothing; the text says what is wrong with it."""


class Statement(msgspec.Struct, frozen=True):
    """The newest word of a trainer in a file."""

    trainer: str
    """Its key, hex."""
    at: float
    """Unix seconds, by its clock."""
    state: str
    accepted: int
    refused: int
    credit: int
    """Trained tokens, before debits."""
    debit: int
    rank: int
    of: int
    until: int
    """Unix milliseconds at which a quarantine ends; 0 in another state."""


class Proof(msgspec.Struct, frozen=True):
    """What a file that holds proves."""

    run: str
    """Run id, hex."""
    name: str
    key: str
    peer_id: str
    made: float
    """Unix seconds, by the clock of whoever made it."""
    statement: Statement | None
    messages: int
    """Signed receipts messages."""
    accepted: int
    """Receipts; repeats of a group have their own."""
    refused: dict[str, int]
    """Receipts by code."""
    first: float | None
    """Unix seconds of the oldest message."""
    last: float | None


@dataclass(frozen=True, slots=True)
class _Message:
    """A receipts envelope that holds."""

    envelope: Envelope
    body: Receipts


@dataclass(slots=True)
class _Told:
    """What receipts messages say of one key. The messages are not kept: anybody may make a file, and of one
    of 300 KB they take 1.5 GB."""

    ids: set[bytes] = field(default_factory=set)
    times: list[float] = field(default_factory=list)
    """Unix seconds."""
    verdicts: dict[bytes, str] = field(default_factory=dict)
    """Rollout -> code, empty where accepted; the first one counts."""

    def take(self, message: _Message, key: bytes) -> None:
        """One more. Raises ProofError where it was there before."""
        if message.envelope.id in self.ids:
            raise ProofError("it holds a receipts message twice.")
        self.ids.add(message.envelope.id)
        self.times.append(message.envelope.head.ts / 1000)
        for receipt in message.body.items:
            if receipt.peer == key:
                self.verdicts.setdefault(
                    receipt.rollout, "" if receipt.verdict == "accepted" else receipt.code
                )


def pack(
    identity: Identity, run: bytes, standing: bytes | None, messages: Sequence[bytes], made: int
) -> bytes:
    """A file about the key of `identity`: only messages that name it, the newest where not all fit."""
    envelope = unseal(run, MAX_MANIFEST)
    manifest = open_manifest(envelope, envelope.head.run)
    room = MAX_FILE - len(run) - len(standing or b"") - BESIDE
    kept: list[bytes] = []
    for data in reversed(messages):
        room -= len(data) + BESIDE
        if room < 0 or len(kept) == MAX_MESSAGES:
            break
        with suppress(RemoteError):  # what does not hold proves nothing, and would spoil the rest
            _about(_receipts(data, envelope.head.run, manifest), identity.key)
            kept.append(data)
    signed = encode(_Signed(1, identity.key, made, run, standing, kept[::-1]))
    return encode(_Outer(identity.sign(DOMAIN + signed), signed))


def open_proofs(data: bytes) -> Proof:
    """Checks all of a file that anybody may have made. Raises ProofError with the first thing wrong."""
    try:
        outer = read(data, _Outer, MAX_FILE)
        signed = read(outer.signed, _Signed, MAX_FILE)
    except RemoteError as error:
        raise ProofError(f"it is no file of `nous-node receipts export`, or is damaged ({error})") from error
    with _naming("it was changed after it was made, or not made by the key that it is about"):
        verify(signed.key, outer.sig, DOMAIN + outer.signed)
    with _naming("its run manifest does not hold"):
        envelope = unseal(signed.run, MAX_MANIFEST)
        run = envelope.head.run
        manifest = open_manifest(envelope, run)
    statement = None
    if signed.standing is not None:
        with _naming("its standing does not hold"):
            statement = _statement(_receipts(signed.standing, run, manifest), signed.key)
    told = _Told()
    for number, data in enumerate(signed.receipts, 1):
        with _naming(f"its receipts message {number} does not hold"):
            message = _receipts(data, run, manifest)
            _about(message, signed.key)
        told.take(message, signed.key)
    return _proof(signed, run, manifest, statement, told)


def _statement(message: _Message, key: bytes) -> Statement:
    """The standing of `key` in a message that holds. RemoteError where there is none."""
    found = [one for one in message.body.standings if one.peer == key]
    if len(found) != 1:
        raise RemoteError(Code.OUT_OF_RANGE, f"It has {len(found)} standings of the key, not one.")
    standing: Standing = found[0]
    return Statement(
        trainer=message.envelope.head.sender.hex(),
        at=message.envelope.head.ts / 1000,
        state=standing.state,
        accepted=standing.accepted,
        refused=standing.refused,
        credit=standing.credit,
        debit=standing.debit,
        rank=standing.rank,
        of=standing.of,
        until=standing.until,
    )


def _proof(
    signed: _Signed,
    run: bytes,
    manifest: RunManifest,
    statement: Statement | None,
    told: _Told,
) -> Proof:
    accepted = sum(not code for code in told.verdicts.values())
    refused = Counter(code for code in told.verdicts.values() if code)
    return Proof(
        run=run.hex(),
        name=manifest.name,
        key=signed.key.hex(),
        peer_id=peer_id(signed.key),
        made=signed.made / 1000,
        statement=statement,
        messages=len(told.ids),
        accepted=accepted,
        refused=dict(refused.most_common()),
        first=min(told.times, default=None),
        last=max(told.times, default=None),
    )


def _receipts(data: bytes, run: bytes, manifest: RunManifest) -> _Message:
    """Raises RemoteError unless it is signed by a trainer of the run. [RCP-1]"""
    envelope = unseal(data)
    return _Message(envelope, open_receipts(envelope, run, manifest))


def _about(message: _Message, key: bytes) -> None:
    """RemoteError where a message has no receipt for `key`."""
    if all(receipt.peer != key for receipt in message.body.items):
        raise RemoteError(Code.WRONG_ROLE, "It has no receipt for the key.")


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except RemoteError as error:
        raise ProofError(f"{what} ({error})") from error
