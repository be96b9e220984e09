"""Rollout groups as they were recorded, for whoever verifies them again. Here: in a trainer's journal.

Read only and page by page, also while a trainer writes. Nothing that stands in a record is believed: a row
that says another thing than the envelope beside it is told as a fault of the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol

import msgspec
from msgspec import Meta

from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Hash, Uint

from .database import Cell, Database, Row
from .journal_tables import SCHEMA, GroupState
from .stored_groups import MAX_STORED

PAGE: Final = 64
"""Rows read at once, and of a file of envelopes their places."""


@dataclass(frozen=True, slots=True)
class Said:
    """The verdict that was recorded of a group."""

    verdict: Literal["accepted", "refused"]
    code: str | None
    """None where only the verdict was kept."""
    credit: int | None
    """Trained tokens credited; None where it was not kept."""
    audited: bool = True
    """Whether the trainer recomputed its tokens, as far as the record says. [VER-13]"""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the record says of an envelope, which says it itself."""

    id: bytes
    key: bytes
    checkpoint: bytes
    version: int
    counter: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A recorded group."""

    id: bytes
    """Envelope id, as recorded; empty where even that is damaged."""
    envelope: bytes
    """As it is stored: of a group by reference with its content, where the record has it."""
    said: Said | None
    """None where it has no verdict."""
    claim: Claim | None = None
    fault: str = ""
    """What the record contradicts itself in."""


@dataclass(frozen=True, slots=True)
class Lot:
    """The recorded groups of one checkpoint."""

    checkpoint: bytes
    """Its hash; empty for groups of which it cannot be told."""
    groups: int


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint, as recorded."""

    envelope: bytes
    """Empty where it was not kept."""
    folder: str
    """Relative to the run's folder; empty where it is not known."""


class Records(Protocol):
    """Groups, lot by lot."""

    def lots(self) -> list[Lot]: ...

    def entries(self, lot: Lot) -> Iterator[Entry]: ...

    def published(self, checkpoint: bytes) -> Published | None: ...


class _GroupRow(msgspec.Struct, frozen=True, array_like=True):
    arrival: int
    id: Hash
    key: Hash
    checkpoint: Hash
    version: Uint
    counter: Uint
    state: GroupState
    audited: Literal[0, 1]
    envelope: bytes
    peer: Hash | None
    verdict: Literal["accepted", "refused"] | None
    code: Annotated[str, Meta(max_length=64)] | None
    credit: Uint | None


class _CheckpointRow(msgspec.Struct, frozen=True, array_like=True):
    envelope: bytes
    folder: str


_ENTRIES: Final = f"""
    SELECT arrival, groups.id, key, checkpoint, version, counter, state, audited,
        x'', peer, verdict, code, credit
    FROM groups JOIN envelopes USING(arrival) LEFT JOIN receipts ON receipts.id = groups.id
    WHERE checkpoint = ? AND arrival > ? ORDER BY arrival LIMIT {PAGE}
"""

_DATA: Final = f"SELECT coalesce(substr(data, 1, {MAX_STORED + 1}), x'') FROM envelopes WHERE arrival = ?"


class JournalRecords:
    """Those of a trainer's journal whose envelopes are still there; `with` closes it."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError for a file that is no journal, or a damaged one."""
        self._database = Database(path, SCHEMA, readonly=True)

    def __enter__(self) -> JournalRecords:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def lots(self) -> list[Lot]:
        """In the order of their versions."""
        rows = self._database.rows(
            "SELECT checkpoint, count(*) FROM groups JOIN envelopes USING(arrival) "
            "GROUP BY checkpoint ORDER BY min(version), min(arrival)"
        )
        return [Lot(row[0], row[1]) for row in rows if isinstance(row[0], bytes) and isinstance(row[1], int)]

    def entries(self, lot: Lot) -> Iterator[Entry]:
        """In the order of their arrival."""
        last = 0
        while rows := self._database.rows(_ENTRIES, (lot.checkpoint, last)):
            yield from map(self._entry, rows)
            last = rows[-1][0] if isinstance(rows[-1][0], int) else last

    def _entry(self, row: Row) -> Entry:
        """Each group is read when its turn comes: one may be as large as all others of a page together."""
        data = self._database.one(_DATA, (row[0],))
        return _entry(row, b"" if data is None else data[0])

    def published(self, checkpoint: bytes) -> Published | None:
        row = self._database.one(
            f"SELECT coalesce(substr(envelope, 1, {MAX_MANIFEST + 1}), x''), folder "
            "FROM checkpoints WHERE hash = ?",
            (checkpoint,),
        )
        if row is None:
            return None
        try:
            found = msgspec.convert(row, _CheckpointRow, builtin_types=(bytes,))
        except msgspec.ValidationError:
            return Published(b"", "")
        return Published(found.envelope, found.folder)


def _entry(row: Row, data: Cell) -> Entry:
    try:
        found = msgspec.convert((*row[:8], data, *row[9:]), _GroupRow, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        identity = row[1] if isinstance(row[1], bytes) else b""
        return Entry(identity, b"", None, None, f"The journal's row is damaged: {error}.")
    claim = Claim(found.id, found.key, found.checkpoint, found.version, found.counter)
    return Entry(found.id, found.envelope, _said(found), claim, _fault(found))


def _said(row: _GroupRow) -> Said | None:
    audited = bool(row.audited)
    if row.verdict is not None:
        return Said(row.verdict, row.code, row.credit, audited)
    match row.state:
        case "accepted" | "dropped":
            return Said("accepted", None, None, audited)
        case "refused":
            return Said("refused", None, None, audited)
        case _:  # to be judged, or used: then it may have been too old to judge
            return None


def _fault(row: _GroupRow) -> str:
    if row.verdict is None:
        return ""
    if row.peer != row.key:
        return "The journal's receipt is for another key than the group's."
    if row.state in ("waiting", "pending") or (row.state == "refused") != (row.verdict == "refused"):
        return f"The journal calls the group {row.state}, and its receipt {row.verdict}."
    return ""
