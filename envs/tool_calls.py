"""What an answer says, from its text: thinking, content and calls of tools.

Three ways of writing calls are known: `<tool_call>{"name": .., "arguments": ..}</tool_call>`, a bare
`{"name": .., "parameters": ..}`, and `[TOOL_CALLS][{"name": .., "arguments": ..}]`. What is malformed stays
content, so nothing that a policy can write is an error.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final, Literal

from .environment import Message, ToolCall

_THINK: Final = "<think>"
_MARK: Final = "[TOOL_CALLS]"
_PYTHON: Final = "<|python_tag|>"

MAX_CALLS: Final = 64
"""Calls of one turn; what else it has stays content."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """How a model's answers are written."""

    calls: Literal["tagged", "bare", "marked"] = "tagged"
    opened: bool = False
    """The prompt ends inside a thinking block."""

    @classmethod
    def of(cls, source: str, opened: bool = False) -> Grammar:
        """The grammar that a template's text gives away."""
        if "<tool_call>" in source:
            return cls("tagged", opened)
        if _MARK in source:
            return cls("marked", opened)
        bare = _PYTHON in source or re.search(r"""["']parameters["']\s*:""", source)
        return cls("bare" if bare else "tagged", opened)

    def parse(self, text: str) -> Message:
        """The assistant's message whose text without the stop token is `text`."""
        reasoning, content = self._apart(text)
        match self.calls:
            case "tagged":
                content, calls = _tagged(content)
            case "marked":
                content, calls = _marked(content)
            case "bare":
                content, calls = _bare(content)
        return Message("assistant", content, reasoning, calls)

    def _apart(self, text: str) -> tuple[str, str]:
        """Thinking and the rest. A block that is not closed goes on to the end."""
        opened, marked = self.opened, text.lstrip().startswith(_THINK)
        if not (opened or marked):
            return "", text
        inside = text.lstrip().removeprefix(_THINK) if marked else text
        thought, closed, rest = inside.partition("</think>")
        return thought.strip(), rest.lstrip("\n") if closed else ""


def _tagged(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    first, *others = text.split("<tool_call>")
    left, calls = [first], list[ToolCall]()
    for part in others:
        body, closed, behind = part.partition("</tool_call>")
        call = _call(_loaded(body), "arguments", len(calls)) if closed and len(calls) < MAX_CALLS else None
        if call is None:
            left.append("<tool_call>" + part)
        else:
            calls.append(call)
            left.append(behind)
    return ("".join(left).strip(), tuple(calls)) if calls else (text, ())


def _marked(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    before, mark, body = text.partition(_MARK)
    loaded = _loaded(body) if mark else None
    if not isinstance(loaded, list) or not 0 < len(loaded) <= MAX_CALLS:
        return text, ()
    calls = [_call(one, "arguments", number) for number, one in enumerate(loaded)]
    known = tuple(call for call in calls if call is not None)
    return (before.strip(), known) if len(known) == len(calls) else (text, ())


def _bare(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    call = _call(_loaded(text.strip().removeprefix(_PYTHON)), "parameters", 0)
    return ("", (call,)) if call else (text, ())


def _loaded(text: str) -> object:
    """None for what is no JSON, or spells a lone surrogate: that is no text, and can be sent nowhere."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _call(body: object, key: str, number: int) -> ToolCall | None:
    """The call that a JSON value is. An id of ours has nine characters, as some formats ask."""
    match body:
        case {"name": str(name), "id": str(id_), **others} if key in others:
            return ToolCall(id_, name, _written(others[key]))
        case {"name": str(name), **others} if key in others:
            return ToolCall(f"call{number:05}", name, _written(others[key]))
        case _:
            return None


def _written(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
