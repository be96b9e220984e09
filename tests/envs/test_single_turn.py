"""Environments of one question and one answer: wording, and what a reply is worth."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.envs.environment import Chat, Completion, Policy, PolicySettings, Score
from nous_node.envs.errors import BadConfig, EnvironmentFailed
from nous_node.envs.single_turn import Wording, collect, held_out_seed, read_wording, score_said
from nous_node.protocol.rollouts import Role, Trajectory, unpack_tokens
from nous_node.protocol.runs import Setting

from .markdown_chat import Markdown


class Says:
    """A policy whose samples say given texts and then stop, or are cut off."""

    def __init__(self, settings: PolicySettings, texts: Sequence[str], ended: bool = True) -> None:
        self.tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group = len(texts)
        self.max_tokens = settings.max_tokens
        self.context = settings.context
        self.logprob_format = settings.logprob_format
        self.texts = texts
        self.ended = ended

    async def generate(self, requests: Sequence[Any]) -> list[Completion]:
        return [self._said(self.texts[one.trajectory], one.max_tokens) for one in requests]

    def _said(self, text: str, room: int) -> Completion:
        tokens = list(text.encode())[: room - 1]
        if self.ended:
            return Completion([*tokens, 258], [-0.5] * (len(tokens) + 1), "stop")
        return Completion((tokens * room)[:room], [-0.5] * room, "length")


def roomy(settings: PolicySettings, chat: Chat | None = None) -> PolicySettings:
    return PolicySettings(settings.tokenizer, 4, 64, 2_048, settings.stop, "f32", chat)


def seven(answer: str) -> Score:
    return Score(float(answer == "7"), {"correct": float(answer == "7")})


def asked(policy: Policy, wording: Wording) -> list[Trajectory]:
    return asyncio.run(collect(policy, wording, "3 + 4?", seven))


@pytest.mark.parametrize(
    ("place", "said", "answer"),
    [
        ("tags", "so <answer>7</answer>", "7"),
        ("tags", "<answer>6</answer> no, <answer> 7\n</answer> done", "7"),
        ("tags", "I put <answer>s in <answer>7</answer>", "7"),
        ("tags", "<answer></answer>", ""),
        ("tags", "7", None),
        ("tags", "<answer>7", None),
        ("tags", "</answer>7<answer>", None),
        ("last-line", "thinking\n 7 \n\n", "7"),
        ("last-line", "7", "7"),
        ("last-line", " \n ", None),
        ("number", "3 + 4 = 7.", "7"),
        ("number", "it is -2.50, I think", "-2.50"),
        ("number", "seven", None),
        ("whole", "\n7 ", "7"),
        ("whole", "it is 7", "it is 7"),
        ("whole", "", None),
    ],
)
def test_the_answer_is_looked_for_where_it_was_asked_for(place: Any, said: str, answer: str | None) -> None:
    assert Wording(answer=place).find(said) == answer


@pytest.mark.parametrize("place", ["tags", "last-line", "number", "whole"])
@given(said=st.text())
def test_any_reply_has_an_answer_or_none(place: Any, said: str) -> None:
    answer = Wording(answer=place).find(said)
    assert answer is None or (answer in said and answer == answer.strip())


@pytest.mark.parametrize("place", ["tags", "last-line", "number", "whole"])
@pytest.mark.parametrize("chat", [False, True])
def test_every_default_wording_has_the_question_once(place: Any, chat: bool) -> None:
    assert Wording(answer=place).text("three {question} and four", chat).count("three {question} and") == 1


def test_a_base_model_gets_text_alone(settings: PolicySettings) -> None:
    (trajectory,) = asked(Says(roomy(settings), ["<answer>7</answer>"]), Wording())
    assert [segment.role for segment in trajectory.segments] == [Role.RAW, Role.ASSISTANT]
    prompt = unpack_tokens(trajectory.tokens)[: trajectory.segments[0].length]
    assert prompt == settings.tokenizer.encode(Wording().text("3 + 4?", False))
    assert (trajectory.reward, trajectory.finish) == (1.0, "stop")


def test_a_chat_model_gets_a_conversation_and_its_thinking_is_no_answer(settings: PolicySettings) -> None:
    wording = Wording(system="Be brief.", answer="whole")
    texts = ["7", "perhaps 8 --- 7", "7 --- 8"]
    trajectories = asked(Says(roomy(settings, Markdown()), texts), wording)
    roles = [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.ASSISTANT]
    assert [segment.role for segment in trajectories[0].segments] == roles
    assert [segment.trained for segment in trajectories[0].segments] == [False, False, False, True]
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 1.0, 0.0]


def test_plain_is_plain_for_a_chat_model_too(settings: PolicySettings) -> None:
    (trajectory,) = asked(Says(roomy(settings, Markdown()), ["7"]), Wording("plain", answer="whole"))
    assert trajectory.segments[0].role == Role.RAW
    assert trajectory.reward == 1.0


def test_chat_without_a_format_fails_with_what_to_do(settings: PolicySettings) -> None:
    with pytest.raises(EnvironmentFailed, match="take a chat model"):
        asked(Says(roomy(settings), ["7"]), Wording("chat"))


def test_an_answer_that_was_cut_off_is_worth_nothing(settings: PolicySettings) -> None:
    policy = Says(roomy(settings), ["<answer>7</answer>"], ended=False)
    (trajectory,) = asked(policy, Wording())
    assert (trajectory.reward, trajectory.finish) == (0.0, "length")
    assert trajectory.components == {"correct": 0.0, "score": 0.0, "format": 0.0}


def test_components_tell_a_wrong_answer_from_a_missing_one() -> None:
    wrong = score_said(Wording(), "<answer>8</answer>", True, seven)
    missing = score_said(Wording(), "8", True, seven)
    assert wrong == Score(0.0, {"correct": 0.0, "score": 0.0, "format": 1.0})
    assert missing == Score(0.0, {"correct": 0.0, "score": 0.0, "format": 0.0})


def test_a_question_that_does_not_fit_is_told(settings: PolicySettings) -> None:
    tight = PolicySettings(settings.tokenizer, 4, 64, 100, settings.stop)
    with pytest.raises(EnvironmentFailed, match="leaves no room in a context of 100"):
        asked(Says(tight, ["7"]), Wording())


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"format": "markdown"}, "format"),
        ({"format": True}, "format"),
        ({"answer": "first-line"}, "answer"),
        ({"template": "no place"}, "template"),
        ({"template": "{question} {question}"}, "template"),
        ({"template": 7}, "template"),
        ({"system": "x" * 20_000}, "system"),
        ({"system": "Be brief.", "format": "plain"}, "system"),
    ],
)
def test_a_bad_wording_is_told_with_what_is_allowed(config: dict[str, Setting], word: str) -> None:
    with pytest.raises(BadConfig, match=word):
        read_wording(config)


def test_other_settings_are_left_to_the_environment() -> None:
    wording, rest = read_wording({"template": "Q: {question}", "answer": "whole", "max_terms": 3})
    assert wording == Wording(template="Q: {question}", answer="whole")
    assert rest == {"max_terms": 3}
    assert wording.text("why", True) == "Q: why"


def test_held_out_seeds_differ_by_environment_and_index() -> None:
    seeds = {held_out_seed(name, index) for name in ("one", "two") for index in range(100)}
    assert len(seeds) == 200
    assert {len(seed) for seed in seeds} == {32}
