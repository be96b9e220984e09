"""Samples in step: one call of the policy for all, trajectories by what was said, random streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from nous_node.envs.environment import (
    Completion,
    GenerateRequest,
    Message,
    Piece,
    PolicySettings,
    Tokenizer,
    Tool,
)
from nous_node.envs.lockstep import Lockstep, NoRoom, Sample
from nous_node.protocol.rollouts import Role

EOS = 258
START = 257
TOOL = Tool("look", "Looks.", "{}")


class ByteChat:
    """`<role:text>` for each message; an answer is all text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), /) -> list[Piece]:
        told = "".join(f"[{tool.name}]" for tool in tools)
        told += "".join(f"<{message.role}:{message.content}>" for message in messages)
        return [Piece(Role.USER, [*self._tokenizer.encode(told), START])]

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = (), /
    ) -> list[Piece]:
        close = [] if tokens[-1] == EOS else [Piece(Role.ASSISTANT, [EOS])]
        return [*close, *self.prompt(messages)]

    def parse(self, tokens: Sequence[int], /) -> Message:
        return Message("assistant", self._tokenizer.decode([one for one in tokens if one < 256]))


class Says:
    """A policy that says the number of the trajectory and of the turn."""

    def __init__(self, settings: PolicySettings) -> None:
        self.tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group = settings.group
        self.max_tokens = settings.max_tokens
        self.context = settings.context
        self.logprob_format = settings.logprob_format
        self.calls: list[list[tuple[int, str]]] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.calls.append([(one.trajectory, self.tokenizer.decode(one.tokens)) for one in requests])
        said = [
            [*self.tokenizer.encode(f"{one.trajectory}.{one.start}"), EOS][: one.max_tokens]
            for one in requests
        ]
        return [
            Completion(tokens, [0.0] * len(tokens), "stop" if tokens[-1] == EOS else "length")
            for tokens in said
        ]


Making = Callable[..., Says]
Play = Callable[[Sample], Awaitable[Any]]


@pytest.fixture
def says(tokenizer: Tokenizer) -> Making:
    def make(max_tokens: int = 40, context: int = 400, chat: bool = True, kind: type[Says] = Says) -> Says:
        form = ByteChat(tokenizer) if chat else None
        return kind(PolicySettings(tokenizer, 3, max_tokens, context, frozenset([EOS]), "f32", form))

    return make


def played(policy: Says, count: int, play: Play, seed: bytes = bytes(32)) -> list[tuple[Sample, Any]]:
    return asyncio.run(Lockstep(policy, seed).play(count, play))


def user(text: str) -> Message:
    return Message("user", text)


def numbers(sample: Sample) -> list[int]:
    return [line.session.trajectory for line in sample.lines]


async def two_turns(sample: Sample, pauses: int = 0) -> str:
    messages = [user(f"s{sample.number}")]
    for _ in range(2):
        for _ in range(pauses):
            await asyncio.sleep(0)
        messages.append((await sample.ask(messages)).message)
        messages.append(user("more"))
    return messages[-2].content


def test_all_samples_are_asked_in_one_call_for_each_turn(says: Making) -> None:
    policy = says()
    results = played(policy, 3, two_turns)
    assert [[number for number, _ in call] for call in policy.calls] == [[0, 1, 2], [0, 1, 2]]
    assert policy.calls[1][1][1] == "<user:s1><257>1.0<258><user:more><257>"
    assert [result for _, result in results] == ["0.4", "1.4", "2.4"]


@pytest.mark.parametrize("pauses", [(0, 0, 0), (0, 9, 2), (7, 0, 1), (1, 2, 30)])
def test_calls_do_not_depend_on_what_samples_wait_for(says: Making, pauses: tuple[int, ...]) -> None:
    policy, other = says(), says()
    played(policy, 3, two_turns)
    played(other, 3, lambda sample: two_turns(sample, pauses[sample.number]))
    assert policy.calls == other.calls


def test_a_sample_that_ends_early_holds_nobody_up(says: Making) -> None:
    async def play(sample: Sample) -> None:
        messages = [user("go")]
        for _ in range(sample.number):
            messages += [(await sample.ask(messages)).message, user("on")]

    policy = says()
    played(policy, 3, play)
    assert [[number for number, _ in call] for call in policy.calls] == [[0, 1], [1]]


def test_a_rewritten_history_is_a_trajectory_of_its_own(says: Making) -> None:
    async def play(sample: Sample) -> None:
        first = [user("page 1")]
        answer = (await sample.ask(first)).message
        await sample.ask([user(f"page 2, note {answer.content}")])
        await sample.ask([*first, answer, user("again")])
        await sample.ask([*first, Message("assistant", answer.content.upper() + "!"), user("again")])

    policy = says()
    results = played(policy, 2, play)
    assert [numbers(sample) for sample, _ in results] == [[0, 2, 4], [1, 3, 5]]
    assert [len(line.turns) for line in results[0][0].lines] == [2, 1, 1]
    assert policy.calls[2][0] == (0, "<user:page 1><257>0.0<258><user:again><257>")


def test_the_same_question_twice_is_two_trajectories(says: Making) -> None:
    async def play(sample: Sample) -> list[str]:
        both = await asyncio.gather(sample.ask([user("q")]), sample.ask([user("q")]))
        return [answer.message.content for answer in both]

    results = played(says(), 2, play)
    assert [result for _, result in results] == [["0.0", "1.0"], ["2.0", "3.0"]]


def test_two_questions_at_once_do_not_share_a_trajectory(says: Making) -> None:
    async def play(sample: Sample) -> None:
        answer = await sample.ask([user("q")])
        history = [user("q"), answer.message]
        await asyncio.gather(sample.ask([*history, user("left")]), sample.ask([*history, user("right")]))

    (sample, _), *_ = played(says(), 1, play)
    assert [len(line.turns) for line in sample.lines] == [2, 1]


def test_other_tools_begin_another_trajectory(says: Making) -> None:
    async def play(sample: Sample) -> None:
        answer = await sample.ask([user("q")], [TOOL])
        history = [user("q"), answer.message, Message("tool", "42", name="look")]
        await sample.ask(history, [TOOL])
        await sample.ask([*history, user("now without")])

    policy = says()
    (sample, _), *_ = played(policy, 1, play)
    assert [line.tools for line in sample.lines] == [(TOOL,), ()]
    assert policy.calls[0][0][1].startswith("[look]<user:q>")


def test_a_cut_answer_is_closed_and_the_conversation_goes_on(says: Making) -> None:
    async def play(sample: Sample) -> None:
        answer = await sample.ask([user("q")], max_tokens=2)
        await sample.ask([user("q"), answer.message, user("and?")])

    policy = says()
    (sample, _), *_ = played(policy, 1, play)
    trained = [(segment.length, segment.trained) for segment in sample.lines[0].session.finish(0.0).segments]
    assert trained == [(9, False), (2, True), (1, False), (12, False), (4, True)]


def test_where_no_token_can_be_sampled_the_question_fails(says: Making) -> None:
    async def play(sample: Sample) -> int:
        messages, turns = [user("q")], 0
        try:
            while True:
                messages += [(await sample.ask(messages)).message, user("go on")]
                turns += 1
        except NoRoom:
            return turns

    results = played(says(max_tokens=8), 2, play)
    assert [turns for _, turns in results] == [2, 2]
    assert results[0][0].lines[0].session.finish(0.0).finish == "stop"


def test_a_trajectory_without_room_takes_no_number(says: Making) -> None:
    async def play(sample: Sample) -> bool:
        try:
            await sample.ask([user("long" * 100 if sample.number == 0 else "short")])
        except NoRoom:
            return False
        return True

    results = played(says(context=100), 3, play)
    assert [fits for _, fits in results] == [False, True, True]
    assert [numbers(sample) for sample, _ in results] == [[], [0], [1]]


@pytest.mark.parametrize("chat", [True, False])
def test_plain_text_uses_no_conversation_format(says: Making, chat: bool) -> None:
    async def play(sample: Sample) -> str:
        answer = await sample.ask([user("one"), user("two")], plain=True)
        return (
            await sample.ask([user("one"), user("two"), answer.message, user("three")], plain=True)
        ).message.content

    policy = says(chat=chat)
    assert played(policy, 1, play)[0][1] == "0.4"
    assert [call[0][1] for call in policy.calls] == ["one\n\ntwo", "one\n\ntwo0.0<258>\n\nthree"]


async def draws(sample: Sample) -> list[float]:
    drawn = [random.random()]
    for _ in range(sample.number):
        await asyncio.sleep(0)
    drawn += await asyncio.gather(_drawn(), _drawn())
    await sample.ask([user("q")])
    return [*drawn, random.random()]


async def _drawn() -> float:
    await asyncio.sleep(0)
    return random.random()


def test_samples_draw_alike_and_change_nothing_outside(says: Making) -> None:
    random.seed(5)
    outside = random.getstate()
    results = [result for _, result in played(says(), 3, draws)]
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) == 4
    assert random.getstate() == outside


def test_another_seed_draws_otherwise(says: Making) -> None:
    assert played(says(), 1, draws)[0][1] != played(says(), 1, draws, bytes([1]) * 32)[0][1]


def test_the_first_failure_ends_all_samples(says: Making) -> None:
    ended = []

    async def play(sample: Sample) -> None:
        try:
            await sample.ask([user("q")])
            if sample.number == 1:
                raise ValueError("a bug")
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(sample.number)

    with pytest.raises(ValueError, match="a bug"):
        played(says(), 3, play)
    assert sorted(ended) == [0, 1, 2]


def test_what_the_policy_raises_is_raised(says: Making) -> None:
    class Broken(Says):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
            raise LookupError("no engine")

    with pytest.raises(LookupError, match="no engine"):
        played(says(kind=Broken), 2, two_turns)


def test_a_loop_that_has_a_task_factory_keeps_it(says: Making) -> None:
    made = []

    def factory(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> Any:
        made.append(work)
        return asyncio.Task(work, loop=loop, **options)

    async def within() -> list[list[float]]:
        asyncio.get_running_loop().set_task_factory(factory)
        return [result for _, result in await Lockstep(says(), bytes(32)).play(2, draws)]

    assert asyncio.run(within()) == [result for _, result in played(says(), 2, draws)]
    assert len(made) >= 2 + 2 * 2
