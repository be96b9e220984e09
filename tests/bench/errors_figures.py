"""What was collected, as the cases of the table: differences and distances, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from errors_attacks import one_edit
from errors_store import GROUP, Check, Rollouts, chunk_path, load_check, load_rollouts
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """Groups as a verifier sees them. Per token: `reported` and `recomputed` log-probs, `distances`; per
    trajectory `lengths` and `stopped`. GROUP trajectories in a row are a group."""

    label: str
    reported: Floats
    recomputed: Floats
    distances: Floats
    lengths: NDArray[np.int64]
    stopped: NDArray[np.bool_]

    @property
    def differences(self) -> Floats:
        """Reported minus recomputed log-prob, a token each."""
        return self.reported - self.recomputed

    @property
    def groups(self) -> int:
        return len(self.lengths) // GROUP

    def sums(self, per_token: Floats) -> Floats:
        """The sum over each trajectory."""
        return np.add.reduceat(per_token, np.cumsum([0, *self.lengths[:-1]]))

    def last_probabilities(self) -> Floats:
        """The recomputed probability of each end-of-sequence token."""
        return np.exp(self.recomputed[np.cumsum(self.lengths) - 1][self.stopped])


def chunks_of(root: Path, model: str, name: str, verifier: str) -> list[int]:
    """The chunks of a set that this verifier has done."""
    folder = root / model / name
    return sorted(int(file.name[:3]) for file in folder.glob(f"*.{verifier}.npz") if file.name[3] == ".")


def case(
    root: Path,
    model: str,
    name: str,
    verifier: str = "base",
    *,
    strange: bool = False,
    remade: str = "",
    chunks: list[int] | None = None,
) -> Case | None:
    """The groups of a set as `verifier` sees them: with the distances to a `strange` key (best-of-N), or with
    log-probs `remade` by another verifier. None where nothing has been collected yet."""
    have = chunks_of(root, model, name, verifier)
    parts = []
    for chunk in have if chunks is None else [c for c in chunks if c in have]:
        rollouts = load_rollouts(chunk_path(root, model, name, chunk))
        check = load_check(chunk_path(root, model, name, chunk, verifier))
        reported = rollouts.reported
        if remade:
            path = chunk_path(root, model, name, chunk, remade)
            if not path.exists():
                continue
            reported = load_check(path).logprobs
        distances = check.strange if strange else check.distances
        parts.append(_part(rollouts, reported, check, distances))
    return _joined(name, parts)


def single_edits(root: Path, model: str) -> Case | None:
    """Honest groups in which one trajectory has one token edited, with its log-probs re-made."""
    parts = []
    for chunk in chunks_of(root, model, "edited", "base"):
        honest, edit = (load_rollouts(chunk_path(root, model, n, chunk)) for n in ("evaluation", "edited"))
        before, after = (
            load_check(chunk_path(root, model, n, chunk, "base")) for n in ("evaluation", "edited")
        )
        taken = np.repeat(one_edit(honest, edit, chunk), honest.lengths)
        mixed = Check(
            np.where(taken, after.logprobs, before.logprobs),
            np.where(taken, after.distances, before.distances),
            before.strange,
            before.hidden,
        )
        parts.append(_part(honest, np.where(taken, edit.reported, honest.reported), mixed, mixed.distances))
    return _joined("one edit", parts)


def _part(rollouts: Rollouts, reported: NDArray[np.float32], check: Check, distances: Floats) -> Case:
    return Case(
        "",
        reported.astype(np.float64),
        check.logprobs.astype(np.float64),
        distances,
        rollouts.lengths,
        rollouts.stopped,
    )


def _joined(label: str, parts: list[Case]) -> Case | None:
    if not parts:
        return None
    names = ("reported", "recomputed", "distances", "lengths", "stopped")
    return Case(label, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def statistics(one: Case, per_group: bool) -> tuple[Floats, Floats, Floats, NDArray[np.int64]]:
    """mad, mean d, largest d and number of tokens, of each group or each trajectory."""
    counts = one.lengths.astype(np.float64)
    absolute, away = one.sums(np.abs(one.differences)), one.sums(one.distances)
    ends = np.cumsum([0, *one.lengths]).tolist()
    largest = np.array([one.distances[a:b].max() for a, b in pairwise(ends)])
    if per_group:
        counts, absolute, away = (a.reshape(-1, GROUP).sum(1) for a in (counts, absolute, away))
        largest = largest.reshape(-1, GROUP).max(1)
    return absolute / counts, away / counts, largest, counts.astype(np.int64)


@dataclass(frozen=True)
class Ratio:
    """Evidence, group by group, that reported log-probs are those of the previous checkpoint: B - A/2 of the
    matched filter, and A (twice its mean, up to sign)."""

    evidence: Floats
    information: Floats


def matched(current: Case, previous: Case, variance: float) -> Ratio:
    """The matched filter of the previous checkpoint's log-probs; `variance` is of honest differences."""
    delta = previous.recomputed - current.recomputed
    product = current.sums(current.differences * delta).reshape(-1, GROUP).sum(1) / variance
    square = current.sums(delta * delta).reshape(-1, GROUP).sum(1) / variance
    return Ratio(product - square / 2, square)


def cases(root: Path, model: str) -> Iterator[Case]:
    """Every case of the table that has been collected, honest evaluation first."""
    found = [
        ("honest", case(root, model, "evaluation")),
        ("best-of-N", case(root, model, "evaluation", strange=True)),
        ("edited, each", case(root, model, "edited")),
        ("edited, one", single_edits(root, model)),
        *((name, case(root, model, name)) for name in ("T 0.9", "T 1.1", "top-p 0.9", "greedy")),
        ("int8", case(root, model, "int8")),
        ("int8, log-probs re-made", case(root, model, "int8", remade="node")),
        ("int4", case(root, model, "int4")),
        ("int4, log-probs re-made", case(root, model, "int4", remade="node")),
        ("other prompt", case(root, model, "other prompt")),
        ("stale checkpoint", case(root, model, "evaluation", "next")),
    ]
    for label, one in found:
        if one is not None:
            yield Case(label, one.reported, one.recomputed, one.distances, one.lengths, one.stopped)
