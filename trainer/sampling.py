"""Seeded sampling as tensors: the token that a uniform draws, and how far a uniform lies from a token.

The rule (specs/06-tasks-and-sampling.md): the smallest id whose cumulative probability exceeds u, where the
probabilities are softmax(logits / temperature), summed in float64 in id order and scaled by the last sum.
`nous_node.protocol.sampling` has the same in plain Python, for single distributions.

A float64 running sum over 49 k ids costs as much as a third of the prefill. So ids are cut into blocks:
block sums (vectorized), a running sum over the blocks, then a running sum inside the one block that matters.

Shape suffixes: B rows, V vocabulary, K blocks, W ids in a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import LogitsError, RequestError

# Around the square root of vocabularies of 49 k to 256 k, where both running sums are short.
BLOCK = 256

# Up to here one running sum over everything is cheaper than two levels of them.
SINGLE_BLOCK = 1024

# Rows are taken in slices of about this many float64 elements (4 MB), which stay in the cache of one core.
SLICE_ELEMENTS = 1 << 19


def choose(logits_BV: Tensor, u_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The token drawn by each uniform, and its log-probability at this temperature.

    `logits_BV`: any floating dtype, -inf allowed. `u_B`: float64 in [0, 1). Returns int64 [B] and
    float32 [B]. Raises LogitsError for a row that is no distribution.
    """
    tokens, logprobs = [], []
    for rows in _slices(logits_BV):
        weights = _Weights(logits_BV[rows], temperature)
        tokens.append(weights.find(u_B[rows]))
        logprobs.append(weights.logprobs(tokens[-1]))
    return torch.cat(tokens), torch.cat(logprobs)


def distances(logits_BV: Tensor, tokens_B: Tensor, u_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The log-probability of each given token, and the distance of u from that token's own interval.

    Returns float32 [B] and float64 [B]; the distance is 0 where u draws the token. A token of probability
    zero has log-probability -inf and an empty interval. Raises LogitsError for a row that is no distribution.
    """
    logprobs, away = [], []
    for rows in _slices(logits_BV):
        weights = _Weights(logits_BV[rows], temperature)
        logprobs.append(weights.logprobs(tokens_B[rows]))
        lower_B, upper_B = weights.interval(tokens_B[rows])
        away.append(torch.maximum(lower_B - u_B[rows], u_B[rows] - upper_B).clamp_(min=0.0))
    return torch.cat(logprobs), torch.cat(away)


class _Weights:
    """exp((logits - max) / temperature) in float64 as blocks [B, K, W], and the running sum over blocks.

    A small vocabulary is one block; `sums_BW` is then its running sum.
    """

    def __init__(self, logits_BV: Tensor, temperature: float) -> None:
        if not temperature > 0:
            raise RequestError(f"A sampling temperature is positive, not {temperature}.")
        rows, vocabulary = logits_BV.shape
        self.logits_BV, self.temperature = logits_BV, temperature
        self.top_B = logits_BV.amax(-1).double()
        weights_BV = _exponentials(logits_BV, self.top_B, temperature)
        self.single = vocabulary <= SINGLE_BLOCK
        if self.single:
            self.sums_BW = weights_BV.cumsum(-1)
            self.total_B = self.sums_BW[:, -1]
        else:
            padded_BV = pad(weights_BV, (0, -vocabulary % BLOCK)) if vocabulary % BLOCK else weights_BV
            self.blocks_BKW = padded_BV.view(rows, -1, BLOCK)
            self.sums_BK = self.blocks_BKW.sum(-1).cumsum(-1)
            self.total_B = self.sums_BK[:, -1]
        if not bool(torch.isfinite(self.total_B).all()):
            row = int((~torch.isfinite(self.total_B)).nonzero()[0])
            raise LogitsError(
                f"The logits of row {row} are not a distribution (NaN, +inf, or -inf everywhere); "
                "the weights are broken: load an earlier checkpoint."
            )

    def find(self, u_B: Tensor) -> Tensor:
        """The smallest id whose running sum exceeds u times the total. [B] int64."""
        bound_B1 = (u_B * self.total_B)[:, None]
        if self.single:
            return torch.searchsorted(self.sums_BW, bound_B1, right=True)[:, 0]
        block_B = torch.searchsorted(self.sums_BK, bound_B1, right=True)[:, 0]
        inner_BW = self._block(block_B)
        sums_BW = self._before(block_B)[:, None] + inner_BW.cumsum(-1)
        place_B = torch.searchsorted(sums_BW, bound_B1, right=True)[:, 0]
        # The block's own sum was rounded in another order: its running sum may stop one ulp short of the
        # bound. Then the last id of the block that has any weight is meant.
        short_B = place_B == BLOCK
        if bool(short_B.any()):
            ids_W = torch.arange(BLOCK, device=u_B.device)
            last_B = torch.where(inner_BW > 0, ids_W, -1).amax(-1)
            place_B = torch.where(short_B, last_B, place_B)
        return block_B * BLOCK + place_B

    def interval(self, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
        """The cumulative probability before and after each token: two float64 [B]."""
        if self.single:
            return _ends(self.sums_BW, tokens_B, 0.0, self.total_B)
        block_B = tokens_B // BLOCK
        sums_BW = self._block(block_B).cumsum(-1)
        return _ends(sums_BW, tokens_B % BLOCK, self._before(block_B), self.total_B)

    def logprobs(self, tokens_B: Tensor) -> Tensor:
        """log softmax(logits / temperature) at the tokens, computed in float64, as float32 [B]."""
        chosen_B = self.logits_BV.gather(1, tokens_B[:, None])[:, 0].double()
        return ((chosen_B - self.top_B) / self.temperature - self.total_B.log()).float()

    def _block(self, block_B: Tensor) -> Tensor:
        return self.blocks_BKW.gather(1, block_B[:, None, None].expand(-1, 1, BLOCK))[:, 0]

    def _before(self, block_B: Tensor) -> Tensor:
        """The sum of all blocks before each given one."""
        return pad(self.sums_BK, (1, 0)).gather(1, block_B[:, None])[:, 0]


def _exponentials(logits_BV: Tensor, top_B: Tensor, temperature: float) -> Tensor:
    scaled_BV = logits_BV.to(torch.float64, copy=True).sub_(top_B[:, None])
    return (scaled_BV if temperature == 1.0 else scaled_BV.div_(temperature)).exp_()


def _ends(
    sums_BW: Tensor, place_B: Tensor, before_B: Tensor | float, total_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The scaled running sum before and after each place."""
    ends_B2 = pad(sums_BW, (1, 0)).gather(1, torch.stack((place_B, place_B + 1), 1))
    return (before_B + ends_B2[:, 0]) / total_B, ((before_B + ends_B2[:, 1]) / total_B).clamp_(max=1.0)


def _slices(logits_BV: Tensor) -> Iterator[slice]:
    rows, vocabulary = logits_BV.shape
    step = max(1, SLICE_ELEMENTS // vocabulary)
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))
