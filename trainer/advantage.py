"""How much better than expected each trajectory of a group was: pure functions of rewards.

Each returns one number a trajectory, for all its trained tokens. An environment that gives its own numbers a
token overrides them. Suffix: G trajectories of one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

# Keeps rewards that differ by rounding alone from being blown up to +-1.
STD_FLOOR = 1e-4

# The running baseline forgets with a half-life of about 70 groups: slower than a version, faster than a run.
BASELINE_DECAY = 0.99


class AdvantageKind(StrEnum):
    """Which baseline rewards are compared with."""

    GRPO = "grpo"
    DR_GRPO = "dr-grpo"
    RLOO = "rloo"
    REINFORCE = "reinforce"


@dataclass(frozen=True)
class Baseline:
    """The running mean reward, for REINFORCE; None until the first group."""

    value: float | None = None

    def after(self, rewards_G: NDArray[np.float64]) -> Baseline:
        """The baseline once this group has been seen: groups too old to train on count here too."""
        mean = float(np.mean(rewards_G))
        if self.value is None:
            return Baseline(mean)
        return Baseline(BASELINE_DECAY * self.value + (1 - BASELINE_DECAY) * mean)


def group_advantages(
    kind: AdvantageKind, rewards_G: NDArray[np.float64], baseline: Baseline
) -> NDArray[np.float32]:
    """The advantages of one group's trajectories; `baseline` matters to REINFORCE only."""
    match kind:
        case AdvantageKind.GRPO:
            advantages_G = grpo(rewards_G)
        case AdvantageKind.DR_GRPO:
            advantages_G = dr_grpo(rewards_G)
        case AdvantageKind.RLOO:
            advantages_G = rloo(rewards_G)
        case AdvantageKind.REINFORCE:
            advantages_G = reinforce(rewards_G, baseline)
    return advantages_G.astype(np.float32)


def has_signal(kind: AdvantageKind, rewards_G: NDArray[np.float64]) -> bool:
    """False for a group from which this kind learns nothing: all rewards equal, compared with each other."""
    if kind is AdvantageKind.REINFORCE:
        return True
    return bool(np.ptp(rewards_G) > 0)


def grpo(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """(r - mean) / std. DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1."""
    centred_G = rewards_G - rewards_G.mean()
    advantages_G: NDArray[np.float64] = centred_G / (rewards_G.std() + STD_FLOOR)
    return advantages_G


def dr_grpo(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean: dividing by std favours questions that are nearly solved or nearly hopeless.
    https://arxiv.org/abs/2503.20783, section 3.2."""
    advantages_G: NDArray[np.float64] = rewards_G - rewards_G.mean()
    return advantages_G


def rloo(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean of the others: unbiased. https://arxiv.org/abs/2402.14740, section 3.3. One alone has 0."""
    size = len(rewards_G)
    return (rewards_G - rewards_G.mean()) * (size / (size - 1)) if size > 1 else np.zeros(size)


def reinforce(rewards_G: NDArray[np.float64], baseline: Baseline) -> NDArray[np.float64]:
    """r - running baseline. Williams 1992, https://doi.org/10.1007/BF00992696. Works for groups of one."""
    expected = float(rewards_G.mean()) if baseline.value is None else baseline.value
    return rewards_G - expected
