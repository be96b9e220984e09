"""A process that is no host of environments but speaks like one: what it says is bounded and looked at."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from nous_node.envs.chat import KEPT, ModelChat
from nous_node.envs.environment import (
    EnvironmentInfo,
    Message,
    Piece,
    PolicySettings,
    Task,
    Tool,
    ToolCall,
)
from nous_node.envs.errors import BrokenEnvironment, CannotStart, EnvError, EnvironmentFailed
from nous_node.envs.framing import framed
from nous_node.envs.host_answers import LEAST, LEAST_EACH, answered
from nous_node.envs.host_line import Line
from nous_node.envs.host_messages import (
    Cancel,
    ChatExtend,
    ChatParse,
    ChatPrompt,
    Decode,
    Describe,
    Encode,
    Failed,
    Ids,
    Make,
    ToHost,
)
from nous_node.envs.host_process import HostProcess
from nous_node.envs.remote import RemoteHeldOut

from .captive import launch
from .conftest import DreamPolicy

SOON_S = 0.5
LONG_S = 20.0
INFO = EnvironmentInfo("false", "1", "exact", "pure", False, 1, 1)
SEED = bytes(32)


def process_of(module: str) -> HostProcess:
    return HostProcess(launch(sandboxed=False, module=module), seconds=SOON_S, start=LONG_S)


@pytest.fixture
def process() -> Iterator[HostProcess]:
    made = process_of("false_host")
    yield made
    made.close()


@pytest.fixture
def environment(process: HostProcess) -> RemoteHeldOut:
    slot = process.number()
    process.make("false", Make(slot, "false", "", {}))
    return RemoteHeldOut(process, slot, INFO, 0)


def test_a_process_that_talks_and_never_starts_is_given_up() -> None:
    process = HostProcess(launch(sandboxed=False, module="false_start"), seconds=SOON_S, start=1.0)
    began = time.monotonic()
    with pytest.raises(CannotStart, match="did not answer within"):
        process.describe(Describe("anything"))
    assert time.monotonic() - began < LONG_S


@pytest.mark.parametrize("value", ["asides", "questions", "others"])
def test_a_process_that_talks_of_other_things_is_given_up(value: str, process: HostProcess) -> None:
    process.start = 1.0
    with pytest.raises(EnvError):
        process.describe(Describe(value))


def test_what_cannot_be_made_leaves_no_process(process: HostProcess) -> None:
    """A run may name many environments of many packages. One in which others were made goes on."""
    with pytest.raises(BrokenEnvironment):
        process.make("false", Make(process.number(), "false", "refused", {}))
    assert process.child is None
    process.make("false", Make(process.number(), "false", "", {}))
    with pytest.raises(BrokenEnvironment):
        process.make("false", Make(process.number(), "false", "refused", {}))
    assert process.alive


def test_more_scores_than_anybody_asks_for_are_not_read(environment: RemoteHeldOut) -> None:
    """Of a frame that is taken they would fill a gigabyte, and take seconds."""
    with pytest.raises(EnvironmentFailed, match=r"is no message: .*length <= 65536"):
        environment.score(Task(SEED, 0, None), "many", True)


@pytest.mark.parametrize("answer", ["nan", "endless", "much", "component"])
def test_a_score_that_is_no_reward_is_refused(answer: str, environment: RemoteHeldOut) -> None:
    with pytest.raises(EnvironmentFailed, match="scored an answer with"):
        environment.score(Task(SEED, 0, None), answer, True)


def test_more_held_out_tasks_than_were_asked_for_are_refused(environment: RemoteHeldOut) -> None:
    with pytest.raises(EnvironmentFailed, match="gave 65 held-out tasks, not 64"):
        environment.held_out(64)


class SlowChat:
    """Takes a while for each conversation, as a long template does."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Piece]:
        time.sleep(0.02)
        return []

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[Piece]:
        return self.prompt(messages, tools)

    def parse(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", "")


@pytest.mark.parametrize(
    ("deed", "sentence"),
    [
        (0, "is no message"),
        (1, "asked about texts for more than 0.5 s|did not end within|neither asked for tokens nor ended"),
        (2, "6400000 characters; 65536 are taken"),
        (3, "ended 2 times while it was at work"),
        (4, "ended 2 times while it was at work"),
    ],
)
def test_a_group_that_asks_without_end_is_given_up(
    deed: int, sentence: str, environment: RemoteHeldOut, settings: PolicySettings
) -> None:
    policy: Any = DreamPolicy(dataclasses.replace(settings, chat=SlowChat()))

    async def main() -> None:
        async with asyncio.timeout(LONG_S):
            await environment.collect_trajectories(Task(bytes([deed]) + SEED[1:], 0, None), policy)

    with pytest.raises(EnvironmentFailed, match=sentence):
        asyncio.run(main())


LONG = "x" * LEAST
USER = Message("user", "")


@pytest.mark.parametrize(
    "question",
    [
        Encode(1, LONG + "x"),
        Decode(1, [1] * (LEAST + 1)),
        ChatParse(1, [1] * (LEAST + 1)),
        ChatExtend(1, [1] * LEAST, [USER], []),
        ChatPrompt(1, [Message("user", LONG)], []),
        ChatPrompt(1, [Message("assistant", reasoning=LONG), USER], []),
        ChatPrompt(1, [Message("tool", tool_call_id=LONG)], []),
        ChatPrompt(1, [Message("tool", name=LONG)], []),
        ChatPrompt(1, [USER] * (LEAST // LEAST_EACH + 1), []),
        *(
            ChatPrompt(1, [Message("assistant", tool_calls=calls), USER], [])
            for calls in (
                (ToolCall(LONG, "", ""),),
                (ToolCall("", LONG, ""),),
                (ToolCall("", "", LONG),),
                (ToolCall("", "", ""),) * (LEAST // LEAST_EACH),
            )
        ),
        *(
            ChatPrompt(1, [USER], tools)
            for tools in (
                [Tool(LONG, "", "")],
                [Tool("", LONG, "")],
                [Tool("", "", LONG)],
                [Tool("", "", "")] * (LEAST // LEAST_EACH),
            )
        ),
    ],
    ids=lambda question: type(question).__name__,
)
def test_a_question_about_more_than_fits_is_not_looked_at(question: Any, settings: PolicySettings) -> None:
    """Wherever it has its length: a template took half a minute for a call's name of 12 MB, and a node does
    nothing else meanwhile."""
    policy: Any = DreamPolicy(dataclasses.replace(settings, chat=SlowChat(), context=1))
    said = answered(question, policy)
    assert isinstance(said, Failed)
    assert f"{LEAST} are taken" in said.text


@pytest.mark.parametrize("tool", [Tool(LONG, "", ""), Tool("", LONG, ""), Tool("", "", LONG)])
def test_shapes_are_forgotten_whatever_makes_them_long(tool: Tool) -> None:
    """What tools say is kept with the shape of a conversation: it would be kept for each of them."""
    chat = ModelChat(BlankFormat())
    for number in range(2 * KEPT // LEAST):
        chat.prompt([USER], [tool, Tool("", "", str(number))])
    assert len(chat._kept) <= KEPT // LEAST


class BlankFormat:
    """Makes the same of everything."""

    vocabulary: Any = None
    close = 0
    thinks = False

    def first(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Any:
        return self

    later = first

    def fill(self, vocabulary: Any, texts: Sequence[str]) -> list[int]:
        return []

    def parse(self, tokens: Sequence[int]) -> Message:
        return USER


# --- the host's own end ---


def test_what_comes_around_an_answer_keeps_its_order() -> None:
    """Else a group is cancelled before it begins, and then begins with nobody to wait for it."""
    reader, to_host = os.pipe()
    from_host, writer = os.pipe()
    around: list[ToHost] = [Cancel(number) for number in range(6)]
    messages: list[ToHost] = [*around[:3], Ids([7]), *around[3:]]
    os.write(to_host, b"".join(framed(msgspec.msgpack.encode(one)) for one in messages))
    heard: list[ToHost] = []
    with asyncio.Runner() as runner:
        line = Line(reader, writer)
        line.serve(runner.get_loop(), heard.append)
        assert line.ask(Encode(1, "x")) == Ids([7])
        runner.run(asyncio.sleep(0))
        runner.get_loop().remove_reader(reader)
    assert heard == around
    for descriptor in (reader, to_host, from_host, writer):
        os.close(descriptor)
