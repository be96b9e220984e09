"""The keys of a journal, within one transaction: each is read once, and written once if it changed.

Verdicts move reputations (`reputation`), and what a key loses with its standing is taken here: what was
accepted and not yet used is not trained on, what waits for a verdict is answered. [REP-2]
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import Receipt, Standing, State, refused

from .database import Database, Row
from .journal_tables import KEY_COLUMNS, KeyRecord, PeerRecord
from .reputation import AUDIT_CODES, Reputation

SEEN_MS: Final = 10_000
"""Groups of a key note that it was seen only so often: a row written for each would show."""

_INDEXED: Final = frozenset({"heard_ms", "heard_version", "agent", "state"})
"""Columns that are not written with the others: they seldom change, and most of them have an index."""

_WRITTEN: Final = [name for name in KEY_COLUMNS.split(", ") if name not in _INDEXED]
_WRITE: Final = f"UPDATE keys SET {', '.join(f'{name} = :{name}' for name in _WRITTEN)} WHERE key = :key"


class Ledger:
    """The keys that one transaction is about. `now`: Unix milliseconds."""

    def __init__(self, connection: sqlite3.Connection, now: int) -> None:
        self.connection, self.now = connection, now
        self.moved: dict[bytes, Reputation] = {}
        """Keys whose state has changed."""
        self.nets: dict[bytes, tuple[int, int]] = {}
        """Credit less debit of keys before and after, once all is written."""
        self._records: dict[bytes, KeyRecord | None] = {}
        self._changed: set[bytes] = set()
        self._totals: Counter[tuple[str, str]] = Counter()
        self._credit: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[tuple[bytes, str]] = Counter()
        self._failed: set[bytes] = set()

    def record(self, key: bytes) -> KeyRecord | None:
        """None for a key that was never heard of."""
        if key not in self._records:
            self.nets[key] = 0, 0
            row = self.connection.execute(f"SELECT {KEY_COLUMNS} FROM keys WHERE key = ?", (key,)).fetchone()
            self._records[key] = None if row is None else KeyRecord.of(row)
            self._pass_time(key)
            if (record := self._records[key]) is not None:
                self.nets[key] = record.net, record.net
        return self._records[key]

    def known(self, key: bytes) -> KeyRecord:
        """Raises RemoteError: KEY_TOO_NEW, or QUARANTINED or BANNED where no groups of it are taken."""
        record = self.record(key)
        if record is None:
            raise RemoteError(
                Code.KEY_TOO_NEW, "This key has sent no hello: it counts from the next version."
            )
        if not record.reputation.trusted:
            raise _distrust(record.reputation, self.now)
        return record

    def seen(self, key: bytes) -> None:
        record = self.record(key)
        if record is not None and self.now - record.seen_ms >= SEEN_MS:
            self._set(key, replace(record, seen_ms=self.now))

    def count(
        self, receipt: Receipt, version: int = -1, *, audited: bool = True, again: bool = False
    ) -> None:
        """One verdict. `version`: of an accepted group's checkpoint. `again`: its fault counts already."""
        kind = (receipt.verdict, receipt.code)
        self._totals[kind] += 1
        self._credit[kind] += receipt.credit
        record = self.record(receipt.peer)
        if record is None:
            return
        before = record.reputation
        if receipt.verdict == "accepted":
            after = before.accepted(version, self.now)
            record = replace(
                record, accepted=record.accepted + 1, credit=record.credit + receipt.credit, reputation=after
            )
        else:
            figures = receipt.code, receipt.measured, receipt.threshold
            after = before if again else before.refused(*figures, self.now)
            record = replace(record, refused=record.refused + 1, reputation=after)
            self._refusals[receipt.peer, receipt.code] += 1
            if audited and receipt.code in AUDIT_CODES:
                self._failed.add(receipt.peer)
        self._set(receipt.peer, record)
        if after.state != before.state:
            self.moved[receipt.peer] = after

    def sums(self, key: bytes, drift: bytes) -> None:
        """The learner's sums over the groups of a key."""
        record = self.record(key)
        if record is not None:
            self._set(key, replace(record, drift=drift))

    def owe(self, key: bytes, holes: int) -> None:
        """Tasks that were withheld cost what a group of the key brought on average. [TSK-7]"""
        record = self.record(key)
        if record is not None and record.accepted:
            self._set(key, replace(record, debit=record.debit + holes * record.credit // record.accepted))

    def _pass_time(self, key: bytes) -> None:
        """A quarantine that is over ends."""
        record = self._records[key]
        if record is None:
            return
        after = record.reputation.at(self.now)
        if after is not record.reputation:
            self._set(key, replace(record, reputation=after))
            self.moved[key] = after

    def lost(self) -> dict[bytes, RemoteError]:
        """Keys that lost their standing just now, and what to tell them about what waits for a verdict; what
        was accepted of them is dropped here, and of keys that failed an audit what had none. [VER-13]"""
        gone = {key: _distrust(one, self.now) for key, one in self.moved.items() if not one.trusted}
        drop = (
            "UPDATE groups SET state = 'dropped' WHERE arrival IN (SELECT arrival FROM groups INDEXED BY "
            "groups_open WHERE state IN ('pending', 'accepted') AND state = 'accepted' AND key = ?)"
        )
        for key in gone:
            self.connection.execute(drop, (key,))
            self.sums(key, b"")
        for key in self._failed:
            self.connection.execute(f"{drop} AND audited = 0", (key,))
        return gone

    def write(self) -> None:
        rows = [record.row(key) for key in self._changed if (record := self._records[key]) is not None]
        self.connection.executemany(_WRITE, rows)
        states = [(one.state, key) for key, one in self.moved.items()]
        self.connection.executemany("UPDATE keys SET state = ? WHERE key = ?", states)
        self.connection.executemany(
            "INSERT INTO totals VALUES(?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "groups = groups + excluded.groups, credit = credit + excluded.credit",
            [(*kind, groups, self._credit[kind]) for kind, groups in self._totals.items()],
        )
        self.connection.executemany(
            "INSERT INTO refusals VALUES(?, ?, ?) "
            "ON CONFLICT DO UPDATE SET groups = groups + excluded.groups",
            [(*kind, groups) for kind, groups in self._refusals.items()],
        )

    def _set(self, key: bytes, record: KeyRecord) -> None:
        self._records[key] = record
        self._changed.add(key)
        self.nets[key] = self.nets[key][0], record.net


def _distrust(reputation: Reputation, now: int) -> RemoteError:
    """[RCP-7]"""
    if reputation.state == "banned":
        return RemoteError(Code.BANNED, "The sender may take no part in this run any more.")
    return RemoteError(
        Code.QUARANTINED,
        f"The sender is in quarantine for another {(reputation.until_ms - now) / 1000:.0f} s.",
        measured=now,
        threshold=reputation.until_ms,
    )


class Ranks:
    """Keys by credit less debit. Read from the file once: to read 100,000 keys takes a tenth of a second, and
    an index would cost each verdict two pages."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sorted: list[int] | None = None

    def move(self, ledger: Ledger) -> None:
        """After the transaction of a ledger."""
        if self._sorted is None:
            return
        for before, after in ledger.nets.values():
            if before != after and before > 0:
                del self._sorted[bisect_left(self._sorted, before)]
            if before != after and after > 0:
                insort(self._sorted, after)

    def forget(self) -> None:
        """Keys with credit are gone."""
        self._sorted = None

    def standings(self, keys: Sequence[bytes]) -> list[Standing]:
        """Of those keys that are known."""
        if self._sorted is None:
            rows = self._database.rows("SELECT credit - debit FROM keys WHERE credit > debit")
            self._sorted = sorted(net for (net,) in rows if isinstance(net, int))
        found = []
        for key in keys:
            row = self._database.one(f"SELECT {KEY_COLUMNS} FROM keys WHERE key = ?", (key,))
            if row is not None:
                found.append(self._standing(key, KeyRecord.of(row), self._sorted))
        return found

    def _standing(self, key: bytes, record: KeyRecord, nets: list[int]) -> Standing:
        reputation = record.reputation
        return Standing(
            peer=key,
            state=reputation.state,
            accepted=record.accepted,
            refused=record.refused,
            credit=record.credit,
            debit=record.debit,
            rank=1 + len(nets) - bisect_right(nets, record.net) if record.net > 0 else 0,
            of=len(nets),
            until=reputation.until_ms if reputation.state == "quarantine" else 0,
        )


def cut_off(ledger: Ledger) -> list[Receipt]:
    """Refusals for what waits for a verdict of keys that lost their standing just now. They are marked."""
    receipts = []
    for key, error in ledger.lost().items():
        rows = ledger.connection.execute(
            "UPDATE groups SET state = 'refused' WHERE arrival IN (SELECT arrival FROM groups INDEXED BY "
            "groups_open WHERE state IN ('pending', 'accepted') AND state = 'pending' AND key = ?) "
            "RETURNING id",
            (key,),
        ).fetchall()
        receipts += [refused(rollout, key, error) for (rollout,) in rows]
    return receipts


def heard(connection: sqlite3.Connection, key: bytes, agent: str, now: int, version: int) -> int:
    """Notes a greeting; the newest version when the key was first heard of."""
    (first,) = connection.execute(
        "INSERT INTO keys(key, heard_ms, heard_version, seen_ms, agent) VALUES(?1, ?2, ?3, ?2, ?4) "
        "ON CONFLICT DO UPDATE SET agent = ?4, seen_ms = ?2 RETURNING heard_version",
        (key, now, version, agent),
    ).fetchone()
    return int(first)


def restrained(database: Database) -> dict[bytes, Reputation]:
    """Keys that are throttled, in quarantine or banned."""
    query = f"SELECT {KEY_COLUMNS}, key FROM keys WHERE state <> 'probation' AND state <> 'active'"
    return {_key(row): KeyRecord.of(row[:-1]).reputation for row in database.rows(query)}


def states(database: Database) -> dict[State, int]:
    """How many keys are in each state."""
    rows = database.rows("SELECT state, count(*) FROM keys WHERE state <> 'probation' GROUP BY state")
    counts = {str(state): number for state, number in rows if isinstance(number, int)}
    known = database.number("SELECT count(*) FROM keys")
    return msgspec.convert({"probation": known - sum(counts.values()), **counts}, dict[State, int])


def peers(database: Database) -> list[PeerRecord]:
    """All keys, those with most credit first."""
    refusals: dict[bytes, dict[str, int]] = {}
    for code, groups, key in database.rows(
        "SELECT code, groups, key FROM refusals ORDER BY groups DESC, code"
    ):
        if isinstance(key, bytes) and isinstance(groups, int):
            refusals.setdefault(key, {})[str(code)] = groups
    query = f"SELECT {KEY_COLUMNS}, key FROM keys ORDER BY credit - debit DESC, accepted DESC, key"
    rows = [(_key(row), KeyRecord.of(row[:-1])) for row in database.rows(query)]
    return [PeerRecord(key, record, refusals.get(key, {})) for key, record in rows]


def _key(row: Row) -> bytes:
    key = row[-1]
    assert isinstance(key, bytes)
    return key
