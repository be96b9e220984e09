"""Checkpoints taken out of a home: `nous-node checkpoints export`.

As a model: a plain transformers folder with exactly the files of the manifest, and a model card. It is
written beside its place and renamed when every chunk and every tensor has the hash that the manifest names;
of damaged weights nothing is left.

As a mirror (`--blobs`): `blob/HASH` for every chunk of files and deltas and for the manifests of the chain,
to be served by any HTTP server or object store [STR-6]. What is there already and right stays, so one folder
takes many versions; what was damaged is written anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from nous_node.protocol.checkpoints import (
    SUFFIXES,
    CheckpointManifest,
    FileEntry,
    weights_hash,
)
from nous_node.protocol.errors import LocalError, RemoteError
from nous_node.trainer.model_folder import CONFIG_FILE, read_config

from .checkpoint_check import check_tensors
from .checkpoint_shelf import Shelf, Stored, is_base, signed
from .chunk_files import read_chunks
from .create import base_tensors, folder_entries
from .home import DamagedError, DiskFullError, StorageError, disk_errors, write_atomic
from .model_card import CARD_FILE, CardFacts, base_model, model_card
from .wording import plural, printable, size

_PUBLIC_FILE = 0o644
_PUBLIC_FOLDER = 0o755


class Exported(msgspec.Struct, frozen=True):
    """What was written. With `--json` these are the keys."""

    folder: str
    run: str
    version: int | None
    checkpoint: str
    """Hash in hexadecimal."""
    weights: str
    """Weights hash in hexadecimal."""
    files: int
    bytes: int
    missing: int
    """Of a mirror: blobs of the chain that are not on this disk."""
    text: str


@dataclass(slots=True)
class _Source:
    """A checkpoint whose manifest is known and whose files are here."""

    shelf: Shelf
    stored: Stored
    files: list[FileEntry]
    tensors: dict[str, bytes]
    signed_by: str = ""
    published: CheckpointManifest | None = None
    sums: dict[str, tuple[int, str]] = field(default_factory=dict)


def export_model(shelf: Shelf, stored: Stored, target: Path, *, force: bool) -> Exported:
    """Writes a transformers folder. Raises LocalError where the checkpoint is not complete or the folder
    holds something else, DamagedError where it is not what its manifest says, StorageError."""
    source = _source(shelf, stored)
    target = _place(shelf, target)
    refuse_other(target, force=force)
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            for entry in source.files:
                source.sums[entry.path] = _copy(source, entry, place)
            _check_tensors(source, place)
            _write_card(source, place)
            refuse_other(target, force=force)  # exporting took its time
            _replace(place, target)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    total = sum(entry.size for entry in source.files)
    return Exported(
        folder=str(target),
        run=shelf.run.hex(),
        version=stored.version,
        checkpoint=stored.hash,
        weights=weights_hash(source.tensors).hex(),
        files=len(source.files),
        bytes=total,
        missing=0,
        text=f"{target}: {stored.name} of {shelf.name}, {plural(len(source.files), 'file')}, {size(total)}, "
        f"every chunk and every tensor verified; {CARD_FILE} is its model card. transformers loads it with "
        "AutoModelForCausalLM.from_pretrained.",
    )


def export_blobs(shelf: Shelf, stored: Stored, target: Path) -> Exported:
    """Writes `blob/HASH` files into a folder that may hold others. Raises as `export_model`; what was written
    before an error is right and stays."""
    source = _source(shelf, stored)
    target = _place(shelf, target)
    blobs = target / "blob"
    written, lacking = set[bytes](), set[bytes]()
    with _writing(target):
        blobs.mkdir(parents=True, exist_ok=True)
        for digest, data in _blobs(source, lacking):
            _write_blob(blobs, digest, data)
            written.add(digest)
    lack = ""
    if lacking:
        lack = (
            f" {plural(len(lacking), 'blob')} of its deltas are not on this disk: who wants them asks the "
            "run's peers, or takes the files by their chunks."
        )
    return Exported(
        folder=str(target),
        run=shelf.run.hex(),
        version=stored.version,
        checkpoint=stored.hash,
        weights=weights_hash(source.tensors).hex(),
        files=len(written),
        bytes=sum(entry.size for entry in source.files),
        missing=len(lacking),
        text=f"{blobs}: {stored.name} of {shelf.name}, {plural(len(written), 'blob')}.{lack} Serve {target} "
        "over HTTP; a trainer names the URL of that folder with --mirror.",
    )


def refuse_other(target: Path, *, force: bool) -> None:
    """Raises LocalError for a place that holds something. With `force` a model may be replaced: a folder with
    a configuration and weights, and nothing that no checkpoint and no card of one can be."""
    if not target.exists():
        return
    if not target.is_dir():
        raise LocalError(f"{target} is no folder; name one that does not exist yet.")
    with _writing(target):
        if not any(target.iterdir()):
            return
        if not force:
            raise LocalError(
                f"{target} is not empty and was not replaced; name another folder or add --force."
            )
        is_model = (target / CONFIG_FILE).is_file() and any(target.glob("*.safetensors"))
        files = (path for path in target.rglob("*") if path.is_symlink() or not path.is_dir())
        other = next((path for path in files if not path.name.endswith((CARD_FILE, *SUFFIXES))), None)
    if not is_model:
        raise LocalError(
            f"{target} is no model's folder, which has a {CONFIG_FILE} and .safetensors files: it was not "
            "replaced, also not with --force. Name another folder."
        )
    if other is not None:
        raise LocalError(
            f"{target} holds {printable(other.relative_to(target).as_posix(), 200)}, which is no part of a "
            "model: it was not replaced, also not with --force. Name another folder."
        )


def _place(shelf: Shelf, target: Path) -> Path:
    """Raises LocalError for a place among the node's own files."""
    place = target.expanduser().resolve()
    own = shelf.path.resolve()
    if place.is_relative_to(own) or own.is_relative_to(place):
        raise LocalError(
            f"{target} is where the node itself keeps this run; name a folder outside of its home."
        )
    return place


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Raises DiskFullError, and LocalError where `target` cannot be written."""
    try:
        with disk_errors(target):
            yield
    except (DiskFullError, DamagedError):
        raise
    except StorageError as error:
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
        raise LocalError(
            f"{target} cannot be written ({reason}); name a folder where you may write."
        ) from error


def _source(shelf: Shelf, stored: Stored) -> _Source:
    """Raises LocalError where it is not complete, DamagedError where its manifest is not what was signed."""
    manifest = stored.manifest
    if not stored.folder.is_dir():
        state = "is being downloaded" if stored.part is not None else "is not on this disk any more"
        raise LocalError(
            f"{_capital(stored.name)} {state}: choose one that `nous-node checkpoints list` shows as "
            "complete."
        )
    if manifest is None:
        if not is_base(shelf, stored):
            raise DamagedError(
                f"Nothing here says what {stored.name} has to be: its manifest is gone or damaged, and what "
                "cannot be verified is not exported. Choose another version."
            )
        return _Source(shelf, stored, folder_entries(stored.folder), base_tensors(stored.folder))
    try:
        signer = signed(shelf, stored)
    except RemoteError as error:
        raise DamagedError(
            f"The manifest of {stored.name} is not what a trainer signed ({error}) Choose another version, "
            "or restore the journal from a backup."
        ) from error
    return _Source(shelf, stored, manifest.files, manifest.tensors, signer, manifest)


def _copy(source: _Source, entry: FileEntry, place: Path) -> tuple[int, str]:
    """Writes one verified file; its bytes and SHA-256."""
    path = place / entry.path
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = hashlib.sha256()
    with path.open("xb") as file:
        for _, data in _chunks(source, source.stored.folder, entry):
            file.write(data)
            whole.update(data)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(_PUBLIC_FILE)
    return entry.size, whole.hexdigest()


def _chunks(source: _Source, folder: Path, entry: FileEntry) -> Iterator[tuple[bytes, bytes]]:
    """Hash and bytes of each chunk of a file. Raises DamagedError for the first that is not what it has to
    be."""
    path = folder / entry.path
    try:
        yield from read_chunks(path, entry)
    except FileNotFoundError as error:
        raise LocalError(
            f"{path} went away while it was read, as a running node drops old versions. Run the command "
            "again, or choose a newer version."
        ) from error
    except (OSError, RemoteError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise DamagedError(
            f"{_capital(source.stored.name)} is damaged in {path} ({reason}) and was not exported. "
            "`nous-node checkpoints verify` says what to do; choose another version meanwhile."
        ) from error


def _check_tensors(source: _Source, place: Path) -> None:
    if source.published is None:
        return
    _, faults = check_tensors(place, source.published)
    if faults:
        raise DamagedError(
            f"{_capital(source.stored.name)} was not exported: {'; '.join(faults)}. The trainer published "
            "files that are not what their own manifest says; tell the run's owner, and choose another "
            "version."
        )


def _write_card(source: _Source, place: Path) -> None:
    config = read_config(place) if (place / CONFIG_FILE).is_file() else {}
    facts = CardFacts(
        run=source.shelf.run,
        manifest=source.shelf.manifest,
        version=source.stored.version or 0,
        checkpoint=source.stored.hash,
        weights=weights_hash(source.tensors),
        files=source.sums,
        published=source.published,
        signed_by=source.signed_by,
        base_model=base_model(config),
    )
    write_atomic(place / CARD_FILE, model_card(facts).encode(), _PUBLIC_FILE)


def _replace(place: Path, target: Path) -> None:
    """Puts `place` where `target` is; in between there is none of that name, never half of one."""
    place.chmod(_PUBLIC_FOLDER)
    if not target.exists():
        place.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / target.name)
    place.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _blobs(source: _Source, lacking: set[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Hash and bytes of all that a node may ask for of a checkpoint and the chain before it. `lacking` gets
    what is not here."""
    for entry in source.files:
        yield from _chunks(source, source.stored.folder, entry)
    chain = [] if source.published is None else source.published.chain
    held = {one.hash: one for one in source.shelf.stored}
    lacking.update(digest for digest in chain if digest.hex() not in held)
    for one in (source.stored, *(held[digest.hex()] for digest in chain if digest.hex() in held)):
        if one.manifest is None:
            continue
        yield bytes.fromhex(one.hash), one.content
        for entry in one.manifest.deltas:
            if one.deltas is None or not (one.deltas / entry.path).is_file():
                lacking.update(entry.hashes())
            else:
                yield from _chunks(source, one.deltas, entry)


def _write_blob(blobs: Path, digest: bytes, data: bytes) -> None:
    path = blobs / digest.hex()
    if not _stands(path, data):
        write_atomic(path, data, _PUBLIC_FILE)


def _stands(path: Path, data: bytes) -> bool:
    """Whether these bytes lie there; a file that cannot be read is written anew."""
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
