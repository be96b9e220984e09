"""Two checkpoints of one version by one key: noticed, and proven to others. Spec: `specs/09-checkpoints.md`.

Checkpoints of one version by different trainers of a run are no equivocation: each speaks for itself, and a
node follows the one that it saw first. [CKP-9] [CKP-17]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from .checkpoints import CheckpointManifest, checkpoint_hash, open_checkpoint
from .constants import MAX_MANIFEST
from .encoding import encode, read
from .envelope import Envelope, unseal
from .errors import Code, RemoteError
from .runs import RunManifest

MAX_PROOF = 2 * MAX_MANIFEST + 1_024
"""Bytes of a proof: two envelopes."""

MAX_LEDGER = 64_000_000
"""Bytes of envelopes that are remembered: thousands of a small model, four of the largest there may be."""


class Equivocation(msgspec.Struct, frozen=True):
    """Both envelopes as they were signed: a proof for anybody who has the run's manifest."""

    first: bytes
    """The one that was seen first."""
    second: bytes

    def to_bytes(self) -> bytes:
        return encode(self)


@dataclass(frozen=True, slots=True)
class Proven:
    """What a proof says."""

    key: bytes
    """Of the trainer that signed both."""
    version: int
    hashes: tuple[bytes, bytes]


def open_equivocation(data: bytes, run: bytes, manifest: RunManifest) -> Proven:
    """What the bytes of an `Equivocation` prove. Raises RemoteError where they prove nothing: as
    `open_checkpoint` for one of the two, WRONG_TYPE where they do not contradict each other. [CKP-17]"""
    proof = read(data, Equivocation, MAX_PROOF)
    first, second = (_opened(part, run, manifest) for part in (proof.first, proof.second))
    if first[0].head.sender != second[0].head.sender or first[1].version != second[1].version:
        raise RemoteError(Code.WRONG_TYPE, "The two checkpoints are not of one key and one version.")
    hashes = _hash(first[0]), _hash(second[0])
    if hashes[0] == hashes[1]:
        raise RemoteError(Code.WRONG_TYPE, "The two checkpoints are the same one.")
    return Proven(first[0].head.sender, first[1].version, hashes)


def _opened(data: bytes, run: bytes, manifest: RunManifest) -> tuple[Envelope, CheckpointManifest]:
    envelope = unseal(data, MAX_MANIFEST)
    return envelope, open_checkpoint(envelope, run, manifest)


def _hash(envelope: Envelope) -> bytes:
    return checkpoint_hash(envelope.content(MAX_MANIFEST))


@dataclass(slots=True)
class Ledger:
    """What each trainer signed of late."""

    horizon: int
    """Versions below the newest that are remembered."""
    room: int = MAX_LEDGER
    """Bytes of envelopes."""
    newest: int = -1
    _signed: dict[tuple[int, bytes], tuple[bytes, bytes]] = field(default_factory=dict)
    """(version, key) -> hash and envelope."""
    _bytes: int = 0

    def note(self, key: bytes, version: int, checkpoint: bytes, envelope: bytes) -> Equivocation | None:
        """A genuine checkpoint; what it proves where the same key signed another one of this version."""
        if version < self.newest - self.horizon:
            return None
        self.newest = max(self.newest, version)
        known = self._signed.get((version, key))
        if known is None:
            self._signed[version, key] = (checkpoint, envelope)
            self._bytes += len(envelope)
            self._forget()
            return None
        return None if known[0] == checkpoint else Equivocation(known[1], envelope)

    def _forget(self) -> None:
        """The oldest versions go, all but the newest where that alone is too large."""
        for place in sorted(self._signed):
            too_old = place[0] < self.newest - self.horizon
            if not too_old and (self._bytes <= self.room or place[0] == self.newest):
                break
            self._bytes -= len(self._signed.pop(place)[1])
