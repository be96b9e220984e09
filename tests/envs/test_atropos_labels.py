"""Scored groups of Atropos as literal data: labels, sentinels, overrides, and what the policy never said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nous_node.envs.atropos_labels import Line, Worth, worths
from nous_node.envs.errors import EnvironmentFailed

FIRST = Line([1, 2, 3, 65, 66, 9], [(3, 6)], [-0.5, -0.25, -1.0])
"""A prompt of three tokens and an answer of three."""
SECOND = Line([1, 2, 3, 67, 9], [(3, 5)], [-2.0, -0.125])
TURNS = Line([1, 2, 65, 9, 5, 66, 67, 9], [(2, 4), (5, 8)], [-1.0, -2.0, -3.0, -4.0, -5.0])
"""Two answers with a token of the environment between them."""
M = -100


def decode(tokens: Sequence[int]) -> str:
    """Text in which 68 looks like 67: another tokenisation of the same words."""
    return "".join(chr(67 if token == 68 else token) for token in tokens)


def group(
    tokens: list[list[int]], masks: list[list[int]], scores: list[float], **more: Any
) -> dict[str, Any]:
    return {"tokens": tokens, "masks": masks, "scores": scores, **more}


PAIR = group(
    [FIRST.tokens, SECOND.tokens],
    [[M, M, M, 65, 66, 9], [M, M, M, 67, 9]],
    [1.0, -1.0],
)


def found(*groups: Mapping[str, Any], lines: Sequence[Line] = (FIRST, SECOND)) -> list[Worth]:
    return worths(groups, lines, decode)


def test_scores_are_rewards_in_the_order_of_the_lines() -> None:
    assert found(PAIR) == [Worth(1.0), Worth(-1.0)]
    swapped = {key: value[::-1] for key, value in PAIR.items()}
    assert found(swapped) == [Worth(1.0), Worth(-1.0)]


def test_sentinels_where_nothing_was_sampled_are_left_out() -> None:
    logprobs = [[1.0, 1.0, 1.0, -0.5, -0.25, -1.0], [1.0, 1.0, 1.0, -2.0, -0.125]]
    assert found({**PAIR, "inference_logprobs": logprobs}) == found(PAIR)


@pytest.mark.parametrize(
    ("logprob", "words"), [(1.0, "the mark of a token that was not sampled"), (-0.7, "not -0.5")]
)
def test_log_probs_of_trained_tokens_are_the_policys(logprob: float, words: str) -> None:
    logprobs = [[1.0, 1.0, 1.0, logprob, -0.25, -1.0], [1.0, 1.0, 1.0, -2.0, -0.125]]
    with pytest.raises(EnvironmentFailed, match=words):
        found({**PAIR, "inference_logprobs": logprobs})


def test_advantages_are_those_of_sampled_tokens() -> None:
    advantages = [[0.0, 0.0, 0.0, 1.0, 2.0, 3.0], [7.0, 7.0, 7.0, -1.0, -2.0]]
    assert [one.advantages for one in found({**PAIR, "advantages": advantages})] == [
        [1.0, 2.0, 3.0],
        [-1.0, -2.0],
    ]


@pytest.mark.parametrize(
    ("overrides", "advantages"),
    [
        ({"overrides": [{"set_advantage_to_zero": True}, {}]}, [0.0, None]),
        ({"overrides": [{"set_advantage_to_zero": False}, None]}, [None, None]),
        ({"overrides": [{"other": True}, {"set_advantage_to_zero": 1}]}, [None, 0.0]),
        ({"overrides": []}, [None, None]),
        ({"group_overrides": {"set_advantage_to_zero": True}}, [0.0, 0.0]),
        ({"group_overrides": {}}, [None, None]),
    ],
)
def test_overrides_set_advantages_to_zero(overrides: dict[str, Any], advantages: list[float | None]) -> None:
    worth = found({**PAIR, **overrides})
    assert [one.advantage for one in worth] == advantages
    assert [one.reward for one in worth] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("labels", "advantages"),
    [
        ([M, M, 65, 9, M, 66, 67, 9], None),
        ([M, M, M, M, M, 66, 67, 9], [0.0, 0.0, 0.5, 0.5, 0.5]),
        ([M, M, 65, M, M, 66, M, M], [0.5, 0.0, 0.5, 0.0, 0.0]),
    ],
)
def test_sampled_tokens_without_a_label_do_not_learn(
    labels: list[int], advantages: list[float] | None
) -> None:
    lines = [TURNS, SECOND]
    made = found(group([TURNS.tokens, SECOND.tokens], [labels, [M, M, M, 67, 9]], [1.0, 0.0]), lines=lines)
    assert made == [Worth(1.0, advantages), Worth(0.0)]


def test_a_sequence_of_which_nothing_is_trained_counts_in_the_baseline_alone() -> None:
    made = found(group([FIRST.tokens], [[M] * 6], [1.0]), lines=[FIRST])
    assert made == [Worth(1.0, advantage=0.0)]


@pytest.mark.parametrize(
    ("tokens", "labels"),
    [
        ([1, 2, 3, 67, 9, 5], [M, M, M, 67, 9, M]),  # what a template puts behind an answer
        ([1, 2, 3, 67], [M, M, M, 67]),  # the stop token left out
        ([1, 2, 3, 68, 9], [M, M, M, 68, 9]),  # the same words in other tokens
        ([1, 2, 3, 68, 9, 5], [M, M, M, 68, 9, M]),
    ],
)
def test_the_tokens_of_a_trajectory_are_those_that_were_sampled(tokens: list[int], labels: list[int]) -> None:
    (made,) = found(group([tokens], [labels], [1.0]), lines=[SECOND])
    trained = made.advantages or [1.0, 1.0]
    assert made.reward == 1.0
    assert len(trained) == 2


def test_two_answers_of_the_same_words_are_told_apart_by_their_order() -> None:
    twins = [SECOND, Line([1, 2, 3, 68, 9], [(3, 5)], [-1.0, -1.0])]
    labels = [M, M, M, 67, 9]
    made = found(group([SECOND.tokens, SECOND.tokens], [labels, labels], [1.0, 2.0]), lines=twins)
    assert made == [Worth(1.0), Worth(2.0)]


def test_a_group_that_was_given_up_trains_nothing() -> None:
    assert found() == [Worth(0.0, components={"given_up": 1.0})] * 2
    assert found(group([], [], [])) == found()


def test_what_was_left_out_has_the_mean_reward() -> None:
    made = found({key: value[:1] for key, value in PAIR.items()})
    assert made == [Worth(1.0), Worth(1.0, components={"left_out": 1.0})]


def test_several_groups_keep_their_own_baselines() -> None:
    third = Line([1, 2, 3, 70, 9], [(3, 5)], [-1.0, -1.0])
    other = group([third.tokens], [[M, M, M, 70, 9]], [5.0])
    made = found(PAIR, other, lines=[FIRST, SECOND, third])
    assert made == [Worth(1.0, advantage=1.0), Worth(-1.0, advantage=-1.0), Worth(5.0, advantage=0.0)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"masks": [[M, M, 3, 65, 66, 9], [M] * 5]}, "trains token 2, which the policy did not sample"),
        ({"masks": [[M, M, M, 65, 67, 9], [M] * 5]}, "label 67 at token 4"),
        ({"masks": [[0, 0, 0, 1, 1, 1], [M] * 5]}, "label 0 at token 0"),
        ({"masks": [[M] * 5, [M] * 5]}, "6 tokens and 5 masks"),
        ({"tokens": [[1, 2, 3, 65, 88, 9], SECOND.tokens]}, "from token 4 on"),
        ({"tokens": [[8, 2, 3, 65, 66, 9], SECOND.tokens]}, "from token 0 on"),
        (
            {"tokens": [FIRST.tokens, FIRST.tokens], "masks": [PAIR["masks"][0]] * 2},
            "nothing that the policy",
        ),
        ({"tokens": [["a"], SECOND.tokens]}, "no number"),
        ({"tokens": "text"}, "no list 'tokens'"),
        ({"tokens": None}, "no list 'tokens'"),
        ({"scores": [1.0]}, "1 scores"),
        ({"scores": [float("nan"), 1.0]}, "score nan"),
        ({"scores": ["good", 1.0]}, "no number"),
        ({"advantages": [[1.0] * 6]}, "1 advantages for 2"),
        ({"advantages": [[1.0] * 3, [1.0] * 5]}, "3 advantages"),
        ({"overrides": [{}]}, "1 overrides for 2"),
    ],
)
def test_what_the_policy_did_not_say_is_refused_in_words(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvironmentFailed, match=words):
        found({**PAIR, **wrong})


def test_more_sequences_than_answers_are_refused() -> None:
    tripled = {key: [*value, value[0]] for key, value in PAIR.items()}
    with pytest.raises(EnvironmentFailed, match="every answer was returned already"):
        found(tripled)


def test_advantages_need_literal_tokens() -> None:
    other = group([[1, 2, 3, 68, 9]], [[M, M, M, 68, 9]], [1.0], advantages=[[0.0] * 5])
    with pytest.raises(EnvironmentFailed, match="managed_server"):
        found(other, lines=[SECOND])
