"""Tokens a second of our generation beside transformers' `generate(do_sample=True)`, in one run.

    python tests/bench/bench_generation.py            the embedded default, float32, batches of 16 and 256
    python tests/bench/bench_generation.py --smollm2  also SmolLM2-135M-Instruct in bfloat16, batch of 16

Ours includes the seeded draw and the log-probs; `generate` draws with torch and returns tokens alone. Both
make the same number of tokens from equally long prompts, with no early stop. Each is the best of `--tries`,
taken in turn. Prints one JSON line; targets: 0.9 at batch 256 and 1.5 at 16; 1.2 on SmolLM2.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch

from nous_node.trainer.generate import Request, generate
from nous_node.trainer.policy import DEFAULT_FOLDER, Policy

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))


def measure(policy: Policy, rows: int, tokens: int, prompt: int, tries: int) -> dict[str, float]:
    """Tokens a second of both, and their ratio."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 250, (rows, prompt), generator=generator)
    requests = [Request(ids[n].tolist(), n.to_bytes(32, "little"), 0, tokens) for n in range(rows)]
    mask = torch.ones_like(ids)

    def ours() -> None:
        generate(policy, requests, 1.0, ())

    def theirs() -> None:
        with torch.inference_mode():
            policy.model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=policy.tokenizer.pad_id,
            )

    best = {"ours": 0.0, "transformers": 0.0}
    for function in (ours, theirs):
        function()
    for _ in range(tries):
        for name, function in (("ours", ours), ("transformers", theirs)):
            best[name] = max(best[name], rows * tokens / timed(function))
    return {k: round(v) for k, v in best.items()} | {"ratio": round(best["ours"] / best["transformers"], 2)}


def timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--tries", type=int, default=5)
    arguments = parser.parse_args()
    default = Policy.load(DEFAULT_FOLDER, threads=THREADS)
    result: dict[str, object] = {"bench": "generation", "threads": THREADS}
    for rows in (16, 256):
        result[f"default_fp32_batch_{rows}"] = measure(default, rows, 32, 10, arguments.tries)
    if arguments.smollm2:
        from smollm2 import smollm2_folder

        policy = Policy.load(smollm2_folder(), "bfloat16", threads=THREADS)
        result["smollm2_bf16_batch_16"] = measure(policy, 16, 64, 40, max(2, arguments.tries // 2))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
