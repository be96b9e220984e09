"""What a long prompt costs that several answers share, beside one row for each answer: forward and backward.

    python tests/bench/bench_tree.py            prompts of 512, 2,048 and 8,192 tokens, 8 answers of 128
    python tests/bench/bench_tree.py --prompts 512,2048 --layers 30

Models: the embedded default, and one of SmolLM2-135M's shape with random weights and `--layers` of its 30: as
what comes behind the layers is not shared, the ratio is smaller with few. `answers` are eight trajectories of
one prompt, `tree` is one trajectory with eight branches; both are laid out as `trainer/batch.py` sees fit,
`separate` has a row for each answer. Times are CPU seconds of one thread, the least of `--tries`, taken in
turn. `logprobs` is the largest difference of a log-prob from that of the separate rows, `gradient` the length
of the difference of both gradients as a share of the gradient's. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nous_node.trainer.batch import MicroBatch, micro_batches
from nous_node.trainer.loss import chosen_logprobs
from nous_node.trainer.policy import DEFAULT_FOLDER, Policy
from nous_node.trainer.prefill import TOKEN_BUDGET, Recorded
from nous_node.trainer.tree import Tree

ANSWERS, TOKENS = 8, 128


def smollm2_shaped(layers: int) -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
        initializer_range=0.04,
        attn_implementation="sdpa",
    )
    tokenizer = Policy.load(DEFAULT_FOLDER).tokenizer
    return Policy(LlamaForCausalLM(config).eval(), tokenizer, Path(), 16_384)


def recorded(prompt: int, vocabulary: int) -> tuple[list[Recorded], list[Recorded]]:
    """The same trained tokens in the same order: as answers, and as one tree."""
    rng = np.random.default_rng(prompt)
    head = rng.integers(0, vocabulary, prompt)
    said = [rng.integers(0, vocabulary, TOKENS) for _ in range(ANSWERS)]
    drawn = np.zeros(TOKENS)
    marks = np.arange(prompt + TOKENS) >= prompt
    answers = [Recorded(np.concatenate([head, one]), marks, drawn) for one in said]
    tree = Tree.of([prompt, *[TOKENS] * ANSWERS], [-1, *[0] * ANSWERS])
    tokens = np.concatenate([head, *said])
    branched = Recorded(tokens, np.arange(len(tokens)) >= prompt, np.zeros(ANSWERS * TOKENS), tree)
    return answers, [branched]


def computed(policy: Policy, batches: Sequence[MicroBatch]) -> tuple[float, torch.Tensor, torch.Tensor]:
    """CPU seconds of one pass forward and backward, the log-probs, and the gradient as one vector."""
    policy.model.zero_grad(set_to_none=True)
    logprobs_N = torch.empty(ANSWERS * TOKENS)
    signs_N = torch.where(torch.arange(len(logprobs_N)) // TOKENS % 2 == 0, 1.0, -1.0)
    began = time.process_time()
    for batch in batches:
        current, _ = chosen_logprobs(policy.logits(batch), batch.targets_N, 1.0)
        (current * signs_N[batch.places_N]).sum().backward()
        logprobs_N[batch.places_N] = current.detach()
    seconds = time.process_time() - began
    gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
    return seconds, logprobs_N, gradient


def measure(policy: Policy, prompt: int, tries: int) -> dict[str, object]:
    vocabulary = int(policy.model.config.vocab_size)
    answers, tree = recorded(prompt, vocabulary)

    def laid_out(records: list[Recorded], share: bool) -> list[MicroBatch]:
        return micro_batches(records, TOKEN_BUDGET, vocabulary, share, "cpu", policy.pair_cost)

    forms = {
        "separate": laid_out(answers, share=False),
        "answers": laid_out(answers, share=True),
        "tree": laid_out(tree, share=True),
    }
    seconds = dict.fromkeys(forms, float("inf"))
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for _ in range(tries):
        for name, batches in forms.items():
            took, *results = computed(policy, batches)
            seconds[name] = min(seconds[name], took)
            found[name] = (results[0], results[1])
    logprobs, gradient = found["separate"]
    return {
        name: {
            "rows": sum(len(batch.tokens_BL) for batch in forms[name]),
            "cheaper": round(seconds["separate"] / seconds[name], 2),
            "logprobs": float((found[name][0] - logprobs).abs().max()),
            "gradient": float((found[name][1] - gradient).norm() / gradient.norm()),
        }
        for name in ("answers", "tree")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default="512,2048,8192")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tries", type=int, default=2)
    arguments = parser.parse_args()
    prompts = [int(one) for one in arguments.prompts.split(",")]
    policies = {
        "default": Policy.load(DEFAULT_FOLDER, threads=1),
        f"smollm2_shape_{arguments.layers}_layers": smollm2_shaped(arguments.layers),
    }
    result: dict[str, object] = {"bench": "tree", "answers": ANSWERS, "tokens": TOKENS}
    for name, policy in policies.items():
        for prompt in prompts:
            result[f"{name}_{prompt}"] = measure(policy, prompt, arguments.tries)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
