"""Files of a checkpoint out of those of another one: linked where they are the same, else made by deltas.

All of it goes into `HEX.part`, as if it had been downloaded: what is right there need not be fetched, what is
not is replaced chunk by chunk, and only what has every hash gets out of it. So nothing here is believed, and
a process that is killed at any point has lost nothing but time. [CKP-11] [CKP-15]

A file that two checkpoints have in common is one file with two names (a hard link), since renewals would
write whole models otherwise. What damages it damages both; so it is verified again for each checkpoint that
it becomes part of, and mended in place for all.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nous_node.protocol.checkpoints import CheckpointManifest, FileEntry
from nous_node.protocol.errors import Code, RemoteError

from .blobs import verify_folder
from .delta_files import apply_delta
from .fetch_plan import Plan, Target
from .home import UNDER_WAY
from .joined import JoinedFolder

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a file is made of."""

    base: bytes
    """Checkpoint whose file of the same path is the beginning."""
    steps: Sequence[Target] = ()
    """Whose deltas are applied to it, in this order."""


def recipes(
    target: CheckpointManifest, plan: Plan, held: Mapping[bytes, CheckpointManifest]
) -> dict[str, Recipe]:
    """For the files of a target that need not be fetched. `held`: checkpoints with all their files."""
    found: dict[str, Recipe] = {}
    twins = {entry: digest for digest, manifest in held.items() for entry in manifest.files}
    for entry in target.files:
        if entry in twins:
            found[entry.path] = Recipe(twins[entry])
        elif plan.base is not None and entry.path in plan.recipes:
            found[entry.path] = Recipe(plan.base.hash, plan.recipes[entry.path])
    return found


def make_files(folder: JoinedFolder, target: Target, made_of: Mapping[str, Recipe]) -> None:
    """Puts files into the `.part` folder of a target.

    Raises RemoteError where deltas do not make what they should or something here cannot be read, and OSError
    where the disk is full. What was made before that stays.
    """
    part = folder.part(target.hash)
    scratch = folder.made(target.hash)
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        for entry in target.manifest.files:
            if entry.path in made_of and not _stands(part, entry):
                made = _made(folder, scratch, entry.path, made_of[entry.path])
                (part / entry.path).parent.mkdir(parents=True, exist_ok=True)
                made.replace(part / entry.path)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise RemoteError(
            Code.HASH_MISMATCH, f"{error.filename or part} cannot be used ({error.strerror})."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def adopt(folder: JoinedFolder, wanted: bytes, under_way: Collection[bytes]) -> Path | None:
    """Makes what is left of a download that was given up the beginning of another, where that has none:
    renewals have the same chunks, and nothing that is here should come twice. Where it was; None: nowhere.
    Raises OSError.

    What is wrong in it is overwritten in place later, so files that a checkpoint shares leave it.
    """
    part, stay = folder.part(wanted), {folder.part(digest) for digest in under_way}
    left = [place for place in folder.checkpoints.glob(f"*{UNDER_WAY}") if ".deltas" not in place.name]
    left = [place for place in left if place not in stay]
    if part.exists() or not left:
        return None
    last = max(left, key=lambda place: place.stat().st_mtime)
    for path in last.rglob("*"):
        if path.is_file() and path.stat().st_nlink > 1:
            path.unlink()
    last.rename(part)
    return last


def _stands(part: Path, entry: FileEntry) -> bool:
    """Whether an earlier try got as far as this file."""
    if not (part / entry.path).is_file():
        return False
    try:
        verify_folder(part, [entry])
    except RemoteError:
        return False
    return True


def _made(folder: JoinedFolder, scratch: Path, path: str, recipe: Recipe) -> Path:
    """The file in a place of its own."""
    source = folder.checkpoint(recipe.base) / path
    if not recipe.steps:
        return _linked(source, scratch / "link")
    for number, step in enumerate(recipe.steps):
        out = scratch / str(number % 2)  # the one before is what it is made of
        apply_delta(source, folder.deltas(step.hash) / path, out, step.manifest.tensors)
        source = out
    return source


def _linked(source: Path, place: Path) -> Path:
    place.unlink(missing_ok=True)
    try:
        os.link(source, place)
    except OSError as error:
        if error.errno in _FULL or not source.is_file():
            raise
        shutil.copyfile(source, place)  # a file system without hard links
    return place
