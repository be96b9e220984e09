"""How much better than expected each trajectory of a group was: pure functions of rewards.

Each returns one number a trajectory, for all its trained tokens. An environment that gives its own numbers
overrides them. Suffix: G trajectories of one group.

Where a group has several agents, each is compared with itself: the first player of a game that favours the
first player learns from its better games, not from being first (role-conditioned advantage estimation,
SPIRAL, https://arxiv.org/abs/2506.24119). An agent with one trajectory is compared with the whole group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """The running mean reward of one environment, for REINFORCE; None until the first group."""

    value: float | None = None

    def after(self, rewards_G: NDArray[np.float64]) -> Baseline:
        """The baseline once this group has been seen: groups too old to train on count here too."""
        mean = float(np.mean(rewards_G))
        if self.value is None:
            return Baseline(mean)
        return Baseline(BASELINE_DECAY * self.value + (1 - BASELINE_DECAY) * mean)


def baselines_of(means: Mapping[str, float]) -> dict[str, Baseline]:
    """From what `means_of` gave: those of a run go on from version to version."""
    return {name: Baseline(mean) for name, mean in means.items()}


def means_of(baselines: Mapping[str, Baseline]) -> dict[str, float]:
    """The mean of each that has one."""
    return {name: one.value for name, one in baselines.items() if one.value is not None}


def group_advantages(
    kind: AdvantageKind, rewards_G: NDArray[np.float64], baseline: Baseline, agents: Sequence[str] = ()
) -> NDArray[np.float32]:
    """The advantages of one group's trajectories; `agents` has the name of each trajectory's, or nothing.
    `baseline`, which is of all agents together, matters to REINFORCE only."""
    advantages_G = _advantages(kind, rewards_G, baseline)
    for places in _of_several(agents):
        advantages_G[places] = _advantages(kind, rewards_G[places], baseline)
    return advantages_G


def _advantages(
    kind: AdvantageKind, rewards_G: NDArray[np.float64], baseline: Baseline
) -> NDArray[np.float32]:
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


def has_signal(kind: AdvantageKind, rewards_G: NDArray[np.float64], agents: Sequence[str] = ()) -> bool:
    """False for a group from which this kind learns nothing: all rewards that are compared with each other
    are equal."""
    if kind is AdvantageKind.REINFORCE:
        return True
    several = list(_of_several(agents))
    if sum(map(len, several)) < len(rewards_G):  # somebody is compared with the whole group
        several.append(np.arange(len(rewards_G)))
    return any(np.ptp(rewards_G[places]) > 0 for places in several)


def _of_several(agents: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    """The places of each agent that has at least two trajectories, where there are several agents."""
    names = sorted(set(agents))
    if len(names) < 2:
        return
    for name in names:
        places = np.flatnonzero([agent == name for agent in agents])
        if len(places) > 1:
            yield places


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
