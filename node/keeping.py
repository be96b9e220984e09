"""Which of the checkpoints that a volunteer or relay holds stay on its disk. Pure: sizes in, things out.

What stays, in this order, while it fits the room allowed:

    1  files of the newest and of what the worker uses or is about to, and of what a download needs: always
    2  deltas of the newest and of its chain, from the newest on: for those who fell behind
    3  files and deltas of the checkpoint before the newest: others still fetch it
    4  files of the full one at the head of the chain: for those who join
    5  files of others, the newest first, while fewer than `keep` have theirs here

Spec: `specs/09-checkpoints.md` [CKP-11].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

FILES, DELTAS = "files", "deltas"


@dataclass(frozen=True, slots=True)
class Thing:
    """The files, or the deltas, of a checkpoint."""

    checkpoint: bytes
    version: int
    what: str
    """FILES or DELTAS."""
    parts: Mapping[object, int]
    """Bytes of each file by what it is on the disk: one that two checkpoints share is there once."""


@dataclass(frozen=True, slots=True)
class Use:
    """What the checkpoints are there for, by their hashes."""

    newest: bytes | None = None
    before: bytes | None = None
    chain: Sequence[bytes] = ()
    """Of the newest: from a full one to its parent."""
    always: Collection[bytes] = ()
    """Whose files stay whatever the room: what the worker uses, what a download needs."""


def kept(things: Sequence[Thing], use: Use, keep: int, room: int) -> list[Thing]:
    """What stays of `things`. `keep`: checkpoints with files, `room`: bytes."""
    here = {(thing.checkpoint, thing.what): thing for thing in things}
    always = {use.newest, *use.always}
    chosen = [thing for thing in things if thing.what == FILES and thing.checkpoint in always]
    for place, needed in _by_rank(things, use):
        thing = here.get(place)
        if thing is None or thing in chosen or not (needed or _count(chosen) < keep):
            continue
        if total([*chosen, thing]) <= room:
            chosen.append(thing)
    return chosen


def total(things: Sequence[Thing]) -> int:
    """Bytes on the disk."""
    return sum({part: size for thing in things for part, size in thing.parts.items()}.values())


def _by_rank(things: Sequence[Thing], use: Use) -> Iterator[tuple[tuple[bytes, str], bool]]:
    """Each with whether it is needed whatever `keep`."""
    if use.newest is not None:
        for checkpoint in (use.newest, *reversed(use.chain)):
            yield (checkpoint, DELTAS), True
    if use.before is not None:
        yield (use.before, FILES), True
        yield (use.before, DELTAS), True
    if use.chain:
        yield (use.chain[0], FILES), True
    for thing in sorted(things, key=lambda one: -one.version):
        if thing.what == FILES:
            yield (thing.checkpoint, FILES), False


def _count(things: Sequence[Thing]) -> int:
    return sum(thing.what == FILES for thing in things)
