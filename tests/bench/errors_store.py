"""Raw numbers of the error-rate bench on disk: rollouts and what verifiers recompute, a token each.

`<root>/<model>/<set>/<chunk>.npz` holds a few groups; `<chunk>.<verifier>.npz` beside it what one verifier
made of them. Files are written whole (renamed into place), so a collector that was stopped goes on where it
was, and thresholds or statistics can be changed without generating again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GROUP = 8
"""Samples of one task."""


@dataclass(frozen=True)
class Rollouts:
    """Whole groups of GROUP trajectories, flat: `prompts` int32 with `prompt_lengths` [groups], `tokens`
    int32 and `reported` float32 with `lengths` [trajectories], `keys` uint8 [trajectories, 32], `stopped`
    bool [trajectories], and `rows` int32 [trajectories]: the batch that a trajectory was generated in."""

    prompts: NDArray[np.int32]
    prompt_lengths: NDArray[np.int64]
    tokens: NDArray[np.int32]
    reported: NDArray[np.float32]
    lengths: NDArray[np.int64]
    keys: NDArray[np.uint8]
    stopped: NDArray[np.bool_]
    rows: NDArray[np.int32]

    def prompt_list(self) -> list[NDArray[np.int32]]:
        """A prompt a group."""
        return np.split(self.prompts, np.cumsum(self.prompt_lengths)[:-1])

    def token_list(self) -> list[NDArray[np.int32]]:
        """Sampled tokens, a trajectory each."""
        return self.split(self.tokens)

    def split(self, flat: NDArray) -> list[NDArray]:  # type: ignore[type-arg]
        """The rows of a flat per-token array that belong to each trajectory."""
        ends = np.cumsum([0, *self.lengths]).tolist()
        return [flat[a:b] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Check:
    """What one verifier recomputed, a sampled token each: `logprobs` float32, `distances` float64 to the
    trajectory's own uniforms and `strange` float64 to those of another sampler key; `hidden` uint16 [N, D] is
    the last hidden state that predicts the token, as bfloat16 bits, or [N, 0] where nobody needs it."""

    logprobs: NDArray[np.float32]
    distances: NDArray[np.float64]
    strange: NDArray[np.float64]
    hidden: NDArray[np.uint16]


def joined(checks: Sequence[Check]) -> Check:
    """One after the other."""
    return Check(**{f.name: np.concatenate([getattr(one, f.name) for one in checks]) for f in fields(Check)})


def save(path: Path, record: Rollouts | Check) -> None:
    """Writes the arrays of `record` under their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        np.savez(file, **{field.name: getattr(record, field.name) for field in fields(record)})
    os.replace(new, path)


def load_rollouts(path: Path) -> Rollouts:
    """The rollouts of one chunk."""
    with np.load(path) as arrays:
        return Rollouts(**{field.name: arrays[field.name] for field in fields(Rollouts)})


def load_check(path: Path, hidden: bool = False) -> Check:
    """A verifier's numbers; the hidden states are read only if asked for."""
    with np.load(path) as arrays:
        names = [field.name for field in fields(Check) if hidden or field.name != "hidden"]
        loaded = {name: arrays[name] for name in names}
    if not hidden:
        loaded["hidden"] = np.zeros((0, 0), np.uint16)
    return Check(**loaded)


def chunk_path(root: Path, model: str, name: str, chunk: int, verifier: str = "") -> Path:
    """Where a chunk of a set lies, or what `verifier` made of it."""
    return root / model / name / (f"{chunk:03}.{verifier}.npz" if verifier else f"{chunk:03}.npz")
