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

_TAGGED: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MARK: Final = "[TOOL_CALLS]"
_PYTHON: Final = "<|python_tag|>"

MAX_CALLS: Final = 64
"""Calls of one turn; an answer with more is all content."""


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
        head, closed, tail = text.partition("</think>")
        before, opens, inside = head.partition("<think>")
        if opens and before.strip():  # text before the block: it is no thinking block
            return "", text
        if not opens and not (self.opened or closed):
            return "", text
        return (inside if opens else head).strip(), tail.lstrip("\n") if closed else ""


def _tagged(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    bodies = _TAGGED.findall(text)
    loaded = [_loaded(body) for body in bodies]
    calls = _made(
        [one for body in loaded for one in ([body] if isinstance(body, dict) else [None])], "arguments"
    )
    return (_TAGGED.sub("", text).strip(), calls) if calls else (text, ())


def _marked(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    before, mark, body = text.partition(_MARK)
    loaded = _loaded(body) if mark else None
    calls = _made(loaded, "arguments") if isinstance(loaded, list) else ()
    return (before.strip(), calls) if calls else (text, ())


def _bare(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    loaded = _loaded(text.strip().removeprefix(_PYTHON))
    calls = _made([loaded], "parameters") or _made([loaded], "arguments")
    return ("", calls) if calls else (text, ())


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _made(bodies: list[object], key: str) -> tuple[ToolCall, ...]:
    """Calls from their JSON; none where one of them is no call."""
    calls: list[ToolCall] = []
    for number, body in enumerate(bodies[: MAX_CALLS + 1]):
        if not isinstance(body, dict) or not isinstance(body.get("name"), str) or key not in body:
            return ()
        arguments, id_ = body[key], body.get("id")
        calls.append(
            ToolCall(
                id_ if isinstance(id_, str) and id_ else f"call{number:05}",
                body["name"],
                arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
            )
        )
    return tuple(calls) if len(calls) <= MAX_CALLS else ()
