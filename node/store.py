"""The trainer's journal: every rollout group from its arrival to the version that used it.

    waiting -> pending                  the holes before it are filled, or on their way to the end [TSK-7]
    waiting -> refused                  they never were
    pending -> accepted -> used         by a verdict; by the version that learnt from it
    pending -> refused                  by a verdict; unseen where the environment fails over groups like it
    pending -> used                     too old to judge when a version was made
    accepted -> dropped                 its key lost its standing: not to be trained on [REP-2] [VER-13]

A group counts from the moment it is here. Its sender may send it again, sealed anew; it stays one group and
each of its envelopes gets the same receipt. `publish` records a checkpoint and marks its groups used in one
transaction: after a crash no group goes into two versions and none is lost. It returns once that is on the
disk, so that after a power failure no version is signed again with other content [CKP-17]. See `database` for
what becomes of the rest. How a group's key stands changes with the verdict, in the same transaction.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Final, Self

import msgspec

from nous_node.protocol.errors import LocalError, RemoteError
from nous_node.protocol.receipts import Receipt, Standing, State

from .database import Cell, Database, SequenceNumbers
from .journal_counters import Draws, RunRules
from .journal_intake import Awaited, Blamed, Intake, Turns, close_accounts, refuse_unrun
from .journal_keys import Ledger, Ranks, heard, peers, restrained, states
from .journal_receipts import SAME_GROUP, answer, place, repeated, settle
from .journal_tables import (
    KEY_COLUMNS,
    MAX_UNUSED,
    SCHEMA,
    UNUSED,
    JournalStats,
    KeyRecord,
    PeerRecord,
    StoredCheckpoint,
    StoredGroup,
    Total,
    converted,
)
from .journal_trim import forget_manifests, trim, trim_peers, trim_receipts
from .network_stats import Offender
from .reputation import PASSED, Reputation

__all__ = [
    "Journal",
    "JournalStats",
    "KeyRecord",
    "PeerRecord",
    "RunRules",
    "StoredCheckpoint",
    "StoredGroup",
]

TRIMMED_AT_ONCE: Final = 256
"""Groups forgotten at a publication beside twice as many as it used: it never waits long for this, and the
journal still shrinks."""

SECRET_BYTES: Final = 32


class Journal:
    """An open journal; `with` closes it. Times are Unix milliseconds; every method raises StorageError."""

    def __init__(self, database: Database, rules: RunRules | None = None) -> None:
        self._database, self._rules = database, rules
        self._numbers = SequenceNumbers(database)
        self._draws = Draws(rules)
        self._ranks = Ranks(database)
        open_groups = "FROM groups WHERE state IN ('pending', 'accepted')"
        self._turns = Turns(database.number(f"SELECT coalesce(max(turn), 0) {open_groups}"))
        self._newest = database.number("SELECT coalesce(max(version), -1) FROM checkpoints")
        self._blamed = Blamed()
        self.awaited: Awaited = lambda key, checkpoint: ()
        """Who fetches groups by reference says here how many. [ROL-17]"""
        self._moved: dict[bytes, Reputation] = {}
        self._kept: frozenset[int] = frozenset()

    @classmethod
    def open(cls, path: Path, rules: RunRules | None = None) -> Self:
        """Makes the file where there is none. Without `rules` groups do not wait for holes before them."""
        return cls(Database(path, SCHEMA), rules)

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

    def secret(self, name: str) -> bytes:
        """32 random bytes that stay the same for the whole run, and that nobody else knows."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO secrets VALUES(?, ?)", (name, os.urandom(SECRET_BYTES)))
            (value,) = connection.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()
        return bytes(value)

    @contextmanager
    def _ledger(self, now: int, *, durable: bool = False) -> Iterator[Ledger]:
        """A transaction over keys: what becomes of their reputations is written at its end."""
        with self._database.transaction(durable=durable) as connection:
            ledger = Ledger(connection, now)
            yield ledger
            settle(ledger)
        self._moved.update(ledger.moved)
        self._ranks.move(ledger)

    # --- keys ------------------------------------------------------------------------------------

    def hear(self, key: bytes, agent: str, now: int, version: int) -> int:
        """Notes a greeting. `version`: newest one published, -1 for none; that of the key's first greeting is
        returned: later ones count for it. [TSK-6]"""
        return self.hear_many({key: agent}, now, version)[key]

    def hear_many(self, greetings: Mapping[bytes, str], now: int, version: int) -> dict[bytes, int]:
        """Notes greetings (key -> agent) in one transaction; what `hear` returns for each key."""
        with self._database.transaction() as connection:
            return {key: heard(connection, key, agent, now, version) for key, agent in greetings.items()}

    def key(self, key: bytes) -> KeyRecord | None:
        row = self._database.one(f"SELECT {KEY_COLUMNS} FROM keys WHERE key = ?", (key,))
        return None if row is None else KeyRecord.of(row)

    def newcomers(self, version: int) -> int:
        """Keys that count for no version up to `version`: they wait for the next beacon."""
        return self._database.number("SELECT count(*) FROM keys WHERE heard_version >= ?", (version,))

    def kept_on_probation(self, version: int) -> int:
        """Keys with as many accepted groups as end a probation, all of `version`: they need another one."""
        return self._database.number(
            f"SELECT count(*) FROM keys WHERE passed >= {PASSED} AND several = 0 AND state = 'probation' "
            "AND first_version >= ?",
            (version,),
        )

    def holes(self, key: bytes, checkpoint: bytes) -> int:
        """Counters of a key that were skipped: rollouts that it withheld, or that are still on their way."""
        return self._database.number(
            "SELECT holes FROM counters WHERE key = ? AND checkpoint = ?", (key, checkpoint)
        )

    def take_moved(self) -> dict[bytes, Reputation]:
        """Keys whose state has changed since this was last asked."""
        moved, self._moved = self._moved, {}
        return moved

    def restrained(self) -> dict[bytes, Reputation]:
        """Keys that are throttled, in quarantine or banned."""
        return restrained(self._database)

    def release(self, keys: Sequence[bytes], now: int) -> None:
        """Ends quarantines that are over."""
        with self._ledger(now) as ledger:
            for key in keys:
                ledger.record(key)  # looks at the clock

    def standings(self, keys: Sequence[bytes]) -> list[Standing]:
        """How these keys stand, those that are known. [RCP-6]"""
        return self._ranks.standings(keys)

    def states(self) -> dict[State, int]:
        """How many keys are in each state."""
        return states(self._database)

    def peers(self) -> list[PeerRecord]:
        """All keys, those with most credit first."""
        return peers(self._database)

    # --- connection peers ------------------------------------------------------------------------

    def offenders(self) -> list[Offender]:
        """Connection peers that broke the rules of the transport. [REP-3]"""
        rows = self._database.rows("SELECT peer, faults, refused_until_ms FROM transport ORDER BY peer")
        return [converted(Offender, row) for row in rows]

    def offended(self, offenders: Sequence[Offender], now: int) -> None:
        """Adds faults of connection peers to those that are known."""
        with self._database.transaction() as connection:
            connection.executemany(
                "INSERT INTO transport VALUES(?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "faults = faults + excluded.faults, seen_ms = excluded.seen_ms, "
                "refused_until_ms = max(refused_until_ms, excluded.refused_until_ms)",
                [(one.peer, one.faults, one.refused_until_ms, now) for one in offenders],
            )
            trim_peers(connection)

    # --- groups ----------------------------------------------------------------------------------

    def add(self, group: StoredGroup) -> None:
        """Journals one group. Raises the RemoteError that `add_many` returns."""
        (error,) = self.add_many([group])
        if error is not None:
            raise error

    def add_many(self, groups: Sequence[StoredGroup]) -> list[RemoteError | None]:
        """Journals groups in one transaction: None for each that is in, else why it is not.

        Most errors get their receipt here; BUSY gets none, because the group may be taken later. DUPLICATE is
        the same group again, in the same envelope or another one: its receipt seems to be lost and is sent
        once more, under the id of the envelope that came, as soon as there is one. [GOS-12]
        """
        with self._intake(max((group.received_ms for group in groups), default=0)) as intake:
            return [intake.add(group) for group in groups]

    def examine(self, group: StoredGroup) -> RemoteError | None:
        """What `add` would say of a group by reference, whatever its content is; as there it is answered."""
        with self._intake(group.received_ms) as intake:
            return intake.examine(group)

    def absent(self, group: StoredGroup, error: RemoteError, now: int) -> None:
        """Nothing came of a group by reference, and this is why: stores its receipt. [ROL-17]"""
        with self._intake(now) as intake:
            intake.absent(group, error)

    @contextmanager
    def _intake(self, now: int) -> Iterator[Intake]:
        with self._ledger(now) as ledger:
            rules, awaited = self._rules, self.awaited
            yield Intake(ledger, rules, self._draws, self._turns, self._newest, self._blamed, awaited)
            trim_receipts(ledger.connection)

    def repeated(self, group: StoredGroup) -> bool:
        """Whether a group that the gossip path turned away is here already; then it is answered as a
        DUPLICATE of `add_many` is. Costs one look-up where it is not."""
        if self._database.one(SAME_GROUP, place(group)) is None:
            return False
        with self._database.transaction() as connection:
            found = repeated(connection, group)
            trim_receipts(connection)
        return found

    def count_pending(self) -> int:
        """Groups that have their turn and no verdict."""
        return self._database.number(
            "SELECT count(*) FROM groups INDEXED BY groups_open "
            "WHERE state IN ('pending', 'accepted') AND state = 'pending'"
        )

    def waiting_since(self, moment: int) -> bool:
        """Whether a group that came at `moment` or before still waits for holes before it."""
        query = "SELECT 1 FROM groups WHERE state = 'waiting' AND received_ms <= ? LIMIT 1"
        return self._database.one(query, (moment,)) is not None

    def unused(self, limit: int = -1, after: int = 0, size: int = MAX_UNUSED) -> list[StoredGroup]:
        """Groups that no version has used, pending or accepted: what a new learner needs.

        In the order in which they are to be judged, those behind number `after`: at most `limit` (-1: all)
        and as many as have `size` bytes, or one.
        """
        sizes = self._database.rows(f"SELECT bytes FROM {UNUSED}", (after, limit))
        total = list(accumulate(count for (count,) in sizes if isinstance(count, int)))
        rows = self._database.rows(
            "SELECT id, key, checkpoint, version, counter, digest, received_ms, "
            "(SELECT data FROM envelopes WHERE envelopes.arrival = groups.arrival), state, turn "
            f"FROM {UNUSED}",
            (after, max(1, bisect_right(total, size))),
        )
        return [converted(StoredGroup, row) for row in rows]

    def decide(
        self,
        receipts: Sequence[Receipt],
        now: int,
        *,
        unaudited: Collection[bytes] = (),
        drifts: Mapping[bytes, bytes] | None = None,
    ) -> list[Receipt]:
        """Stores verdicts, and the receipts to be sent. A group keeps its first verdict: those that count.

        `unaudited`: groups of which not all was verified [VER-13]. `drifts`: the learner's sums by key.
        """
        first = []
        failing = set[tuple[bytes, bytes]]()
        with self._ledger(now) as ledger:
            for key, drift in (drifts or {}).items():
                ledger.sums(key, drift)
            for receipt in receipts:
                audited = receipt.rollout not in unaudited
                row = ledger.connection.execute(
                    "SELECT arrival, version, key, checkpoint FROM groups WHERE id = ? AND state = 'pending'",
                    (receipt.rollout,),
                ).fetchone()
                if row is None:
                    continue
                arrival, version, key, checkpoint = row
                ledger.connection.execute(
                    "UPDATE groups SET state = ?, audited = ? WHERE arrival = ?",
                    (receipt.verdict, audited, arrival),
                )
                again = self._blamed.again(key, checkpoint, receipt.code)
                answer(ledger, receipt, version=version, audited=audited, again=again)
                first.append(receipt)
                if self._blamed.breaks(key, checkpoint):
                    failing.add((key, checkpoint))
            for key, checkpoint in failing:
                refuse_unrun(ledger, key, checkpoint, self._blamed)
        return first

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

    def publish(self, checkpoint: StoredCheckpoint, used: Sequence[bytes], *, leap: bool = False) -> None:
        """Records a checkpoint and that the groups of these ids are done with, in one transaction that is on
        the disk before this returns. In it the accounts of versions that become stale are closed. [TSK-7]

        Raises LocalError where the version is not the next one, or with `leap` not above the last.
        """
        version = checkpoint.version
        with self._ledger(checkpoint.published_ms, durable=True) as ledger:
            connection = ledger.connection
            (last,) = connection.execute("SELECT max(version) FROM checkpoints").fetchone()
            if last is not None and version != last + 1 and not (leap and version > last):
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
            if self._rules is not None and last is not None:
                held = self._rules.staleness
                for stale in range(last - held, min(last + 1, version - held)):
                    close_accounts(ledger, stale, self._draws, self._turns, self.awaited)
        self._newest = version
        self.trim(TRIMMED_AT_ONCE + 2 * len(used))

    def last_checkpoint(self) -> StoredCheckpoint | None:
        return next(iter(self.checkpoints(1)), None)

    def checkpoints(self, count: int = -1) -> list[StoredCheckpoint]:
        """The newest `count` checkpoints, or all, in order of their versions."""
        rows = self._database.rows("SELECT * FROM checkpoints ORDER BY version DESC LIMIT ?", (count,))
        return [StoredCheckpoint.of(row) for row in reversed(rows)]

    def keep_manifests(self, versions: Collection[int]) -> None:
        """From now on those of these versions stay, however old; of others that did the files are gone."""
        before, self._kept = self._kept, frozenset(versions)
        with self._database.transaction() as connection:
            forget_manifests(connection, before - self._kept)

    def stats(self) -> JournalStats:
        number = self._database.number
        rows = self._database.rows("SELECT verdict, code, groups, credit FROM totals ORDER BY code")
        totals = [converted(Total, row) for row in rows]
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
        """Forgets what nobody needs any more, at most `limit` groups (-1: all). `publish` calls it."""
        with self._database.transaction() as connection:
            merit = trim(connection, limit, self._kept)
        if merit:
            self._ranks.forget()
