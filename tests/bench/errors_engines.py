"""Honest and cheating engines of the error-rate bench, and the verifier that keeps what it computes.

A cheating sampler stands in for `choose` of the generation loop: it takes another token than the uniform
draws, and reports the true log-probability of what it took, as a clever cheat would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from errors_store import Check
from numpy.typing import NDArray
from torch import Tensor

from nous_node.trainer import generate as generation
from nous_node.trainer.batch import micro_batches
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import TOKEN_BUDGET, Recorded
from nous_node.trainer.sampling import choose, distances

Sampler = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]

INT4_GROUP = 32
"""Weights that share a scale, as common 4-bit formats have it."""


def truthful(draw: Callable[[Tensor, Tensor], Tensor]) -> Sampler:
    """A sampler that takes the token of `draw(logits, u)` and reports its log-probability at the run's
    temperature."""

    def sample(logits_BV: Tensor, u_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        tokens_B = draw(logits_BV, u_B)
        return tokens_B, distances(logits_BV, tokens_B, u_B, temperature)[0]

    return sample


def at_temperature(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Draws at another temperature than the run's."""
    return lambda logits_BV, u_B: choose(logits_BV, u_B, temperature)[0]


def top_p(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Draws from the smallest set of tokens that holds `share` of the probability."""

    def draw(logits_BV: Tensor, u_B: Tensor) -> Tensor:
        ranked_BV, order_BV = logits_BV.float().softmax(-1).sort(-1, descending=True)
        outside_BV = ranked_BV.cumsum(-1) - ranked_BV >= share
        masked_BV = logits_BV.scatter(
            1, order_BV, logits_BV.gather(1, order_BV).masked_fill(outside_BV, -torch.inf)
        )
        return choose(masked_BV, u_B, 1.0)[0]

    return draw


SAMPLERS: dict[str, Sampler] = {
    "seeded": choose,
    "T 0.9": truthful(at_temperature(0.9)),
    "T 1.1": truthful(at_temperature(1.1)),
    "top-p 0.9": truthful(top_p(0.9)),
    "greedy": truthful(lambda logits_BV, u_B: logits_BV.argmax(-1)),
}


@contextmanager
def sampling_as(sampler: Sampler) -> Iterator[None]:
    """Generation inside draws with `sampler`."""
    generation.choose = sampler
    try:
        yield
    finally:
        generation.choose = choose


@torch.no_grad()
def quantize(policy: Policy, kind: str) -> None:
    """Rounds the projections of all layers to the nearest step and back: "int8" with a scale an output
    channel, "int4" with a scale for INT4_GROUP weights. Embeddings stay, as engines usually leave them."""
    for name, weight in policy.tensors().items():
        if weight.ndim != 2 or "embed" in name or "lm_head" in name:
            continue
        groups = weight.float() if kind == "int8" else weight.float().view(weight.shape[0], -1, INT4_GROUP)
        top = 127 if kind == "int8" else 7
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
        rounded = (groups / scale).round().clamp(-top, top) * scale
        weight.copy_(rounded.view(weight.shape))


@torch.inference_mode()
def recompute(
    policy: Policy,
    recorded: Sequence[Recorded],
    strange: Sequence[NDArray[np.float64]] | None = None,
    temperature: float = 1.0,
    hidden: bool = False,
    token_budget: int = TOKEN_BUDGET,
) -> Check:
    """As `trainer.prefill.prefill`, also against `strange` uniforms (else the same), and keeping hidden
    states."""
    counts = sum(len(one.uniforms) for one in recorded)
    own = torch.from_numpy(np.concatenate([one.uniforms for one in recorded]))
    other = None if strange is None else torch.from_numpy(np.concatenate(strange))
    logprobs = torch.empty(counts, dtype=torch.float32)
    near, far = torch.empty(counts, dtype=torch.float64), torch.empty(counts, dtype=torch.float64)
    width = policy.model.config.hidden_size if hidden else 0
    kept = torch.zeros(counts, width, dtype=torch.bfloat16)
    vocabulary = policy.tokenizer.vocab_size
    for batch in micro_batches(recorded, token_budget, vocabulary, policy.shares_prompts):
        states_ND = policy.model.base_model(
            input_ids=batch.tokens_BL,
            attention_mask=batch.mask_B1LL,
            position_ids=batch.positions_BL,
            use_cache=False,
        ).last_hidden_state[batch.rows_N, batch.columns_N]
        logits_NV = policy.model.get_output_embeddings()(states_ND)
        places = batch.places_N
        logprobs[places], near[places] = distances(logits_NV, batch.targets_N, own[places], temperature)
        far[places] = near[places]
        if other is not None:
            far[places] = distances(logits_NV, batch.targets_N, other[places], temperature)[1]
        if hidden:
            kept[places] = states_ND.bfloat16()
    bits = kept.view(torch.int16).numpy().view(np.uint16)
    return Check(logprobs.numpy(), near.numpy(), far.numpy(), bits)
