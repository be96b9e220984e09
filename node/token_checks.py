"""What the sampled tokens of a trajectory show: repetition, and ends that the checkpoint would not make.

Without torch: a client's adapter asks the same functions. Spec: `specs/08-verification.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nous_node.protocol.errors import Code, RemoteError

MAX_PERIOD = 16
"""Tokens of a piece that repeats: a line of a list or a sentence; honest text hardly repeats longer ones."""

MAX_REPEATED = 64
"""Tokens that repeat before it counts: tables and counting do less, a policy stuck in a loop does more."""


def check_repetition(sampled: NDArray[np.int64], stop: Sequence[int]) -> None:
    """RemoteError(REPETITION) where the last tokens of a trajectory [N], a stop token at the end apart, are
    one short piece again and again, and half of them or more. [VER-9]"""
    said = sampled[:-1] if len(sampled) and sampled[-1] in stop else sampled
    for period in range(1, min(MAX_PERIOD, len(said) - 1) + 1):
        repeated = _repeated(said, period)
        if repeated >= MAX_REPEATED and 2 * repeated >= len(said):
            raise RemoteError(
                Code.REPETITION,
                f"A trajectory ends in {repeated} tokens that repeat every {period}.",
                measured=repeated,
                threshold=MAX_REPEATED,
            )


def _repeated(tokens: NDArray[np.int64], period: int) -> int:
    """How many of the last tokens [N] have this period."""
    differs = np.flatnonzero(tokens[period:] != tokens[:-period])
    return len(tokens) - (int(differs[-1]) + 1 if len(differs) else 0)


def check_ends(
    sampled: NDArray[np.int64], logprobs: NDArray[np.float32], stop: Sequence[int], least: float
) -> None:
    """RemoteError(FINISH) where a stop token is less likely than `least`: sampled tokens [N] of a trajectory,
    and their recomputed log-probs [N]. [VER-8]"""
    for place in np.flatnonzero(np.isin(sampled, stop)):
        probability = math.exp(float(logprobs[place]))
        if not probability >= least:
            raise RemoteError(
                Code.FINISH,
                "A trajectory ends where the checkpoint would hardly ever end it.",
                measured=probability,
                threshold=least,
            )
