"""The policy loss: PPO with a two-sided clip, decoupled or not. Pure functions; suffix N trained tokens.

Three policies: *behaviour* sampled the tokens (a volunteer, some versions ago); *proximal* is the middle of
the trust region; *current* is being changed. Decoupled PPO (AReaL, https://arxiv.org/abs/2505.24298, section
5.2) takes the policy when the update began as proximal and only corrects for the behaviour policy:

    loss = -w * min(min(r, cap) * A, clip(r, 1 - low, 1 + high) * A)
    r = current / proximal,  w = min(proximal / behaviour, importance_cap)

- `min` of the two terms, as in PPO (https://arxiv.org/abs/1707.06347, eq. 7): for A > 0 pushing stops at
  r = 1 + high, for A < 0 at r = 1 - low; the other side always pulls back.
- `cap` bounds min's other side: without it a token with A < 0 and r = 100 pulls 100 times as hard
  (dual clip, https://arxiv.org/abs/1912.09729; two-sided, https://arxiv.org/abs/2505.07291, eq. 2).
- high > low lets unlikely tokens grow (DAPO clip-higher, https://arxiv.org/abs/2503.14476, section 3.1).
- the truncated weight trades a little bias for bounded variance (https://arxiv.org/abs/1802.01561, V-trace).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Aggregation(StrEnum):
    """How the losses of tokens become one number."""

    TOKEN = "token"
    """Mean over all tokens (DAPO, https://arxiv.org/abs/2503.14476, section 3.3)."""
    SEQUENCE = "sequence"
    """Mean over each sample, then over samples (GRPO, https://arxiv.org/abs/2402.03300, eq. 3)."""
    FIXED = "fixed"
    """Sum over each sample by a fixed length: long wrong answers are not spared (Dr. GRPO,
    https://arxiv.org/abs/2503.20783, section 3.1)."""


class Anchor(StrEnum):
    """The middle of the trust region."""

    BEHAVIOUR = "behaviour"
    """The policy that sampled (PPO, https://arxiv.org/abs/1707.06347): what the versions since then have
    already done for a token counts as done. On sorting with data two versions old this reaches in 100 steps
    what the other does not reach in 500, because each version pushes the same tokens again."""
    PROXIMAL = "proximal"
    """The policy when the update began (decoupled PPO): stale data is used in full."""


@dataclass(frozen=True)
class ClipRange:
    """Bounds of the ratios: see the module."""

    low: float = 0.2
    high: float = 0.28
    cap: float = 4.0
    importance_cap: float = 2.0


@dataclass(frozen=True)
class LossInputs:
    """All float32 [N]; only `current_N` carries a gradient. `weights_N`: each token's share of the mean."""

    current_N: Tensor
    proximal_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


@dataclass(frozen=True)
class LossOutputs:
    """`loss` is the scalar to minimise, the rest are sums over the tokens, without gradient, to be divided by
    their number: `kl` of behaviour from current (k3, http://joschu.net/blog/kl-approx.html), tokens whose
    gradient is `clipped_high`, `clipped_low`, or `capped`, and `truncated` importance weights."""

    loss: Tensor
    kl: float
    clipped_high: int
    clipped_low: int
    capped: int
    truncated: int


def policy_loss(inputs: LossInputs, clip: ClipRange) -> LossOutputs:
    """The loss over these tokens: sums over micro-batches are the loss of the whole batch."""
    A = inputs.advantages_N
    ratio_N = (inputs.current_N - inputs.proximal_N).exp()
    importance_N = (inputs.proximal_N - inputs.behaviour_N).exp()
    bounded_N = ratio_N.clamp(max=clip.cap)
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    objective_N = torch.minimum(bounded_N * A, clipped_N * A)
    weight_N = importance_N.clamp(max=clip.importance_cap) * inputs.weights_N
    with torch.no_grad():
        drift_N = inputs.current_N - inputs.behaviour_N
        counts = torch.stack(
            (
                ((A > 0) & (ratio_N > 1 + clip.high)).sum(),
                ((A < 0) & (ratio_N < 1 - clip.low)).sum(),
                ((A < 0) & (ratio_N > clip.cap)).sum(),
                (importance_N > clip.importance_cap).sum(),
            )
        ).tolist()
        kl = float((drift_N.exp() - 1 - drift_N).sum())
    return LossOutputs(-(weight_N * objective_N).sum(), kl, *counts)


def aggregation_weights(
    kind: Aggregation, lengths: NDArray[np.int64], fixed_length: int
) -> NDArray[np.float32]:
    """Each trained token's weight in the loss, for samples of these numbers of trained tokens, flat [N].

    `fixed_length` (tokens) is the divisor of FIXED; it should be the run's token limit.
    """
    samples = max(1, len(lengths))
    match kind:
        case Aggregation.TOKEN:
            each = np.full(len(lengths), 1 / max(1, int(lengths.sum())))
        case Aggregation.SEQUENCE:
            each = 1 / (samples * np.maximum(lengths, 1))
        case Aggregation.FIXED:
            each = np.full(len(lengths), 1 / (samples * fixed_length))
    return np.repeat(each, lengths).astype(np.float32)


def chosen_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Float32 log-probs [N] of the targets at `temperature`, and the entropy [N] (no gradient, nats).

    The backward pass turns the saved probabilities into the gradient in place, so it runs only once.
    """
    function: Any = _ChosenLogprobs  # torch leaves `apply` untyped
    logprobs_N, entropy_N = function.apply(logits_NV, targets_N, temperature)
    return logprobs_N, entropy_N


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        scaled_NV = logits_NV.to(torch.float32, copy=True)
        if temperature != 1.0:
            scaled_NV /= temperature
        scaled_NV -= scaled_NV.amax(-1, keepdim=True)
        weights_NV = scaled_NV.exp()
        total_N = weights_NV.sum(-1)
        logprobs_N = scaled_NV.gather(1, targets_N[:, None])[:, 0] - total_N.log()
        mean_N = torch.linalg.vecdot(weights_NV, scaled_NV) / total_N
        if mean_N.isnan().any():  # 0 * -inf
            mean_N = torch.linalg.vecdot(weights_NV, scaled_NV.clamp_(min=-1e4)) / total_N
        entropy_N = total_N.log() - mean_N
        probabilities_NV = weights_NV.div_(total_N[:, None])
        ctx.save_for_backward(probabilities_NV, targets_N)
        ctx.temperature, ctx.dtype = temperature, logits_NV.dtype
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """d logprob[target] / d logit = (1[target] - p) / temperature."""
        gradient_N = gradients[0] / ctx.temperature
        probabilities_NV, targets_N = ctx.saved_tensors
        gradient_NV = probabilities_NV.mul_(-gradient_N[:, None])
        gradient_NV.scatter_add_(1, targets_N[:, None], gradient_N[:, None])
        return gradient_NV.to(ctx.dtype), None, None
