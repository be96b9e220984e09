"""Messages to text to tokens and back, as environments written for Atropos go: always the policy's tokens."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest

from nous_node.envs.atropos_speech import Speech
from nous_node.envs.atropos_tokenizer import PolicyTokenizer
from nous_node.envs.chat import ModelChat, load_chat
from nous_node.envs.conversation import Conversations, Player
from nous_node.envs.environment import Chat, Completion, GenerateRequest, Policy
from nous_node.envs.errors import EnvironmentFailed

from .chat_worlds import CREATED, STYLES, Spoken, write_folder

FIRST = {"role": "user", "content": "2 + 2?"}
SECOND = {"role": "user", "content": "And 3 + 3?"}


@dataclass
class Wild:
    """Says any bytes at all, whole characters or not, and mostly a stop token behind them."""

    chat: Chat | None
    tokenizer: Spoken
    group = 3
    max_tokens = 64
    context = 2048
    logprob_format = "f32"

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return [self._said(request) for request in requests]

    def _said(self, request: GenerateRequest) -> Completion:
        stream = hashlib.shake_256(repr(request).encode()).digest(32)
        count = 1 + stream[0] % 6
        if count >= request.max_tokens or stream[1] < 64:
            tokens = list(stream[2 : 2 + request.max_tokens])[:8]
            tokens = (tokens * request.max_tokens)[: request.max_tokens]
            return Completion(tokens, [-1.0] * len(tokens), "length")
        tokens = [*stream[2 : 2 + count], self.tokenizer.eos_id]
        return Completion(tokens, [-0.5] * len(tokens), "stop")


@pytest.fixture(scope="module", params=[("qwen3", "merges"), *((name, "bytes") for name in STYLES)])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelChat:
    name, kind = request.param
    folder = write_folder(tmp_path_factory.mktemp("model") / name, kind, STYLES[name])
    return load_chat(folder, "template", CREATED)


@pytest.fixture
def wild(chat: ModelChat) -> Wild:
    return Wild(chat, Spoken(chat))


def spoken(policy: Policy, play: Callable[[Speech], Awaitable[None]]) -> Speech:
    """The speech of a group, after it was played; every trajectory is as long as its session."""
    conversations = Conversations(policy, 1)
    heard: list[Speech] = []

    async def episode(player: Player) -> None:
        heard.append(Speech(player, policy))
        await play(heard[0])

    asyncio.run(conversations.play(episode))
    sessions = conversations.players[0].sessions
    assert [line.tokens for line in heard[0].lines()] == [session.tokens for session in sessions]
    assert [len(line.logprobs) for line in heard[0].lines()] == [session.sampled for session in sessions]
    return heard[0]


def test_a_conversation_that_is_rendered_again_has_the_tokens_that_were_sampled(wild: Wild) -> None:
    async def play(speech: Speech) -> None:
        tokenizer = PolicyTokenizer(speech)
        prompt = tokenizer.apply_chat_template([FIRST], add_generation_prompt=True)
        for answer in await speech.chat({"messages": [FIRST], "n": 3, "max_tokens": 8}):
            assert answer.prompt == prompt
            said = [FIRST, {"role": "assistant", "content": answer.content}]
            first = next(one for one in speech.spoken if one.content.strip() == answer.content.strip())
            assert tokenizer.apply_chat_template(said) == [*prompt, *first.tokens]

    spoken(wild, play)


def test_turns_through_text_are_one_trajectory_of_literal_tokens(wild: Wild) -> None:
    """As a server does that tracks its conversations by their text."""

    async def play(speech: Speech) -> None:
        tokenizer = PolicyTokenizer(speech)
        messages, known, before = [FIRST], "", list[int]()
        for _ in range(4):
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert prompt.startswith(known)
            ids = tokenizer.encode(prompt)
            (answer,) = await speech.complete({"prompt": prompt, "input_ids": ids, "max_tokens": 8})
            assert answer.prompt == ids
            assert answer.prompt[: len(before)] == before
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            known, before = prompt + text, answer.all
            messages = [*messages, {"role": "assistant", "content": text}, SECOND]

    speech = spoken(wild, play)
    (line,) = speech.lines()
    assert len(line.spans) == 4


def test_samples_whose_words_are_alike_go_on_each_in_its_own_trajectory(wild: Wild) -> None:
    async def play(speech: Speech) -> None:
        answers = await speech.chat({"messages": [FIRST], "n": 3, "max_tokens": 2})
        histories = [[FIRST, {"role": "assistant", "content": one.content}, SECOND] for one in answers]
        await asyncio.gather(*[speech.chat({"messages": one, "max_tokens": 4}) for one in histories])

    assert [len(line.spans) for line in spoken(wild, play).lines()] == [2, 2, 2]


def test_the_beginning_of_an_answer_is_put_behind_the_prompt(wild: Wild) -> None:
    async def play(speech: Speech) -> None:
        tokenizer = PolicyTokenizer(speech)
        prompt = tokenizer.apply_chat_template([FIRST], add_generation_prompt=True, tokenize=False)
        ids = tokenizer.apply_chat_template([FIRST], add_generation_prompt=True)
        (answer,) = await speech.complete({"prompt": prompt + "It is", "max_tokens": 4})
        assert answer.prompt == [*ids, *wild.tokenizer.encode("It is")]
        assert tokenizer.encode(prompt + "It is") == answer.prompt

    spoken(wild, play)


def test_a_stop_text_ends_what_the_environment_sees_and_nothing_else(wild: Wild) -> None:
    async def play(speech: Speech) -> None:
        (whole,) = await speech.chat({"messages": [FIRST], "max_tokens": 8})
        stop = whole.content[1:2]
        (cut,) = await speech.complete({"prompt": "2 + 2 =", "stop": [stop or "x", speech.policy], "n": 1})
        assert (stop or "x") not in cut.content
        assert cut.tokens == speech.spoken[-1].tokens

    spoken(wild, play)


def test_plain_text_goes_on_as_text(wild: Wild) -> None:
    base = Wild(None, wild.tokenizer)

    async def play(speech: Speech) -> None:
        (first,) = await speech.complete({"prompt": "Q: 2 + 2?\nA:", "max_tokens": 6})
        assert first.prompt == wild.tokenizer.encode("Q: 2 + 2?\nA:")
        await speech.complete({"prompt": f"Q: 2 + 2?\nA:{first.content}\nQ: 3 + 3?\nA:", "max_tokens": 6})
        ids = wild.tokenizer.encode("other")
        (third,) = await speech.complete({"prompt": "", "input_ids": ids, "max_tokens": 6})
        assert third.prompt == ids
        with pytest.raises(EnvironmentFailed, match="chat model"):
            PolicyTokenizer(speech).apply_chat_template([FIRST])

    assert [len(line.spans) for line in spoken(base, play).lines()] == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"messages": [FIRST], "n": 100_000}, "100000 answers"),
        ({"messages": [{"role": "user", "content": 5}]}, "speak text"),
        ({"messages": []}, "nothing"),
        ({"prompt": ""}, "nothing"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(
    arguments: dict[str, object], words: str, wild: Wild
) -> None:
    async def play(speech: Speech) -> None:
        asked = speech.chat if "messages" in arguments else speech.complete
        with pytest.raises(EnvironmentFailed, match=words):
            await asked(arguments)

    spoken(wild, play)


def test_an_answer_that_the_policy_did_not_give_has_no_tokens(wild: Wild) -> None:
    async def play(speech: Speech) -> None:
        await speech.chat({"messages": [FIRST], "max_tokens": 4})
        tokenizer = PolicyTokenizer(speech)
        invented = [FIRST, {"role": "assistant", "content": "four, as everybody knows"}]
        with pytest.raises(EnvironmentFailed, match="did not give"):
            tokenizer.apply_chat_template(invented)
        with pytest.raises(EnvironmentFailed, match="tensors"):
            tokenizer.apply_chat_template([FIRST], return_tensors="pt")
        made = tokenizer.apply_chat_template([FIRST], add_generation_prompt=True, return_dict=True)
        assert made["input_ids"] == speech.spoken[0].prompt

    spoken(wild, play)
