"""The formulas of the loss, each against its plain statement; gradients on the right side of the clip."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nous_node.trainer.advantage import (
    AdvantageKind,
    Baseline,
    dr_grpo,
    group_advantages,
    grpo,
    has_signal,
    reinforce,
    rloo,
)
from nous_node.trainer.loss import (
    Aggregation,
    ClipRange,
    LossInputs,
    LossOutputs,
    aggregation_weights,
    chosen_logprobs,
    policy_loss,
)

CLIP = ClipRange()


def one_token(ratio: float, advantage: float, importance: float = 1.0) -> tuple[LossOutputs, float]:
    """The loss of a single token and d loss / d logprob."""
    current = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    behaviour = torch.tensor([-math.log(importance)], dtype=torch.float64)
    inputs = LossInputs(current, zero, behaviour, torch.tensor([advantage]).double(), torch.ones(1).double())
    outputs = policy_loss(inputs, CLIP)
    outputs.loss.backward()
    return outputs, float(current.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 1.0, -1.0),
        (1.27, 1.0, -1.27),  # clip-higher: still pushing at 1.27
        (1.29, 1.0, 0.0),
        (9.0, 1.0, 0.0),
        (0.1, 1.0, -0.1),  # fallen too far: pulled back up
        (1.0, -1.0, 1.0),
        (0.81, -1.0, 0.81),
        (0.79, -1.0, 0.0),  # pushed down enough: min, not max, stops here
        (0.1, -1.0, 0.0),
        (3.9, -1.0, 3.9),  # risen although bad: pulled back down
        (4.1, -1.0, 0.0),  # but not with a force that explodes
        (1e6, -1.0, 0.0),
    ],
)
def test_gradient_of_each_side_of_the_clip(ratio, advantage, gradient):
    assert one_token(ratio, advantage)[1] == pytest.approx(gradient)


def test_loss_is_bounded_for_bad_tokens_that_became_likely():
    assert float(one_token(1e6, -2.0)[0].loss.detach()) == pytest.approx(8.0)


@pytest.mark.parametrize(("importance", "expected"), [(0.5, 0.5), (1.9, 1.9), (50.0, 2.0)])
def test_importance_of_stale_tokens_is_truncated(importance, expected):
    outputs, gradient = one_token(1.0, 1.0, importance)
    assert gradient == pytest.approx(-expected)
    assert outputs.truncated == (importance > 2)


def test_on_policy_gradient_is_that_of_reinforce():
    logits = torch.randn(20, 30, dtype=torch.float64, requires_grad=True)
    targets, advantages = torch.randint(30, (20,)), torch.randn(20, dtype=torch.float64)
    current = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    old = current.detach()
    weights = torch.full((20,), 1 / 20, dtype=torch.float64)
    policy_loss(LossInputs(current, old, old, advantages, weights), CLIP).loss.backward()
    again = logits.detach().requires_grad_()
    (-(torch.log_softmax(again, -1).gather(1, targets[:, None])[:, 0] * advantages).mean()).backward()
    torch.testing.assert_close(logits.grad, again.grad)


def test_counts_name_what_was_clipped():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 5.0, 1.0]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    zeros = torch.zeros(6)
    outputs = policy_loss(LossInputs(ratios, zeros, zeros, advantages, torch.ones(6)), CLIP)
    assert (outputs.clipped_high, outputs.clipped_low, outputs.capped) == (1, 1, 1)
    assert outputs.kl == pytest.approx(float((ratios.exp() - 1 - ratios).sum()), rel=1e-5)


def test_aggregation_weights_of_each_kind():
    lengths = np.array([1, 3])
    np.testing.assert_allclose(aggregation_weights(Aggregation.TOKEN, lengths, 10), [0.25] * 4)
    np.testing.assert_allclose(
        aggregation_weights(Aggregation.SEQUENCE, lengths, 10), [0.5, 1 / 6, 1 / 6, 1 / 6], rtol=1e-6
    )
    np.testing.assert_allclose(aggregation_weights(Aggregation.FIXED, lengths, 10), [0.05] * 4)
    assert len(aggregation_weights(Aggregation.TOKEN, np.array([], np.int64), 10)) == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_logprobs_and_their_gradient_are_those_of_log_softmax(temperature, dtype):
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(40, 300, generator=generator) * 3).to(dtype)
    start[3, 5] = -torch.inf
    targets = torch.randint(6, 300, (40,), generator=generator)
    upstream = torch.randn(40, generator=generator)
    ours, plain = start.clone().requires_grad_(), start.clone().requires_grad_()
    logprobs, entropy = chosen_logprobs(ours, targets, temperature)
    (logprobs * upstream).sum().backward()
    whole = torch.log_softmax(plain.float() / temperature, -1)
    expected = whole.gather(1, targets[:, None])[:, 0]
    (expected * upstream).sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad, plain.grad, atol=tolerance, rtol=tolerance)
    plain_entropy = -(whole.exp() * whole.clamp(min=-1e4)).sum(-1)
    torch.testing.assert_close(entropy, plain_entropy.detach(), atol=1e-4, rtol=1e-4)
    assert not entropy.requires_grad


rewards = st.lists(st.floats(-5, 5), min_size=2, max_size=16).map(np.array)


@given(rewards)
@settings(deadline=None)
def test_group_baselines_centre_the_rewards(values):
    for advantages in (grpo(values), dr_grpo(values), rloo(values)):
        assert abs(advantages.mean()) < 1e-9
        assert np.all(np.isfinite(advantages))
        assert np.all(np.diff(advantages[np.argsort(values)]) > -1e-9)


def test_advantages_of_known_rewards():
    values = np.array([0.0, 1.0])
    np.testing.assert_allclose(grpo(values), [-1, 1], rtol=1e-3)
    np.testing.assert_allclose(dr_grpo(values), [-0.5, 0.5])
    np.testing.assert_allclose(rloo(values), [-1, 1])
    np.testing.assert_allclose(reinforce(values, Baseline(0.25)), [-0.25, 0.75])
    assert group_advantages(AdvantageKind.RLOO, values, Baseline()).dtype == np.float32


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    values = np.array([0.1, 0.5, 0.9, 0.2])
    others = [np.delete(values, i).mean() for i in range(4)]
    np.testing.assert_allclose(rloo(values), values - others)


def test_groups_without_differences_teach_nothing_but_a_running_baseline():
    equal = np.ones(8)
    for kind in (AdvantageKind.GRPO, AdvantageKind.DR_GRPO, AdvantageKind.RLOO):
        assert not has_signal(kind, equal)
        assert not group_advantages(kind, equal, Baseline()).any()
    assert has_signal(AdvantageKind.REINFORCE, equal)
    assert group_advantages(AdvantageKind.REINFORCE, equal, Baseline(0.5)).tolist() == [0.5] * 8


def test_the_running_baseline_follows_the_rewards():
    baseline = Baseline().after(np.array([1.0, 0.0]))
    assert baseline.value == 0.5
    for _ in range(1000):
        baseline = baseline.after(np.ones(4))
    assert baseline.value == pytest.approx(1.0, abs=1e-4)


def test_a_group_of_one_has_no_advantage_under_rloo():
    assert rloo(np.array([3.0])).tolist() == [0.0]
