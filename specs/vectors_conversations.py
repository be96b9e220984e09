"""Vectors of whole conversations: which trajectory a question goes on with, and how they are numbered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from vectors_chat import loaded, model_of
from vectors_world import case

from nous_node.envs.conversation import Conversations, Player
from nous_node.envs.environment import Message, ToolCall
from nous_node.envs.errors import EnvironmentFailed
from nous_node.envs.transcripts import Ask
from nous_node.node.adapter_policy import Replies
from nous_node.protocol.rollouts import Trajectory, unpack_tokens

CLOSE = 256
"""Control tokens come behind the bytes, the close first."""

Step = list[dict[str, Any]]
Samples = list[list[Step]]
Limits = dict[str, int]
LIMITS: Limits = {"max_tokens": 256, "context": 400}
SHORT: Limits = {**LIMITS, "max_tokens": 16}


def ask(*texts: str, **more: Any) -> dict[str, Any]:
    """A question: texts of the user and of the policy in turn, the user first; a text with `S:` in front is a
    system message before them."""
    system = [Message("system", text[2:]) for text in texts if text.startswith("S:")]
    rest = [text for text in texts if not text.startswith("S:")]
    said = [Message("assistant" if at % 2 else "user", text) for at, text in enumerate(rest)]
    return {"messages": msgspec.to_builtins([*system, *said]), **more}


def of(*messages: Message) -> dict[str, Any]:
    return {"messages": msgspec.to_builtins(list(messages))}


FIRST, NEXT = ask("2 + 2?"), ask("2 + 2?", "4", "And 3?")
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOKED = Message("assistant", "", tool_calls=(ToolCall("call00000", "look", "{}"),))
WAITED = Message("assistant", "", tool_calls=(ToolCall("call00000", "wait", "{}"),))
TOLD = Message("tool", "It is here.", tool_call_id="call00000", name="look")
WHERE = Message("user", "Where?")


def conversations() -> list[dict[str, Any]]:
    return [*_going_on(), *_numbered()]


def _going_on() -> list[dict[str, Any]]:
    rows: list[tuple[str, str, Samples, list[list[str]]]] = [
        ("another question behind the answer", "chatml", [[[FIRST], [NEXT]]], [["4", "3"]]),
        ("white space around an answer", "chatml", [[[FIRST], [ask("2 + 2?", " 4\n", "And 3?")]]], [["4", "3"]]),
        ("another answer is another trajectory", "chatml", [[[FIRST], [ask("2 + 2?", "5", "And 3?")]]], [["4"], ["3"]]),
        ("another question before it", "chatml", [[[FIRST], [ask("2 * 2?", "4", "And 3?")]]], [["4"], ["3"]]),
        ("white space around a question counts", "chatml", [[[FIRST], [ask("2 + 2? ", "4", "And 3?")]]], [["4"], ["3"]]),
        ("a system message that was not there", "chatml", [[[FIRST], [ask("S:Be brief.", "2 + 2?", "4", "And 3?")]]], [["4"], ["3"]]),
        ("the same question once more has nothing that follows", "chatml", [[[FIRST], [FIRST]]], [["4"], ["four"]]),
        ("an answer that the policy did not give follows", "chatml", [[[FIRST], [ask("2 + 2?", "4", "And 3?", "3", "And 5?")]]], [["4"], ["5"]]),
        ("back to an earlier place is another trajectory", "chatml", [[[FIRST], [NEXT], [ask("2 + 2?", "4", "And 7?")]]], [["4", "3"], ["7"]]),
        ("of several, that with the most tokens", "chatml", [[[ask("2 + 2?", count=2)], [NEXT]]], [["4"], ["    4    ", "3"]]),
        ("of equal ones, the first", "chatml", [[[ask("2 + 2?", count=2)], [NEXT]]], [["4", "3"], ["4"]]),
        ("in one round none twice", "chatml", [[[FIRST], [NEXT, ask("2 + 2?", "4", "And 5?")]]], [["4", "3"], ["5"]]),
        ("each agent has its own", "chatml", [[[ask("2 + 2?", agent="a")], [ask("2 + 2?", "4", "And 3?", agent="b")]]], [["4"], ["3"]]),
        ("thinking is left out of an answer", "qwen3", [[[FIRST], [NEXT]]], [["<think>\nTwo.\n</think>\n\n4", "3"]]),
        ("an answer with its thinking", "qwen3", [[[FIRST], [ask("2 + 2?", "<think>\nTwo.\n</think>\n\n4", "And 3?")]]], [["<think>\nTwo.\n</think>\n\n4", "3"]]),
        ("a call is known by its name", "qwen3", [[[of(WHERE)], [of(WHERE, LOOKED, TOLD)]]], [[CALL, "Here."]]),
        ("a call of another name", "qwen3", [[[of(WHERE)], [of(WHERE, WAITED, TOLD)]]], [[CALL], ["Here."]]),
    ]  # fmt: skip
    return [_case(comment, "CHT-8", *row) for comment, *row in rows]


def _numbered() -> list[dict[str, Any]]:
    rows: list[tuple[str, str, Samples, list[list[str]]]] = [
        ("two samples", "chatml", [[[FIRST]], [[FIRST]]], [["4"], ["four"]]),
        ("a second trajectory of the first sample comes behind the first of the second", "chatml", [[[FIRST], [ask("1 + 1?")]], [[FIRST]]], [["4"], ["4"], ["2"]]),
        ("questions of one step in their order", "chatml", [[[FIRST, ask("1 + 1?")], [ask("1 + 1?", "2", "And 4?")]], [[FIRST]]], [["4"], ["2", "4"], ["4"]]),
        ("a sample that ends early is not waited for", "chatml", [[[FIRST]], [[FIRST], [NEXT], [ask("9?")]]], [["4"], ["4", "3"], ["9"]]),
        ("several answers to one question", "chatml", [[[ask("2 + 2?", count=3)]], [[FIRST]]], [["a"], ["b"], ["c"], ["d"]]),
        ("a later prompt that does not fit is answered with nothing", "chatml", [[[FIRST], [ask("x" * 400)], [ask("1?")]], [[FIRST], [FIRST]]], [["4"], ["4"], ["4"], ["1"]]),
    ]  # fmt: skip
    made = [_case(comment, "CHT-9", *row) for comment, *row in rows]
    cut = [[[FIRST], [ask("2 + 2?", "4" * 16, "And 3?"), ask("1?")]]]
    full = _case(
        "a turn that was cut is closed, and has no room behind it",
        "CHT-1 CHT-9",
        "chatml",
        cut,
        [["4" * 99], ["1"]],
        SHORT,
    )
    return [
        *made,
        full,
        _refused("a first prompt that does not fit", [[[FIRST]], [[ask("x" * 400)]]], [["4"], ["4"]]),
    ]


def _case(
    comment: str, rules: str, name: str, samples: Samples, replies: list[list[str]], limits: Limits = LIMITS
) -> dict[str, Any]:
    model = model_of(name)
    policy, trajectories = asyncio.run(_played(model, limits, samples, replies))
    data = {**model, **limits, "samples": samples, "replies": replies}
    return case(comment, rules, "valid", **data, calls=policy.calls, trajectories=_told(trajectories))


def _refused(comment: str, samples: Samples, replies: list[list[str]]) -> dict[str, Any]:
    model = model_of("chatml")
    try:
        asyncio.run(_played(model, LIMITS, samples, replies))
    except EnvironmentFailed:
        data = {**model, **LIMITS, "samples": samples, "replies": replies}
        return case(comment, "CHT-9", "invalid", **data, refused=True)
    raise AssertionError(f"{comment}: it was played")


async def _played(
    model: dict[str, Any], limits: Limits, samples: Samples, replies: list[list[str]]
) -> tuple[Replies, list[Trajectory]]:
    policy = Replies(replies, len(samples), limits["max_tokens"], limits["context"], loaded(**model), CLOSE)
    conversations = Conversations(policy)

    async def episode(player: Player) -> float:
        for step in samples[player.sample]:
            await asyncio.gather(*(player.ask(_asked(one)) for one in step))
        return 0.0

    return policy, conversations.finish(await conversations.play(episode))


def _asked(one: dict[str, Any]) -> Ask:
    said = tuple(msgspec.convert(one["messages"], list[Message]))
    return Ask(said, True, (), one.get("count", 1), None, (), one.get("agent", ""))


def _told(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    found = []
    for trajectory in trajectories:
        tokens, position, segments = unpack_tokens(trajectory.tokens), 0, []
        for one in trajectory.segments:
            segments.append([int(one.role), one.trained, tokens[position : position + one.length]])
            position += one.length
        found.append({"agent": trajectory.agent, "segments": segments})
    return found
