"""Deltas as files: made of two safetensors files, and applied to one to make the other.

Both go segment by segment and hold some tens of megabytes, whatever the model's size. Nothing is mapped: a
file that is cut short under a mapping kills the process. Free of torch, for relays.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nous_node.protocol.deltas import (
    LENGTH_BYTES,
    MAGIC,
    Record,
    apply_payload,
    delta_head,
    delta_header_length,
    make_payload,
    pieces,
    read_delta_header,
)
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.layout import LENGTH_BYTES as SIZE_BYTES
from nous_node.protocol.layout import Place, header_length, read_layout

COPY_BYTES = 1 << 20


@dataclass(slots=True)
class _Tensors:
    """A safetensors file that is open for reading."""

    file: IO[bytes]
    head: bytes
    """Its bytes before the first tensor."""
    places: list[Place]

    def read(self, offset: int, length: int) -> bytes:
        self.file.seek(offset)
        return _exactly(self.file, length)


def write_delta(old: Path, new: Path, out: Path, *, most: int) -> int | None:
    """Writes to `out` what makes the file `new` of `old`; the bytes written.

    None, and nothing is left at `out`, where the two have other headers (names, shapes, types, metadata),
    where deltas are not for them (sub-byte types, damaged files), or where it would exceed `most` bytes.
    Raises OSError.
    """
    try:
        with _opened(old) as before, _opened(new) as after, _whole(out) as file:
            if before.head != after.head:
                raise _NoDelta
            return _write(before, after, file, most)
    except (_NoDelta, RemoteError, LocalError):
        return None


def apply_delta(old: Path, delta: Path, out: Path, tensors: Mapping[str, bytes]) -> None:
    """Writes to `out` the file that `delta` makes of `old`, checked against `tensors` (name -> SHA-256).

    Raises RemoteError with the codes of chapter 09 [DLT-1] to [DLT-8], and OSError; nothing is left at `out`
    then. `old` is only read, so that applying again gives the same.
    """
    with _opened(old) as before, delta.open("rb") as changes, _whole(out) as file:
        size = changes.seek(0, 2)
        changes.seek(0)
        header = _exactly(changes, delta_header_length(changes.read(len(MAGIC) + LENGTH_BYTES)))
        start = changes.tell()
        records = read_delta_header(header, size - start, before.places)
        file.write(before.head)
        for place in before.places:
            digest = hashlib.sha256()
            for number, offset, length in pieces(place):
                data = before.read(offset, length)
                if (found := records.get((place.name, number))) is not None:
                    record, at = found
                    changes.seek(start + at)
                    data = apply_payload(data, record.encoding, _exactly(changes, record.size), place.dtype)
                digest.update(data)
                file.write(data)
            if tensors.get(place.name) != digest.digest():  # [DLT-8]
                raise RemoteError(Code.HASH_MISMATCH, f"The tensor {place.name[:64]!r} has another hash.")


class _NoDelta(Exception):
    """There is none between these two files, or it would not pay."""


def _write(before: _Tensors, after: _Tensors, file: IO[bytes], most: int) -> int:
    """Payloads come behind a header that counts them, so they wait in a temporary file."""
    records: dict[str, list[Record]] = {}
    total = 0
    with tempfile.TemporaryFile(dir=Path(file.name).parent) as payloads:
        for place in sorted(before.places, key=lambda one: one.name):  # as the header's keys
            for number, offset, length in pieces(place):
                made = make_payload(before.read(offset, length), after.read(offset, length), place.dtype)
                if made is None:
                    continue
                encoding, payload = made
                total += len(payload)
                if total > most:
                    raise _NoDelta
                records.setdefault(place.name, []).append(Record(number, encoding, len(payload)))
                payloads.write(payload)
        head = delta_head(records)
        if len(head) + total > most:
            raise _NoDelta
        file.write(head)
        payloads.seek(0)
        shutil.copyfileobj(payloads, file, COPY_BYTES)
    return len(head) + total


@contextmanager
def _opened(path: Path) -> Iterator[_Tensors]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = file.read(SIZE_BYTES)
        header = _exactly(file, header_length(length))
        yield _Tensors(file, length + header, read_layout(header, size))


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A new file that is gone again where writing it fails."""
    try:
        with path.open("wb") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _exactly(file: IO[bytes], length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise RemoteError(Code.SIZE_MISMATCH, f"{file.name} ends too early.")
    return data
