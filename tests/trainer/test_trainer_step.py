"""The update as a whole: what goes in, what is dropped, and that it climbs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nous_node.trainer.advantage import AdvantageKind, Baseline
from nous_node.trainer.errors import BatchError, ConfigError
from nous_node.trainer.generate import Request, generate
from nous_node.trainer.loss import Aggregation, Anchor
from nous_node.trainer.optim import Optimizer, OptimizerConfig
from nous_node.trainer.policy import DEFAULT_FOLDER, Policy
from nous_node.trainer.step import Group, Trajectory, UpdateConfig, update

EOS = 258


@pytest.fixture
def policy() -> Policy:
    return Policy.load(DEFAULT_FOLDER, threads=1)


def make_groups(policy: Policy, count: int = 4, size: int = 6, version: int = 0) -> list[Group]:
    """Groups rewarded for the letter 3: learnable in a few steps."""
    prompts = [policy.tokenizer.encode(f"sort {1000 + 37 * n}=") for n in range(count)]
    asked = [
        Request(prompt, bytes([version, n, i]) + bytes(29), 0, 8)
        for n, prompt in enumerate(prompts)
        for i in range(size)
    ]
    answers = generate(policy, asked, 1.0, {EOS})
    groups = []
    for n in range(count):
        trajectories, rewards = [], []
        for request, answer in zip(asked[n * size : n * size + size], answers[n * size :], strict=False):
            tokens = np.array([*request.prompt, *answer.tokens])
            trained = np.arange(len(tokens)) >= len(request.prompt)
            trajectories.append(Trajectory(tokens, trained, answer.logprobs))
            rewards.append(answer.tokens.count(ord("3")) / len(answer.tokens))
        groups.append(Group(trajectories, rewards, version))
    return groups


def weights(policy: Policy) -> list[torch.Tensor]:
    return [t.clone() for t in policy.tensors().values()]


def fresh(policy: Policy, **changes: object) -> tuple[Optimizer, UpdateConfig]:
    config = UpdateConfig(**changes)
    return Optimizer(policy, config.optimizer), config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", list(AdvantageKind))
def test_reward_rises(dtype, kind):
    policy = Policy.load(DEFAULT_FOLDER, dtype, threads=1)
    optimizer, config = fresh(policy, advantage=kind, optimizer=OptimizerConfig(rate=3e-3, warmup=2))
    baselines, rewards = {}, []
    for version in range(12):
        report = update(policy, optimizer, make_groups(policy, version=version), config, baselines)
        baselines = report.baselines
        rewards.append(report.reward)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    assert optimizer.steps >= 9  # a version whose groups are all flat makes none


def test_the_budget_of_a_pass_does_not_change_the_update():
    results = []
    for budget, share in ((4096, True), (40, True), (4096, False)):
        policy = Policy.load(DEFAULT_FOLDER, threads=1)
        if not share:
            policy.model.config.model_type = "unknown"
        optimizer, config = fresh(policy, token_budget=budget)
        report = update(policy, optimizer, make_groups(policy), config, {})
        results.append((report.gradient_norm, report.loss, report.entropy, report.kl))
    np.testing.assert_allclose(results[1], results[0], atol=1e-5)
    np.testing.assert_allclose(results[2], results[0], atol=1e-5)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_first_step_on_fresh_samples_is_neither_clipped_nor_truncated(policy, aggregation):
    optimizer, config = fresh(policy, aggregation=aggregation)
    report = update(policy, optimizer, make_groups(policy), config, {})
    assert (report.clipped_high, report.clipped_low, report.capped, report.truncated) == (0, 0, 0, 0)
    assert abs(report.kl) < 1e-6
    assert 0 < report.tokens <= 4 * 6 * 8
    assert report.steps == 1


@pytest.mark.parametrize("anchor", list(Anchor))
def test_epochs_and_minibatches_make_several_steps_around_one_policy(policy, anchor):
    fast = OptimizerConfig(rate=1e-2, warmup=0)
    optimizer, config = fresh(policy, anchor=anchor, epochs=4, minibatches=2, optimizer=fast)
    report = update(policy, optimizer, make_groups(policy), config, {})
    assert report.steps == optimizer.steps == 8
    assert report.clipped_high + report.clipped_low > 0
    assert report.kl > 1e-4
    assert report.truncated == 0  # the samples are fresh: proximal and behaviour are one policy


def test_stale_tokens_are_clipped_around_their_own_policy_or_weighted(policy):
    """Samples that seem to come from a policy that found their tokens half as likely."""
    stale = [
        Group([replace(t, behaviour_logprobs=t.behaviour_logprobs - 1) for t in g.trajectories], g.rewards, 0)
        for g in make_groups(policy)
    ]
    reports = {}
    for anchor in Anchor:
        optimizer, config = fresh(policy, anchor=anchor)
        reports[anchor] = update(policy, optimizer, stale, config, {})
    assert reports[Anchor.BEHAVIOUR].clipped_high > 0.2
    assert reports[Anchor.BEHAVIOUR].truncated == 0
    assert reports[Anchor.PROXIMAL].clipped_high == 0
    assert reports[Anchor.PROXIMAL].truncated > 0.9


def test_groups_without_signal_are_dropped_but_counted(policy):
    groups = make_groups(policy)
    flat = [Group(g.trajectories, [1.0] * len(g.rewards), 0) for g in groups]
    optimizer, config = fresh(policy)
    before = weights(policy)
    report = update(policy, optimizer, flat, config, {})
    assert (report.groups, report.zero_variance, report.tokens, report.steps) == (4, 4, 0, 0)
    assert report.reward == 1.0
    assert report.baselines[""].value == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(policy), strict=True))
    mixed = update(policy, optimizer, [groups[0], *flat[1:]], config, report.baselines)
    assert (mixed.zero_variance, mixed.steps) == (3, 1)
    assert mixed.tokens == sum(len(t.behaviour_logprobs) for t in groups[0].trajectories)


def test_flat_groups_can_count_in_the_mean(policy):
    groups = make_groups(policy)
    groups[1:] = [Group(g.trajectories, [1.0] * len(g.rewards), 0) for g in groups[1:]]
    norms = []
    for count in (False, True):
        other = Policy.load(DEFAULT_FOLDER, threads=1)
        optimizer, config = fresh(other, count_flat=count)
        norms.append(update(other, optimizer, groups, config, {}).gradient_norm)
    assert norms[1] == pytest.approx(norms[0] / 4, rel=1e-4)


def test_advantages_of_the_environment_override_those_of_the_group(policy):
    groups = make_groups(policy, 1)
    own = [
        Trajectory(t.tokens, t.trained, t.behaviour_logprobs, np.zeros(len(t.behaviour_logprobs), np.float32))
        for t in groups[0].trajectories
    ]
    optimizer, config = fresh(policy)
    report = update(policy, optimizer, [Group(own, groups[0].rewards, 0)], config, {})
    assert report.gradient_norm == 0
    assert report.zero_variance == 1  # whatever the rewards say


def test_a_step_that_is_not_finite_changes_nothing(policy):
    groups = make_groups(policy)
    own = [
        Trajectory(
            t.tokens, t.trained, t.behaviour_logprobs, np.full(len(t.behaviour_logprobs), np.nan, np.float32)
        )
        for t in groups[0].trajectories
    ]
    optimizer, config = fresh(policy)
    before = weights(policy)
    report = update(policy, optimizer, [Group(own, groups[0].rewards, 0)], config, {})
    assert report.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, weights(policy), strict=True))


def test_no_groups_are_no_update(policy):
    optimizer, config = fresh(policy)
    report = update(policy, optimizer, [], config, {"": Baseline(0.5)})
    assert (report.steps, report.groups, report.baselines[""].value) == (0, 0, 0.5)


def test_a_group_whose_rewards_do_not_match_is_refused(policy):
    group = make_groups(policy, 1)[0]
    optimizer, config = fresh(policy)
    with pytest.raises(BatchError, match="6 trajectories has 5 rewards"):
        update(policy, optimizer, [Group(group.trajectories, group.rewards[:5], 0)], config, {})


@pytest.mark.parametrize("change", [{"minibatches": 0}, {"temperature": 0.0}, {"token_budget": 0}])
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ConfigError):
        UpdateConfig(**change)
    with pytest.raises(ConfigError):
        OptimizerConfig(rate=0.0)


def test_harder_tasks_bring_the_full_rate_back(policy: Policy) -> None:
    optimizer = Optimizer(policy, OptimizerConfig(rate=1e-3, warmup=10, hold=100))
    optimizer.steps = 400
    assert optimizer.config.rate_at(optimizer.steps) == pytest.approx(5e-4)
    optimizer.refresh()
    assert optimizer.config.rate_at(optimizer.steps) == pytest.approx(1e-3)
    optimizer.steps = 5
    optimizer.refresh()
    assert optimizer.steps == 5  # the warm-up goes on


def test_the_rate_warms_up_holds_and_falls():
    config = OptimizerConfig(rate=1e-3, warmup=10, hold=100)
    assert [config.rate_at(s) for s in (0, 4, 9, 100, 400)] == pytest.approx([1e-4, 5e-4, 1e-3, 1e-3, 5e-4])
    assert OptimizerConfig(rate=1e-3).rate_at(10**6) == 1e-3


def test_masters_keep_what_bf16_would_lose():
    policy = Policy.load(DEFAULT_FOLDER, "bfloat16", threads=1)
    optimizer = Optimizer(policy, OptimizerConfig(rate=1e-5, warmup=0))
    start = {n: t.clone() for n, t in policy.tensors().items()}
    for _ in range(200):
        for weight in policy.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.accumulate()
        optimizer.step()
    moved = [(start[n] - t).float() for n, t in policy.tensors().items() if "norm" not in n]
    assert float(torch.cat([m.flatten() for m in moved]).mean()) == pytest.approx(2e-3, rel=0.05)


def test_a_policy_in_fp32_has_no_second_copy(policy):
    optimizer = Optimizer(policy, OptimizerConfig())
    assert not optimizer.state()
    update(policy, optimizer, make_groups(policy), UpdateConfig(), {})
    assert {name.split("/")[0] for name in optimizer.state()} == {"exp_avg", "exp_avg_sq"}
