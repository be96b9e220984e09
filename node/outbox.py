"""The volunteer's outbox: every group that was made, until a receipt says what became of it.

A group is here before it is published, so that a crash between the two loses nothing, and it is sent again
while it is fresh: sealed anew, since nobody forwards an envelope twice. A receipt for any envelope of a group
settles it, once. Numbers that may be used once only (`seq`, `counter`) are handed out here too, and tasks
that were handed out and never became a group are remembered: they are made rather than left as holes.

    waiting -> accepted | refused       by a receipt; `unavailable` is one only after some tries
    waiting -> given-up                 its checkpoint is too old; a late receipt still counts
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Self

import msgspec

from nous_node.protocol.constants import MAX_ENVELOPE
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.envelope import Kind, unseal
from nous_node.protocol.errors import LocalError
from nous_node.protocol.receipts import Receipt, Standing
from nous_node.protocol.rollouts import Engine

from .database import Database, SequenceNumbers
from .outbox_tables import (
    KEPT_COUNTERS,
    KEPT_OPEN,
    SCHEMA,
    Failing,
    drop_content,
    forget_old,
    settle,
    tally,
)

_KNOWN_FROM: Final = "known-from"
_SHARE: Final = "generating-permille"
"""Names in the table of numbers."""

State = Literal["waiting", "accepted", "refused", "given-up"]


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


class Word(msgspec.Struct, frozen=True):
    """What a trainer said last of our key. [RCP-6]"""

    standing: Standing
    ts: int
    """Unix milliseconds, by the trainer's clock."""
    proof: bytes
    """The signed receipts envelope that it came in."""


class Outbox:
    """An open outbox; `with` closes it. All times are Unix milliseconds; every method raises StorageError."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers = SequenceNumbers(database)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Makes the file where there is none."""
        return cls(Database(path, SCHEMA))

    @classmethod
    def read(cls, path: Path) -> Self:
        """For looking at an outbox that another process may be using."""
        return cls(Database(path, SCHEMA, readonly=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def next_seq(self) -> int:
        """A sequence number that was never used, whatever happened to this process before."""
        return self._numbers.take()

    def counters(self, checkpoint: bytes, count: int = 1) -> range:
        """The next `count` of 0, 1, 2, ... for each checkpoint, each number once, also across restarts.

        They are unfinished until a group is `put` or `skip` gives them up.
        """
        with self._database.transaction() as connection:
            (after,) = connection.execute(
                "INSERT INTO counters VALUES(?1, ?2) "
                "ON CONFLICT DO UPDATE SET next = next + ?2 RETURNING next",
                (checkpoint, count),
            ).fetchone()
            numbers = range(int(after) - count, int(after))
            connection.executemany(
                "INSERT INTO unfinished VALUES(?, ?)", [(checkpoint, number) for number in numbers]
            )
            if after == count:
                connection.execute(
                    "DELETE FROM counters WHERE rowid <= (SELECT max(rowid) FROM counters) - ?",
                    (KEPT_COUNTERS,),
                )
                connection.execute(
                    "DELETE FROM unfinished WHERE checkpoint NOT IN "
                    "(SELECT checkpoint FROM counters ORDER BY rowid DESC LIMIT ?)",
                    (KEPT_OPEN,),
                )
        return numbers

    def unfinished(self, checkpoint: bytes) -> list[int]:
        """Counters that were handed out and have no group, in order. [TSK-7]"""
        rows = self._database.rows(
            "SELECT counter FROM unfinished WHERE checkpoint = ? ORDER BY counter", (checkpoint,)
        )
        return [_int(counter) for (counter,) in rows]

    def skip(self, checkpoint: bytes, counter: int) -> None:
        """Leaves a task for good: it became no group, and will not."""
        self._database.write(
            "DELETE FROM unfinished WHERE checkpoint = ? AND counter = ?", (checkpoint, counter)
        )

    @property
    def known_from(self) -> int | None:
        """Newest version when a trainer first heard of our key: later ones count for it [TSK-6]. None: none
        has said so."""
        row = self._database.one("SELECT value FROM numbers WHERE name = ?", (_KNOWN_FROM,))
        return None if row is None else _int(row[0])

    def note_known(self, version: int | None) -> None:
        """A trainer says which version that was; None: that it never heard of our key. [HEL-2]"""
        if version is None:
            self._database.write("DELETE FROM numbers WHERE name = ?", (_KNOWN_FROM,))
        else:
            self._database.write("INSERT OR REPLACE INTO numbers VALUES(?, ?)", (_KNOWN_FROM, version))

    @property
    def generating_share(self) -> float | None:
        """Share of its time in which the last session generated; None before the first batch."""
        row = self._database.one("SELECT value FROM numbers WHERE name = ?", (_SHARE,))
        return None if row is None else _int(row[0]) / 1000

    def note_share(self, generating: float) -> None:
        """Of the session so far."""
        permille = round(1000 * generating)
        self._database.write("INSERT OR REPLACE INTO numbers VALUES(?, ?)", (_SHARE, permille))

    @property
    def word(self) -> Word | None:
        """What a trainer said last of our key; None before the first time."""
        row = self._database.one("SELECT standing, ts, data FROM standing")
        if row is None:
            return None
        standing, ts, proof = row
        assert isinstance(standing, bytes)
        assert isinstance(proof, bytes)
        return Word(read(standing, Standing, MAX_ENVELOPE), _int(ts), proof)

    def note_standing(self, standing: Standing, ts: int, proof: bytes) -> None:
        """Stores what a trainer says of our key in the envelope `proof` of time `ts`, unless a later word
        about it is known. [RCP-6]"""
        self._database.write(
            "INSERT INTO standing VALUES(1, ?1, ?2, ?3, ?4) ON CONFLICT DO UPDATE SET "
            "peer = ?1, ts = ?2, standing = ?3, data = ?4 WHERE ts <= ?2 OR peer <> ?1",
            (standing.peer, ts, encode(standing), proof),
        )

    @property
    def engine(self) -> Engine | None:
        """What made the last groups; None before the first policy was loaded."""
        row = self._database.one("SELECT facts FROM engine")
        return read(row[0], Engine, MAX_ENVELOPE) if row and isinstance(row[0], bytes) else None

    def note_engine(self, engine: Engine) -> None:
        """The worker has loaded a policy."""
        self._database.write("INSERT OR REPLACE INTO engine VALUES(1, ?)", (encode(engine),))

    @property
    def failing(self) -> list[Failing]:
        """Environments of which groups were given up in the last session."""
        rows = self._database.rows("SELECT environment, failures, until_ms, why FROM failing ORDER BY 1")
        return [Failing(str(name), _int(count), _int(until), str(why)) for name, count, until, why in rows]

    def note_failing(self, failing: Sequence[Failing]) -> None:
        """How environments stand now; none: a session begins."""
        if not failing:
            self._database.write("DELETE FROM failing")
        for one in failing:
            self._database.write("INSERT OR REPLACE INTO failing VALUES(?, ?, ?, ?)", one)

    def put(
        self,
        data: bytes,
        *,
        checkpoint: bytes,
        version: int,
        counter: int,
        chunks: Sequence[tuple[bytes, bytes]] = (),
    ) -> bytes:
        """Stores a sealed group before it is published; returns its envelope id.

        `chunks`: of one by reference, hash and content of each. `chunk` gives them out while the group waits.
        """
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
            connection.executemany(
                "INSERT INTO chunks VALUES(?, ?, ?, ?)",
                [(made.lastrowid, number, *chunk) for number, chunk in enumerate(chunks)],
            )
            connection.execute(
                "DELETE FROM unfinished WHERE checkpoint = ? AND counter = ?", (checkpoint, counter)
            )
            tally(connection, "waiting", "", 1)
        return envelope.id

    def unused(self) -> bool:
        """Whether there never was a group in it."""
        return self._database.number("SELECT count(*) FROM totals") == 0

    def waiting(self) -> int:
        """Groups without a receipt that are not given up."""
        return self._database.number("SELECT count(*) FROM groups WHERE state = 'waiting'")

    def due(self, now: int, silence: int) -> list[bytes]:
        """Ids of groups that wait and were last sent `silence` ms ago or earlier, oldest first.

        After each repeat of a group twice as long.
        """
        rows = self._database.rows(
            "SELECT id FROM groups "
            "WHERE state = 'waiting' AND sent_ms + (? << (sent - 1)) <= ? ORDER BY made",
            (silence, now),
        )
        return [rollout for (rollout,) in rows if isinstance(rollout, bytes)]

    def expired(self, rollout: bytes, now: int) -> bool:
        """Whether nobody would take the envelope any more that a group was stored in; sealed anew it is as
        good as before, as long as its checkpoint is fresh."""
        row = self._database.one("SELECT exp_ms FROM groups WHERE id = ?", (rollout,))
        return row is not None and _int(row[0]) <= now

    def content(self, rollout: bytes) -> tuple[Kind, bytes] | None:
        """Kind and content of the message of a group that waits, to be sealed again; None where it no longer
        waits."""
        row = self._database.one(
            "SELECT data FROM groups JOIN envelopes USING(made) WHERE id = ? AND state = 'waiting'",
            (rollout,),
        )
        if row is None or not isinstance(row[0], bytes):
            return None
        envelope = unseal(row[0], len(row[0]))
        return Kind(envelope.head.kind), envelope.content()

    def chunk(self, digest: bytes) -> bytes | None:
        """A chunk of a group by reference that waits. [ROL-16]"""
        row = self._database.one("SELECT data FROM chunks WHERE hash = ?", (digest,))
        return row[0] if row is not None and isinstance(row[0], bytes) else None

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

    def drop_stale(self, horizon: int) -> int:
        """Gives up what is of a version below `horizon`; how many groups that were. Nothing else is given up:
        a trainer that comes back after an hour at the same version would see holes. [TSK-7]"""
        with self._database.transaction() as connection:
            stale = connection.execute(
                "SELECT made FROM groups WHERE state = 'waiting' AND version < ?", (horizon,)
            ).fetchall()
            connection.executemany("UPDATE groups SET state = 'given-up' WHERE made = ?", stale)
            for (made,) in stale:
                drop_content(connection, made)
            if stale:
                tally(connection, "waiting", "", -len(stale))
                tally(connection, "given-up", "", len(stale))
            forget_old(connection)
        return len(stale)

    def acknowledge(self, receipts: Sequence[Receipt], proof: bytes) -> list[Receipt]:
        """Stores what receipts say of our groups; returns those that settle one, with the id that `put` gave.

        `proof` is the signed envelope that they came in.
        """
        if not receipts:
            return []
        with self._database.transaction() as connection:
            settled = [settle(connection, receipt) for receipt in receipts]
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


def _int(cell: object) -> int:
    assert isinstance(cell, int)
    return cell
