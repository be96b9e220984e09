"""One version of the policy: from verified rollout groups to changed weights. Reads from top to bottom.

Left out of the textbook's loop: no reference model and no KL penalty (rewards are computed, not learned, so
there is little to hack; the trust region keeps steps small); no value network (the group is the baseline).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .advantage import AdvantageKind, Baseline, group_advantages, has_signal
from .batch import MicroBatch, Sample, flatten, micro_batches
from .errors import BatchError, ConfigError
from .loss import (
    Aggregation,
    Anchor,
    ClipRange,
    LossInputs,
    LossOutputs,
    aggregation_weights,
    chosen_logprobs,
    policy_loss,
)
from .optim import Optimizer, OptimizerConfig
from .policy import Policy
from .tree import Tree


@dataclass(frozen=True)
class UpdateConfig:
    """The knobs of an update.

    `minibatches` optimizer steps are made over the samples, `epochs` times. `temperature` is the sampling
    temperature. `fixed_length` (tokens) divides under the aggregation "fixed". `token_budget` bounds a
    forward pass. `count_flat`: whether samples of groups without signal count in the mean of the loss (the
    step then shrinks as fewer groups have something to teach). `anchor`: the middle of the trust region.
    """

    advantage: AdvantageKind = AdvantageKind.GRPO
    aggregation: Aggregation = Aggregation.TOKEN
    clip: ClipRange = field(default_factory=ClipRange)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    temperature: float = 1.0
    minibatches: int = 1
    epochs: int = 1
    fixed_length: int = 512
    token_budget: int = 4096
    count_flat: bool = False
    anchor: Anchor = Anchor.BEHAVIOUR

    def __post_init__(self) -> None:
        if min(self.minibatches, self.epochs, self.fixed_length, self.token_budget) < 1:
            raise ConfigError("minibatches, epochs, fixed_length and token_budget are at least 1.")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"The sampling temperature is positive, not {self.temperature}.")


@dataclass(frozen=True)
class Trajectory:
    """A verified trajectory: `tokens` int64 [T], `trained` bool [T], and a trained token each:
    `behaviour_logprobs` float32 [N] and, where the environment gives its own, `advantages` float32 [N].

    `advantage` is the environment's own for all of them (0: left out of the update, but its reward counts in
    the baseline); `agent` is who played, where there are several; `tree`: where
    attention is one."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32] | None = None
    advantage: float | None = None
    agent: str = ""
    tree: Tree | None = None

    @property
    def idle(self) -> bool:
        """Whether its environment wants nothing to be learnt from it."""
        return self.advantage == 0


@dataclass(frozen=True)
class Group:
    """All samples of one task, made with checkpoint `version`, with their recomputed `rewards`.
    `environment`: whose task it is, where there are several; each has rewards on a scale of its own."""

    trajectories: Sequence[Trajectory]
    rewards: Sequence[float]
    version: int
    environment: str = ""


@dataclass(frozen=True)
class UpdateReport:
    """What an update did. Means are over trained tokens; `kl` is of behaviour from current policy, in nats.

    `zero_variance` groups had nothing to teach and were left out. `skipped_steps`: steps whose gradient was
    not finite. `baselines`, by environment, are to be handed to the next update."""

    loss: float
    reward: float
    kl: float
    entropy: float
    gradient_norm: float
    clipped_high: float
    clipped_low: float
    capped: float
    truncated: float
    groups: int
    zero_variance: int
    tokens: int
    steps: int
    skipped_steps: int
    baselines: dict[str, Baseline]


def update(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[Group],
    config: UpdateConfig,
    baselines: Mapping[str, Baseline],
) -> UpdateReport:
    """Changes the weights of `policy` by what `groups` teach.

    Raises BatchError if a group's parts do not match; a group without signal is dropped but counted.
    """
    samples: list[Sample] = []
    flat = flat_samples = 0
    after = dict(baselines)
    for group in groups:
        baseline = after.get(group.environment, Baseline())
        taught = _samples(group, config.advantage, baseline)
        samples += taught
        if not taught:
            flat += 1
            flat_samples += sum(not one.idle for one in group.trajectories)
        after[group.environment] = baseline.after(np.asarray(group.rewards, np.float64))
    uncounted = flat_samples / config.minibatches if config.count_flat else 0.0

    tally = _Tally()
    stepping = config.epochs * config.minibatches > 1 and config.anchor is Anchor.PROXIMAL
    proximal = _logprobs(policy, samples, config) if stepping else None
    for _ in range(config.epochs):
        for part in _minibatches(len(samples), config.minibatches):
            chosen = [samples[i] for i in part]
            before = None if proximal is None else flatten([proximal[i] for i in part], policy.device)
            _backward(policy, optimizer, chosen, before, config, uncounted, tally)
            tally.stepped(optimizer.step())
    return tally.report(groups, flat, after)


def _samples(group: Group, kind: AdvantageKind, baseline: Baseline) -> list[Sample]:
    """The group's samples with an advantage a token; none if it has nothing to teach."""
    if len(group.rewards) != len(group.trajectories):
        raise BatchError(
            f"A group of {len(group.trajectories)} trajectories has {len(group.rewards)} rewards; "
            "there must be one of each."
        )
    rewards = np.asarray(group.rewards, np.float64)
    agents = [one.agent for one in group.trajectories]
    own = any(one.advantages is not None or one.advantage is not None for one in group.trajectories)
    if not own and not has_signal(kind, rewards, agents):
        return []
    advantages = group_advantages(kind, rewards, baseline, agents)
    samples = [
        Sample(
            one.tokens, one.trained, one.behaviour_logprobs, _each(one, advantage), group.version, one.tree
        )
        for one, advantage in zip(group.trajectories, advantages, strict=True)
        if not one.idle
    ]
    # Zeros of the environment's own are as flat as equal rewards, and would count in the mean of the loss.
    return samples if not own or any(sample.advantages.any() for sample in samples) else []


def _each(one: Trajectory, advantage: np.float32) -> NDArray[np.float32]:
    """The advantage of each trained token: the environment's where it has one, else the group's."""
    if one.advantages is not None:
        return one.advantages
    return np.full(
        len(one.behaviour_logprobs), advantage if one.advantage is None else one.advantage, np.float32
    )


def _minibatches(count: int, parts: int) -> Iterator[range]:
    """Equal runs of samples, in order: those of one group stay together and share their prompt."""
    edges = [round(count * part / parts) for part in range(parts + 1)]
    for start, end in pairwise(edges):
        if end > start:
            yield range(start, end)


@torch.no_grad()
def _logprobs(policy: Policy, samples: Sequence[Sample], config: UpdateConfig) -> list[NDArray[np.float32]]:
    """The proximal log-probs: of the policy as it is now, for each sample."""
    counts = [len(s.advantages) for s in samples]
    logprobs_N = torch.empty(sum(counts), device=policy.device)
    for batch in _micro_batches(policy, samples, config):
        logprobs_N[batch.places_N], _ = chosen_logprobs(
            policy.logits(batch), batch.targets_N, config.temperature
        )
    return np.split(logprobs_N.cpu().numpy(), np.cumsum(counts)[:-1])


def _micro_batches(policy: Policy, samples: Sequence[Sample], config: UpdateConfig) -> list[MicroBatch]:
    return micro_batches(
        samples,
        config.token_budget,
        policy.tokenizer.vocab_size,
        policy.shares_prompts,
        policy.device,
        policy.pair_cost,
    )


def _backward(
    policy: Policy,
    optimizer: Optimizer,
    samples: Sequence[Sample],
    proximal_N: Tensor | None,
    config: UpdateConfig,
    flat_samples: float,
    tally: _Tally,
) -> None:
    """Gathers the gradient of one optimizer step. Without `proximal_N` the current policy is proximal."""
    lengths = np.array([len(s.advantages) for s in samples], np.int64)
    kept_share = len(samples) / (len(samples) + flat_samples)
    weights = aggregation_weights(config.aggregation, lengths, config.fixed_length) * np.float32(kept_share)
    weights_N = torch.from_numpy(weights).to(policy.device)
    behaviour_N = flatten([s.behaviour_logprobs for s in samples], policy.device)
    advantages_N = flatten([s.advantages for s in samples], policy.device)
    for batch in _micro_batches(policy, samples, config):
        places = batch.places_N
        current, entropy = chosen_logprobs(policy.logits(batch), batch.targets_N, config.temperature)
        behaviour = behaviour_N[places]
        if config.anchor is Anchor.BEHAVIOUR:
            proximal = behaviour
        else:
            proximal = current.detach() if proximal_N is None else proximal_N[places]
        outputs = policy_loss(
            LossInputs(
                current,
                proximal,
                behaviour,
                advantages_N[places],
                weights_N[places],
            ),
            config.clip,
        )
        torch.autograd.backward(outputs.loss)
        optimizer.accumulate()
        tally.add(outputs, entropy)


class _Tally:
    """Sums over the micro-batches of one update."""

    def __init__(self) -> None:
        self.loss = self.kl = self.entropy = self.norms = 0.0
        self.counts = np.zeros(4)
        self.tokens = self.steps = self.skipped = 0

    def add(self, outputs: LossOutputs, entropy_N: Tensor) -> None:
        self.loss += float(outputs.loss.detach())
        self.kl += outputs.kl
        self.entropy += float(entropy_N.sum())
        self.counts += (outputs.clipped_high, outputs.clipped_low, outputs.capped, outputs.truncated)
        self.tokens += len(entropy_N)

    def stepped(self, norm: float) -> None:
        self.steps += 1
        if math.isfinite(norm):
            self.norms += norm
        else:
            self.skipped += 1

    def report(self, groups: Sequence[Group], flat: int, baselines: dict[str, Baseline]) -> UpdateReport:
        tokens, steps = max(1, self.tokens), max(1, self.steps)
        rewards = [reward for group in groups for reward in group.rewards]
        high, low, capped, truncated = (self.counts / tokens).tolist()
        return UpdateReport(
            loss=self.loss / steps,
            reward=float(np.mean(rewards)) if rewards else 0.0,
            kl=self.kl / tokens,
            entropy=self.entropy / tokens,
            gradient_norm=self.norms / steps,
            clipped_high=high,
            clipped_low=low,
            capped=capped,
            truncated=truncated,
            groups=len(groups),
            zero_variance=flat,
            tokens=self.tokens,
            steps=self.steps,
            skipped_steps=self.skipped,
            baselines=baselines,
        )
