"""What verification costs beside generation, and the seeded check beside the prefill that it rides on.

    python tests/bench/bench_verification.py            the embedded default, float32
    python tests/bench/bench_verification.py --smollm2  also SmolLM2-135M-Instruct, generated in both dtypes

Groups of 8, 16 rows a generation batch; CPU seconds of this process, so that other work on the machine weighs
little; each ratio is the median of `--tries`, all taken in one run. `cheaper`: generation over verification
of the same tokens, verified in float32 (as runs do) and in bfloat16; target 2.5. `seeded_share`: what the
distances cost beyond plain log-probs, as a share of the prefill with plain log-probs; target at most 0.15.
`seeded_whole`: log-probs and distances together, as a share of the forward pass. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from errors_jobs import MODELS, Model

from nous_node.trainer import prefill as verification
from nous_node.trainer.generate import Request, generate, uniforms
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recorded, prefill
from nous_node.trainer.sampling import distances

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
GROUP, ROWS = 8, 16


def work(model: Model, policy: Policy, groups: int) -> list[Request]:
    """Requests of whole groups, as a run has them."""
    prompts = model.prompts("verification", groups, policy)
    return [
        Request(prompts[i // GROUP], i.to_bytes(32, "little"), 0, model.max_tokens)
        for i in range(groups * GROUP)
    ]


def generated(policy: Policy, requests: list[Request]) -> list[Recorded]:
    """The answers, as a verifier takes them."""
    recorded = []
    for start in range(0, len(requests), ROWS):
        part = requests[start : start + ROWS]
        for ask, done in zip(part, generate(policy, part, 1.0, [policy.tokenizer.eos_id]), strict=True):
            tokens = np.array([*ask.prompt, *done.tokens], np.int64)
            trained = np.arange(len(tokens)) >= len(ask.prompt)
            recorded.append(Recorded(tokens, trained, uniforms(ask.key, 0, len(done.tokens))))
    return recorded


def cpu(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def shares(policy: Policy, recorded: list[Recorded]) -> tuple[float, float]:
    """`seeded_share` and `seeded_whole` of one prefill."""
    spent = {"seeded": 0.0, "plain": 0.0}

    def timed(
        logits_NV: torch.Tensor, targets_N: torch.Tensor, u_N: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = time.process_time()
        logits_NV.float().log_softmax(-1).gather(1, targets_N[:, None])
        middle = time.process_time()
        both = distances(logits_NV, targets_N, u_N, temperature)
        spent["plain"] += middle - start
        spent["seeded"] += time.process_time() - middle
        return both

    verification.distances = timed
    try:
        whole = cpu(lambda: prefill(policy, recorded, 1.0))
    finally:
        verification.distances = distances
    forward = whole - spent["seeded"] - spent["plain"]
    return (spent["seeded"] - spent["plain"]) / (forward + spent["plain"]), spent["seeded"] / forward


def measure(model: Model, dtype: str, groups: int, tries: int) -> dict[str, object]:
    """Of one model that generates in `dtype`."""
    policy = Policy.load(model.folder, dtype, threads=THREADS)
    verifiers = {"float32": policy if dtype == "float32" else Policy.load(model.folder, "float32")}
    if dtype != "float32":
        verifiers[dtype] = policy
    requests = work(model, policy, groups)
    recorded = generated(policy, requests)  # also the warm-up
    for verifier in verifiers.values():
        prefill(verifier, recorded[:ROWS], 1.0)
    generation = [cpu(lambda: generated(policy, requests)) for _ in range(tries)]
    tokens = sum(len(one.uniforms) for one in recorded)
    told: dict[str, object] = {
        "tokens": tokens,
        "generation_tokens_per_cpu_second": round(tokens / statistics.median(generation)),
    }
    for name, verifier in verifiers.items():
        spent = [cpu(lambda v=verifier: prefill(v, recorded, 1.0)) for _ in range(tries)]
        both = [shares(verifier, recorded) for _ in range(tries)]
        told[f"verified in {name}"] = {
            "tokens_per_cpu_second": round(tokens / statistics.median(spent)),
            "cheaper": round(statistics.median(generation) / statistics.median(spent), 2),
            "seeded_share": round(statistics.median(share for share, _ in both), 3),
            "seeded_whole": round(statistics.median(whole for _, whole in both), 3),
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args()
    result: dict[str, object] = {"bench": "verification", "threads": THREADS, "rows": ROWS}
    result["embedded float32"] = measure(MODELS["embedded"], "float32", 128, 3 * options.tries)
    if options.smollm2:
        for dtype in ("bfloat16", "float32"):
            result[f"smollm2 {dtype}"] = measure(MODELS["smollm2"], dtype, 2, options.tries)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
