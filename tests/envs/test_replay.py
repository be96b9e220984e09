"""Verification by replay."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nous_node.envs.batcher import Batcher, Job
from nous_node.envs.environment import Completion, Environment, Policy, PolicySettings, Task
from nous_node.envs.replay import ReplayPolicy, replay
from nous_node.envs.session import Session, sample_all
from nous_node.envs.sort_digits import SortDigits
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import (
    Role,
    RolloutGroup,
    Segment,
    Trajectory,
    pack_floats,
    pack_tokens,
    unpack_floats,
    unpack_tokens,
)
from nous_node.protocol.tasks import assign

Maker = Callable[[list[Trajectory]], RolloutGroup]
SEED = bytes([3]) * 32


class Case:
    """An environment, its task, and an honest group of it."""

    def __init__(self, environment: Environment, engine: Any, settings: PolicySettings, make: Maker) -> None:
        self.environment = environment
        self.task = environment.task(SEED, 0)
        self.settings = settings
        with Batcher(settings, engine) as batcher:
            outcome = batcher.run([Job(environment, self.task, assign(SEED, [1]))])[0]
        assert isinstance(outcome, list)
        self.group = make(outcome)

    def replay(self, **changes: Any) -> list[float]:
        """Replays the group with the first trajectory changed."""
        first, *others = self.group.trajectories
        return self.replay_group([msgspec.structs.replace(first, **changes), *others])

    def replay_group(self, trajectories: list[Trajectory]) -> list[float]:
        group = msgspec.structs.replace(self.group, trajectories=trajectories)
        made = replay(self.environment, self.task, group, self.settings, 1e-6)
        return [trajectory.reward for trajectory in made]

    def code(self, **changes: Any) -> Code:
        with pytest.raises(RemoteError) as caught:
            self.replay(**changes)
        return caught.value.code


@pytest.fixture
def sort(engine: Any, settings: PolicySettings, group_of: Maker) -> Case:
    return Case(SortDigits({}), engine, settings, group_of)


@pytest.fixture
def guess(engine: Any, settings: PolicySettings, group_of: Maker, toys: Any) -> Case:
    return Case(toys.guess, engine, settings, group_of)


@pytest.fixture
def duel(engine: Any, settings: PolicySettings, group_of: Maker, toys: Any) -> Case:
    return Case(toys.duel, engine, settings, group_of)


@pytest.fixture
def shaped(engine: Any, settings: PolicySettings, group_of: Maker) -> Case:
    return Case(Shaped(), engine, settings, group_of)


class Shaped:
    """One turn of two tokens, a last word of its own, and an advantage of its own."""

    info = SortDigits.info
    levels = 0

    def task(self, seed: bytes, level: int) -> Task:
        return Task(seed, level, None)

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append([1, 2, 3], Role.RAW)
        await sample_all(policy, sessions, 2)
        for session in sessions:
            session.append([4], Role.USER)
        return [session.finish(1.0, advantage=-0.25) for session in sessions]


class Wrong(Shaped):
    """Says whatever it is told of its tokens, past what a session allows."""

    def __init__(self, advantages: bytes) -> None:
        self.advantages = advantages

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        made = await super().collect_trajectories(task, policy)
        return [msgspec.structs.replace(one, advantage=None, advantages=self.advantages) for one in made]


@pytest.fixture
def tree(engine: Any, settings: PolicySettings, group_of: Maker) -> Case:
    return Case(Branching(), engine, settings, group_of)


class Branching(Shaped):
    """Two answers to one prompt, a remark behind each, and another answer behind the first remark."""

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append([1, 2, 3], Role.RAW)
        await sample_all(policy, sessions, 2)
        for session in sessions:
            session.branch(0)
        await sample_all(policy, sessions, 2)
        for session in sessions:
            session.append([5], Role.TOOL)
            session.branch(1)
            session.append([4], Role.TOOL)
        await sample_all(policy, sessions, 2)
        return [session.finish(1.0) for session in sessions]


def test_other_attention_is_seen(tree: Case) -> None:
    first = tree.group.trajectories[0]
    assert first.parents == [-1, 0, 0, 2, 1, 4]
    assert tree.code(parents=[-1, 0, 0, 2, 2, 4]) is Code.PROMPT_MISMATCH
    assert tree.code(parents=[-1, 0, 0, 1, 1, 4]) is Code.SEGMENTS
    assert tree.code(parents=None) is Code.PROMPT_MISMATCH


@pytest.mark.parametrize("name", ["sort", "guess", "duel", "shaped", "tree"])
def test_an_honest_group_replays_to_its_rewards(name: str, request: pytest.FixtureRequest) -> None:
    case: Case = request.getfixturevalue(name)
    assert case.replay() == [trajectory.reward for trajectory in case.group.trajectories]


def test_a_claimed_reward_is_compared_and_never_used(sort: Case) -> None:
    claimed = sort.group.trajectories[0].reward + 0.25
    with pytest.raises(RemoteError) as caught:
        sort.replay(reward=claimed)
    assert caught.value.code is Code.REWARD_MISMATCH
    assert caught.value.measured == pytest.approx(0.25)
    assert caught.value.threshold == 1e-6
    honest = [trajectory.reward for trajectory in sort.group.trajectories]
    assert sort.replay(reward=honest[0] + 1e-7) == honest


def test_a_changed_prompt_is_named_with_its_position(sort: Case) -> None:
    tokens = unpack_tokens(sort.group.trajectories[0].tokens)
    tokens[5] ^= 1
    with pytest.raises(RemoteError, match=r"Trajectory 0 .* token 5") as caught:
        sort.replay(tokens=pack_tokens(tokens))
    assert caught.value.code is Code.PROMPT_MISMATCH


def test_a_changed_answer_of_the_environment_is_seen(guess: Case) -> None:
    first = guess.group.trajectories[0]
    assert len(first.segments) >= 3
    tokens = unpack_tokens(first.tokens)
    tokens[first.segments[0].length + first.segments[1].length + 1] ^= 1
    assert guess.code(tokens=pack_tokens(tokens)) is Code.PROMPT_MISMATCH


def test_a_longer_prompt_is_seen(sort: Case) -> None:
    first = sort.group.trajectories[0]
    head = first.segments[0]
    tokens = [32, *unpack_tokens(first.tokens)]
    segments = [Segment(head.length + 1, head.role, False), *first.segments[1:]]
    assert sort.code(tokens=pack_tokens(tokens), segments=segments) is Code.PROMPT_MISMATCH


def test_another_role_is_seen(sort: Case) -> None:
    first = sort.group.trajectories[0]
    head = Segment(first.segments[0].length, Role.SYSTEM, False)
    assert sort.code(segments=[head, *first.segments[1:]]) is Code.SEGMENTS


def test_attention_that_the_environment_does_not_ask_for_is_seen(sort: Case) -> None:
    assert sort.code(parents=[-1, 0]) is Code.SEGMENTS
    assert sort.code(parents=[-1, -1]) is Code.PROMPT_MISMATCH


def test_a_turn_that_is_left_out_is_seen(guess: Case) -> None:
    first = guess.group.trajectories[0]
    kept = first.segments[:2]
    length = sum(segment.length for segment in kept)
    tokens = unpack_tokens(first.tokens)[:length]
    assert guess.code(tokens=pack_tokens(tokens), segments=kept) is Code.SEGMENTS


def test_a_turn_that_was_added_is_seen(sort: Case) -> None:
    first = sort.group.trajectories[0]
    tokens = [*unpack_tokens(first.tokens), 258]
    segments = [*first.segments, Segment(1, Role.ASSISTANT, True)]
    logprobs = pack_floats([-1.0] * (segments[1].length + 1))
    assert sort.code(tokens=pack_tokens(tokens), segments=segments, logprobs=logprobs) is Code.PROMPT_MISMATCH


def test_a_turn_that_stops_early_is_seen(sort: Case) -> None:
    first = sort.group.trajectories[0]
    head = first.segments[0]
    tokens = [*unpack_tokens(first.tokens)[: head.length], 50]
    segments = [head, Segment(1, Role.ASSISTANT, True)]
    changed = {"tokens": pack_tokens(tokens), "segments": segments, "logprobs": pack_floats([-1.0])}
    assert sort.code(**changed, finish="length") is Code.FINISH


def test_a_turn_that_is_too_long_is_seen(sort: Case) -> None:
    first = sort.group.trajectories[0]
    head = first.segments[0]
    tokens = [*unpack_tokens(first.tokens)[: head.length], *[50] * 13]
    segments = [head, Segment(13, Role.ASSISTANT, True)]
    changed = {"tokens": pack_tokens(tokens), "segments": segments, "logprobs": pack_floats([-1.0] * 13)}
    assert sort.code(**changed) is Code.FINISH


def test_another_finish_is_seen(sort: Case) -> None:
    other = "length" if sort.group.trajectories[0].finish == "stop" else "stop"
    assert sort.code(finish=other) is Code.FINISH


def test_another_agent_is_seen(duel: Case) -> None:
    assert duel.code(agent="right") is Code.SEGMENTS


def test_other_advantages_are_seen(duel: Case) -> None:
    first = duel.group.trajectories[0]
    assert first.advantages is not None
    count = len(first.advantages) // 4
    assert duel.code(advantages=pack_floats([7.0] * count)) is Code.ADVANTAGES
    assert duel.code(advantages=None) is Code.ADVANTAGES


def test_an_advantage_of_another_kind_is_seen(duel: Case) -> None:
    assert duel.code(advantages=None, advantage=7.0) is Code.ADVANTAGES


@pytest.mark.parametrize("changes", [{"advantage": 0.75}, {"advantage": None}, {"advantage": 0.0}])
def test_another_advantage_is_seen(shaped: Case, changes: Any) -> None:
    first = shaped.group.trajectories[0]
    assert first.advantage == pytest.approx(-0.25)
    assert shaped.replay(advantage=first.advantage + 1e-7)
    assert shaped.code(**changes) is Code.ADVANTAGES
    each = pack_floats([first.advantage] * (len(first.logprobs) // 4))
    assert shaped.code(advantage=None, advantages=each) is Code.ADVANTAGES


@pytest.mark.parametrize("own", [[1.0], [0.5, float("nan")], [float("nan"), 0.5], [0.5, float("inf")], []])
def test_advantages_that_an_environment_made_wrong_are_nobodys(shaped: Case, own: list[float]) -> None:
    """They would be learnt from: neither another number of them nor what is no number passes."""
    claimed = [msgspec.structs.replace(one, advantage=None) for one in shaped.group.trajectories]
    claimed = [msgspec.structs.replace(one, advantages=pack_floats([0.5, 0.5])) for one in claimed]
    shaped.environment = Wrong(pack_floats(own))
    with pytest.raises(RemoteError) as caught:
        shaped.replay_group(claimed)
    assert caught.value.code is Code.ADVANTAGES
    shaped.environment = Wrong(pack_floats([0.5, 0.5]))
    assert len(shaped.replay_group(claimed)) == len(claimed)


def test_an_answer_that_was_truncated_is_seen_whatever_it_says_of_its_end(sort: Case) -> None:
    first = sort.group.trajectories[0]
    head = first.segments[0]
    tokens = [*unpack_tokens(first.tokens)[: head.length], 50]
    segments = [head, Segment(1, Role.ASSISTANT, True)]
    changed = {"tokens": pack_tokens(tokens), "segments": segments, "logprobs": pack_floats([-1.0])}
    assert sort.code(**changed, finish="cut") is Code.FINISH


def test_a_turn_limit_of_the_environment_replays(shaped: Case) -> None:
    assert {one.finish for one in shaped.group.trajectories} == {"cut"}
    assert shaped.replay() == [one.reward for one in shaped.group.trajectories]
    assert shaped.code(finish="stop") is Code.FINISH


def test_the_number_of_trajectories_is_compared(sort: Case, duel: Case) -> None:
    for case in (sort, duel):
        honest = case.group.trajectories
        for trajectories in (honest[:-1], [*honest, honest[0]]):
            with pytest.raises(RemoteError) as caught:
                case.replay_group(trajectories)
            assert caught.value.code is Code.GROUP_SIZE


def test_swapped_trajectories_are_seen(duel: Case) -> None:
    first, second, *others = duel.group.trajectories
    with pytest.raises(RemoteError) as caught:
        duel.replay_group([second, first, *others])
    assert caught.value.code is Code.PROMPT_MISMATCH


def test_an_environment_that_raises_is_told_apart_from_a_wrong_group(sort: Case, toys: Any) -> None:
    sort.environment = toys.failing
    with pytest.raises(RemoteError) as caught:
        sort.replay(
            tokens=pack_tokens([1, 258]),
            segments=[Segment(1, Role.RAW, False), Segment(1, Role.ASSISTANT, True)],
            logprobs=pack_floats([-1.0]),
        )
    assert caught.value.code is Code.ENVIRONMENT_FAILED
    assert "a bug in the scorer" in str(caught.value)


def test_an_environment_that_swallows_the_refusal_changes_nothing(sort: Case) -> None:
    class Swallowing(SortDigits):
        async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
            try:
                return await super().collect_trajectories(task, policy)
            except Exception:
                return sort.group.trajectories

    sort.environment = Swallowing({})
    tokens = unpack_tokens(sort.group.trajectories[0].tokens)
    tokens[0] ^= 1
    assert sort.code(tokens=pack_tokens(tokens)) is Code.PROMPT_MISMATCH


def test_what_an_environment_leaves_running_is_cancelled(sort: Case) -> None:
    ended: list[str] = []

    class Leaving(SortDigits):
        async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
            asyncio.get_running_loop().create_task(self._linger()).add_done_callback(
                lambda done: ended.append("cancelled" if done.cancelled() else "ended")
            )
            return await super().collect_trajectories(task, policy)

        async def _linger(self) -> None:
            await asyncio.get_running_loop().create_future()

    sort.environment = Leaving({})
    assert len(sort.replay()) == 4
    assert ended == ["cancelled"]


@pytest.mark.parametrize("form", ["f32", "f16"])
def test_an_environment_sees_log_probs_as_they_are_recorded(
    engine: Any, settings: PolicySettings, group_of: Maker, form: Any
) -> None:
    """Or what it makes of them would differ at the verifier, which has no others."""

    class Sure(SortDigits):
        async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
            session = Session(policy, 0)
            session.append(policy.tokenizer.encode("?"), Role.RAW)
            completion = await session.sample()
            return [session.finish(1e6 * sum(completion.logprobs))]

    def rough(requests: Any) -> list[Completion]:
        tenth = unpack_floats(pack_floats([-0.1]))
        return [one._replace(logprobs=tenth * len(one.tokens)) for one in engine(requests)]

    rules = dataclasses.replace(settings, logprob_format=form)
    case = Case(Sure({}), rough, rules, group_of)
    assert case.replay_group(case.group.trajectories) == [case.group.trajectories[0].reward]


def test_the_replay_policy_hands_out_recorded_logprobs_by_turn(guess: Case) -> None:
    policy = ReplayPolicy(guess.settings, guess.group.trajectories)
    returned = asyncio.run(guess.environment.collect_trajectories(guess.task, policy))
    assert [t.logprobs for t in returned] == [t.logprobs for t in guess.group.trajectories]
