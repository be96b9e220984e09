"""The checkpoints of a run that lie on this disk. Everything is read and nothing written: a node may be
running on the same home, so a folder may also go while it is looked at.

    a trainer's run   the journal names them; checkpoints/NNNNNN/ has their files, deltas/NNNNNN/ their deltas
    a joined run      checkpoints/HEX/ has their files, HEX.deltas/ their deltas, HEX.manifest says what they
                      are; HEX.part/ is a download under way; the newest is signed in head.envelope
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import hexdigits

from nous_node.protocol.checkpoints import (
    CheckpointManifest,
    checkpoint_hash,
    files_hash,
    open_checkpoint,
    read_manifest,
)
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import LocalError, NousError, RemoteError
from nous_node.protocol.runs import RunManifest, open_manifest

from .home import UNDER_WAY, DamagedError, disk_errors
from .outbox import Outbox
from .runfolder import RunFolder
from .store import Journal, StoredCheckpoint
from .wording import printable

NAME_DIGITS = 16
"""Of a checkpoint's hash in the names of a joined run's folders, and where a person reads it."""

LEAST_DIGITS = 8
"""Of a hash that is typed: fewer would be taken for a version."""

LEAST_RUN_DIGITS = 4
"""Of a run id that is typed."""

NEWEST, GOOD, IN_USE, CHAIN = "newest", "good", "in use", "full of the chain"
"""What is said of a checkpoint: the newest here; the one that a trainer may go back to; the one that the last
group was made with; the full one that the newest is made from by deltas."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One checkpoint, with as much of it as is here."""

    version: int | None
    """None where nothing says which it is."""
    hash: str
    """In hexadecimal: all of it, or as much as is known."""
    folder: Path
    """Where its files are, or would be."""
    part: Path | None = None
    """A download under way."""
    deltas: Path | None = None
    manifest: CheckpointManifest | None = None
    content: bytes = b""
    """The manifest's bytes, which its hash is of."""
    envelope: bytes = b""
    """The manifest as it was signed, where that is at hand."""
    since: float | None = None
    """Unix seconds: when it was published, or came here."""
    eval: dict[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How a person calls it."""
        known = "a checkpoint of unknown version" if self.version is None else f"version {self.version}"
        return f"{known} ({self.hash[:NAME_DIGITS]})" if self.hash else known

    @property
    def is_here(self) -> bool:
        """Whether any of its files or deltas are."""
        return any(place is not None and place.is_dir() for place in (self.folder, self.part, self.deltas))


@dataclass(frozen=True, slots=True)
class Shelf:
    """The checkpoints of one run."""

    path: Path
    run: bytes
    manifest: RunManifest
    role: str
    """`trained` or `joined`."""
    stored: tuple[Stored, ...]
    """By version; those of which only a manifest is left are among them."""

    @property
    def name(self) -> str:
        return printable(self.manifest.name, 64)

    def find(self, wanted: str | None) -> Stored:
        """By version or the beginning of a hash; None: the newest. Raises LocalError where that is none here,
        or several."""
        if wanted is None:
            if not self.stored:
                raise LocalError(
                    f"The run {self.name} has no checkpoint here yet: "
                    + ("train it first." if self.role == "trained" else "a node fetches one once it joins.")
                )
            return next((one for one in self.stored if NEWEST in one.flags), self.stored[-1])
        found = [
            one
            for one in self.stored
            if wanted.isascii() and wanted.isdigit() and one.version == int(wanted[:20])
        ]
        if not found and len(wanted) >= LEAST_DIGITS and set(wanted) <= set(hexdigits):
            found = [one for one in self.stored if one.hash.startswith(wanted.lower())]
        if len(found) == 1:
            return found[0]
        if found:
            raise LocalError(f"Several checkpoints begin with {wanted}: give more digits of the hash.")
        versions = [one.version for one in self.stored if one.is_here and one.version is not None]
        has = f"here are {_ranges(versions)}" if versions else "there is none"
        raise LocalError(
            f"The run {self.name} has no checkpoint {printable(wanted, 80)!r} on this disk: {has}. Give a "
            f"version or at least {LEAST_DIGITS} digits of a hash, as `nous-node checkpoints list` shows "
            "them."
        )


def shelves(home: Path) -> Iterator[Shelf | NousError]:
    """Every run of a home, those that it trains first; for one that cannot be read, why. Raises LocalError
    where the home is no folder."""
    if home.exists() and not home.is_dir():
        raise LocalError(f"{home} is no folder, and so no home of a node. Name another one with --home.")
    for pattern, opened in (("runs/*/run.envelope", _trained), ("joined/*/run.envelope", _joined)):
        for file in sorted(home.glob(pattern)):
            try:
                yield opened(file.parent)
            except NousError as error:
                yield error


def chosen(home: Path, named: str | None, hint: str = "") -> Shelf:
    """The run of that name or id, else the only one. `hint`: what a proposed command ends with.

    Raises LocalError where that is none or several, and what hinders reading it.
    """
    found = list(shelves(home))
    runs = [one for one in found if isinstance(one, Shelf)]
    fits = [one for one in runs if named is None or _is_called(one, named)]
    if fits and all(one.run == fits[0].run for one in fits):
        return fits[0]
    for one in found:
        if isinstance(one, NousError) and not fits:
            raise one
    if not runs:
        raise LocalError(
            f"There are no runs in {home}. Make one with `nous-node init NAME{hint}`, join one with "
            f"`nous-node join INVITE{hint}`, or name another home with --home."
        )
    known = ", ".join(f"{one.name} ({one.run.hex()[:NAME_DIGITS]})" for one in runs)
    wanted = "There are several runs" if fits else f"No run here is called {printable(named or '', 64)}"
    raise LocalError(f"{wanted}; name one with --run: {known}.")


def _is_called(shelf: Shelf, named: str) -> bool:
    by_id = len(named) >= LEAST_RUN_DIGITS and shelf.run.hex().startswith(named.lower())
    return by_id or named in (shelf.manifest.name, shelf.path.name)


# --- a trainer's run -----------------------------------------------------------------------------


def _trained(path: Path) -> Shelf:
    run = RunFolder.open(path)
    rows: list[StoredCheckpoint] = []
    if run.journal.is_file():
        with Journal.read(run.journal) as journal:
            rows = journal.checkpoints()
    stored = [_published(run, row) for row in rows] or _base(run)
    newest = next((one for one in reversed(stored) if one.is_here), None)
    good = _good(run, stored)
    return Shelf(
        path, run.run, run.manifest, "trained", tuple(_flagged(stored, newest, {GOOD: good} if good else {}))
    )


def _published(run: RunFolder, row: StoredCheckpoint) -> Stored:
    """Raises DamagedError for a row that the trainer cannot have written."""
    folder = (run.path / row.folder).resolve()
    if not folder.is_relative_to(run.path.resolve()):
        raise DamagedError(
            f"{run.journal} names a checkpoint outside of the run's folder: restore it from a backup."
        )
    content, manifest = b"", None
    if row.envelope:
        try:
            content = unseal(row.envelope, MAX_MANIFEST).content(MAX_MANIFEST)
            manifest = read_manifest(content, row.hash)
        except RemoteError:
            manifest = None  # `verify` says so
    return Stored(
        version=row.version,
        hash=row.hash.hex(),
        folder=folder,
        deltas=run.path / "deltas" / f"{row.version:06d}",
        manifest=manifest,
        content=content,
        envelope=row.envelope,
        since=row.published_ms / 1000,
        eval=row.eval,
    )


def _base(run: RunFolder) -> list[Stored]:
    """Version 0 of a run that was never trained: on the disk, and published nowhere."""
    folder = run.checkpoint(0)
    return [Stored(0, "", folder)] if folder.is_dir() else []


def _good(run: RunFolder, stored: Sequence[Stored]) -> Stored | None:
    """What the trainer may go back to: beside the newest the only version whose optimizer state is kept."""
    states = {folder.name for folder in run.path.glob("optimizer/[0-9]*")}
    kept = [one for one in stored if one.folder.name in states and one.folder != stored[-1].folder]
    return kept[-1] if kept else None


def is_base(shelf: Shelf, stored: Stored) -> bool:
    """Whether a folder without a manifest holds what the run began with: its run manifest names that."""
    from .create import folder_entries

    if stored.version != 0 or not stored.folder.is_dir():
        return False
    with disk_errors(stored.folder):
        return files_hash(folder_entries(stored.folder)) == shelf.manifest.base


# --- a joined run --------------------------------------------------------------------------------


def _joined(path: Path) -> Shelf:
    file = path / "run.envelope"
    with disk_errors(file), file.open("rb") as stream:
        data = stream.read(MAX_MANIFEST + 1)
    try:
        envelope = unseal(data, MAX_MANIFEST)
        run, manifest = envelope.head.run, open_manifest(envelope, envelope.head.run)
    except RemoteError as error:
        raise DamagedError(
            f"{file} is damaged ({error}) Delete it and join the run again: it is fetched anew."
        ) from error
    head = _read(path / "head.envelope")
    stored = [_fetched(path / "checkpoints", name, head) for name in _names(path / "checkpoints")]
    stored.sort(key=lambda one: (-1 if one.version is None else one.version, one.hash))
    complete = [one for one in stored if one.version is not None and one.folder.is_dir()]
    last = _last_used(path / "outbox.sqlite")
    used = [one for one in stored if last and last.startswith(one.hash)]
    flags = {IN_USE: used[-1]} if used else {}
    newest = complete[-1] if complete else None
    return Shelf(path, run, manifest, "joined", tuple(_flagged(stored, newest, flags)))


def _names(checkpoints: Path) -> list[str]:
    """The checkpoints that any file or folder is named for."""
    if not checkpoints.is_dir():
        return []
    with disk_errors(checkpoints):
        names = {place.name.split(".")[0] for place in checkpoints.iterdir()}
    return sorted(name for name in names if len(name) == NAME_DIGITS and set(name) <= set(hexdigits.lower()))


def _read(file: Path) -> bytes:
    """Empty where it cannot be read."""
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_MANIFEST + 1)
    except OSError:
        return b""


def _is_signed_in(envelope: bytes, content: bytes) -> bool:
    try:
        return unseal(envelope, MAX_MANIFEST).content(MAX_MANIFEST) == content
    except RemoteError:
        return False


def _fetched(checkpoints: Path, name: str, head: bytes) -> Stored:
    place, part = checkpoints / name, checkpoints / f"{name}{UNDER_WAY}"
    deltas = checkpoints / f"{name}.deltas"
    stored = Stored(
        version=None,
        hash=name,
        folder=place,
        part=part if part.is_dir() else None,
        deltas=deltas,
        since=_since(place, part, deltas),
    )
    data = _read(checkpoints / f"{name}.manifest")
    digest = checkpoint_hash(data)
    try:
        if digest.hex()[:NAME_DIGITS] != name:
            return stored
        manifest = read_manifest(data, digest)
    except RemoteError:
        return stored  # `verify` says so
    return replace(
        stored,
        version=manifest.version,
        hash=digest.hex(),
        manifest=manifest,
        content=data,
        envelope=head if _is_signed_in(head, data) else b"",
        eval=manifest.eval,
    )


def _since(*places: Path) -> float | None:
    for place in places:
        try:
            return place.stat().st_mtime
        except OSError:
            continue
    return None


def _last_used(outbox: Path) -> str:
    """Hash of the checkpoint that the last group was made with; empty before the first."""
    if not outbox.is_file():
        return ""
    with Outbox.read(outbox) as opened:
        history = opened.history(1)
    return history[0].checkpoint.hex() if history else ""


# --- both ----------------------------------------------------------------------------------------


def signed(shelf: Shelf, stored: Stored) -> str:
    """Who signed it, in hexadecimal; empty where the envelope is not at hand. Raises RemoteError where what
    is there is not what a trainer of the run signed."""
    if not stored.envelope:
        return ""
    envelope = unseal(stored.envelope, MAX_MANIFEST)
    open_checkpoint(envelope, shelf.run, shelf.manifest)
    read_manifest(envelope.content(MAX_MANIFEST), bytes.fromhex(stored.hash))
    return envelope.head.sender.hex()


def _flagged(stored: Sequence[Stored], newest: Stored | None, known: dict[str, Stored]) -> Iterator[Stored]:
    chain = newest.manifest.chain if newest is not None and newest.manifest is not None else []
    for one in stored:
        flags = [NEWEST] if one is newest else []
        flags += [flag for flag, whose in known.items() if one is whose]
        flags += [CHAIN] if chain and one.hash == chain[0].hex() else []
        yield replace(one, flags=tuple(flags))


def _ranges(versions: Sequence[int]) -> str:
    """`version 0`, `versions 0, 4 to 7`."""
    spans: list[list[int]] = []
    for version in sorted(set(versions)):
        if spans and version == spans[-1][1] + 1:
            spans[-1][1] = version
        else:
            spans.append([version, version])
    told = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)
    return f"{'version' if len(set(versions)) == 1 else 'versions'} {told}"
