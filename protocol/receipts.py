"""Receipts: what became of each rollout group, signed by a trainer. Spec: `specs/10`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .constants import MAX_BODY, MAX_INT, MAX_RECEIPTS
from .encoding import encode, read
from .envelope import Envelope, Hash, Kind, Uint
from .errors import Code, RemoteError
from .rollouts import Engine
from .runs import RunManifest

MAX_AGENT = 64
"""Characters of a client's name and version: a trainer keeps one for each key that it ever heard of."""


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """`[rollout, peer, verdict, code, measured, threshold, credit]`."""

    rollout: Hash
    """Envelope id of the group."""
    peer: Hash
    """Key of its sender."""
    verdict: Literal["accepted", "refused"]
    code: Annotated[str, Meta(max_length=64, pattern=r"^[a-z0-9-]*\Z")]
    """Empty when accepted."""
    measured: float | None
    threshold: float | None
    credit: Uint
    """Trained tokens credited; 0 when refused."""


State = Literal["probation", "active", "throttled", "quarantine", "banned"]
"""How a trainer treats a key. [REP-1]"""


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """`[peer, state, accepted, refused, credit, debit, rank, of, until]`: how a key stands in the run."""

    peer: Hash
    state: State
    accepted: Uint
    """Groups."""
    refused: Uint
    """Groups."""
    credit: Uint
    """Trained tokens credited, before debits."""
    debit: Uint
    """Trained tokens taken off for tasks that were withheld. [TSK-7]"""
    rank: Uint
    """1 for the most credit less debit; 0 without any."""
    of: Uint
    """Keys with a rank."""
    until: Uint
    """Unix milliseconds at which a quarantine ends; 0 where there is none."""


class Known(msgspec.Struct, frozen=True, array_like=True):
    """`[peer, version]`: the trainer has heard of a key. [HEL-2]"""

    peer: Hash
    version: Annotated[int, Meta(ge=-1, le=MAX_INT)]
    """Newest version when it did: the key counts for later ones. [TSK-6]"""


class Receipts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a `receipts` envelope."""

    items: Annotated[list[Receipt], Meta(max_length=MAX_RECEIPTS)]
    standings: Annotated[list[Standing], Meta(max_length=MAX_RECEIPTS)] = []
    """Of keys whose receipts are here or were not long ago, now and then. [RCP-6]"""
    known: Annotated[list[Known], Meta(max_length=MAX_RECEIPTS)] = []
    """Answers to hellos. [HEL-2]"""

    def to_bytes(self) -> bytes:
        return encode(self)


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a `hello` envelope: a node makes its key known before it takes tasks.

    A key counts for the checkpoints whose beacon is drawn after the trainer has heard of it. [TSK-6]
    """

    agent: Annotated[str, Meta(max_length=MAX_AGENT)]
    """Name and version of the client."""
    engine: Engine

    def to_bytes(self) -> bytes:
        return encode(self)


def accepted(rollout: bytes, peer: bytes, credit: int) -> Receipt:
    return Receipt(rollout, peer, "accepted", "", None, None, credit)


def refused(rollout: bytes, peer: bytes, error: RemoteError) -> Receipt:
    return Receipt(
        rollout,
        peer,
        "refused",
        error.code.value,
        _number(error.measured),
        _number(error.threshold),
        0,
    )


def _number(value: float | None) -> float | None:
    """A figure as it travels; NaN and infinity (a broken model's log-probs) have no encoding."""
    return float(value) if value is not None and math.isfinite(value) else None


def open_receipts(envelope: Envelope, run: bytes, manifest: RunManifest) -> Receipts:
    """Receipts signed by a trainer of the run; RemoteError otherwise. [RCP-1]"""
    head = envelope.head
    if head.kind != Kind.RECEIPTS:
        raise RemoteError(Code.WRONG_KIND, f"Receipts were expected, not a {head.kind}.")
    if head.run != run:
        raise RemoteError(Code.WRONG_RUN, "The receipts belong to another run.")
    if head.sender not in manifest.trainers:
        raise RemoteError(Code.WRONG_ROLE, "The receipts are signed by a key that may not issue them.")
    envelope.verify_signature()
    return read(envelope.content(), Receipts, MAX_BODY)
