"""What `nous-node checkpoints list` and `show` print, for people and as JSON.

Names, figures and URLs in a manifest come from a trainer: they are escaped for the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from nous_node.protocol.checkpoints import CheckpointManifest, FileEntry, files_hash, weights_hash
from nous_node.protocol.errors import RemoteError

from .checkpoint_check import has_sizes, held_chunks
from .checkpoint_shelf import NAME_DIGITS, Shelf, Stored, is_base, signed
from .wording import duration, plural, printable, share, size

_TITLES = ("version", "hash", "kind", "size", "delta", "here", "age", "greedy", "")
_RIGHT = frozenset({"version", "size", "delta", "age", "greedy"})
_MANY = 64
"""Figures, mirrors and files that are shown of one checkpoint; `--json` has all."""


class Listed(msgspec.Struct, frozen=True):
    """One line of `list`. With `--json` these are the keys."""

    run: str
    name: str
    role: str
    version: int | None
    hash: str
    kind: str
    """`full` or `delta`; empty where its manifest is not here."""
    size: int
    delta_size: int
    state: str
    """`complete`, `partial`, `damaged`, `delta only`, or `unknown` without a manifest."""
    chunks: int
    """Of its files that are here."""
    of: int
    since: float | None
    """Unix seconds: when it was published, or came here."""
    eval: dict[str, float]
    flags: list[str]


def listed(shelf: Shelf) -> Iterator[Listed]:
    """The checkpoints of which any file is here."""
    for stored in shelf.stored:
        if not stored.is_here:
            continue
        manifest = stored.manifest
        chunks, of = held_chunks(stored)
        yield Listed(
            run=shelf.run.hex(),
            name=shelf.manifest.name,
            role=shelf.role,
            version=stored.version,
            hash=stored.hash,
            kind="" if manifest is None else manifest.kind,
            size=0 if manifest is None else manifest.size,
            delta_size=0 if manifest is None else manifest.delta_size,
            state=_state(shelf, stored),
            chunks=chunks,
            of=of,
            since=stored.since,
            eval=stored.eval,
            flags=list(stored.flags),
        )


def _state(shelf: Shelf, stored: Stored) -> str:
    """By names and sizes: `verify` reads the bytes."""
    if stored.folder.is_dir():
        if stored.manifest is None:
            return "complete" if is_base(shelf, stored) else "unknown"
        return "complete" if has_sizes(stored.folder, stored.manifest.files) else "damaged"
    return "partial" if stored.part is not None else "delta only"


def list_lines(shelf: Shelf, rows: Sequence[Listed], now: float) -> list[str]:
    """A run for a person. `now`: Unix seconds."""
    head = f"{shelf.name} ({shelf.run.hex()[:NAME_DIGITS]}), {shelf.role}, {printable(str(shelf.path), 300)}"
    if not rows:
        return [head, "  no checkpoint here yet"]
    cells = [_cells(row, now) for row in rows]
    widths = [max(len(title), *(len(row[i]) for row in cells)) for i, title in enumerate(_TITLES)]

    def line(row: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if title in _RIGHT else cell.ljust(width)
            for title, cell, width in zip(_TITLES, row, widths, strict=True)
        ]
        return "  " + "  ".join(aligned).rstrip()

    return [head, line(_TITLES), *map(line, cells)]


def _cells(row: Listed, now: float) -> tuple[str, ...]:
    greedy = row.eval.get("greedy")
    return (
        "?" if row.version is None else str(row.version),
        row.hash[:NAME_DIGITS] or "-",
        row.kind or "-",
        size(row.size) if row.kind else "-",
        size(row.delta_size) if row.delta_size else "-",
        f"{row.chunks:,} of {row.of:,} chunks" if row.state == "partial" and row.of else row.state,
        "-" if row.since is None else duration(max(0.0, now - row.since)),
        share(greedy) if greedy is None or math.isfinite(greedy) else "-",
        ", ".join(row.flags),
    )


def show_lines(shelf: Shelf, stored: Stored, now: float) -> list[str]:
    """A manifest for a person. `now`: Unix seconds."""
    told = [
        f"run         {shelf.name} ({shelf.run.hex()}), {shelf.role}",
        f"version     {'?' if stored.version is None else stored.version}",
        f"hash        {stored.hash or 'not published yet'}",
        f"here        {_state(shelf, stored) if stored.is_here else 'its manifest only'}, "
        f"{printable(str(stored.folder), 300)}",
    ]
    if stored.since is not None:
        word = "published" if shelf.role == "trained" else "came"
        told.append(f"{word:<12}{duration(max(0.0, now - stored.since))} ago")
    if stored.flags:
        told.append(f"it is       {', '.join(stored.flags)}")
    manifest = stored.manifest
    if manifest is None:
        return [*told, "Its manifest is not here: `nous-node checkpoints verify` says what that means."]
    told += [
        f"signed by   {_signer(shelf, stored)}",
        f"kind        {printable(manifest.kind, 64)}",
        f"parent      {'none' if manifest.parent is None else manifest.parent.hex()}",
        f"beacon      {manifest.beacon.hex()}",
        f"weights     {weights_hash(manifest.tensors).hex()}, {plural(len(manifest.tensors), 'tensor')}",
    ]
    told += _files("files", manifest.files, manifest.size) + _files(
        "deltas", manifest.deltas, manifest.delta_size
    )
    if manifest.chain:
        told.append(
            f"chain       {plural(len(manifest.chain), 'checkpoint')}, from the full one to its parent:"
        )
        told += [f"  {digest.hex()}" for digest in manifest.chain]
    told += _texts("mirrors", [printable(mirror, 300) for mirror in manifest.mirrors])
    told += _figures("levels", manifest.levels)
    told += _figures("eval", manifest.eval)
    return told + _figures("stats", manifest.stats)


def show_json(shelf: Shelf, stored: Stored) -> str:
    """All of a manifest, hashes in hexadecimal."""
    facts: dict[str, object] = {
        "run": shelf.run.hex(),
        "name": shelf.manifest.name,
        "role": shelf.role,
        "version": stored.version,
        "hash": stored.hash,
        "folder": str(stored.folder),
        "state": _state(shelf, stored) if stored.is_here else "gone",
        "since": stored.since,
        "flags": list(stored.flags),
    }
    if stored.manifest is not None:
        facts |= {"signed_by": _signer(shelf, stored)} | _manifest(stored.manifest)
    return msgspec.json.encode(facts).decode()


def _manifest(manifest: CheckpointManifest) -> dict[str, object]:
    return {
        "kind": manifest.kind,
        "parent": None if manifest.parent is None else manifest.parent.hex(),
        "beacon": manifest.beacon.hex(),
        "files_hash": files_hash(manifest.files).hex(),
        "weights": weights_hash(manifest.tensors).hex(),
        "size": manifest.size,
        "delta_size": manifest.delta_size,
        "files": [_entry(entry) for entry in manifest.files],
        "deltas": [_entry(entry) for entry in manifest.deltas],
        "tensors": {name: digest.hex() for name, digest in manifest.tensors.items()},
        "chain": [digest.hex() for digest in manifest.chain],
        "mirrors": manifest.mirrors,
        "levels": manifest.levels,
        "eval": manifest.eval,
        "stats": manifest.stats,
    }


def _entry(entry: FileEntry) -> dict[str, object]:
    chunks = [digest.hex() for digest in entry.hashes()]
    return {"path": entry.path, "size": entry.size, "chunk": entry.chunk, "chunks": chunks}


def _signer(shelf: Shelf, stored: Stored) -> str:
    try:
        return signed(shelf, stored) or "not at hand: the hash is right, the signature is not stored"
    except RemoteError as error:
        return f"NOT A TRAINER: {printable(str(error))}"


def _files(title: str, entries: Sequence[FileEntry], total: int) -> list[str]:
    if not entries:
        return []
    lines = [f"{title:<12}{plural(len(entries), 'file')}, {total:,} bytes ({size(total)})"]
    width = max(len(printable(entry.path)) for entry in entries[:_MANY])
    lines += [
        f"  {printable(entry.path):<{width}}  {entry.size:>15,}  "
        f"{plural(len(entry.hashes()), 'chunk')} of {size(entry.chunk)}"
        for entry in entries[:_MANY]
    ]
    return lines + _more(len(entries))


def _figures(title: str, figures: Mapping[str, float]) -> list[str]:
    return _texts(title, [f"{printable(name, 80)} {value:.6g}" for name, value in figures.items()])


def _texts(title: str, texts: Sequence[str]) -> list[str]:
    if not texts:
        return []
    return [title, *(f"  {text}" for text in texts[:_MANY]), *_more(len(texts))]


def _more(number: int) -> list[str]:
    return [f"  and {number - _MANY:,} more (--json)"] if number > _MANY else []
