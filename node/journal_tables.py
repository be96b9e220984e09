"""The tables of a trainer's journal, and what comes out of them. `store` works on them."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .database import NUMBERS, Schema

SCHEMA: Final = Schema(
    "journal",
    0x4E4F554A,  # NOUJ
    2,
    f"""
    CREATE TABLE groups(
        arrival INTEGER PRIMARY KEY AUTOINCREMENT,
        id BLOB NOT NULL UNIQUE,
        key BLOB NOT NULL,
        checkpoint BLOB NOT NULL,
        version INTEGER NOT NULL,
        counter INTEGER NOT NULL,
        digest BLOB NOT NULL,
        received_ms INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        state TEXT NOT NULL DEFAULT 'pending',
        used_version INTEGER,
        UNIQUE(key, checkpoint, counter)
    );
    CREATE INDEX groups_pending ON groups(arrival) WHERE state = 'pending';
    CREATE INDEX groups_done ON groups(version, bytes) WHERE state IN ('refused', 'used');
    CREATE TABLE repeats(id BLOB PRIMARY KEY, first BLOB NOT NULL) WITHOUT ROWID;
    CREATE INDEX repeats_first ON repeats(first);
    CREATE TABLE envelopes(arrival INTEGER PRIMARY KEY, data BLOB NOT NULL);
    CREATE TABLE counters(
        key BLOB, checkpoint BLOB, version INTEGER NOT NULL,
        floor INTEGER NOT NULL, highest INTEGER NOT NULL, count INTEGER NOT NULL,
        PRIMARY KEY(key, checkpoint)
    ) WITHOUT ROWID;
    CREATE INDEX counters_version ON counters(version);
    CREATE TABLE keys(
        key BLOB PRIMARY KEY, heard_ms INTEGER NOT NULL, heard_version INTEGER NOT NULL,
        seen_ms INTEGER NOT NULL, agent TEXT NOT NULL,
        accepted INTEGER NOT NULL DEFAULT 0, refused INTEGER NOT NULL DEFAULT 0,
        credit INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID;
    CREATE INDEX keys_heard ON keys(heard_version);
    CREATE TABLE checkpoints(
        version INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, envelope BLOB NOT NULL, folder TEXT NOT NULL,
        published_ms INTEGER NOT NULL, stats BLOB NOT NULL, eval BLOB NOT NULL
    );
    CREATE TABLE receipts(
        number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB NOT NULL UNIQUE, peer BLOB NOT NULL,
        verdict TEXT NOT NULL, code TEXT NOT NULL, measured REAL, threshold REAL, credit INTEGER NOT NULL,
        sent INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX receipts_unsent ON receipts(number) WHERE sent = 0;
    CREATE TABLE totals(
        verdict TEXT, code TEXT, groups INTEGER NOT NULL, credit INTEGER NOT NULL, PRIMARY KEY(verdict, code)
    );
    {NUMBERS}
    """,
)


class StoredGroup(msgspec.Struct, frozen=True):
    """A rollout group with where it came from; `state` and `arrival` are the journal's."""

    id: bytes
    """Envelope id."""
    key: bytes
    """Its sender."""
    checkpoint: bytes
    version: int
    """Of the checkpoint."""
    counter: int
    digest: bytes
    """SHA-256 of the content: two envelopes with the same one hold the same group."""
    received_ms: int
    """Unix milliseconds."""
    envelope: bytes
    """As it came over the wire."""
    state: Literal["pending", "accepted", "refused", "used"] = "pending"
    arrival: int = 0
    """1, 2, 3, ... in the order of arrival."""


class StoredCheckpoint(msgspec.Struct, frozen=True):
    """A published checkpoint."""

    version: int
    hash: bytes
    envelope: bytes
    """The signed manifest; empty for old versions."""
    folder: str
    """Relative to the run's folder."""
    published_ms: int
    stats: dict[str, float]
    eval: dict[str, float]


class KeyRecord(msgspec.Struct, frozen=True):
    """What is known of a volunteer's key."""

    heard_ms: int
    """When it was first heard of."""
    heard_version: int
    """Newest version published then: the key counts for later ones. [TSK-6]"""
    seen_ms: int
    """When it was last heard of."""
    agent: str
    accepted: int
    refused: int
    credit: int
    """Trained tokens credited."""


class JournalStats(msgspec.Struct, frozen=True):
    """Figures over the whole run."""

    pending: int
    """Groups without a verdict."""
    unused: int
    """Accepted groups that no version has used yet."""
    accepted: int
    refused: dict[str, int]
    """By code."""
    credit: int
    """Trained tokens credited."""
    keys: int
    unsent: int
    """Receipts to be sent."""
