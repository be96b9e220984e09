"""Whether a checkpoint on this disk is what its manifest says: `nous-node checkpoints verify`.

Every chunk of its files and deltas is compared with its hash, every tensor with that of `tensors`, and the
manifest with the signature where that is at hand. A file is read once for its chunks and once for its
tensors, a chunk or a megabyte at a time.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from nous_node.protocol.checkpoints import CheckpointManifest, FileEntry
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.layout import LENGTH_BYTES, Place, header_length, read_layout

from .checkpoint_shelf import Shelf, Stored, is_base, signed
from .chunk_files import stands
from .journal_trim import KEPT_MANIFESTS
from .wording import plural, printable

READ_BYTES = 1 << 20

NAMED = 4
"""Faults of one checkpoint that are named; of more only the number is told."""


class Outcome(StrEnum):
    """How a checkpoint stands."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    PARTIAL = "partial"
    """A download that goes on: what is there of it is right."""
    UNKNOWN = "unknown"
    """Nothing here says what it has to be, and something should."""
    FORGOTTEN = "forgotten"
    """The journal keeps the manifests of the newest versions only."""
    GONE = "gone"
    """Only its manifest is here."""


class Checked(msgspec.Struct, frozen=True):
    """One checkpoint. With `--json` these are the keys."""

    run: str
    version: int | None
    hash: str
    outcome: Outcome
    files: int
    chunks: int
    """That are here and right, of its files and its deltas."""
    of: int
    """Chunks that it has."""
    tensors: int
    """That are right."""
    signed_by: str
    """Key of the trainer; empty where the signed manifest is not at hand."""
    problems: list[str]
    text: str
    """For people."""

    @property
    def is_wrong(self) -> bool:
        return self.outcome in (Outcome.DAMAGED, Outcome.UNKNOWN)


def check(shelf: Shelf, stored: Stored) -> Checked:
    """Reads all of a checkpoint. Never raises for what is on the disk: that is what it tells."""
    if stored.manifest is None:
        return _unnamed(shelf, stored)
    manifest, problems = stored.manifest, []
    signer = ""
    try:
        signer = signed(shelf, stored)
    except RemoteError as error:
        problems.append(f"its manifest is not what a trainer signed ({error})")
    place = stored.folder if stored.folder.is_dir() else stored.part
    held = total = tensors = 0
    whole = stored.folder.is_dir()
    for folder, entries in ((place, manifest.files), (stored.deltas, manifest.deltas)):
        for entry in entries:
            total += len(entry.hashes())
            if folder is None or (folder != stored.folder and not (folder / entry.path).is_file()):
                continue  # of a download, or of deltas, not all has to be here
            right, faults = check_file(folder, entry, strict=folder != stored.part)
            held += right
            problems += faults
    if whole and not problems:
        tensors, faults = check_tensors(stored.folder, manifest)
        problems += faults
    if problems and not stored.is_here:
        return _result(shelf, stored, Outcome.GONE, "it was dropped while it was read")
    outcome = Outcome.DAMAGED if problems else Outcome.WHOLE if whole else Outcome.PARTIAL
    if not stored.is_here:
        outcome = Outcome.GONE
    return _result(
        shelf,
        stored,
        outcome,
        _told(shelf, outcome, manifest, held, total, tensors, signer, problems),
        chunks=held,
        of=total,
        tensors=tensors,
        signed_by=signer,
        problems=problems,
    )


def check_file(folder: Path, entry: FileEntry, *, strict: bool) -> tuple[int, list[str]]:
    """Chunks of a file that are right, and what is wrong. `strict`: a chunk that is not there is wrong as
    well; otherwise nothing is: it is a download that goes on."""
    path = folder / entry.path
    wrong: list[int] = []
    right = 0
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for number, digest in enumerate(entry.hashes()):
                if not strict and _is_hole(file, number * entry.chunk, entry.length(number)):
                    continue
                if stands(file, number * entry.chunk, entry.length(number), digest):
                    right += 1
                elif strict:
                    wrong.append(number)
    except FileNotFoundError:
        return 0, [f"{entry.path} is missing"] if strict else []
    except OSError as error:
        return right, [f"{entry.path} cannot be read ({error.strerror})"]
    faults = []
    if strict and size != entry.size:
        faults.append(f"{entry.path} has {size:,} bytes instead of {entry.size:,}")
    if wrong:
        named = ", ".join(str(number) for number in wrong[:NAMED]) + (", ..." if len(wrong) > NAMED else "")
        faults.append(f"{entry.path} is damaged in {plural(len(wrong), 'chunk')} ({named})")
    return right, faults


def _is_hole(file: FileIO, offset: int, length: int) -> bool:
    """Whether nothing was ever written there: of a download that has begun, little is read."""
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        return error.errno == errno.ENXIO  # no data behind it


def held_chunks(stored: Stored) -> tuple[int, int]:
    """Chunks of its files that are here, and how many there are. Of a complete folder only the sizes are
    looked at: `check` reads it."""
    if stored.manifest is None:
        return 0, 0
    entries = stored.manifest.files
    total = sum(len(entry.hashes()) for entry in entries)
    if has_sizes(stored.folder, entries):
        return total, total
    place = stored.folder if stored.folder.is_dir() else stored.part
    if place is None:
        return 0, total
    return sum(check_file(place, entry, strict=False)[0] for entry in entries), total


def has_sizes(folder: Path, entries: Sequence[FileEntry]) -> bool:
    """Whether all files are there, in their sizes."""
    try:
        return all((folder / entry.path).stat().st_size == entry.size for entry in entries)
    except OSError:
        return False


def check_tensors(folder: Path, manifest: CheckpointManifest) -> tuple[int, list[str]]:
    """Tensors that are what the manifest says, and what is wrong. [CKP-10]"""
    found: dict[str, bytes] = {}
    for entry in manifest.files:
        if entry.path.endswith(".safetensors"):
            try:
                found.update(_tensor_hashes(folder / entry.path))
            except (OSError, RemoteError) as error:
                reason = str(error).rstrip(".")
                return 0, [f"the tensors of {entry.path} cannot be read ({printable(reason, 200)})"]
    other = [name for name, digest in manifest.tensors.items() if name in found and found[name] != digest]
    missing = [name for name in manifest.tensors if name not in found]
    more = [name for name in found if name not in manifest.tensors]
    faults = [
        f"{plural(len(names), 'tensor')} {what} ({_names(names)})"
        for names, what in (
            (other, "with another hash than the manifest's"),
            (missing, "missing"),
            (more, "that the manifest does not name"),
        )
        if names
    ]
    return len(manifest.tensors) - len(other) - len(missing), faults


def _tensor_hashes(path: Path) -> dict[str, bytes]:
    """SHA-256 of each tensor's bytes. Raises RemoteError for what is no safetensors file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(header_length(file.read(LENGTH_BYTES)))
        return {place.name: _digest(file, place) for place in read_layout(header, size)}


def _digest(file: BinaryIO, place: Place) -> bytes:
    file.seek(place.offset)
    digest, left = hashlib.sha256(), place.elements * place.width
    while left and (piece := file.read(min(left, READ_BYTES))):
        digest.update(piece)
        left -= len(piece)
    return digest.digest()


def _names(names: Sequence[str]) -> str:
    told = ", ".join(printable(name, 80) for name in names[:NAMED])
    return told + (", ..." if len(names) > NAMED else "")


def _unnamed(shelf: Shelf, stored: Stored) -> Checked:
    """Without a manifest only the base is known: the run's own manifest names its files."""
    if is_base(shelf, stored):
        return _result(shelf, stored, Outcome.WHOLE, "the base that the run's manifest names")
    if not stored.is_here:
        return _result(shelf, stored, Outcome.GONE, "neither its files nor its manifest are here any more")
    if stored.version == 0:
        problem = "it is not the base that the run's manifest names"
        return _result(shelf, stored, Outcome.DAMAGED, f"{problem}: {_step(shelf)}", problems=[problem])
    if shelf.role == "trained" and not stored.envelope:
        return _result(
            shelf,
            stored,
            Outcome.FORGOTTEN,
            f"the journal keeps the manifests of the newest {KEPT_MANIFESTS} versions, and of those whose "
            "files stay, so nothing says any more what it has to be",
        )
    lack = "its manifest is not here or damaged, so nothing says what it has to be"
    return _result(shelf, stored, Outcome.UNKNOWN, f"{lack}: {_step(shelf)}", problems=[lack])


def _told(
    shelf: Shelf,
    outcome: Outcome,
    manifest: CheckpointManifest,
    held: int,
    total: int,
    tensors: int,
    signer: str,
    problems: Sequence[str],
) -> str:
    by = f"signed by {signer[:16]}" if signer else "its hash is right, the signature is not at hand"
    match outcome:
        case Outcome.WHOLE:
            missing = f", {total - held:,} of its deltas are not here" if held < total else ""
            return (
                f"{plural(len(manifest.files), 'file')}, {plural(held, 'chunk')}{missing}, "
                f"{plural(tensors, 'tensor')}; {by}"
            )
        case Outcome.PARTIAL:
            return f"{held:,} of {plural(total, 'chunk')} are here and right; {by}"
        case Outcome.GONE:
            return f"only its manifest is here; {by}"
        case _:
            more = f"; and {len(problems) - NAMED:,} more" if len(problems) > NAMED else ""
            return f"{'; '.join(problems[:NAMED])}{more}: {_step(shelf)}"


def _step(shelf: Shelf) -> str:
    """What to do about damage."""
    if shelf.role == "trained":
        return (
            "put the files back from a backup, or from a volunteer's folder of this run, and check the disk. "
            "A trainer that is started again goes on from the newest version that is whole."
        )
    return "stop the node and join the run again, which fetches what is broken anew, and check the disk."


def _result(
    shelf: Shelf,
    stored: Stored,
    outcome: Outcome,
    text: str,
    *,
    chunks: int = 0,
    of: int = 0,
    tensors: int = 0,
    signed_by: str = "",
    problems: Sequence[str] = (),
) -> Checked:
    return Checked(
        run=shelf.run.hex(),
        version=stored.version,
        hash=stored.hash,
        outcome=outcome,
        files=0 if stored.manifest is None else len(stored.manifest.files),
        chunks=chunks,
        of=of,
        tensors=tensors,
        signed_by=signed_by,
        problems=list(problems),
        text=f"{stored.name}: {outcome.value}: {text}",
    )
