"""Task counters of a key and checkpoint: each is taken once, and too many holes make groups wait. [TSK-5]
[TSK-7]

    holes = counters below the highest that never came and are of an environment that the key plays

In a run with several environments those of the counters that never came have to be derived. It is done a few
at a time, in order; beyond the counters derived so far holes are counted by the environments' weights. Honest
keys send their counters nearly in order, so that all of theirs are derived.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from typing import Final, Self

import msgspec

from nous_node.protocol.checkpoints import CheckpointManifest
from nous_node.protocol.constants import MAX_COUNTER_GAP, MAX_MANIFEST
from nous_node.protocol.encoding import read
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.runs import RunManifest
from nous_node.protocol.tasks import assign, task_seed

from .journal_tables import StoredGroup, converted

ALLOWED_HOLES: Final = 2
ALLOWED_SHARE: Final = 8
"""One in so many tasks may be missing, and ALLOWED_HOLES more."""

DERIVED_AT_ONCE: Final = 1_024
"""Environments derived for one group, 3 us each: more than any honest key skips, and 3 ms of the trainer for
the largest jump that a counter may make."""

MAX_WAITING: Final = 1_024
"""Groups of one key and checkpoint that wait for its holes, those that fill holes not counted."""

MAX_WAITING_GROUPS: Final = 8_192
MAX_WAITING_BYTES: Final = 256 << 20
"""Of all keys: nothing else holds them off, and they are answered all at once when a version is published."""

KEPT_BEACONS: Final = 16
"""Of the checkpoints that groups come for: `staleness` is 8 at most."""


class RunRules(msgspec.Struct, frozen=True):
    """What the journal has to know of a run to count holes."""

    run: bytes
    """Run id."""
    weights: tuple[int, ...]
    """Of its environments."""
    staleness: int

    @classmethod
    def of(cls, run: bytes, manifest: RunManifest) -> Self:
        weights = tuple(environment.weight for environment in manifest.environments)
        return cls(run, weights, manifest.staleness)


class Draws:
    """Which environment a counter is of. Keeps the beacons of the newest checkpoints."""

    def __init__(self, rules: RunRules | None) -> None:
        self.weights = (1,) if rules is None else rules.weights
        self._run = bytes(32) if rules is None else rules.run
        self._beacons: dict[bytes, bytes] = {}

    def of(self, connection: sqlite3.Connection, key: bytes, checkpoint: bytes) -> Callable[[int], int]:
        """For one key and checkpoint: counter -> index of its environment."""
        if len(self.weights) == 1:
            return lambda counter: 0
        beacon = self._beacon(connection, checkpoint)
        return lambda counter: (
            assign(task_seed(self._run, checkpoint, beacon, key, counter), self.weights, 0).environment
        )

    def _beacon(self, connection: sqlite3.Connection, checkpoint: bytes) -> bytes:
        if checkpoint not in self._beacons:
            query = "SELECT envelope FROM checkpoints WHERE hash = ?"
            (data,) = connection.execute(query, (checkpoint,)).fetchone()
            content = unseal(data, MAX_MANIFEST).content(MAX_MANIFEST)
            while len(self._beacons) >= KEPT_BEACONS:
                del self._beacons[next(iter(self._beacons))]
            self._beacons[checkpoint] = read(content, CheckpointManifest, MAX_MANIFEST).beacon
        return self._beacons[checkpoint]


class Counters(msgspec.Struct):
    """A row: the counters of one key and checkpoint."""

    floor: int = 0
    """Smallest that never came."""
    highest: int = -1
    count: int = 0
    """Those that came."""
    holes: int = 0
    waiting: int = 0
    """Groups that wait."""
    derived: int = 0
    """Counters below it have been derived."""
    tasks: list[tuple[int, int]] = []
    """By environment: counters below `derived` that are of it, and groups of it that came."""

    @property
    def allowed(self) -> float:
        """Holes above which groups wait: by the tasks of the environments that the key plays, not by all
        counters, or who plays one that seldom comes up could leave out as many as it likes."""
        return ALLOWED_HOLES + (self.count + self.holes) / ALLOWED_SHARE

    @property
    def held_up(self) -> bool:
        return self.holes > self.allowed

    def take(self, counter: int, environment: Callable[[int], int], weights: tuple[int, ...]) -> None:
        """Counts one that came; the floor is the caller's."""
        self.count += 1
        self.highest = max(self.highest, counter)
        if len(weights) == 1:
            self.holes = self.highest + 1 - self.count
            return
        totals = [total for total, _ in self.tasks] or [0] * len(weights)
        came = [number for _, number in self.tasks] or [0] * len(weights)
        own = environment(counter)
        came[own] += 1
        end = min(self.highest + 1, self.derived + DERIVED_AT_ONCE)
        for other in range(self.derived, end):
            totals[own if other == counter else environment(other)] += 1
        self.derived = max(self.derived, end)
        self.tasks = list(zip(totals, came, strict=True))
        played = [index for index, number in enumerate(came) if number]
        ahead = (self.highest + 1 - self.derived) * sum(weights[index] for index in played) // sum(weights)
        self.holes = max(0, ahead + sum(totals[index] - came[index] for index in played))

    def is_hole(self, counter: int, environment: Callable[[int], int]) -> bool:
        """Whether one that did not come is among the holes."""
        if counter >= self.highest:
            return False
        return not self.tasks or self.tasks[environment(counter)][1] > 0

    def missing(self, awaited: Collection[int], environment: Callable[[int], int]) -> int:
        """Holes of which nothing is on its way. [ROL-17]"""
        return max(0, self.holes - sum(self.is_hole(counter, environment) for counter in awaited))


_QUEUED: Final = "waiting groups"
_QUEUED_BYTES: Final = "waiting bytes"

_COLUMNS: Final = "floor, highest, count, holes, waiting, derived, tasks"
_UPDATED: Final = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS.split(", "))


def read_counters(connection: sqlite3.Connection, key: bytes, checkpoint: bytes) -> Counters:
    query = f"SELECT {_COLUMNS} FROM counters WHERE key = ? AND checkpoint = ?"
    row = connection.execute(query, (key, checkpoint)).fetchone()
    if row is None:
        return Counters()
    *numbers, tasks = row
    return converted(Counters, (*numbers, msgspec.msgpack.decode(tasks, type=list[tuple[int, int]])))


def write_counters(connection: sqlite3.Connection, group: StoredGroup, counters: Counters) -> None:
    *numbers, tasks = msgspec.structs.astuple(counters)
    connection.execute(
        f"INSERT INTO counters(key, checkpoint, version, {_COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT DO UPDATE SET {_UPDATED}",
        (group.key, group.checkpoint, group.version, *numbers, msgspec.msgpack.encode(tasks)),
    )


def check_counter(connection: sqlite3.Connection, group: StoredGroup, counters: Counters) -> None:
    """Raises RemoteError(COUNTER_REUSED | COUNTER_GAP). [TSK-5]"""
    floor = counters.floor
    if group.counter < floor or (
        group.counter <= counters.highest and _came(connection, group, group.counter)
    ):
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


def advance_floor(connection: sqlite3.Connection, group: StoredGroup, counters: Counters) -> None:
    """Over the group's counter, which is in the journal by now, and those behind it that came before."""
    if group.counter != counters.floor:
        return
    counters.floor += 1
    if counters.floor > counters.highest:
        return
    for (counter,) in connection.execute(
        "SELECT counter FROM groups WHERE key = ? AND checkpoint = ? AND counter >= ? ORDER BY counter",
        (group.key, group.checkpoint, counters.floor),
    ):
        if counter != counters.floor:
            return
        counters.floor += 1


def check_room(connection: sqlite3.Connection, group: StoredGroup, counters: Counters) -> None:
    """RemoteError(BUSY) where as many groups wait for holes as may; its sender sends it again. `counters`:
    with the group."""
    if counters.waiting >= MAX_WAITING and group.counter == counters.highest:
        raise RemoteError(Code.BUSY, "As many groups of this key wait for earlier ones as may.")
    query = f"SELECT name, value FROM numbers WHERE name IN ('{_QUEUED}', '{_QUEUED_BYTES}')"
    queued = dict(connection.execute(query).fetchall())
    groups, size = queued.get(_QUEUED, 0), queued.get(_QUEUED_BYTES, 0)
    if groups >= MAX_WAITING_GROUPS or size + len(group.envelope) > MAX_WAITING_BYTES:
        raise RemoteError(Code.BUSY, "As many groups wait for earlier ones of their keys as may.")


def queue(connection: sqlite3.Connection, group: StoredGroup, counters: Counters) -> None:
    """One more group waits."""
    counters.waiting += 1
    _count_queued(connection, 1, len(group.envelope))


def unqueue(connection: sqlite3.Connection, key: bytes, checkpoint: bytes) -> None:
    """Those of a key and checkpoint are about to wait no more."""
    groups, size = connection.execute(
        "SELECT count(*), coalesce(sum(bytes), 0) FROM groups "
        "WHERE key = ? AND checkpoint = ? AND state = 'waiting'",
        (key, checkpoint),
    ).fetchone()
    _count_queued(connection, -groups, -size)


def _count_queued(connection: sqlite3.Connection, groups: int, size: int) -> None:
    connection.executemany(
        "INSERT INTO numbers VALUES(?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
        [(_QUEUED, groups), (_QUEUED_BYTES, size)],
    )


def withheld(counters: Counters, holes: int) -> RemoteError:
    """What groups are refused with that waited in vain."""
    return RemoteError(
        Code.WITHHELD,
        f"{holes} earlier tasks of this key and checkpoint never came.",
        measured=holes,
        threshold=counters.allowed,
    )


def _came(connection: sqlite3.Connection, group: StoredGroup, counter: int) -> bool:
    found = connection.execute(
        "SELECT 1 FROM groups WHERE key = ? AND checkpoint = ? AND counter = ?",
        (group.key, group.checkpoint, counter),
    )
    return found.fetchone() is not None
