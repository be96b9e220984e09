"""What honest groups of the embedded default measure in verification, and what cheaper weights do.

    python tests/bench/bench_thresholds.py --groups 1000

Generated in one process and recomputed in others with other vector instructions (ATEN_CPU_CAPABILITY), thread
counts and batches. Groups of 8, as the run's manifest has them; figures are the largest of any group, as the
thresholds in node/plan.py are compared with them. `perturbed`: the smallest of any group when the generating
weights were off by a relative 1e-3. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from nous_node.node.plan import DEFAULT_MODEL, EMBEDDED_MAX_TOKENS
from nous_node.trainer.generate import Request, generate, uniforms
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recorded, prefill

GROUP = 8
TASKS_SEED = 20_240
BATCHES = {"make": 64, "check": 37}
"""Groups of one call; different, so that shapes and paddings differ between the two sides."""


def requests(groups: int, tokenizer: object) -> list[Request]:
    draw = np.random.default_rng(TASKS_SEED)
    wanted = []
    for number in range(groups):
        digits = "".join(map(str, draw.integers(0, 10, 4 + number % 5)))
        prompt = tokenizer.encode(f"sort {digits}=")  # type: ignore[attr-defined]
        wanted += [Request(prompt, draw.bytes(32), 0, EMBEDDED_MAX_TOKENS) for _ in range(GROUP)]
    return wanted


def make(path: Path, groups: int, relative: float) -> None:
    """Generates and stores tokens and log-probs; weights are off by `relative` (normally distributed)."""
    policy = Policy.load(DEFAULT_MODEL, "float32")
    wanted = requests(groups, policy.tokenizer)
    noise = torch.Generator().manual_seed(1)
    for weight in policy.tensors().values():
        weight.mul_(1 + relative * torch.randn(weight.shape, generator=noise))
    size = GROUP * BATCHES["make"]
    made = []
    for start in range(0, len(wanted), size):
        made += generate(policy, wanted[start : start + size], 1.0, [policy.tokenizer.eos_id])
    stored = [{"tokens": one.tokens, "logprobs": one.logprobs.tolist()} for one in made]
    path.write_text(json.dumps(stored))


def check(path: Path, groups: int) -> None:
    """Prints [mad, mean d, max d] of each group."""
    policy = Policy.load(DEFAULT_MODEL, "float32")
    wanted, made = requests(groups, policy.tokenizer), json.loads(path.read_text())
    recorded = [
        Recorded(
            np.array([*ask.prompt, *one["tokens"]], np.int64),
            np.array([False] * len(ask.prompt) + [True] * len(one["tokens"])),
            uniforms(ask.key, 0, len(one["tokens"])),
        )
        for ask, one in zip(wanted, made, strict=True)
    ]
    figures = []
    size = GROUP * BATCHES["check"]
    results = []
    for start in range(0, len(recorded), size):
        results += prefill(policy, recorded[start : start + size], 1.0)
    for start in range(0, len(results), GROUP):
        part = slice(start, start + GROUP)
        reported = np.concatenate([np.array(one["logprobs"], np.float32) for one in made[part]])
        recomputed = np.concatenate([one.logprobs for one in results[part]])
        distances = np.concatenate([one.distances for one in results[part]])
        mad = float(np.abs(reported - recomputed).mean())
        figures.append([mad, float(distances.mean()), float(distances.max())])
    print(json.dumps(figures))


def child(capability: str, threads: int, *arguments: str) -> str:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--relative", type=float, default=0.0)
    options = parser.parse_args()
    if options.make:
        return make(options.make, options.groups, options.relative)
    if options.check:
        return check(options.check, options.groups)
    names = ("logprob_mad", "distance_mean", "distance_max")
    told: dict[str, object] = {
        "bench": "thresholds",
        "groups": options.groups,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    with tempfile.TemporaryDirectory() as folder:
        file, groups = Path(folder) / "made.json", ("--groups", str(options.groups))
        for relative, label in ((0.0, "honest"), (1e-3, "perturbed")):
            child("avx512", 1, "--make", str(file), "--relative", str(relative), *groups)
            for capability, threads in (("avx512", 2), ("avx2", 1), ("default", 1)):
                figures = np.array(json.loads(child(capability, threads, "--check", str(file), *groups)))
                worst = figures.max(0) if label == "honest" else figures.min(0)
                told[f"{label} {capability} x{threads}"] = dict(zip(names, worst.tolist(), strict=True))
    print(json.dumps(told))
    return None


if __name__ == "__main__":
    main()
