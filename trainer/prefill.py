"""The verifier's forward pass: log-probs and seeded-sampling distances of recorded tokens.

One pass over whole sequences costs less than generating them, with the prompts of a group shared (`batch.py`)
less still: `tests/bench/bench_verification.py` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from .batch import micro_batches
from .errors import RequestError
from .policy import Policy
from .sampling import distances
from .tree import Tree

# Places of one forward pass: enough to fill two cores, small enough for the memory of a laptop.
TOKEN_BUDGET = 4096


@dataclass(frozen=True)
class Recorded:
    """A trajectory as its sender reported it: `tokens` int64 [T], `trained` bool [T] where the policy
    sampled, and the `uniforms` float64 [N] that were to be used for those tokens."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    uniforms: NDArray[np.float64]
    tree: Tree | None = None
    """Where attention is not plain causal."""


@dataclass(frozen=True)
class Recomputed:
    """Of each trained token: `logprobs` float32 [N] at the sampling temperature, and `distances` float64 [N]
    of its uniform from its interval (0: this is the token that the uniform draws)."""

    logprobs: NDArray[np.float32]
    distances: NDArray[np.float64]


@torch.inference_mode()
def prefill(
    policy: Policy, recorded: Sequence[Recorded], temperature: float, token_budget: int = TOKEN_BUDGET
) -> list[Recomputed]:
    """What `policy` gives for each trajectory, in their order.

    Raises RequestError for tokens outside the vocabulary, a trajectory longer than the context or uniforms
    that do not match the trained tokens; BatchError for a trained first token; LogitsError for broken
    weights.
    """
    for one in recorded:
        _check(policy, one)
    counts = [len(one.uniforms) for one in recorded]
    logprobs = torch.empty(sum(counts), dtype=torch.float32, device=policy.device)
    away = torch.empty(sum(counts), dtype=torch.float64, device=policy.device)
    u = torch.from_numpy(np.concatenate([one.uniforms for one in recorded] or [np.zeros(0)])).to(
        policy.device
    )
    for batch in micro_batches(
        recorded,
        token_budget,
        policy.tokenizer.vocab_size,
        policy.shares_prompts,
        policy.device,
        policy.pair_cost,
    ):
        logits_NV = policy.logits(batch)
        logprobs[batch.places_N], away[batch.places_N] = distances(
            logits_NV, batch.targets_N, u[batch.places_N], temperature
        )
    ends = np.cumsum([0, *counts]).tolist()
    flat_logprobs, flat_away = logprobs.cpu().numpy(), away.cpu().numpy()
    return [Recomputed(flat_logprobs[a:b], flat_away[a:b]) for a, b in pairwise(ends)]


def _check(policy: Policy, one: Recorded) -> None:
    if len(one.tokens) != len(one.trained) or int(one.trained.sum()) != len(one.uniforms):
        raise RequestError(
            f"A trajectory of {len(one.tokens)} tokens has {len(one.trained)} marks and "
            f"{len(one.uniforms)} uniforms for {int(one.trained.sum())} sampled tokens; they must match."
        )
    if len(one.tokens):
        policy.check_tokens(int(one.tokens.min()), int(one.tokens.max()), len(one.tokens))
