"""One SQLite file of ours: opened, checked, written in transactions, with its errors as sentences.

WAL with synchronous=NORMAL: a commit has left the process before it returns, so `kill -9` loses nothing; the
WAL is synced at its checkpoints only, so a power failure may lose the last transactions but never damages
the file. synchronous=FULL would cost a disk flush for each batch of groups and buy the seconds before a power
failure, in which volunteers' outboxes hold the same groups anyway. A transaction that others must never see
undone, a publication, is flushed by itself (`durable`): one flush, of 0.2 ms to some 10 ms.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

from .home import DamagedError, DiskFullError, StorageError, disk_errors

Cell = None | int | float | str | bytes
"""What SQLite holds."""
Row = tuple[Cell, ...]

PAGE_BYTES: Final = 16_384
"""A group of 25 KB lies on two pages, not on seven."""

WAL_PAGES: Final = 2_048
"""Pages (32 MB) in the WAL before they are moved into the file, each time with two disk flushes."""

BUSY_SECONDS: Final = 5.0
"""How long to wait for another process (`nous-node status`) to end its transaction."""

CHECKED_BYTES: Final = 256 << 20
"""Files up to this size are checked whole when opened (0.2 s at most); damage in larger ones shows later."""


SEQ_BLOCK: Final = 1_024
"""Sequence numbers reserved at once: one write for as many messages. A restart skips the rest."""

SEQ_LEAP: Final = 1 << 20
"""Skipped whenever the file is opened: a power failure may undo the last reservations, and fewer than these
fit between two synced checkpoints of the WAL (a reservation takes at least one of its pages)."""

_SEQ_BYTES: Final = 6
"""A new file begins at a random number, in case the file before it was lost and its numbers were used."""

NUMBERS: Final = "CREATE TABLE numbers(name TEXT PRIMARY KEY, value INTEGER NOT NULL);"
"""What `SequenceNumbers` needs in a schema."""


class Schema:
    """What a kind of file consists of. `application` marks it as ours; `version` is raised with `tables`."""

    def __init__(self, what: str, application: int, version: int, tables: str) -> None:
        self.what = what
        self.application = application
        self.version = version
        self.tables = tables


class Database:
    """An open file. Safe to use from several threads; transactions of one do not mix with another's."""

    def __init__(self, path: Path, schema: Schema, *, readonly: bool = False) -> None:
        """Makes the file where there is none. Raises StorageError: damaged, foreign, newer, or not usable."""
        self.path = path
        self._what = schema.what
        self._lock = threading.RLock()
        mode = "ro" if readonly else "rwc"
        with self.errors():
            self._connection = sqlite3.connect(
                f"file:{quote(str(path.absolute()))}?mode={mode}",
                uri=True,
                isolation_level=None,
                timeout=BUSY_SECONDS,
                check_same_thread=False,
            )
        try:
            with self.errors():
                self._prepare(schema, readonly)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """All of what is written within, or nothing; with `durable`, on the disk before this returns, and all
        transactions before it. Raises StorageError."""
        with self._lock, self.errors(), self._flushing(durable):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a full disk may have rolled back already
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _flushing(self, durable: bool) -> Iterator[None]:
        if not durable:
            yield
            return
        self._connection.execute("PRAGMA synchronous=FULL")
        try:
            yield
        finally:
            self._connection.execute("PRAGMA synchronous=NORMAL")

    def rows(self, query: str, values: Sequence[Cell] = ()) -> list[Row]:
        with self._lock, self.errors():
            return self._connection.execute(query, values).fetchall()

    def one(self, query: str, values: Sequence[Cell] = ()) -> Row | None:
        with self._lock, self.errors():
            row: Row | None = self._connection.execute(query, values).fetchone()
            return row

    def number(self, query: str, values: Sequence[Cell] = ()) -> int:
        """The integer that a query gives; 0 where it gives none."""
        row = self.one(query, values)
        return row[0] if row is not None and isinstance(row[0], int) else 0

    def write(self, statement: str, values: Sequence[Cell] = ()) -> int:
        """One statement in a transaction of its own; the number of rows that it changed."""
        with self.transaction() as connection:
            return connection.execute(statement, values).rowcount

    def change(self, statement: str, values: Sequence[Cell] = ()) -> Row | None:
        """One statement with RETURNING in a transaction of its own; its row."""
        with self.transaction() as connection:
            row: Row | None = connection.execute(statement, values).fetchone()
            return row

    def write_many(self, statement: str, rows: Iterable[Sequence[Cell]]) -> None:
        with self.transaction() as connection:
            connection.executemany(statement, rows)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns SQLite's errors into sentences with the next step in them."""
        try:
            with disk_errors(self.path):
                yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            raise self._told(error) from error

    def _prepare(self, schema: Schema, readonly: bool) -> None:
        connection = self._connection
        if not readonly:
            os.chmod(self.path, 0o600)
            if self._pragma("application_id") == 0 and self._pragma("schema_version") == 0:
                connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA fullfsync=ON")  # macOS: the disk's own cache is flushed, too
            connection.execute("PRAGMA secure_delete=OFF")  # zeroing dropped envelopes would write them again
            connection.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
            connection.execute(f"PRAGMA journal_size_limit={4 * WAL_PAGES * PAGE_BYTES}")
        self._check_ours(schema, readonly)
        if self.path.stat().st_size <= CHECKED_BYTES:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != ("ok",):
                raise sqlite3.DatabaseError(str(found[0]).splitlines()[-1])

    def _check_ours(self, schema: Schema, readonly: bool) -> None:
        """An empty file becomes ours; any other has to be."""
        if not readonly and self._pragma("application_id") == 0 and self._pragma("schema_version") == 0:
            self._connection.executescript(
                f"BEGIN IMMEDIATE;{schema.tables};PRAGMA application_id={schema.application};"
                f"PRAGMA user_version={schema.version};COMMIT;"
            )
        if self._pragma("application_id") != schema.application:
            raise DamagedError(
                f"{self.path} is no {self._what} of nous-node but another program's file. Move it away, "
                "or give another folder."
            )
        found = self._pragma("user_version")
        if found != schema.version:
            raise StorageError(
                f"The {self._what} {self.path} has format {found}; this nous-node reads {schema.version}. "
                "Use the release that wrote it, or move the file away to begin a new one."
            )

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _told(self, error: sqlite3.DatabaseError) -> StorageError:
        match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF:
            case sqlite3.SQLITE_FULL:
                return DiskFullError(
                    f"The disk is full: the {self._what} {self.path} could not be written. All that was "
                    "stored before is intact. Make room and start again."
                )
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return StorageError(
                    f"The {self._what} {self.path} is in use by another process. Stop the other node of "
                    "this home."
                )
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return DamagedError(
                    f"The {self._what} {self.path} is damaged ({error}). Restore it from a backup, or move "
                    "it (and the files beside it that begin with its name) away to begin a new one."
                )
            case _:  # cannot open, read-only, I/O error
                return StorageError(
                    f"The {self._what} {self.path} cannot be used ({error}). Mend the disk or the "
                    "permissions of its folder, or give another one with --home."
                )


class SequenceNumbers:
    """Hands out the `seq` of a key's messages in one run: each number once, also across crashes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        stored = database.one("SELECT value FROM numbers WHERE name = 'seq'")
        known = stored[0] if stored is not None else None
        self._next = known + SEQ_LEAP if isinstance(known, int) else int.from_bytes(os.urandom(_SEQ_BYTES))
        self._end = self._next

    def take(self) -> int:
        if self._next == self._end:
            self._database.write("INSERT OR REPLACE INTO numbers VALUES('seq', ?)", (self._end + SEQ_BLOCK,))
            self._end += SEQ_BLOCK
        self._next += 1
        return self._next - 1
