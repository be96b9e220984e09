"""What a trainer's journal forgets, so that its file stops growing. Works within a transaction of `store`."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from typing import Final

from nous_node.protocol.constants import MAX_CHAIN

KEPT_VERSIONS: Final = 64
"""Versions after which a group that is done with is forgotten. Its checkpoint is stale long before (8 at
most), so nobody can send it or its counter again."""

KEPT_BYTES: Final = 512 << 20
"""Envelopes of groups that are done with, kept for audits: 20,000 groups of 25 KB."""

KEPT_RECEIPTS: Final = 200_000
"""Receipts kept in case their group is sent again, because the first one was lost."""

KEPT_MANIFESTS: Final = MAX_CHAIN + 8 + 2
"""Newest checkpoints whose manifest is kept: those that rollouts may belong to, and the chain of the oldest.
Of older ones whose files are gone only the figures stay."""

KEPT_KEYS: Final = 262_144
"""Keys known at once; those that never had a group accepted go first. A greeting costs its sender nothing."""

FORGOTTEN_KEYS: Final = KEPT_KEYS // 16
"""Room made beside where there are more: which go is found by sorting them all, a tenth of a second."""

COUNTED_EVERY: Final = 16
"""Versions after which keys are counted, 2 ms each time. In between only so many come as greet meanwhile."""

KEPT_PEERS: Final = 4_096
"""Connection peers whose faults are known: those that were refused last stay. Peer ids cost nothing."""

_DONE: Final = "state IN ('refused', 'used', 'dropped')"
"""Nothing but an audit, or its sender once more, asks for such a group."""


def trim(connection: sqlite3.Connection, limit: int, kept: Collection[int] = ()) -> bool:
    """Forgets what nobody needs any more, at most `limit` groups (-1: all). Whether keys with credit went.
    `kept`: versions whose manifest stays whatever their age."""
    (newest,) = connection.execute("SELECT coalesce(max(version), 0) FROM checkpoints").fetchone()
    horizon = newest - KEPT_VERSIONS
    old = connection.execute(
        f"SELECT arrival, id FROM groups WHERE {_DONE} AND version < ? LIMIT ?", (horizon, limit)
    ).fetchall()
    arrivals = [(arrival,) for arrival, _ in old]
    connection.executemany("DELETE FROM groups WHERE arrival = ?", arrivals)
    connection.executemany("DELETE FROM envelopes WHERE arrival = ?", arrivals)
    connection.executemany("DELETE FROM repeats WHERE first = ?", [(rollout,) for _, rollout in old])
    _trim_envelopes(connection, limit)
    connection.execute("DELETE FROM counters WHERE version < ?", (horizon,))
    trim_receipts(connection)
    behind = connection.execute(  # by their number: after a leap the ones before it leave one by one as well
        "SELECT version FROM checkpoints ORDER BY version DESC LIMIT ? OFFSET ?",
        (KEPT_MANIFESTS, KEPT_MANIFESTS),
    ).fetchall()
    forget_manifests(connection, [version for (version,) in behind if version not in kept])
    trim_peers(connection)
    if limit >= 0 and newest % COUNTED_EVERY:
        return False
    return _trim_keys(connection)


def forget_manifests(connection: sqlite3.Connection, versions: Collection[int]) -> None:
    """Those of these versions that are not among the newest."""
    connection.executemany(
        "UPDATE checkpoints SET envelope = x'' WHERE version = ?1 AND envelope <> x'' AND ?1 NOT IN "
        "(SELECT version FROM checkpoints ORDER BY version DESC LIMIT ?2)",
        [(version, KEPT_MANIFESTS) for version in versions],
    )


def trim_receipts(connection: sqlite3.Connection) -> None:
    """The oldest ones. Not at publications only: groups of keys that nobody knows are answered, too, and
    where updates take hours their senders would fill the disk meanwhile."""
    connection.execute(
        "DELETE FROM receipts WHERE number <= (SELECT max(number) FROM receipts) - ?", (KEPT_RECEIPTS,)
    )


def _trim_envelopes(connection: sqlite3.Connection, limit: int) -> None:
    """Drops the oldest envelopes that nobody needs but an audit, where all of them take too much room."""
    (total,) = connection.execute(f"SELECT coalesce(sum(bytes), 0) FROM groups WHERE {_DONE}").fetchone()
    excess, dropped = total - KEPT_BYTES, []
    for arrival, size in connection.execute(
        f"SELECT arrival, bytes FROM groups WHERE {_DONE} AND bytes > 0 ORDER BY version LIMIT ?",
        (limit,),
    ):
        if excess <= 0:
            break
        excess -= size
        dropped.append((arrival,))
    connection.executemany("DELETE FROM envelopes WHERE arrival = ?", dropped)
    connection.executemany("UPDATE groups SET bytes = 0 WHERE arrival = ?", dropped)


def _trim_keys(connection: sqlite3.Connection) -> bool:
    """Those on probation without an accepted group go first, unless they come out of a quarantine. True where
    others had to go as well. [REP-4]"""
    (known,) = connection.execute("SELECT count(*) FROM keys").fetchone()
    if known <= KEPT_KEYS:
        return False
    gone = connection.execute(
        "SELECT key, accepted FROM keys "
        "ORDER BY accepted > 0 OR state <> 'probation' OR quarantines > 0, seen_ms LIMIT ?",
        (known - KEPT_KEYS + FORGOTTEN_KEYS,),
    ).fetchall()
    keys = [(key,) for key, _ in gone]
    connection.executemany("DELETE FROM keys WHERE key = ?", keys)
    connection.executemany("DELETE FROM refusals WHERE key = ?", keys)
    return any(accepted for _, accepted in gone)


def trim_peers(connection: sqlite3.Connection) -> None:
    (known,) = connection.execute("SELECT count(*) FROM transport").fetchone()
    if known > KEPT_PEERS:
        connection.execute(
            "DELETE FROM transport WHERE peer IN "
            "(SELECT peer FROM transport ORDER BY refused_until_ms, seen_ms LIMIT ?)",
            (known - KEPT_PEERS,),
        )
