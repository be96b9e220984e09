"""How a node that holds some checkpoints comes to another one. Pure: manifests in, plans out.

    patches   the deltas behind a checkpoint of the chain that is held: after falling behind by some versions
    joining   the full checkpoint at the head of the chain, then the deltas behind it
    files     the chunks of its own files: nothing is needed but those

Each plan stands for itself; where one fails the next is tried, and the last is always `files`. A renewal has
the files of a checkpoint that is held, so that `files` costs nothing.
Spec: `specs/09-checkpoints.md` [CKP-15].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from nous_node.protocol.checkpoints import DELTA, CheckpointManifest, FileEntry

JOINING_EXCESS = 1.5
"""Of the bytes of a checkpoint's own files, what a joiner rather takes as a full checkpoint and deltas, which
is as much as a chain has by the rules of publication: the full one is held by most peers, and stays useful
when a newer head comes before all is here."""

NEARLY = 0.75
"""Of a download's chunks: what is this far is finished."""

Known = Mapping[bytes, CheckpointManifest]
"""Manifests by the hash of their checkpoint."""


@dataclass(frozen=True, slots=True)
class Target:
    """The checkpoint that is wanted."""

    hash: bytes
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to a target."""

    base: Target | None
    """Whose files the deltas are applied to; None: no deltas."""
    steps: tuple[Target, ...]
    """Whose deltas are applied, one after the other; the last is the target."""
    recipes: Mapping[str, tuple[Target, ...]]
    """For each file that is made of the base's file of that path: whose deltas make it. Without any it is the
    base's file; files that are not here are fetched by their chunks."""
    bytes: int
    """What has to be fetched."""
    scratch: int
    """What it takes on the disk while it is carried out: the target's files, deltas, what lies between two of
    them, and a base that is not here."""


def needed_manifests(target: Target, held: Collection[bytes]) -> Sequence[bytes]:
    """Of which checkpoints of the chain the manifests are needed to plan, the newest last: from the latest
    that is held on, or all."""
    chain = target.manifest.chain
    for index in reversed(range(len(chain))):
        if chain[index] in held:
            return chain[index:]
    return chain


def plans(
    target: Target,
    held: Known,
    known: Known,
    deltas: Collection[bytes],
    has: Callable[[bytes], bool],
) -> list[Plan]:
    """All ways to the target, the best first.

    `held`: checkpoints with all their files. `known`: manifests of the chain that are in their places.
    `deltas`: checkpoints of which all deltas are here. `has`: whether a chunk lies on this disk.
    """
    files = Plan(None, (), {}, _chunk_bytes(target.manifest.files, has), target.manifest.size)
    found = [(float(files.bytes), files)]
    if target.manifest.kind == DELTA and files.bytes:
        patches = _patches(target, held, known, deltas, has)
        joining = _joining(target, held, known, deltas, has)
        found += [(float(plan.bytes), plan) for plan in patches]
        found += [(plan.bytes / JOINING_EXCESS, plan) for plan in joining if not patches]
    found.sort(key=lambda pair: pair[0])
    ordered = [plan for _, plan in found]
    return ordered[: ordered.index(files) + 1]


def _patches(
    target: Target, held: Known, known: Known, deltas: Collection[bytes], has: Callable[[bytes], bool]
) -> list[Plan]:
    chain = target.manifest.chain
    for index in reversed(range(len(chain))):
        if chain[index] in held:
            base = Target(chain[index], held[chain[index]])
            return _plan(base, _steps(target, index, known), deltas, has, 0, 0)
    return []


def _joining(
    target: Target, held: Known, known: Known, deltas: Collection[bytes], has: Callable[[bytes], bool]
) -> list[Plan]:
    full = target.manifest.chain[0]
    if full in held or full not in known:
        return []
    base = Target(full, known[full])
    fetched = _chunk_bytes(base.manifest.files, has)
    return _plan(base, _steps(target, 0, known), deltas, has, fetched, base.manifest.size)


def _steps(target: Target, index: int, known: Known) -> list[Target] | None:
    """From behind element `index` of the chain to the target; None where a manifest from there on is not
    known."""
    onward = target.manifest.chain[index:]
    if not all(digest in known for digest in onward):
        return None
    return [*(Target(digest, known[digest]) for digest in onward[1:]), target]


def _plan(
    base: Target,
    steps: list[Target] | None,
    deltas: Collection[bytes],
    has: Callable[[bytes], bool],
    beside: int,
    space: int,
) -> list[Plan]:
    """At most one. `beside`: bytes that the base costs, `space`: what it takes on the disk."""
    if steps is None:
        return []
    recipes = _recipes(base, steps)
    manifest = steps[-1].manifest
    rest = [entry for entry in manifest.files if entry.path not in recipes]
    fetched = sum(step.manifest.delta_size for step in steps if step.hash not in deltas)
    cost = beside + fetched + _chunk_bytes(rest, has)
    between = max((_sizes(manifest)[path] for path, made in recipes.items() if len(made) > 1), default=0)
    space += manifest.size + between + sum(step.manifest.delta_size for step in steps)
    return [Plan(base, tuple(steps), recipes, cost, space)]


def _recipes(base: Target, steps: Sequence[Target]) -> dict[str, tuple[Target, ...]]:
    """By path of the last step's files."""
    before = base.manifest
    recipes: dict[str, tuple[Target, ...]] = {entry.path: () for entry in before.files}
    for step in steps:
        patched = {entry.path for entry in step.manifest.deltas}
        earlier = set(before.files)
        same = {entry.path for entry in step.manifest.files if entry in earlier}
        recipes = {
            path: (*made, step) if path in patched else made
            for path, made in recipes.items()
            if path in patched or path in same
        }
        before = step.manifest
    return recipes


def _sizes(manifest: CheckpointManifest) -> dict[str, int]:
    return {entry.path: entry.size for entry in manifest.files}


def _chunk_bytes(files: Sequence[FileEntry], has: Callable[[bytes], bool]) -> int:
    """Bytes of the chunks that are not on this disk."""
    return sum(
        entry.length(number)
        for entry in files
        for number, digest in enumerate(entry.hashes())
        if not has(digest)
    )


def is_left_for(
    current: Target, newer: CheckpointManifest, done: float, staleness: int, *, again: bool
) -> bool:
    """Whether a download is given up for a newer head.

    It is finished where the newer one is made from it, where it is nearly done, while it is no older than
    rollouts may be, and where another one was given up for it (`again`): so at least every second download is
    finished, however fast versions come. `done`: share of its chunks that are here.
    """
    if again or done >= NEARLY or current.hash in newer.chain:
        return False
    return newer.version - current.manifest.version > staleness
