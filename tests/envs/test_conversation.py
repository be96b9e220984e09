"""Whole lists of messages, on sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

import pytest

from nous_node.envs.chat import ModelChat, load_chat
from nous_node.envs.conversation import Conversations, Player
from nous_node.envs.environment import (
    Completion,
    EnvironmentInfo,
    GenerateRequest,
    Message,
    Policy,
    PolicySettings,
    Task,
    Tokenizer,
)
from nous_node.envs.errors import EnvironmentFailed
from nous_node.envs.replay import replay
from nous_node.protocol.rollouts import Engine, Role, RolloutGroup, Trajectory, unpack_tokens

from .chat_worlds import CREATED, STYLES, Spoken, write_folder
from .conftest import dreamt


class Speaker:
    """A policy that answers with digits and remembers its batches."""

    logprob_format = "f32"

    def __init__(self, settings: PolicySettings) -> None:
        self.tokenizer: Tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group, self.max_tokens, self.context = settings.group, settings.max_tokens, settings.context
        self.eos = settings.tokenizer.eos_id
        self.batches: list[list[GenerateRequest]] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.batches.append(list(requests))
        return [self._ended(dreamt(request)) for request in requests]

    def _ended(self, said: Completion) -> Completion:
        tokens = [self.eos if one == 258 else one for one in said.tokens]
        return Completion(tokens, said.logprobs, said.finish)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ModelChat:
    folder = write_folder(tmp_path_factory.mktemp("model") / "chatml", "bytes", STYLES["chatml"])
    return load_chat(folder, "template", CREATED)


@pytest.fixture
def speaks(chat: ModelChat) -> PolicySettings:
    return PolicySettings(Spoken(chat), 3, 64, 2048, frozenset([chat.close]), chat=chat)


def user(text: str) -> Message:
    return Message("user", text)


async def talk(player: Player, turns: int = 3) -> float:
    """Asks, and asks on with what it was told."""
    messages = [Message("system", "Be brief."), user("Say a number.")]
    for turn in range(turns):
        reply = await player.say(messages)
        messages += [reply.message, user(f"And number {turn + 2}?")]
    return float(len(messages))


def tried(
    settings: PolicySettings, episode: Callable[[Player], Awaitable[float]]
) -> tuple[list[Trajectory], Speaker]:
    async def run() -> tuple[list[Trajectory], Speaker]:
        speaker = Speaker(settings)
        conversations = Conversations(speaker)
        rewards = await conversations.play(episode)
        return conversations.finish(rewards), speaker

    return asyncio.run(run())


def test_a_conversation_that_goes_on_stays_one_trajectory(speaks: PolicySettings) -> None:
    trajectories, speaker = tried(speaks, talk)
    assert len(trajectories) == 3
    assert [len(batch) for batch in speaker.batches] == [3, 3, 3]
    for trajectory in trajectories:
        assert [segment.trained for segment in trajectory.segments].count(True) == 3
        assert trajectory.reward == 8.0


def test_a_rewritten_history_begins_a_trajectory_of_the_same_sample(speaks: PolicySettings) -> None:
    async def forgetful(player: Player) -> float:
        reply = await player.say([user("Say a number.")])
        await player.say([user("Say a number."), reply.message, user("Another.")])
        if player.sample == 1:
            await player.say([user("In short: a number."), reply.message, user("Another.")])
        return float(player.sample)

    trajectories, speaker = tried(speaks, forgetful)
    assert [one.reward for one in trajectories] == [0.0, 1.0, 2.0, 1.0]
    assert [request.trajectory for request in speaker.batches[2]] == [3]


def test_asking_the_same_again_begins_a_trajectory(speaks: PolicySettings) -> None:
    async def twice(player: Player) -> float:
        for _ in range(2):
            await player.say([user("Say a number.")])
        return 0.0

    trajectories, _ = tried(speaks, twice)
    assert len(trajectories) == 6


def test_indices_do_not_depend_on_how_long_players_take(speaks: PolicySettings) -> None:
    async def slow(player: Player) -> float:
        for turn in range(3):
            for _ in range((7 * player.sample + 5 * turn) % 11 * 40):
                await asyncio.sleep(0)
            await player.say([user(f"Turn {turn}, sample {player.sample}.")])
        return 0.0

    async def quick(player: Player) -> float:
        for turn in range(3):
            await player.say([user(f"Turn {turn}, sample {player.sample}.")])
        return 0.0

    assert tried(speaks, slow)[0] == tried(speaks, quick)[0]


def test_players_of_different_lengths_go_on_without_each_other(speaks: PolicySettings) -> None:
    async def uneven(player: Player) -> float:
        return await talk(player, 1 + player.sample)

    trajectories, speaker = tried(speaks, uneven)
    assert [len(batch) for batch in speaker.batches] == [3, 2, 1]
    assert len(trajectories) == 3


def test_answers_that_were_asked_for_together_are_sessions_that_go_on(speaks: PolicySettings) -> None:
    from nous_node.envs.transcripts import Ask

    async def several(player: Player) -> float:
        asked = (user("Say a number."),)
        replies = await player.ask(Ask(asked, True, (), 4, None, (), ""))
        more = [player.say([*asked, reply.message, user("On.")]) for reply in replies]
        assert len(await asyncio.gather(*more)) == 4
        return 1.0

    async def run() -> list[Trajectory]:
        conversations = Conversations(Speaker(speaks), samples=1)
        return conversations.finish(await conversations.play(several))

    trajectories = asyncio.run(run())
    assert [[s.trained for s in one.segments].count(True) for one in trajectories] == [2, 2, 2, 2]


def test_agents_have_sessions_of_their_own(speaks: PolicySettings) -> None:
    async def two(player: Player) -> float:
        for agent in ("left", "right"):
            await player.say([user("Say a number.")], agent=agent)
        return 0.0

    assert [one.agent for one in tried(speaks, two)[0]] == ["left"] * 3 + ["right"] * 3


def test_an_answer_without_its_thinking_is_known_again(speaks: PolicySettings) -> None:
    async def strips(player: Player) -> float:
        reply = await player.say([user("Say a number.")])
        told = Message("assistant", reply.message.content.strip() + " ")
        await player.say([user("Say a number."), told, user("Another.")])
        return 0.0

    assert len(tried(speaks, strips)[0]) == 3


def test_text_goes_on_without_being_tokenised_again(speaks: PolicySettings) -> None:
    async def writes(player: Player) -> float:
        first = await player.go_on("1, 2, ", stop=["9"])
        text = "1, 2, " + speaks.tokenizer.decode([one for one in first.tokens if one < 256])
        second = await player.go_on(text + " and ")
        assert second.prompt[: len(first.prompt + first.tokens)] == first.prompt + first.tokens
        third = await player.go_on(second.prompt + second.tokens + [44])
        assert third.prompt[-1] == 44
        return 0.0

    trajectories, _ = tried(speaks, writes)
    assert len(trajectories) == 3
    assert {segment.role for segment in trajectories[0].segments} == {Role.RAW, Role.ASSISTANT}


def test_text_goes_on_where_tokens_stood_and_nowhere_else(speaks: PolicySettings) -> None:
    async def writes(player: Player) -> float:
        first = await player.go_on(speaks.tokenizer.encode("1, 2, "))
        said = speaks.tokenizer.decode([one for one in first.tokens if one < 256])
        second = await player.go_on("1, 2, " + said + " and ")
        assert second.prompt[: len(first.prompt + first.tokens)] == first.prompt + first.tokens
        other = await player.go_on(said + " and ")
        assert other.prompt == speaks.tokenizer.encode(said + " and ")
        return 0.0

    assert len(tried(speaks, writes)[0]) == 6


def test_a_reply_without_room_is_empty(speaks: PolicySettings) -> None:
    async def endless(player: Player) -> float:
        messages = [user("Say a number.")]
        while True:
            reply = await player.say(messages)
            if not reply.tokens:
                assert reply.finish == "length"
                return float(len(messages))
            messages += [reply.message, user("On.")]

    trajectories, _ = tried(speaks, endless)
    assert all(one.finish == "length" for one in trajectories)


def test_a_player_that_fails_ends_the_others(speaks: PolicySettings) -> None:
    async def fails(player: Player) -> float:
        await player.say([user("Say a number.")])
        if player.sample == 1:
            raise ZeroDivisionError
        await asyncio.get_running_loop().create_future()
        return 0.0

    with pytest.raises(ZeroDivisionError):
        tried(speaks, fails)


def test_a_prompt_that_does_not_fit_is_an_error(speaks: PolicySettings) -> None:
    async def long(player: Player) -> float:
        await player.say([user("x" * 5000)])
        return 0.0

    with pytest.raises(EnvironmentFailed, match="does not fit the context"):
        tried(speaks, long)


class Talking:
    """An environment whose samples differ in length and rewrite their histories."""

    info: ClassVar[EnvironmentInfo] = EnvironmentInfo("talking", "1", "exact", "pure", False, 8, 1)
    levels = 0

    def task(self, seed: bytes, level: int) -> Task:
        return Task(seed, level, None)

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        conversations = Conversations(policy)
        return conversations.finish(await conversations.play(self._episode))

    async def _episode(self, player: Player) -> float:
        messages = [user("Say a number.")]
        total = 0.0
        for turn in range(3 + player.sample):
            reply = await player.say(messages, max_tokens=6)
            total += len(reply.message.content)
            if len(reply.message.content) % 3 == turn % 3:
                messages = [user(f"So far {total}.")]
            else:
                messages += [reply.message, user("Another.")]
        return total / 100


def test_a_replay_asks_for_what_was_recorded(speaks: PolicySettings) -> None:
    environment = Talking()
    task = environment.task(bytes(32), 0)
    trajectories = asyncio.run(environment.collect_trajectories(task, Speaker(speaks)))
    assert len(trajectories) > 3
    group = RolloutGroup(bytes(32), 0, "talking", Engine("dream", "1", "float32", "cpu"), trajectories)
    assert replay(environment, task, group, speaks, 0.0) == trajectories
    assert all(unpack_tokens(one.tokens) for one in trajectories)
