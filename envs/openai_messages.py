"""Messages and tools in the JSON form of OpenAI's interface, which most libraries speak, and ours.

Raises EnvironmentFailed: what cannot be said in text, such as pictures, and what is no message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from .environment import Message, Tool, ToolCall
from .errors import EnvironmentFailed

_ROLES: Final[dict[str, Literal["system", "user", "assistant", "tool"]]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def read_messages(messages: Sequence[Mapping[str, object]]) -> tuple[Message, ...]:
    """A conversation. Content may be text, nothing, or a list of text parts."""
    return tuple(_message(one) for one in messages)


def read_tools(tools: Sequence[Mapping[str, object]] | None) -> tuple[Tool, ...]:
    """Function tools, in the form with `function` or without it."""
    return tuple(_tool(one) for one in tools or ())


def write_message(message: Message) -> dict[str, object]:
    """An answer as libraries expect it; without calls or thinking these keys are missing."""
    made: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return made


def _message(data: Mapping[str, object]) -> Message:
    role = _ROLES.get(str(data.get("role")))
    if role is None:
        raise EnvironmentFailed(
            f"A message has the role {str(data.get('role'))[:32]!r}; mend the environment."
        )
    reasoning = data.get("reasoning_content") or data.get("reasoning")
    calls = data.get("tool_calls")
    return Message(
        role,
        _text(data.get("content")),
        reasoning if isinstance(reasoning, str) else "",
        tuple(_call(one) for one in calls) if isinstance(calls, list | tuple) else (),
        str(data.get("tool_call_id") or ""),
        str(data.get("name") or ""),
    )


def _text(content: object) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list() | tuple():
            return "".join(_part(one) for one in content)
        case _:
            raise EnvironmentFailed(f"A content is a {type(content).__name__}; environments here speak text.")


def _part(part: object) -> str:
    match part:
        case str():
            return part
        case {"text": str(text)}:
            return text
        case _:
            raise EnvironmentFailed("A content has a part that is no text; environments here speak text.")


def _call(call: object) -> ToolCall:
    match call:
        case {"function": {"name": str(name), "arguments": arguments}, **others}:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return ToolCall(str(others.get("id") or ""), name, text)
        case _:
            raise EnvironmentFailed("A call of a tool has no function with name and arguments.")


def _tool(data: Mapping[str, object]) -> Tool:
    inner = data.get("function")
    function = inner if isinstance(inner, Mapping) else data
    name = function.get("name")
    if not isinstance(name, str):
        raise EnvironmentFailed("A tool has no name; mend the environment.")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(name, str(function.get("description") or ""), json.dumps(parameters, ensure_ascii=False))
