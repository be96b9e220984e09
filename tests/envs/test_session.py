"""The token log of one trajectory."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.envs.environment import Completion, Policy, PolicySettings
from nous_node.envs.errors import EnvironmentFailed
from nous_node.envs.session import Session, sample_all
from nous_node.protocol.errors import LocalError
from nous_node.protocol.rollouts import Role, Segment, Trajectory, unpack_floats, unpack_tokens

EOS = 258


class Settings:
    """The part of a policy that a session reads."""

    def __init__(self, max_tokens: int, context: int) -> None:
        self.max_tokens = max_tokens
        self.context = context
        self.logprob_format = "f32"


def opened(max_tokens: int = 8, context: int = 32) -> Session:
    return Session(Settings(max_tokens, context), 0)


def answered() -> Session:
    session = opened()
    session.append([1], Role.USER)
    session.request()
    session.take(Completion([EOS], [-1.0], "stop"))
    return session


def test_a_turn_becomes_one_trained_segment_with_its_logprobs() -> None:
    session = opened()
    session.append([1, 2, 3], Role.RAW)
    assert session.request() == ([1, 2, 3], 0, 0, 8)
    session.take(Completion([7, EOS], [-0.5, -0.25], "stop"))
    trajectory = session.finish(1.0, {"correct": 1.0})
    assert unpack_tokens(trajectory.tokens) == [1, 2, 3, 7, EOS]
    assert trajectory.segments == [Segment(3, Role.RAW, False), Segment(2, Role.ASSISTANT, True)]
    assert unpack_floats(trajectory.logprobs) == [-0.5, -0.25]
    assert (trajectory.finish, trajectory.reward) == ("stop", 1.0)


def test_the_second_turn_counts_on_from_the_first() -> None:
    session = opened()
    session.append([1], Role.USER)
    session.request()
    session.take(Completion([7, EOS], [-1.0, -1.0], "stop"))
    session.append([2, 3], Role.TOOL)
    assert session.request(4) == ([1, 7, EOS, 2, 3], 0, 2, 4)


def test_an_append_beyond_the_context_is_cut_and_ends_the_trajectory() -> None:
    session = opened(context=4)
    session.append([1], Role.USER)
    session.request()
    session.take(Completion([7, EOS], [-1.0, -1.0], "stop"))
    session.append([2, 3, 4], Role.TOOL)
    assert session.room == 0
    trajectory = session.finish(0.0)
    assert unpack_tokens(trajectory.tokens) == [1, 7, EOS, 2]
    assert trajectory.finish == "length"


def test_a_request_never_exceeds_the_room() -> None:
    session = opened(max_tokens=8, context=6)
    session.append([1, 2], Role.USER)
    assert session.request(100).max_tokens == 4


@pytest.mark.parametrize(
    "completion",
    [
        Completion([], [], "stop"),
        Completion([1] * 9, [-1.0] * 9, "length"),
        Completion([1, 2], [-1.0], "stop"),
        Completion([1, 2], [-1.0, -1.0], "length"),
    ],
)
def test_a_completion_that_does_not_fit_its_request_is_an_engine_error(completion: Completion) -> None:
    session = opened()
    session.append([1], Role.USER)
    session.request()
    with pytest.raises(LocalError, match=r"[Tt]he engine"):
        session.take(completion)


def test_a_session_without_prompt_cannot_ask() -> None:
    with pytest.raises(EnvironmentFailed, match="no prompt"):
        opened().request()


def test_a_session_without_room_cannot_ask() -> None:
    session = opened(context=2)
    session.append([1, 2, 3], Role.USER)
    with pytest.raises(EnvironmentFailed, match="no room"):
        session.request()


def test_a_session_that_waits_takes_nothing_else() -> None:
    session = opened()
    session.append([1], Role.USER)
    session.request()
    with pytest.raises(EnvironmentFailed, match="waits for the policy"):
        session.append([2], Role.USER)


@pytest.mark.parametrize("last_word", [[], [2, 3]])
def test_a_trajectory_that_its_environment_ends_is_cut(last_word: list[int]) -> None:
    session = opened()
    session.append([1], Role.USER)
    session.request(2)
    session.take(Completion([4, 5], [-1.0, -1.0], "length"))
    session.append(last_word, Role.USER)
    trajectory = session.finish(0.0)
    assert (trajectory.finish, unpack_tokens(trajectory.tokens)) == ("cut", [1, 4, 5, *last_word])


def test_a_turn_that_stopped_and_was_answered_is_cut() -> None:
    session = answered()
    session.append([2], Role.TOOL)
    assert session.finish(0.0).finish == "cut"


def test_a_trajectory_without_a_sampled_token_fails_the_environment() -> None:
    session = opened()
    session.append([1], Role.USER)
    with pytest.raises(EnvironmentFailed, match="no sampled token"):
        session.finish(0.0)


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e7])
def test_a_reward_out_of_range_fails_the_environment(reward: float) -> None:
    with pytest.raises(EnvironmentFailed, match="out of range"):
        answered().finish(reward)


@pytest.mark.parametrize("advantages", [[], [1.0, 2.0], [math.nan]])
def test_advantages_are_one_finite_number_a_sampled_token(advantages: list[float]) -> None:
    with pytest.raises(EnvironmentFailed, match="advantage"):
        answered().finish(0.0, advantages=advantages)


@pytest.mark.parametrize("advantage", [math.nan, -math.inf, 1e7])
def test_an_advantage_out_of_range_fails_the_environment(advantage: float) -> None:
    with pytest.raises(EnvironmentFailed, match="advantage"):
        answered().finish(0.0, advantage=advantage)


def test_a_trajectory_has_one_kind_of_advantage() -> None:
    with pytest.raises(EnvironmentFailed, match="both"):
        answered().finish(0.0, advantages=[1.0], advantage=1.0)


@pytest.mark.parametrize("advantage", [0, -2.5])
def test_one_advantage_goes_with_the_trajectory(advantage: float) -> None:
    assert answered().finish(0.0, advantage=advantage).advantage == advantage


def said(session: Session, tokens: list[int]) -> list[int]:
    """What the policy is asked with before it says this."""
    asked = session.request(len(tokens)).tokens
    finish = "stop" if tokens[-1] == EOS else "length"
    session.take(Completion(tokens, [-1.0] * len(tokens), finish))
    return asked


def test_a_branch_sees_its_own_path_and_nothing_else() -> None:
    session = opened()
    session.append([1, 2], Role.USER)
    root = session.last
    assert said(session, [5, 6]) == [1, 2]
    first = session.last
    session.branch(root)
    assert said(session, [7]) == [1, 2]
    session.append([3], Role.TOOL)
    assert said(session, [8]) == [1, 2, 7, 3]
    session.branch(first)
    assert session.path == [1, 2, 5, 6]
    assert said(session, [EOS]) == [1, 2, 5, 6]
    trajectory = session.finish(1.0)
    assert trajectory.parents == [-1, 0, 0, 2, 3, 1]
    assert unpack_tokens(trajectory.tokens) == [1, 2, 5, 6, 7, 3, 8, EOS]
    assert (trajectory.finish, session.sampled) == ("stop", 5)


def test_branches_count_their_sampled_tokens_together() -> None:
    session = opened(max_tokens=4)
    session.append([1], Role.USER)
    said(session, [5, 6])
    session.branch(0)
    assert session.request().start == 2
    session.take(Completion([5, 6], [-1.0, -1.0], "length"))
    session.branch(0)
    assert session.room == 0
    assert session.finish(0.0).finish == "length"


@pytest.mark.parametrize("segment", [-2, 2, 7])
def test_a_branch_from_nowhere_fails_the_environment(segment: int) -> None:
    session = answered()
    with pytest.raises(EnvironmentFailed, match="no segment"):
        session.branch(segment)


def test_a_new_root_needs_a_prompt() -> None:
    session = answered()
    session.branch(-1)
    with pytest.raises(EnvironmentFailed, match="no prompt"):
        session.request()
    session.append([4], Role.USER)
    assert said(session, [5]) == [4]


def test_going_on_from_the_end_is_no_branch() -> None:
    session = answered()
    session.branch(0)
    session.branch(1)
    session.append([2], Role.TOOL)
    assert session.finish(0.0).parents is None


def test_many_sessions_are_sampled_in_one_call(policy: Policy, settings: PolicySettings) -> None:
    sessions = [Session(policy, index) for index in range(3)]
    for session in sessions:
        session.append([1, 2], Role.RAW)
    completions = asyncio.run(sample_all(policy, sessions))
    assert [session.tokens[2:] for session in sessions] == [c.tokens for c in completions]
    assert asyncio.run(sample_all(policy, [])) == []


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 257), max_size=6),
        st.lists(st.integers(0, 257), min_size=1, max_size=6),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@given(turns, st.integers(1, 16), st.integers(1, 40))
def test_segments_masks_and_logprobs_always_agree(
    script: list[tuple[list[int], list[int], bool]], max_tokens: int, context: int
) -> None:
    session = opened(max_tokens, context)
    session.append([1], Role.SYSTEM)
    expected, sampled = [1], 0
    for appended, said, stops in script:
        fitting = appended[: context - len(expected)]
        session.append(appended, Role.USER)
        expected += fitting
        assert session.tokens == expected
        if not session.room:
            break
        request = session.request(len(said))
        assert request.tokens == expected
        assert request.start == sampled
        tokens = said[: request.max_tokens]
        if stops:
            tokens[-1] = EOS
        session.take(Completion(tokens, [-1.0] * len(tokens), "stop" if stops else "length"))
        expected, sampled = expected + tokens, sampled + len(tokens)
    if sampled or not session.room:
        _check_trajectory(session.finish(0.0), expected, sampled, max_tokens, context)
    assert len(expected) <= context
    assert sampled <= max_tokens


def _check_trajectory(
    trajectory: Trajectory, expected: list[int], sampled: int, max_tokens: int, context: int
) -> None:
    assert unpack_tokens(trajectory.tokens) == expected
    assert sum(segment.length for segment in trajectory.segments) == len(expected)
    assert sum(segment.length for segment in trajectory.segments if segment.trained) == sampled
    assert len(unpack_floats(trajectory.logprobs)) == sampled
    full = sampled == max_tokens or len(expected) == context
    match trajectory.finish:
        case "stop":
            assert expected[-1] == EOS
        case "length":
            assert full
        case "cut":
            assert not full
            assert sampled
