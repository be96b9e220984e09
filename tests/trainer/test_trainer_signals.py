"""Rewards and advantages of every kind, from what an environment says to the sign of the gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nous_node.trainer.advantage import AdvantageKind, Baseline, group_advantages, has_signal, means_of
from nous_node.trainer.optim import Optimizer, OptimizerConfig
from nous_node.trainer.policy import DEFAULT_FOLDER, Policy
from nous_node.trainer.prefill import Recorded, prefill
from nous_node.trainer.step import Group, Trajectory, UpdateConfig, update

COMPARING = [AdvantageKind.GRPO, AdvantageKind.DR_GRPO, AdvantageKind.RLOO]


@pytest.fixture
def policy() -> Policy:
    return Policy.load(DEFAULT_FOLDER, threads=1)


def logprobs(policy: Policy, one: Trajectory) -> np.ndarray:
    recorded = Recorded(one.tokens, one.trained, np.zeros(int(one.trained.sum())), one.tree)
    return prefill(policy, [recorded], 1.0)[0].logprobs


def said(policy: Policy, *turns: tuple[str, bool], **more: object) -> Trajectory:
    """A trajectory of texts, each sampled or not, with the log-probs that the policy gives."""
    pieces = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text, _ in turns]
    trained = np.repeat([sampled for _, sampled in turns], [len(piece) for piece in pieces])
    bare = Trajectory(np.concatenate(pieces), trained, np.zeros(int(trained.sum()), np.float32))
    return replace(bare, behaviour_logprobs=logprobs(policy, bare), **more)


def base_model(policy: Policy, answer: str, **more: object) -> Trajectory:
    return said(policy, ("sort 4821=", False), (answer, True), **more)


def chat(policy: Policy, first: str, second: str, **more: object) -> Trajectory:
    """Two turns, with words of the environment before, between and behind them."""
    turns = [("user: 4821?\n", False), (first, True), ("\nuser: sure?\n", False), (second, True)]
    return said(policy, *turns, ("\nuser: bye\n", False), **more)


def moved(policy: Policy, groups: list[Group], kind: AdvantageKind = AdvantageKind.DR_GRPO) -> list[float]:
    """By how much one step changes the log-prob of each trajectory, group by group."""
    trajectories = [one for group in groups for one in group.trajectories]
    before = [logprobs(policy, one).sum() for one in trajectories]
    optimizer = Optimizer(policy, OptimizerConfig(rate=1e-4, warmup=0))
    update(policy, optimizer, groups, UpdateConfig(advantage=kind), {"": Baseline(0.0)})
    return [float(logprobs(policy, one).sum() - old) for one, old in zip(trajectories, before, strict=True)]


@pytest.mark.parametrize("kind", COMPARING)
@pytest.mark.parametrize("rewards", [[-1.0, -3.0], [0.0, -1e-3], [-1e6, -2e6], [2.0, -2.0]])
def test_the_less_bad_of_two_answers_gains(policy, kind, rewards):
    """Negative rewards are as good as any: they are compared."""
    better, worse = moved(
        policy, [Group([base_model(policy, "73"), base_model(policy, "90")], rewards, 0)], kind
    )
    assert better > 0 > worse


def test_a_negative_reward_alone_pushes_away_from_a_baseline(policy):
    (change,) = moved(policy, [Group([base_model(policy, "73")], [-1.0], 0)], AdvantageKind.REINFORCE)
    assert change < 0


@pytest.mark.parametrize("alone", [True, False])
def test_zeros_of_an_environment_are_as_flat_as_equal_rewards(policy, alone):
    """They would count in the mean of the loss, and make other groups' steps smaller."""
    zeros = base_model(policy, "73")
    flat = replace(zeros, advantages=np.zeros(len(zeros.behaviour_logprobs), np.float32))
    taught = Group([base_model(policy, "73"), base_model(policy, "90")], [1.0, 0.0], 0)
    groups = [Group([flat, flat], [1.0, 0.0], 0), *([] if alone else [taught])]
    optimizer = Optimizer(policy, OptimizerConfig(rate=1e-4, warmup=0))
    report = update(policy, optimizer, groups, UpdateConfig(), {})
    assert (report.groups, report.zero_variance) == (len(groups), 1)
    assert report.tokens == (0 if alone else sum(one.trained.sum() for one in taught.trajectories))


@pytest.mark.parametrize("scales", [(1.0, -100.0), (0.0, 1000.0)])
def test_each_environment_has_a_baseline_of_its_own(policy, scales):
    """An answer that is usual in its environment teaches nothing, whatever others are paid elsewhere."""
    groups = [
        Group([base_model(policy, "73")], [scale], 0, name)
        for name, scale in zip("ab", scales, strict=True)
        for _ in range(3)
    ]
    optimizer = Optimizer(policy, OptimizerConfig(rate=1e-4, warmup=0))
    report = update(policy, optimizer, groups, UpdateConfig(advantage=AdvantageKind.REINFORCE), {})
    assert means_of(report.baselines) == pytest.approx(dict(zip("ab", scales, strict=True)))
    assert report.gradient_norm == 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("make", ["one", "each"])
def test_an_advantage_of_the_environment_decides_the_sign(policy, sign, make):
    """Whatever the rewards say, which are against it here."""
    one = base_model(policy, "73")
    own = {"one": {"advantage": sign}, "each": {"advantages": np.full(2, sign, np.float32)}}[make]
    group = Group([replace(one, **own), base_model(policy, "90")], [-sign, sign], 0)
    assert np.sign(moved(policy, [group])[0]) == sign


def test_shaped_advantages_reach_their_own_tokens(policy):
    """The first turn was good and the second was not."""
    one = chat(policy, "73", "90")
    shaped = replace(one, advantages=np.array([1, 1, -1, -1], np.float32))
    before = logprobs(policy, one)
    moved(policy, [Group([shaped], [0.0], 0)])
    change = logprobs(policy, one) - before
    assert change[:2].sum() > 0 > change[2:].sum()


def test_base_model_and_chat_environments_learn_in_one_update(policy):
    """Raw prompts of one turn, conversations of two, and one that brings its own advantages."""
    groups = [
        Group([base_model(policy, "1248"), base_model(policy, "zzzz")], [1.0, -1.0], 0),
        Group([chat(policy, "1248", "yes"), chat(policy, "qqqq", "qqq")], [-0.5, -2.0], 0),
        Group([chat(policy, "ab", "cd", advantage=0.5), chat(policy, "xy", "uv", advantage=-0.5)], [0, 0], 0),
    ]
    changes = moved(policy, groups)
    assert all(better > worse for better, worse in zip(changes[::2], changes[1::2], strict=True))


def test_an_advantage_of_zero_is_not_trained_but_counts_in_the_baseline(policy):
    best, good, bad = (base_model(policy, text) for text in ("1248", "1284", "9000"))
    idle = replace(best, advantage=0.0)
    optimizer = Optimizer(policy, OptimizerConfig())
    report = update(policy, optimizer, [Group([idle, good, bad], [9.0, 1.0, 0.0], 0)], UpdateConfig(), {})
    assert report.tokens == 8  # four of each of the others
    assert report.reward == pytest.approx(10 / 3)
    assert report.baselines[""].value == pytest.approx(10 / 3)
    fresh = Policy.load(DEFAULT_FOLDER, threads=1)
    _, behind, last = moved(fresh, [Group([idle, good, bad], [9.0, 1.0, 0.0], 0)])
    assert behind < 0  # better than the other, and worse than the mean
    assert last < 0


@pytest.mark.parametrize("count_flat", [False, True])
def test_a_group_of_which_nothing_is_to_be_learnt_leaves_the_step_as_it_is(policy, count_flat):
    taught = Group([base_model(policy, "1248"), base_model(policy, "9000")], [1.0, 0.0], 0)
    idle = Group([base_model(policy, "1284", advantage=0.0)] * 2, [0.0, 0.0], 0)
    norms = []
    for groups in ([taught], [taught, idle]):
        other = Policy.load(DEFAULT_FOLDER, threads=1)
        config = UpdateConfig(count_flat=count_flat)
        report = update(other, Optimizer(other, OptimizerConfig()), groups, config, {})
        norms.append(report.gradient_norm)
    assert report.zero_variance == 1
    assert norms[0] == norms[1]


def test_shaped_advantages_train_a_group_of_equal_rewards(policy):
    shaped = Group([base_model(policy, "73", advantage=1.0), base_model(policy, "90")], [1.0, 1.0], 0)
    report = update(policy, Optimizer(policy, OptimizerConfig()), [shaped], UpdateConfig(), {})
    assert (report.zero_variance, report.tokens) == (0, 4)
    assert report.gradient_norm > 0


def advantages(kind: AdvantageKind, rewards: list[float], agents: list[str]) -> list[float]:
    values = np.array(rewards, np.float64)
    return group_advantages(kind, values, Baseline(0.25), agents).tolist()


@pytest.mark.parametrize("kind", list(AdvantageKind))
def test_agents_are_compared_with_themselves(kind):
    first, second = [1.0, 0.0, 1.0, 1.0], [-1.0, 0.5, -1.0, 0.0]
    together = advantages(kind, [*first, *second], ["white"] * 4 + ["black"] * 4)
    assert together == advantages(kind, first, []) + advantages(kind, second, [])
    turns = [reward for pair in zip(first, second, strict=True) for reward in pair]
    assert advantages(kind, turns, ["white", "black"] * 4) == [
        value for pair in zip(together[:4], together[4:], strict=True) for value in pair
    ]


@pytest.mark.parametrize("kind", list(AdvantageKind))
@pytest.mark.parametrize("agents", [[], [""] * 4, ["one"] * 4, ["a", "b", "c", "d"]])
def test_groups_of_one_agent_or_of_single_games_are_compared_as_a_whole(kind, agents):
    rewards = [1.0, 0.0, -2.0, 0.5]
    assert advantages(kind, rewards, agents) == advantages(kind, rewards, [])


def test_an_agent_that_played_once_is_compared_with_the_whole_group():
    rewards, agents = [4.0, 0.0, 2.0], ["judge", "player", "player"]
    assert advantages(AdvantageKind.DR_GRPO, rewards, agents) == [2.0, -1.0, 1.0]


@pytest.mark.parametrize("kind", COMPARING)
def test_a_game_that_one_side_always_wins_teaches_nothing(kind):
    agents, rewards = ["white", "black"] * 3, np.array([1.0, -1.0] * 3)
    assert not has_signal(kind, rewards, agents)
    assert not np.any(advantages(kind, rewards.tolist(), agents))
    assert has_signal(kind, rewards)
    assert has_signal(kind, np.array([1.0, -1.0] * 2 + [0.0, 0.0]), agents)
    assert has_signal(kind, np.array([1.0, -1.0, -1.0]), ["white", "black", "black"])


@pytest.mark.parametrize("rewards", [(1.0, 0.5), (-0.5, -1.0)])
def test_an_update_compares_agents_with_themselves(policy, rewards):
    """One side wins always, by more or by less: the whole group's mean lies beyond both. The other side says
    the same twice, which cancels."""
    better, worse = rewards
    ours = [base_model(policy, "1248", agent="ours"), base_model(policy, "9000", agent="ours")]
    theirs = [base_model(policy, "73", agent="theirs")] * 2
    group = Group([*ours, *theirs], [better, worse, -better, -worse], 0)
    gained, lost, *_ = moved(policy, [group])
    assert gained > 0 > lost
