"""Groups that come into a journal, in one transaction; and those whose time has passed. [TSK-5..7]"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from typing import Final

from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import refused

from .journal_counters import (
    Counters,
    Draws,
    RunRules,
    advance_floor,
    check_counter,
    check_room,
    queue,
    read_counters,
    unqueue,
    withheld,
    write_counters,
)
from .journal_keys import Ledger
from .journal_receipts import answer, queue_receipt, repeated
from .journal_tables import KeyRecord, StoredGroup

_UNANSWERED: Final = frozenset({Code.BUSY})
"""Codes without a receipt: the same group may be taken later."""

Awaited = Callable[[bytes, bytes], Collection[int]]
"""Key and checkpoint -> counters of groups by reference whose content is being fetched."""

MAX_BLAMED: Final = 65_536
"""Faults of which it is known that they have counted: those of the checkpoints that groups come for now. A
restart of the trainer forgets them, and one more may count."""


ONCE: Final = frozenset({Code.COUNTER_REUSED, Code.COUNTER_GAP, Code.ENVIRONMENT_FAILED})
"""Codes that are one fault a key and checkpoint, however many groups are refused with them. Nothing comes of
those groups; a volunteer that lost its last minutes to a power failure makes all their tasks again; and an
environment that fails at the trainer may fail over everything."""

MAX_FAILED: Final = 3
"""Groups of a key and checkpoint over which the environment may fail. Each may cost the trainer a minute or a
learner; those that follow are refused without being run. [VER-3]"""


class Blamed:
    """Faults that have counted and do so once a key and checkpoint. [REP-1]"""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes, str], int] = {}
        """By key, checkpoint and code: how many groups."""

    def again(self, key: bytes, checkpoint: bytes, code: str) -> bool:
        """Whether it is such a fault and has counted before; from now on it has."""
        if code not in ONCE:
            return False
        place = key, checkpoint, code
        self._known[place] = self._known.get(place, 0) + 1
        if len(self._known) > MAX_BLAMED:
            del self._known[next(iter(self._known))]
        return self._known.get(place, 0) > 1

    def breaks(self, key: bytes, checkpoint: bytes) -> bool:
        """Whether the environment failed over as many of its groups as it may. [VER-3]"""
        return self._known.get((key, checkpoint, Code.ENVIRONMENT_FAILED), 0) >= MAX_FAILED


class Turns:
    """Numbers in the order in which groups are judged."""

    def __init__(self, last: int) -> None:
        self.last = last

    def next(self) -> int:
        self.last += 1
        return self.last

    def skip(self, counters: Counters) -> int:
        """Makes room for all counters up to the highest; the number of counter 0."""
        first = self.last + 1
        self.last = first + counters.highest
        return first


class Intake:
    """One transaction's groups. `newest`: the version published last, -1 before the first; without `rules`
    no group waits for holes."""

    def __init__(
        self,
        ledger: Ledger,
        rules: RunRules | None,
        draws: Draws,
        turns: Turns,
        newest: int,
        blamed: Blamed,
        awaited: Awaited,
    ) -> None:
        self._ledger, self._connection = ledger, ledger.connection
        self._rules, self._draws, self._turns, self._newest = rules, draws, turns, newest
        self._blamed, self._awaited = blamed, awaited

    def add(self, group: StoredGroup) -> RemoteError | None:
        """Journals one group, or says why not and stores the receipt of that."""
        return self._tried(group, self._add)

    def examine(self, group: StoredGroup) -> RemoteError | None:
        """The same of a group by reference, before its content is here: what would be refused in any case.
        [ROL-17]"""
        return self._tried(group, self._check)

    def absent(self, group: StoredGroup, error: RemoteError) -> None:
        """A group by reference of which nothing comes: its receipt. Where the accounts of its checkpoint were
        closed while it was awaited, its task is owed now. [TSK-7]"""
        self._refuse(group, error)
        counters = read_counters(self._connection, group.key, group.checkpoint)
        environment = self._draws.of(self._connection, group.key, group.checkpoint)
        if self._closed(group) and counters.is_hole(group.counter, environment):
            self._ledger.owe(group.key, 1)

    def _closed(self, group: StoredGroup) -> bool:
        return self._rules is not None and group.version < self._newest - self._rules.staleness

    def _refuse(self, group: StoredGroup, error: RemoteError) -> None:
        receipt = refused(group.id, group.key, error)
        queue_receipt(self._connection, receipt)
        again = self._blamed.again(group.key, group.checkpoint, receipt.code)
        self._ledger.count(receipt, again=again)

    def _tried(self, group: StoredGroup, attempt: Callable[[StoredGroup], object]) -> RemoteError | None:
        if repeated(self._connection, group):
            return RemoteError(Code.DUPLICATE, "The group is in the journal already.")
        try:
            attempt(group)
        except RemoteError as error:
            if error.code not in _UNANSWERED:
                self._refuse(group, error)
            return error
        return None

    def _check(self, group: StoredGroup) -> Counters:
        _check_version(group, self._ledger.known(group.key))
        if self._blamed.breaks(group.key, group.checkpoint):
            raise not_run()
        self._ledger.seen(group.key)
        counters = read_counters(self._connection, group.key, group.checkpoint)
        check_counter(self._connection, group, counters)
        return counters

    def _add(self, group: StoredGroup) -> None:
        counters = self._check(group)
        environment = self._draws.of(self._connection, group.key, group.checkpoint)
        counters.take(group.counter, environment, self._draws.weights)
        held_up = self._held_up(group, counters, environment)
        waits = held_up or counters.waiting > 0  # it may be what the others wait for: it goes with them
        facts = (group.id, group.key, group.checkpoint, group.version, group.counter, group.digest)
        row = self._connection.execute(
            "INSERT INTO groups(id, key, checkpoint, version, counter, digest, received_ms, bytes, state, "
            "turn) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *facts,
                group.received_ms,
                len(group.envelope),
                "waiting" if waits else "pending",
                None if waits else self._turns.next(),
            ),
        )
        self._connection.execute("INSERT INTO envelopes VALUES(?, ?)", (row.lastrowid, group.envelope))
        if waits:
            queue(self._connection, group, counters)
        advance_floor(self._connection, group, counters)
        if waits and not held_up:
            self._promote(group, counters)
        write_counters(self._connection, group, counters)

    def _held_up(self, group: StoredGroup, counters: Counters, environment: Callable[[int], int]) -> bool:
        """Whether it waits for holes. RemoteError(WITHHELD) where it would in vain, since the accounts of its
        checkpoint are closed, BUSY where there is no room."""
        if self._rules is None or not counters.held_up:
            return False
        if not self._closed(group):
            check_room(self._connection, group, counters)
            return True
        missing = counters.missing(self._awaited(group.key, group.checkpoint), environment)
        if missing > counters.allowed:
            raise withheld(counters, missing)
        return False

    def _promote(self, group: StoredGroup, counters: Counters) -> None:
        _promote(self._connection, group.key, group.checkpoint, self._turns.skip(counters))
        counters.waiting = 0


def _promote(connection: sqlite3.Connection, key: bytes, checkpoint: bytes, turn: int) -> None:
    """What waited for holes is judged, in order of its counters. `turn`: of counter 0."""
    unqueue(connection, key, checkpoint)
    connection.execute(
        "UPDATE groups SET state = 'pending', turn = ? + counter "
        "WHERE key = ? AND checkpoint = ? AND state = 'waiting'",
        (turn, key, checkpoint),
    )


def close_accounts(ledger: Ledger, version: int, draws: Draws, turns: Turns, awaited: Awaited) -> None:
    """A checkpoint has become stale: its holes are owed, and what waited for them is refused. [TSK-7]

    What is still on its way is no hole; `Intake.absent` owes it if it does not come. What waited for nothing
    else is judged: its sender has done all that it could. [ROL-17]
    """
    rows = ledger.connection.execute(
        "SELECT key, checkpoint FROM counters WHERE version = ? AND (holes > 0 OR waiting > 0)", (version,)
    ).fetchall()
    for key, checkpoint in rows:
        counters = read_counters(ledger.connection, key, checkpoint)
        environment = draws.of(ledger.connection, key, checkpoint)
        missing = counters.missing(awaited(key, checkpoint), environment)
        ledger.owe(key, missing)
        if not counters.waiting:
            continue
        if missing > counters.allowed:
            _refuse_waiting(ledger, key, checkpoint, withheld(counters, missing))
        else:
            _promote(ledger.connection, key, checkpoint, turns.skip(counters))


def _refuse_waiting(ledger: Ledger, key: bytes, checkpoint: bytes, error: RemoteError) -> None:
    unqueue(ledger.connection, key, checkpoint)
    ids = ledger.connection.execute(
        "UPDATE groups SET state = 'refused' WHERE key = ? AND checkpoint = ? AND state = 'waiting' "
        "RETURNING id",
        (key, checkpoint),
    ).fetchall()
    for (rollout,) in ids:
        answer(ledger, refused(rollout, key, error))


def refuse_unrun(ledger: Ledger, key: bytes, checkpoint: bytes, blamed: Blamed) -> None:
    """The environment has failed often enough: what else of the key and checkpoint has no verdict is not run.
    [VER-3]"""
    unqueue(ledger.connection, key, checkpoint)
    ids = ledger.connection.execute(
        "UPDATE groups SET state = 'refused' WHERE key = ? AND checkpoint = ? "
        "AND state IN ('pending', 'waiting') RETURNING id",
        (key, checkpoint),
    ).fetchall()
    for (rollout,) in ids:
        receipt = refused(rollout, key, not_run())
        answer(ledger, receipt, again=blamed.again(key, checkpoint, receipt.code))


def not_run() -> RemoteError:
    """Why a group behind MAX_FAILED others is refused."""
    return RemoteError(
        Code.ENVIRONMENT_FAILED,
        f"The environment failed over {MAX_FAILED} groups of this key and checkpoint: no more are run.",
    )


def _check_version(group: StoredGroup, record: KeyRecord) -> None:
    """[TSK-6]: a key counts for versions published after it was first heard of."""
    if group.version <= record.heard_version:
        raise RemoteError(
            Code.KEY_TOO_NEW,
            f"This key was first heard of at version {record.heard_version} and counts from the next one on, "
            f"not for version {group.version}.",
            measured=group.version,
            threshold=record.heard_version + 1,
        )
