"""Messages of other libraries, as ours and back."""

from __future__ import annotations

import pytest

from nous_node.envs.environment import Message, Tool, ToolCall
from nous_node.envs.errors import EnvironmentFailed
from nous_node.envs.openai_messages import read_messages, read_tools, write_message

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"role": "user", "content": "hi"}, Message("user", "hi")),
        ({"role": "developer", "content": "rules"}, Message("system", "rules")),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, Message("user", "ab")),
        ({"role": "assistant", "content": None, "reasoning": "why"}, Message("assistant", "", "why")),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            Message("assistant", tool_calls=(ToolCall("c1", "add", '{"a": 1}'),)),
        ),
        (
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
            Message("tool", "2", tool_call_id="c1", name="add"),
        ),
    ],
)
def test_a_message_is_read(data: dict[str, object], message: Message) -> None:
    assert read_messages([data]) == (message,)


@pytest.mark.parametrize(
    "data",
    [
        {"role": "nobody", "content": "hi"},
        {"content": "hi"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1"}]},
    ],
)
def test_what_is_no_message_of_text_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(EnvironmentFailed):
        read_messages([data])


@pytest.mark.parametrize(
    "message",
    [
        Message("assistant", "hello", "why"),
        Message("assistant", "", tool_calls=(ToolCall("c1", "add", '{"a": 1}'),)),
    ],
)
def test_an_answer_is_read_as_it_was_written(message: Message) -> None:
    assert read_messages([write_message(message)]) == (message,)


def test_tools_are_read_with_and_without_their_wrapping() -> None:
    inner = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    tool = Tool("add", "Adds.", '{"type": "object"}')
    assert read_tools([{"type": "function", "function": inner}, inner]) == (tool, tool)
    assert read_tools(None) == ()
    with pytest.raises(EnvironmentFailed):
        read_tools([{"type": "function"}])
