"""The trainer's journal: every rollout group from its arrival to the version that used it.

    pending -> accepted -> used         by a verdict; by the version that learnt from it
    pending -> refused                  by a verdict
    pending -> used                     too old to judge when a version was made

A group counts from the moment it is here. Its sender may send it again, sealed anew; it stays one group and
each of its envelopes gets the same receipt. `publish` records a checkpoint and marks its groups used in one
transaction: after a crash no group goes into two versions and none is lost. See `database` for what
`kill -9` and a power failure do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.receipts import Receipt, refused

from .database import Cell, Database, Row, SequenceNumbers
from .journal_tables import SCHEMA, JournalStats, KeyRecord, StoredCheckpoint, StoredGroup
from .journal_trim import trim

__all__ = ["Journal", "JournalStats", "KeyRecord", "StoredCheckpoint", "StoredGroup"]

T = TypeVar("T")

TRIMMED_AT_ONCE: Final = 256
"""Groups forgotten at a publication beside twice as many as it used: it never waits long for this, and the
journal still shrinks."""


class Journal:
    """An open journal; `with` closes it. Times are Unix milliseconds; every method raises StorageError."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers = SequenceNumbers(database)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Makes the file where there is none."""
        return cls(Database(path, SCHEMA))

    @classmethod
    def read(cls, path: Path) -> Self:
        """For looking at a journal that another process may be using."""
        return cls(Database(path, SCHEMA, readonly=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def next_seq(self) -> int:
        """A sequence number for the trainer's own messages that was never used."""
        return self._numbers.take()

    # --- keys ------------------------------------------------------------------------------------

    def hear(self, key: bytes, agent: str, now: int, version: int) -> bool:
        """Notes a greeting; whether the key is new. `version`: newest one published, -1 for none."""
        return self.hear_many({key: agent}, now, version) == 1

    def hear_many(self, greetings: Mapping[bytes, str], now: int, version: int) -> int:
        """Notes greetings (key -> agent) in one transaction; how many keys are new."""
        with self._database.transaction() as connection:
            return sum(_heard(connection, key, agent, now, version) for key, agent in greetings.items())

    def key(self, key: bytes) -> KeyRecord | None:
        columns = "heard_ms, heard_version, seen_ms, agent, accepted, refused, credit"
        row = self._database.one(f"SELECT {columns} FROM keys WHERE key = ?", (key,))
        return None if row is None else _converted(KeyRecord, row)

    def newcomers(self, version: int) -> int:
        """Keys that count for no version up to `version`: they wait for the next beacon."""
        return self._database.number("SELECT count(*) FROM keys WHERE heard_version >= ?", (version,))

    def holes(self, key: bytes, checkpoint: bytes) -> int:
        """Counters of a key that were skipped: rollouts that it withheld, or that are still on their way."""
        return self._database.number(
            "SELECT highest + 1 - count FROM counters WHERE key = ? AND checkpoint = ?", (key, checkpoint)
        )

    # --- groups ----------------------------------------------------------------------------------

    def add(self, group: StoredGroup) -> None:
        """Journals one group. Raises the RemoteError that `add_many` returns."""
        (error,) = self.add_many([group])
        if error is not None:
            raise error

    def add_many(self, groups: Sequence[StoredGroup]) -> list[RemoteError | None]:
        """Journals groups in one transaction: None for each that is in, else why it is not.

        KEY_TOO_NEW, COUNTER_REUSED and COUNTER_GAP get their receipt here. DUPLICATE is the same group again,
        in the same envelope or another one: its receipt seems to be lost and is sent once more, under the id
        of the envelope that came, as soon as there is one. [GOS-12]
        """
        with self._database.transaction() as connection:
            return [_added(connection, group) for group in groups]

    def repeated(self, group: StoredGroup) -> bool:
        """Whether a group that the gossip path turned away is here already; then it is answered as a
        DUPLICATE of `add_many` is. Costs one look-up where it is not."""
        if self._database.one(_SAME, _place(group)) is None:
            return False
        with self._database.transaction() as connection:
            return _repeated(connection, group)

    def count_pending(self) -> int:
        """Groups without a verdict."""
        return self._database.number("SELECT count(*) FROM groups WHERE state = 'pending'")

    def unused(self, limit: int = -1, after: int = 0) -> list[StoredGroup]:
        """Groups that no version has used, pending or accepted: what a new learner needs.

        In order of arrival, those behind arrival number `after`, at most `limit` (-1: all).
        """
        rows = self._database.rows(
            "SELECT id, key, checkpoint, version, counter, digest, received_ms, data, state, arrival "
            "FROM groups JOIN envelopes USING(arrival) "
            "WHERE arrival > ? AND state IN ('pending', 'accepted') ORDER BY arrival LIMIT ?",
            (after, limit),
        )
        return [_converted(StoredGroup, row) for row in rows]

    def decide(self, receipts: Sequence[Receipt]) -> None:
        """Stores verdicts, and the receipts to be sent. A group keeps its first verdict."""
        with self._database.transaction() as connection:
            for receipt in receipts:
                decided = connection.execute(
                    "UPDATE groups SET state = ? WHERE id = ? AND state = 'pending'",
                    (receipt.verdict, receipt.rollout),
                )
                if decided.rowcount:
                    _store_receipt(connection, receipt)
                    _answer_repeats(connection, receipt)

    # --- receipts --------------------------------------------------------------------------------

    def receipt(self, rollout: bytes) -> Receipt | None:
        """What became of an envelope id, if it was decided."""
        found = self._receipts("id = ?", rollout)
        return found[0] if found else None

    def unsent_receipts(self, limit: int) -> list[Receipt]:
        """Receipts that are to be sent, oldest first."""
        return self._receipts("sent = 0 ORDER BY number LIMIT ?", limit)

    def receipts_sent(self, receipts: Sequence[Receipt]) -> None:
        sent = [(receipt.rollout,) for receipt in receipts]
        self._database.write_many("UPDATE receipts SET sent = 1 WHERE id = ?", sent)

    def _receipts(self, condition: str, value: Cell) -> list[Receipt]:
        columns = "id, peer, verdict, code, measured, threshold, credit"
        rows = self._database.rows(f"SELECT {columns} FROM receipts WHERE {condition}", (value,))
        return msgspec.convert(rows, list[Receipt], builtin_types=(bytes,))

    # --- checkpoints -----------------------------------------------------------------------------

    def publish(self, checkpoint: StoredCheckpoint, used: Sequence[bytes]) -> None:
        """Records a checkpoint and that the groups of these ids are done with, in one transaction.

        Raises LocalError where the version is not the next one.
        """
        version = checkpoint.version
        with self._database.transaction() as connection:
            (last,) = connection.execute("SELECT max(version) FROM checkpoints").fetchone()
            if last is not None and version != last + 1:
                raise LocalError(f"Version {version} cannot follow version {last} in the journal.")
            *facts, stats, figures = msgspec.structs.astuple(checkpoint)
            connection.execute(
                "INSERT INTO checkpoints VALUES(?, ?, ?, ?, ?, ?, ?)",
                (*facts, msgspec.json.encode(stats), msgspec.json.encode(figures)),
            )
            connection.executemany(
                "UPDATE groups SET state = 'used', used_version = ? "
                "WHERE id = ? AND state IN ('pending', 'accepted')",
                [(version, rollout) for rollout in used],
            )
        self.trim(TRIMMED_AT_ONCE + 2 * len(used))

    def last_checkpoint(self) -> StoredCheckpoint | None:
        found = self.checkpoints(1)
        return found[0] if found else None

    def checkpoints(self, count: int = -1) -> list[StoredCheckpoint]:
        """The newest `count` checkpoints, or all, in order of their versions."""
        rows = self._database.rows("SELECT * FROM checkpoints ORDER BY version DESC LIMIT ?", (count,))
        return [_checkpoint(row) for row in reversed(rows)]

    def stats(self) -> JournalStats:
        number = self._database.number
        rows = self._database.rows("SELECT verdict, code, groups, credit FROM totals ORDER BY code")
        totals = [_converted(_Total, row) for row in rows]
        return JournalStats(
            pending=self.count_pending(),
            unused=number("SELECT count(*) FROM groups WHERE state = 'accepted'"),
            accepted=sum(total.groups for total in totals if total.verdict == "accepted"),
            refused={total.code: total.groups for total in totals if total.verdict == "refused"},
            credit=sum(total.credit for total in totals),
            keys=number("SELECT count(*) FROM keys"),
            unsent=number("SELECT count(*) FROM receipts WHERE sent = 0"),
        )

    def trim(self, limit: int = -1) -> None:
        """Forgets what nobody needs any more, so that the file stops growing. `publish` calls it.

        `limit`: most groups forgotten now (-1: all).
        """
        with self._database.transaction() as connection:
            trim(connection, limit)


class _Total(msgspec.Struct):
    verdict: str
    code: str
    groups: int
    credit: int


def _heard(connection: sqlite3.Connection, key: bytes, agent: str, now: int, version: int) -> bool:
    """Notes a greeting; whether the key is new."""
    known = connection.execute("UPDATE keys SET agent = ?, seen_ms = ? WHERE key = ?", (agent, now, key))
    if known.rowcount:
        return False
    connection.execute(
        "INSERT INTO keys(key, heard_ms, heard_version, seen_ms, agent) VALUES(?, ?, ?, ?, ?)",
        (key, now, version, now, agent),
    )
    return True


def _added(connection: sqlite3.Connection, group: StoredGroup) -> RemoteError | None:
    """Journals one group, or says why not and stores the receipt of that."""
    if _repeated(connection, group):
        return RemoteError(Code.DUPLICATE, "The group is in the journal already.")
    try:
        _check_key(connection, group)
        floor = _check_counter(connection, group)
    except RemoteError as error:
        _store_receipt(connection, refused(group.id, group.key, error))
        return error
    place = (group.id, group.key, group.checkpoint, group.version, group.counter)
    row = connection.execute(
        "INSERT INTO groups(id, key, checkpoint, version, counter, digest, received_ms, bytes) "
        "VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
        (*place, group.digest, group.received_ms, len(group.envelope)),
    )
    connection.execute("INSERT INTO envelopes VALUES(?, ?)", (row.lastrowid, group.envelope))
    _count_counter(connection, group, floor)
    return None


_SAME: Final = "SELECT id, state FROM groups WHERE key = ? AND checkpoint = ? AND counter = ? AND digest = ?"


def _place(group: StoredGroup) -> tuple[bytes, bytes, int, bytes]:
    return group.key, group.checkpoint, group.counter, group.digest


def _repeated(connection: sqlite3.Connection, group: StoredGroup) -> bool:
    """Whether the group is here already. Its receipt is to be sent under the id of this envelope: now where
    it was decided, else with the verdict. Nothing is counted again."""
    if connection.execute("UPDATE receipts SET sent = 0 WHERE id = ?", (group.id,)).rowcount:
        return True
    row: tuple[bytes, str] | None = connection.execute(_SAME, _place(group)).fetchone()
    if row is None:
        return False
    first, state = row
    if state != "pending":
        connection.execute(
            "INSERT INTO receipts(id, peer, verdict, code, measured, threshold, credit) "
            "SELECT ?, peer, verdict, code, measured, threshold, credit FROM receipts WHERE id = ?",
            (group.id, first),
        )
    elif group.id != first:
        connection.execute("INSERT OR IGNORE INTO repeats VALUES(?, ?)", (group.id, first))
    return True


def _answer_repeats(connection: sqlite3.Connection, receipt: Receipt) -> None:
    """The verdict on a group answers its repeats, too."""
    for (again,) in connection.execute(
        "DELETE FROM repeats WHERE first = ? RETURNING id", (receipt.rollout,)
    ).fetchall():
        _queue_receipt(connection, msgspec.structs.replace(receipt, rollout=again))


def _check_key(connection: sqlite3.Connection, group: StoredGroup) -> None:
    """[TSK-6]: a key counts for versions published after it was first heard of."""
    row = connection.execute("SELECT heard_version FROM keys WHERE key = ?", (group.key,)).fetchone()
    if row is None:
        raise RemoteError(Code.KEY_TOO_NEW, "This key has sent no hello: it counts from the next version.")
    if group.version <= row[0]:
        raise RemoteError(
            Code.KEY_TOO_NEW,
            f"This key was first heard of at version {row[0]} and counts from the next one on, not for "
            f"version {group.version}.",
            measured=group.version,
            threshold=row[0] + 1,
        )


def _check_counter(connection: sqlite3.Connection, group: StoredGroup) -> int:
    """The smallest counter not seen before this group. Raises RemoteError(COUNTER_REUSED | COUNTER_GAP)."""
    place = (group.key, group.checkpoint)
    row = connection.execute("SELECT floor FROM counters WHERE key = ? AND checkpoint = ?", place).fetchone()
    floor = int(row[0]) if row is not None else 0
    if group.counter < floor or _has_counter(connection, group, group.counter):
        raise RemoteError(
            Code.COUNTER_REUSED,
            f"Another group of this key and checkpoint has the counter {group.counter}.",
            measured=group.counter,
            threshold=floor,
        )
    if group.counter > floor + MAX_COUNTER_GAP:
        raise RemoteError(
            Code.COUNTER_GAP,
            f"The counter {group.counter} lies {group.counter - floor} above the smallest one not seen.",
            measured=group.counter - floor,
            threshold=MAX_COUNTER_GAP,
        )
    return floor


def _has_counter(connection: sqlite3.Connection, group: StoredGroup, counter: int) -> bool:
    found = connection.execute(
        "SELECT 1 FROM groups WHERE key = ? AND checkpoint = ? AND counter = ?",
        (group.key, group.checkpoint, counter),
    )
    return found.fetchone() is not None


def _count_counter(connection: sqlite3.Connection, group: StoredGroup, floor: int) -> None:
    if group.counter == floor:
        floor += 1
        while _has_counter(connection, group, floor):
            floor += 1
    connection.execute(
        "INSERT INTO counters VALUES(?, ?, ?, ?, ?, 1) ON CONFLICT DO UPDATE SET "
        "floor = excluded.floor, highest = max(highest, excluded.highest), count = count + 1",
        (group.key, group.checkpoint, group.version, floor, group.counter),
    )


def _queue_receipt(connection: sqlite3.Connection, receipt: Receipt) -> None:
    connection.execute(
        "INSERT INTO receipts(id, peer, verdict, code, measured, threshold, credit) "
        "VALUES(?, ?, ?, ?, ?, ?, ?)",
        msgspec.structs.astuple(receipt),
    )


def _store_receipt(connection: sqlite3.Connection, receipt: Receipt) -> None:
    """Queues the receipt and counts it, for its sender and over all."""
    _queue_receipt(connection, receipt)
    accepted = receipt.verdict == "accepted"
    connection.execute(
        "UPDATE keys SET accepted = accepted + ?, refused = refused + ?, credit = credit + ? WHERE key = ?",
        (accepted, not accepted, receipt.credit, receipt.peer),
    )
    connection.execute(
        "INSERT INTO totals VALUES(?, ?, 1, ?) ON CONFLICT DO UPDATE SET "
        "groups = groups + 1, credit = credit + excluded.credit",
        (receipt.verdict, receipt.code, receipt.credit),
    )


def _converted(struct: Callable[..., T], row: Row) -> T:
    """A row as the struct whose fields it has, in their order. The tables' own types hold: what stands in
    them came out of structs, and a damaged file is noticed when it is opened."""
    return struct(*row)


def _checkpoint(row: Row) -> StoredCheckpoint:
    *facts, stats, figures = row
    decoded = [msgspec.json.decode(text) for text in (stats, figures) if isinstance(text, bytes)]
    return _converted(StoredCheckpoint, (*facts, *decoded))
