"""The tables of a trainer's journal, and what comes out of them. `store` works on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal, TypeVar

import msgspec

from .database import NUMBERS, Cell, Row, Schema
from .reputation import PASSED, Reputation

SCHEMA: Final = Schema(
    "journal",
    0x4E4F554A,  # NOUJ
    3,
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
        turn INTEGER,
        audited INTEGER NOT NULL DEFAULT 1,
        UNIQUE(key, checkpoint, counter)
    );
    CREATE INDEX groups_open ON groups(turn, state, key) WHERE state IN ('pending', 'accepted');
    CREATE INDEX groups_waiting ON groups(key, checkpoint, counter, bytes) WHERE state = 'waiting';
    CREATE INDEX groups_done ON groups(version, bytes) WHERE state IN ('refused', 'used', 'dropped');
    CREATE TABLE repeats(id BLOB PRIMARY KEY, first BLOB NOT NULL) WITHOUT ROWID;
    CREATE INDEX repeats_first ON repeats(first);
    CREATE TABLE envelopes(arrival INTEGER PRIMARY KEY, data BLOB NOT NULL);
    CREATE TABLE counters(
        key BLOB, checkpoint BLOB, version INTEGER NOT NULL,
        floor INTEGER NOT NULL, highest INTEGER NOT NULL, count INTEGER NOT NULL,
        holes INTEGER NOT NULL, waiting INTEGER NOT NULL, derived INTEGER NOT NULL, tasks BLOB NOT NULL,
        PRIMARY KEY(key, checkpoint)
    ) WITHOUT ROWID;
    CREATE INDEX counters_version ON counters(version);
    CREATE TABLE keys(
        key BLOB PRIMARY KEY, heard_ms INTEGER NOT NULL, heard_version INTEGER NOT NULL,
        seen_ms INTEGER NOT NULL, agent TEXT NOT NULL,
        accepted INTEGER NOT NULL DEFAULT 0, refused INTEGER NOT NULL DEFAULT 0,
        credit INTEGER NOT NULL DEFAULT 0, debit INTEGER NOT NULL DEFAULT 0,
        state TEXT NOT NULL DEFAULT 'probation', score REAL NOT NULL DEFAULT 0,
        passed INTEGER NOT NULL DEFAULT 0, first_version INTEGER NOT NULL DEFAULT -1,
        several INTEGER NOT NULL DEFAULT 0, quarantines INTEGER NOT NULL DEFAULT 0,
        since INTEGER NOT NULL DEFAULT 0, until_ms INTEGER NOT NULL DEFAULT 0,
        drift BLOB NOT NULL DEFAULT x''
    ) WITHOUT ROWID;
    CREATE INDEX keys_heard ON keys(heard_version);
    CREATE INDEX keys_passed ON keys(first_version) WHERE passed >= {PASSED} AND several = 0;
    CREATE INDEX keys_state ON keys(state) WHERE state <> 'probation';
    CREATE TABLE refusals(
        key BLOB, code TEXT, groups INTEGER NOT NULL, PRIMARY KEY(key, code)
    ) WITHOUT ROWID;
    CREATE TABLE transport(
        peer TEXT PRIMARY KEY, faults INTEGER NOT NULL, refused_until_ms INTEGER NOT NULL,
        seen_ms INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE secrets(name TEXT PRIMARY KEY, value BLOB NOT NULL);
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
MAX_UNUSED: Final = 64 << 20
"""Bytes of groups that are read at once: as many as one group may have."""

UNUSED: Final = (
    "groups INDEXED BY groups_open WHERE turn > ? AND state IN ('pending', 'accepted') ORDER BY turn LIMIT ?"
)
"""Groups that no version has used, behind a number, so many."""

T = TypeVar("T")

GroupState = Literal["waiting", "pending", "accepted", "refused", "used", "dropped"]
"""See `store`."""


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
    state: GroupState = "pending"
    arrival: int = 0
    """1, 2, 3, ... in the order in which they are to be judged; there may be gaps."""


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

    @classmethod
    def of(cls, row: Row) -> StoredCheckpoint:
        """Of a row of all columns."""
        *facts, stats, figures = row
        decoded = [msgspec.json.decode(text) for text in (stats, figures) if isinstance(text, bytes)]
        return converted(cls, (*facts, *decoded))


class Total(msgspec.Struct, frozen=True):
    """A row of the totals."""

    verdict: str
    code: str
    groups: int
    credit: int


class KeyRecord(msgspec.Struct, frozen=True):
    """What is known of a volunteer's key."""

    heard_ms: int
    """When it was first heard of."""
    heard_version: int
    """Newest version published then: the key counts for later ones. [TSK-6]"""
    seen_ms: int
    """When it was last heard of, to some seconds."""
    agent: str
    accepted: int
    refused: int
    credit: int
    """Trained tokens credited."""
    debit: int
    """Trained tokens taken off for withheld tasks. [TSK-7]"""
    reputation: Reputation
    drift: bytes
    """The learner's sums over its groups, encoded; empty where there are none."""

    @classmethod
    def of(cls, row: Row) -> KeyRecord:
        """Of a row of KEY_COLUMNS."""
        *facts, drift = row
        reputation = (*facts[8:12], bool(facts[12]), *facts[13:])
        return converted(cls, (*facts[:8], converted(Reputation, reputation), drift))

    @property
    def net(self) -> int:
        """What ranks are by."""
        return self.credit - self.debit

    def row(self, key: bytes) -> dict[str, Cell]:
        """Values of all columns by their names."""
        facts = msgspec.structs.asdict(self)
        return {**facts, **msgspec.structs.asdict(self.reputation), "reputation": None, "key": key}


KEY_COLUMNS: Final = (
    "heard_ms, heard_version, seen_ms, agent, accepted, refused, credit, debit, "
    "state, score, passed, first_version, several, quarantines, since, until_ms, drift"
)


class PeerRecord(msgspec.Struct, frozen=True):
    """A key with what became of its groups."""

    key: bytes
    record: KeyRecord
    refused: dict[str, int]
    """By code, the most frequent first."""


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


def converted(struct: Callable[..., T], row: Iterable[object]) -> T:
    """A row as the struct whose fields it has, in their order. The tables' own types hold: what stands in
    them came out of structs, and a damaged file is noticed when it is opened."""
    return struct(*row)
