"""A file of envelopes one after the other, as somebody recorded them from gossip.

Rollouts are indexed by their checkpoint, those by reference too, whose content is nowhere in gossip; the
checkpoint envelopes in the file say which tasks those assigned, its receipts which verdicts they had. The
index lies in a temporary file, so that a long record takes little memory. Bytes that are no envelope are
passed over, and told.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from nous_node.protocol.checkpoints import checkpoint_hash, open_checkpoint
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Envelope, Kind, unseal
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.receipts import Receipt, open_receipts
from nous_node.protocol.references import MAX_REFERENCE, read_reference
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.runs import RunManifest

from .recorded import PAGE, Entry, Lot, Published, Said

_BEGIN: Final = b"\x82\xa3sig\xc4\x40"
_MIDDLE: Final = b"\xa6signed"
_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_HEADER: Final = len(_BEGIN) + 64 + len(_MIDDLE) + 5
"""The canonical encoding leaves an envelope one possible beginning: a map of `sig` (64 bytes) and `signed`
(bytes, whose length ends this header). Whatever else stands in a file is found without decoding it."""

SEARCH_BYTES: Final = 1 << 20
"""Looked through at once for the next beginning."""

_TABLES: Final = """
    CREATE TABLE groups(
        number INTEGER PRIMARY KEY, id BLOB NOT NULL, checkpoint BLOB NOT NULL,
        place INTEGER NOT NULL, size INTEGER NOT NULL
    );
    CREATE INDEX groups_checkpoint ON groups(checkpoint, number);
    CREATE TABLE checkpoints(hash BLOB PRIMARY KEY, place INTEGER NOT NULL, size INTEGER NOT NULL);
    CREATE TABLE receipts(
        id BLOB PRIMARY KEY, verdict TEXT NOT NULL, code TEXT NOT NULL, credit INTEGER NOT NULL
    );
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """An envelope's place in the file, or that of bytes between envelopes."""

    place: int
    size: int
    envelope: bool


def pieces(file: BinaryIO, end: int) -> Iterator[Piece]:
    """All of the first `end` bytes, in their order."""
    place = 0
    while place < end:
        size = _size(file, place)
        if size is not None and place + size <= end:
            yield Piece(place, size, envelope=True)
            place += size
            continue
        following = _search(file, place + 1, end)
        yield Piece(place, following - place, envelope=False)
        place = following


def _size(file: BinaryIO, place: int) -> int | None:
    """Bytes of the envelope that begins at `place`; None where none does."""
    file.seek(place)
    header = file.read(_HEADER)
    middle = len(_BEGIN) + 64
    length = middle + len(_MIDDLE) + 1
    if not header.startswith(_BEGIN) or header[middle : length - 1] != _MIDDLE or len(header) < length:
        return None
    width = _LENGTHS.get(header[length - 1], 0)
    if not width or len(header) < length + width:
        return None
    size = length + width + int.from_bytes(header[length : length + width])
    return size if size <= MAX_MANIFEST else None


def _search(file: BinaryIO, place: int, end: int) -> int:
    """Where the next envelope may begin."""
    while place < end:
        file.seek(place)
        block = file.read(min(SEARCH_BYTES, end - place))
        found = block.find(_BEGIN)
        if found >= 0:
            return place + found
        if len(block) < len(_BEGIN):
            break
        place += len(block) - len(_BEGIN) + 1
    return end


def first_envelope(path: Path) -> bytes | None:
    """What a file of envelopes begins with; None for any other file."""
    with path.open("rb") as file:
        size = _size(file, 0)
        file.seek(0)
        data = file.read(size or 0)
    return data if size is not None and len(data) == size else None


class FileRecords:
    """The rollouts in such a file; `with` closes it. `tell` hears of what in it cannot be used."""

    def __init__(self, path: Path, run: bytes, manifest: RunManifest, tell: Callable[[str], None]) -> None:
        """Reads it once. Raises LocalError where nothing in it is an envelope."""
        self._run, self._manifest, self._tell = run, manifest, tell
        self._index = sqlite3.connect("", isolation_level=None)  # a file that SQLite deletes itself
        self._file = path.open("rb")
        try:
            self._index.executescript(_TABLES)
            self._read_all(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FileRecords:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._index.close()

    def lots(self) -> list[Lot]:
        """In the order in which their first groups came."""
        query = "SELECT checkpoint, count(*) FROM groups GROUP BY checkpoint ORDER BY min(number)"
        return [Lot(checkpoint, groups) for checkpoint, groups in self._index.execute(query)]

    def entries(self, lot: Lot) -> Iterator[Entry]:
        last = 0
        query = (
            "SELECT number, groups.id, place, size, verdict, code, credit FROM groups "
            "LEFT JOIN receipts ON receipts.id = groups.id "
            f"WHERE checkpoint = ? AND number > ? ORDER BY number LIMIT {PAGE}"
        )
        while rows := self._index.execute(query, (lot.checkpoint, last)).fetchall():
            for _, identity, place, size, verdict, code, credit in rows:
                said = None if verdict is None else Said(verdict, code, credit)
                yield Entry(identity, self._data(place, size), said)
            last = rows[-1][0]

    def published(self, checkpoint: bytes) -> Published | None:
        query = "SELECT place, size FROM checkpoints WHERE hash = ?"
        row = self._index.execute(query, (checkpoint,)).fetchone()
        return None if row is None else Published(self._data(*row), "")

    def _data(self, place: int, size: int) -> bytes:
        self._file.seek(place)
        return self._file.read(size)

    def _read_all(self, path: Path) -> None:
        envelopes = 0
        self._index.execute("BEGIN")
        for piece in pieces(self._file, path.stat().st_size):
            if not piece.envelope:
                self._tell(f"{piece.size} bytes from byte {piece.place} on are no envelope.")
                continue
            envelopes += 1
            try:
                self._take(piece, unseal(self._data(piece.place, piece.size), MAX_MANIFEST))
            except RemoteError as error:
                self._tell(f"The envelope at byte {piece.place} is not used ({error.code}): {error}")
        self._index.execute("COMMIT")
        if not envelopes:
            raise LocalError(
                f"{path} is neither a journal nor a file of envelopes one after the other; name a run's "
                "folder, its journal.sqlite, or what was recorded of its gossip."
            )

    def _take(self, piece: Piece, envelope: Envelope) -> None:
        """Indexes one. Raises RemoteError where it is not what it should be."""
        if envelope.head.run != self._run:
            raise RemoteError(Code.WRONG_RUN, "It belongs to another run.")
        place = (piece.place, piece.size)
        match envelope.head.kind:
            case Kind.ROLLOUT | Kind.REFERENCE:
                row = (envelope.id, self._checkpoint(envelope), *place)
                self._index.execute("INSERT INTO groups(id, checkpoint, place, size) VALUES(?, ?, ?, ?)", row)
            case Kind.CHECKPOINT:
                open_checkpoint(envelope, self._run, self._manifest)
                digest = checkpoint_hash(envelope.content(MAX_MANIFEST))
                self._index.execute("INSERT OR IGNORE INTO checkpoints VALUES(?, ?, ?)", (digest, *place))
            case Kind.RECEIPTS:
                for receipt in open_receipts(envelope, self._run, self._manifest).items:
                    self._note(receipt)
            case _:
                pass  # the run's manifest, and greetings

    def _note(self, receipt: Receipt) -> None:
        """The first one counts."""
        row = (receipt.rollout, receipt.verdict, receipt.code, receipt.credit)
        self._index.execute("INSERT OR IGNORE INTO receipts VALUES(?, ?, ?, ?)", row)

    def _checkpoint(self, envelope: Envelope) -> bytes:
        """What a rollout names; empty where it cannot be told, and the audit says why."""
        try:
            if envelope.head.kind == Kind.REFERENCE:
                content = envelope.content(MAX_REFERENCE)
                return read_reference(content, self._manifest.referenced_limit).checkpoint
            body = envelope.content(self._manifest.rollout_body_limit)
            return RolloutGroup.from_bytes(body, self._manifest.rollout_body_limit).checkpoint
        except RemoteError:
            return b""
