"""The outbox's tables, and what changes several of them at once. Used by `outbox.Outbox` only."""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

import msgspec

from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import Receipt

from .database import NUMBERS, Schema

KEPT_GROUPS: Final = 10_000
"""Groups whose fate is remembered one by one (2 MB); totals are kept for ever."""

KEPT_PROOFS: Final = 512
"""Signed receipt messages kept as portable proof of contribution, newest first: about 50 MB at most."""

KEPT_COUNTERS: Final = 256
"""Checkpoints whose task counter is remembered: far more than the staleness bound lets anyone use."""

TRIES: Final = 3
"""In which a group by reference may turn out to be unavailable until it counts as refused: a trainer that
could not reach us a minute ago may do so now."""

KEPT_OPEN: Final = 16
"""Checkpoints whose unfinished tasks are remembered: those that a restart may come back to."""

SCHEMA: Final = Schema(
    "outbox",
    0x4E4F5542,  # NOUB
    6,
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
    CREATE TABLE chunks(
        made INTEGER NOT NULL, number INTEGER NOT NULL, hash BLOB NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY(made, number)
    );
    CREATE INDEX chunks_hash ON chunks(hash);
    CREATE TABLE repeats(id BLOB PRIMARY KEY, made INTEGER NOT NULL) WITHOUT ROWID;
    CREATE INDEX repeats_made ON repeats(made);
    CREATE TABLE unavailable(
        id BLOB PRIMARY KEY, made INTEGER NOT NULL, try INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX unavailable_made ON unavailable(made);
    CREATE TABLE counters(checkpoint BLOB PRIMARY KEY, next INTEGER NOT NULL);
    CREATE TABLE unfinished(
        checkpoint BLOB NOT NULL, counter INTEGER NOT NULL, PRIMARY KEY(checkpoint, counter)
    ) WITHOUT ROWID;
    CREATE TABLE totals(
        state TEXT, code TEXT, groups INTEGER NOT NULL, credit INTEGER NOT NULL, PRIMARY KEY(state, code)
    );
    CREATE TABLE proofs(number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB UNIQUE, data BLOB NOT NULL);
    CREATE TABLE standing(
        one INTEGER PRIMARY KEY CHECK(one = 1),
        peer BLOB NOT NULL,
        ts INTEGER NOT NULL,
        standing BLOB NOT NULL,
        data BLOB NOT NULL
    );
    CREATE TABLE failing(
        environment TEXT PRIMARY KEY, failures INTEGER NOT NULL, until_ms INTEGER NOT NULL, why TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE engine(one INTEGER PRIMARY KEY CHECK(one = 1), facts BLOB NOT NULL);
    {NUMBERS}
    """,
)


class Failing(NamedTuple):
    """An environment of which groups were given up in the last session."""

    environment: str
    failures: int
    """Groups."""
    until_ms: int
    """Until when it is paused; 0 where it is not."""
    why: str
    """The last time; empty once it made a group again."""


def settle(connection: sqlite3.Connection, receipt: Receipt) -> Receipt | None:
    """The receipt under the group's first id, where it names an envelope of a group that had none. One that
    says that the group was unavailable settles it after TRIES only. [ROL-16]"""
    row: tuple[int, bytes, str] | None = connection.execute(
        "SELECT made, id, state FROM groups WHERE state IN ('waiting', 'given-up') AND made = "
        "coalesce((SELECT made FROM repeats WHERE id = ?1), (SELECT made FROM groups WHERE id = ?1))",
        (receipt.rollout,),
    ).fetchone()
    if row is None:
        return None
    made, first, before = row
    if (
        receipt.code == Code.UNAVAILABLE
        and before == "waiting"
        and not _tried(connection, receipt.rollout, made)
    ):
        return None
    code = "" if receipt.verdict == "accepted" else receipt.code
    connection.execute(
        "UPDATE groups SET state = ?, code = ?, measured = ?, threshold = ?, credit = ? WHERE made = ?",
        (receipt.verdict, code, receipt.measured, receipt.threshold, receipt.credit, made),
    )
    drop_content(connection, made)
    connection.execute("DELETE FROM repeats WHERE made = ?", (made,))
    tally(connection, before, "", -1)
    tally(connection, receipt.verdict, code, 1, receipt.credit)
    return msgspec.structs.replace(receipt, rollout=first)


def _tried(connection: sqlite3.Connection, rollout: bytes, made: int) -> bool:
    """Notes that a group was unavailable in one of its envelopes; whether it was the last try. All envelopes
    so far belong to this try: while a trainer waits for a group, it answers them alike."""
    if connection.execute("SELECT 1 FROM unavailable WHERE id = ?", (rollout,)).fetchone():
        return False
    (last,) = connection.execute(
        "SELECT coalesce(max(try), 0) FROM unavailable WHERE made = ?", (made,)
    ).fetchone()
    connection.execute(
        "INSERT OR IGNORE INTO unavailable SELECT id, made, ?2 FROM groups WHERE made = ?1 "
        "UNION SELECT id, made, ?2 FROM repeats WHERE made = ?1",
        (made, last + 1),
    )
    connection.execute("UPDATE groups SET sent = 1 WHERE made = ?", (made,))
    return bool(last + 1 >= TRIES)


def drop_content(connection: sqlite3.Connection, made: int) -> None:
    """Nobody will ask for the group any more."""
    connection.execute("DELETE FROM envelopes WHERE made = ?", (made,))
    connection.execute("DELETE FROM chunks WHERE made = ?", (made,))
    connection.execute("DELETE FROM unavailable WHERE made = ?", (made,))


def tally(connection: sqlite3.Connection, state: str, code: str, groups: int, credit: int = 0) -> None:
    connection.execute(
        "INSERT INTO totals VALUES(?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "groups = groups + excluded.groups, credit = credit + excluded.credit",
        (state, code, groups, credit),
    )


def forget_old(connection: sqlite3.Connection) -> None:
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
