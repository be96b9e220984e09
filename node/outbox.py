"""The volunteer's outbox: every group that was made, until a receipt says what became of it.

A group is here before it is published, so that a crash between the two loses nothing, and it is sent again
while it is fresh: sealed anew, since nobody forwards an envelope twice. A receipt for any envelope of a group
settles it, once. Numbers that may be used once only (`seq`, `counter`) are handed out here too.

    waiting -> accepted | refused       by a receipt
    waiting -> given-up                 expired, or its checkpoint is too old; a late receipt still counts
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Self

import msgspec

from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import LocalError
from nous_node.protocol.receipts import Receipt

from .database import NUMBERS, Database, Schema, SequenceNumbers

KEPT_GROUPS: Final = 10_000
"""Groups whose fate is remembered one by one (2 MB); totals are kept for ever."""

KEPT_PROOFS: Final = 512
"""Signed receipt messages kept as portable proof of contribution, newest first: about 50 MB at most."""

KEPT_COUNTERS: Final = 256
"""Checkpoints whose task counter is remembered: far more than the staleness bound lets anyone use."""

_KNOWN_FROM: Final = "known-from"
"""Name in the table of numbers."""

State = Literal["waiting", "accepted", "refused", "given-up"]

_SCHEMA: Final = Schema(
    "outbox",
    0x4E4F5542,  # NOUB
    2,
    f"""
    CREATE TABLE groups(
        made INTEGER PRIMARY KEY AUTOINCREMENT,
        id BLOB NOT NULL UNIQUE,
        checkpoint BLOB NOT NULL,
        version INTEGER NOT NULL,
        counter INTEGER NOT NULL,
        made_ms INTEGER NOT NULL,
        exp_ms INTEGER NOT NULL,
        sent_ms INTEGER NOT NULL,
        sent INTEGER NOT NULL DEFAULT 1,
        state TEXT NOT NULL DEFAULT 'waiting',
        code TEXT NOT NULL DEFAULT '',
        measured REAL,
        threshold REAL,
        credit INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX groups_waiting ON groups(made) WHERE state = 'waiting';
    CREATE TABLE envelopes(made INTEGER PRIMARY KEY, data BLOB NOT NULL);
    CREATE TABLE repeats(id BLOB PRIMARY KEY, made INTEGER NOT NULL) WITHOUT ROWID;
    CREATE INDEX repeats_made ON repeats(made);
    CREATE TABLE counters(checkpoint BLOB PRIMARY KEY, next INTEGER NOT NULL);
    CREATE TABLE totals(
        state TEXT, code TEXT, groups INTEGER NOT NULL, credit INTEGER NOT NULL, PRIMARY KEY(state, code)
    );
    CREATE TABLE proofs(number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB UNIQUE, data BLOB NOT NULL);
    {NUMBERS}
    """,
)


class SentGroup(msgspec.Struct, frozen=True):
    """What became of one group."""

    id: bytes
    """Id of its first envelope."""
    checkpoint: bytes
    version: int
    counter: int
    made_ms: int
    state: State
    code: str
    measured: float | None
    threshold: float | None
    credit: int


class Totals(msgspec.Struct, frozen=True):
    """All groups of this run, also those no longer remembered one by one."""

    waiting: int
    accepted: int
    given_up: int
    refused: dict[str, int]
    """By code."""
    credit: int
    """Trained tokens credited."""


class Outbox:
    """An open outbox; `with` closes it. All times are Unix milliseconds; every method raises StorageError."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers = SequenceNumbers(database)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Makes the file where there is none."""
        return cls(Database(path, _SCHEMA))

    @classmethod
    def read(cls, path: Path) -> Self:
        """For looking at an outbox that another process may be using."""
        return cls(Database(path, _SCHEMA, readonly=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def next_seq(self) -> int:
        """A sequence number that was never used, whatever happened to this process before."""
        return self._numbers.take()

    def counters(self, checkpoint: bytes, count: int = 1) -> range:
        """The next `count` of 0, 1, 2, ... for each checkpoint, each number once, also across restarts."""
        with self._database.transaction() as connection:
            (after,) = connection.execute(
                "INSERT INTO counters VALUES(?1, ?2) "
                "ON CONFLICT DO UPDATE SET next = next + ?2 RETURNING next",
                (checkpoint, count),
            ).fetchone()
            if after == count:
                connection.execute(
                    "DELETE FROM counters WHERE rowid <= (SELECT max(rowid) FROM counters) - ?",
                    (KEPT_COUNTERS,),
                )
        return range(int(after) - count, int(after))

    @property
    def known_from(self) -> int:
        """Newest version when our key was made known: later ones count for it [TSK-6]. -1: it never was."""
        row = self._database.one("SELECT value FROM numbers WHERE name = ?", (_KNOWN_FROM,))
        return row[0] if row is not None and isinstance(row[0], int) else -1

    def note_known(self, version: int) -> None:
        """A hello was published while `version` was the newest, or a trainer says that it heard it then."""
        self._database.write("INSERT OR REPLACE INTO numbers VALUES(?, ?)", (_KNOWN_FROM, version))

    def put(self, data: bytes, *, checkpoint: bytes, version: int, counter: int) -> bytes:
        """Stores a sealed group before it is published; returns its envelope id."""
        envelope = unseal(data, len(data))
        head = envelope.head
        with self._database.transaction() as connection:
            made = connection.execute(
                "INSERT INTO groups(id, checkpoint, version, counter, made_ms, exp_ms, sent_ms) "
                "VALUES(?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (envelope.id, checkpoint, version, counter, head.ts, head.exp, head.ts),
            )
            if made.rowcount == 0:
                raise LocalError("This group is in the outbox already; every message is sealed anew.")
            connection.execute("INSERT INTO envelopes VALUES(?, ?)", (made.lastrowid, data))
            _count(connection, "waiting", "", 1)
        return envelope.id

    def waiting(self) -> int:
        """Groups without a receipt that are not given up."""
        return self._database.number("SELECT count(*) FROM groups WHERE state = 'waiting'")

    def due(self, now: int, silence: int) -> list[bytes]:
        """Ids of groups that wait and were last sent `silence` ms ago or earlier, oldest first.

        After each repeat of a group twice as long.
        """
        rows = self._database.rows(
            "SELECT id FROM groups "
            "WHERE state = 'waiting' AND sent_ms + (? << (sent - 1)) <= ? AND exp_ms > ? ORDER BY made",
            (silence, now, now),
        )
        return [rollout for (rollout,) in rows if isinstance(rollout, bytes)]

    def content(self, rollout: bytes) -> bytes | None:
        """The content of a group that waits, to be sealed again; None where it no longer waits."""
        row = self._database.one(
            "SELECT data FROM groups JOIN envelopes USING(made) WHERE id = ? AND state = 'waiting'",
            (rollout,),
        )
        return unseal(row[0], len(row[0])).content() if row and isinstance(row[0], bytes) else None

    def repeat(self, rollout: bytes, data: bytes) -> None:
        """Notes, before it is published, that a group may be sent again as `data`: a receipt for that settles
        it, too."""
        self._database.write(
            "INSERT INTO repeats SELECT ?, made FROM groups WHERE id = ?",
            (unseal(data, len(data)).id, rollout),
        )

    def was_repeated(self, rollout: bytes, now: int) -> None:
        """Notes that a group was sent again: it is due only after twice as long as before."""
        self._database.write(
            "UPDATE groups SET sent_ms = ?, sent = sent + 1 WHERE id = ?",
            (now, rollout),
        )

    def drop_stale(self, now: int, horizon: int) -> int:
        """Gives up what expired or is of a version below `horizon`; how many groups that were."""
        with self._database.transaction() as connection:
            stale = connection.execute(
                "SELECT made FROM groups WHERE state = 'waiting' AND (exp_ms <= ? OR version < ?)",
                (now, horizon),
            ).fetchall()
            connection.executemany("UPDATE groups SET state = 'given-up' WHERE made = ?", stale)
            connection.executemany("DELETE FROM envelopes WHERE made = ?", stale)
            if stale:
                _count(connection, "waiting", "", -len(stale))
                _count(connection, "given-up", "", len(stale))
            _forget(connection)
        return len(stale)

    def acknowledge(self, receipts: Sequence[Receipt], proof: bytes) -> list[Receipt]:
        """Stores what receipts say of our groups; returns those that settle one, with the id that `put` gave.

        `proof` is the signed envelope that they came in.
        """
        if not receipts:
            return []
        with self._database.transaction() as connection:
            settled = [_settled(connection, receipt) for receipt in receipts]
            fresh = [receipt for receipt in settled if receipt is not None]
            if fresh:
                connection.execute(
                    "INSERT OR IGNORE INTO proofs(id, data) VALUES(?, ?)",
                    (hashlib.sha256(proof).digest(), proof),
                )
        return fresh

    def totals(self) -> Totals:
        rows = self._database.rows("SELECT state, code, groups, credit FROM totals WHERE groups > 0")
        counts = {(str(state), str(code)): _int(groups) for state, code, groups, _ in rows}
        return Totals(
            waiting=counts.get(("waiting", ""), 0),
            accepted=counts.get(("accepted", ""), 0),
            given_up=counts.get(("given-up", ""), 0),
            refused={code: groups for (state, code), groups in sorted(counts.items()) if state == "refused"},
            credit=sum(_int(credit) for _, _, _, credit in rows),
        )

    def history(self, count: int = 100) -> list[SentGroup]:
        """The last `count` groups, newest first."""
        rows = self._database.rows(
            "SELECT id, checkpoint, version, counter, made_ms, state, code, measured, threshold, credit "
            "FROM groups ORDER BY made DESC LIMIT ?",
            (count,),
        )
        names = SentGroup.__struct_fields__
        return [
            msgspec.convert(dict(zip(names, row, strict=True)), SentGroup, builtin_types=(bytes,))
            for row in rows
        ]

    def proofs(self) -> list[bytes]:
        """Signed receipt messages that name groups of ours, oldest first."""
        return [
            data
            for (data,) in self._database.rows("SELECT data FROM proofs ORDER BY number")
            if isinstance(data, bytes)
        ]


def _settled(connection: sqlite3.Connection, receipt: Receipt) -> Receipt | None:
    """The receipt under the group's first id, where it names an envelope of a group that had none."""
    row: tuple[int, bytes, str] | None = connection.execute(
        "SELECT made, id, state FROM groups WHERE state IN ('waiting', 'given-up') AND made = "
        "coalesce((SELECT made FROM repeats WHERE id = ?1), (SELECT made FROM groups WHERE id = ?1))",
        (receipt.rollout,),
    ).fetchone()
    if row is None:
        return None
    made, first, before = row
    code = "" if receipt.verdict == "accepted" else receipt.code
    connection.execute(
        "UPDATE groups SET state = ?, code = ?, measured = ?, threshold = ?, credit = ? WHERE made = ?",
        (receipt.verdict, code, receipt.measured, receipt.threshold, receipt.credit, made),
    )
    connection.execute("DELETE FROM envelopes WHERE made = ?", (made,))
    connection.execute("DELETE FROM repeats WHERE made = ?", (made,))
    _count(connection, before, "", -1)
    _count(connection, receipt.verdict, code, 1, receipt.credit)
    return msgspec.structs.replace(receipt, rollout=first)


def _count(connection: sqlite3.Connection, state: str, code: str, groups: int, credit: int = 0) -> None:
    connection.execute(
        "INSERT INTO totals VALUES(?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "groups = groups + excluded.groups, credit = credit + excluded.credit",
        (state, code, groups, credit),
    )


def _forget(connection: sqlite3.Connection) -> None:
    """Drops the oldest fates and proofs; nothing that waits."""
    connection.execute(
        "DELETE FROM groups WHERE state <> 'waiting' AND made <= (SELECT max(made) FROM groups) - ?",
        (KEPT_GROUPS,),
    )
    connection.execute(
        "DELETE FROM repeats WHERE made <= (SELECT max(made) FROM groups) - ? "
        "AND made NOT IN (SELECT made FROM groups)",
        (KEPT_GROUPS,),
    )
    connection.execute(
        "DELETE FROM proofs WHERE number <= (SELECT max(number) FROM proofs) - ?", (KEPT_PROOFS,)
    )


def _int(cell: object) -> int:
    assert isinstance(cell, int)
    return cell
