"""The column of activation proofs: `toploc` 0.1.6 (https://arxiv.org/abs/2501.16007), same rollouts.

    python tests/bench/errors_toploc.py --root DIR    in an environment that has toploc

Prints a JSON line, and leaves it in the root for the table.

Proofs are of the last hidden states that predict the sampled tokens, in bfloat16, 32 tokens a proof, their
128 largest values (the library's defaults). The node builds them, the verifier checks them against its own
hidden states from another batch shape. Thresholds lie half as far again above the honest mean as the extremes
of the calibration set: of a single proof, and of a group's means; a group with one figure beyond is refused.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from errors_figures import chunks_of
from errors_store import GROUP, Rollouts, chunk_path, load_check, load_rollouts
from numpy.typing import NDArray
from toploc import build_proofs_bytes, verify_proofs_bytes

BATCH, TOPK = 32, 128
MARGIN = 1.5
"""On the largest excess over the mean; without it the next set of honest groups exceeds it."""
MODEL = "smollm2"
RESULT = "toploc.json"
"""The file in the root that holds the line."""


@dataclass(frozen=True)
class Source:
    """Where hidden states come from: what `verifier` computed of set `name`."""

    name: str
    verifier: str


@dataclass(frozen=True)
class Row:
    """A case: proofs of one source, checked against another."""

    label: str
    column: str
    prover: Source
    verifier: Source


def same_engine(label: str, name: str) -> Row:
    """A cheat that runs the true model: its own proof is the true model's."""
    return Row(label, "own and re-made", Source(name, "node"), Source(name, "base"))


ROWS = (
    same_engine("honest", "evaluation"),
    same_engine("best-of-N", "evaluation"),
    *(same_engine(name, name) for name in ("T 0.9", "T 1.1", "top-p 0.9", "greedy")),
    Row("edited, each", "own", Source("evaluation", "node"), Source("edited", "base")),
    Row("edited, each", "re-made", Source("edited", "node"), Source("edited", "base")),
    Row("int8", "own", Source("int8", "int8"), Source("int8", "base")),
    Row("int8", "re-made", Source("int8", "node"), Source("int8", "base")),
    Row("int4", "own", Source("int4", "int4"), Source("int4", "base")),
    Row("int4", "re-made", Source("int4", "node"), Source("int4", "base")),
    Row("other prompt", "own", Source("evaluation", "node"), Source("other prompt", "base")),
    Row("other prompt", "re-made", Source("other prompt", "node"), Source("other prompt", "base")),
    Row("stale checkpoint", "own", Source("evaluation", "node"), Source("evaluation", "next")),
)
CALIBRATION = same_engine("calibration", "calibration")


def figures(root: Path, row: Row) -> NDArray[np.float64]:
    """Of each proof: group, exponent mismatches, mean and median mantissa error."""
    prover, verifier = (chunks_of(root, MODEL, s.name, s.verifier) for s in (row.prover, row.verifier))
    found, group = [], 0
    for chunk in sorted(set(prover) & set(verifier)):
        rollouts = load_rollouts(chunk_path(root, MODEL, row.verifier.name, chunk))
        sides = [hidden(root, rollouts, side, chunk) for side in (row.prover, row.verifier)]
        if not all(sides):
            continue
        for trajectory, (proven, own) in enumerate(zip(*sides, strict=True)):
            proofs = build_proofs_bytes(proven, BATCH, TOPK, skip_prefill=True)
            for one in verify_proofs_bytes(own, proofs, BATCH, TOPK, skip_prefill=True):
                found.append(
                    (
                        group + trajectory // GROUP,
                        one.exp_mismatches,
                        min(one.mant_err_mean, 256.0),
                        min(one.mant_err_median, 256.0),
                    )
                )
        group += len(rollouts.lengths) // GROUP
    return np.array(found, np.float64).reshape(-1, 4)


def hidden(root: Path, rollouts: Rollouts, source: Source, chunk: int) -> list[list[torch.Tensor]]:
    """The hidden states of each trajectory, a tensor a token; nothing where they were not kept."""
    check = load_check(chunk_path(root, MODEL, source.name, chunk, source.verifier), hidden=True)
    if not check.hidden.shape[1]:
        return []
    states = torch.from_numpy(check.hidden.view(np.int16)).view(torch.bfloat16)
    return [list(part) for part in torch.split(states, rollouts.lengths.tolist())]


def means(found: NDArray[np.float64]) -> NDArray[np.float64]:
    """The figures' mean over each group's proofs."""
    groups = np.unique(found[:, 0])
    return np.array([found[found[:, 0] == g, 1:].mean(0) for g in groups])


def refused(found: NDArray[np.float64], honest: NDArray[np.float64]) -> list[bool]:
    """Whether each group has a figure beyond the honest extremes."""
    singles, averages = bounds(honest[:, 1:]), bounds(means(honest))
    groups = np.unique(found[:, 0])
    bad = beyond(found[:, 1:], singles)
    single = np.array([bad[found[:, 0] == g].any() for g in groups])
    return list(single | beyond(means(found), averages))


def bounds(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Of each figure."""
    average = values.mean(0)
    mismatches, mean, median = (average + MARGIN * (values.max(0) - average)).tolist()
    return mismatches, mean, median


def beyond(values: NDArray[np.float64], limits: tuple[float, float, float]) -> NDArray[np.bool_]:
    return np.asarray((values > np.array(limits)).any(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    root = parser.parse_args().root
    honest = figures(root, CALIBRATION)
    told: dict[str, object] = {
        "bench": "toploc",
        "calibration_groups": len(np.unique(honest[:, 0])),
        "proof_limits": bounds(honest[:, 1:]),
        "group_limits": bounds(means(honest)),
    }
    rows: dict[str, dict[str, object]] = {}
    for row in ROWS:
        found = figures(root, row)
        if len(found):
            decided = refused(found, honest)
            rows.setdefault(row.label, {})[row.column] = {"refused": sum(decided), "groups": len(decided)}
    told["rows"] = rows
    line = json.dumps(told, default=int)
    (root / RESULT).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
