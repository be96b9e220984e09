"""Conversations without their contents: what a template makes of a shape, and its tokens with contents in.

A template never sees what a message says. It sees a placeholder, with the white space around the text and
whether there is any, and so it cannot be led by a content, nor can a content become a control token. What
it makes of a shape is the skeleton, which is kept: most conversations of a run have few shapes. [CHT-3]

    masked = mask(messages, thinks=False)
    skeleton = Skeleton(vocabulary, template.render(masked.data, None, True))
    ids = skeleton.fill(masked.texts)
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from .chat_tokens import Control, Vocabulary
from .environment import Message, Tool
from .template_functions import ESCAPED, PLACEHOLDER_END, TemplateRefused

_BEGIN: Final = "\ue101"
_DIGITS: Final = "".join(chr(0xE110 + digit) for digit in range(10))
_PLACEHOLDER: Final = re.compile(f"{_BEGIN}([{_DIGITS}]+){PLACEHOLDER_END}({ESCAPED}*)")
_PRIVATE: Final = re.compile("[\ue101-\ue11f]")
_TO_DIGITS: Final = str.maketrans("0123456789", _DIGITS)
_FROM_DIGITS: Final = str.maketrans(_DIGITS, "0123456789")

_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
"""Names and ids that a template may see: some check their length, and they spell nothing."""


class Slot(NamedTuple):
    """Where a text goes."""

    text: int
    """Which of `Masked.texts`."""
    escaped: int
    """How often it is written as JSON inside JSON."""


@dataclass(frozen=True, slots=True)
class Masked:
    """Messages for a template, and what was taken out of them."""

    data: list[dict[str, object]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    contents: list[int | None] = field(default_factory=list)
    """For each message: the index of its content, None where it is blank."""

    def hide(self, text: str) -> str:
        """A placeholder, between the white space that was around the text; blank text stays."""
        core = text.strip()
        if not core:
            return text
        at = text.index(core)
        self.texts.append(core)
        return text[:at] + placeholder(len(self.texts) - 1) + text[at + len(core) :]

    def hide_name(self, text: str) -> str:
        return text if _NAME.fullmatch(text) else self.hide(text)

    def hide_leaves(self, value: object) -> object:
        """The texts of a JSON value; a key is a name."""
        match value:
            case str():
                return self.hide(value)
            case list():
                return [self.hide_leaves(one) for one in value]
            case dict():
                return {self.hide_name(key): self.hide_leaves(one) for key, one in value.items()}
            case _:
                return value


def placeholder(index: int) -> str:
    return _BEGIN + str(index).translate(_TO_DIGITS) + PLACEHOLDER_END


def mask(messages: Sequence[Message], thinks: bool) -> Masked:
    """`thinks`: the template knows thinking blocks, so one that stands in a content is taken out of it."""
    masked = Masked()
    for message in messages:
        masked.data.append(_masked(masked, message, thinks))
    return masked


def _masked(masked: Masked, message: Message, thinks: bool) -> dict[str, object]:
    content, reasoning = message.content, message.reasoning
    if thinks and message.role == "assistant" and not reasoning and "</think>" in content:
        before, _, content = content.rpartition("</think>")
        reasoning = before.rpartition("<think>")[2]
    data: dict[str, object] = {"role": message.role}
    known = len(masked.texts)
    data["content"] = masked.hide(content)
    masked.contents.append(known if len(masked.texts) > known else None)
    if reasoning:
        data["reasoning_content"] = data["thinking"] = masked.hide(reasoning)
    if message.tool_calls:
        data["tool_calls"] = [
            {
                "id": masked.hide_name(call.id),
                "type": "function",
                "function": {
                    "name": masked.hide_name(call.name),
                    "arguments": masked.hide_leaves(_arguments(call.arguments)),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        data["tool_call_id"] = masked.hide_name(message.tool_call_id)
    if message.name:
        data["name"] = masked.hide_name(message.name)
    return data


def _arguments(text: str) -> object:
    """An object, which templates expect; the text itself where it is none."""
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return loaded if isinstance(loaded, dict) else text


def private(text: str) -> bool:
    """Whether a text could be taken for a placeholder or for a piece of one."""
    return _PRIVATE.search(text) is not None


def parts(text: str) -> list[str | Slot]:
    """What a template rendered, taken apart. Raises TemplateRefused where it has cut or changed a content."""
    found: list[str | Slot] = []
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        found.append(text[end : match.start()])
        found.append(Slot(int(match[1].translate(_FROM_DIGITS)), len(match[2])))
        end = match.end()
    found.append(text[end:])
    if any(isinstance(one, str) and _PRIVATE.search(one) for one in found):
        raise TemplateRefused("it cuts or changes what a message says")
    return [one for one in found if one != ""]


def filled(value: Any, texts: Sequence[str]) -> Any:
    """A masked value with its texts put back."""
    match value:
        case str():
            return "".join(one if isinstance(one, str) else written(one, texts) for one in parts(value))
        case list():
            return [filled(one, texts) for one in value]
        case dict():
            return {key: filled(one, texts) for key, one in value.items()}
        case _:
            return value


def check_shown(masked: Masked, messages: Sequence[Message], shown: Sequence[int]) -> None:
    """Raises TemplateRefused unless every content is among those shown, in order: a system's may be moved."""
    asked = [index for index in masked.contents if index is not None]
    if not set(asked) <= set(shown):
        raise TemplateRefused("it leaves a message out")
    body = [
        index
        for index, message in zip(masked.contents, messages, strict=True)
        if index is not None and message.role != "system"
    ]
    if [index for index in dict.fromkeys(shown) if index in body] != body:
        raise TemplateRefused("it puts messages into another order")


def tool_data(vocabulary: Vocabulary, tool: Tool) -> dict[str, object]:
    """A tool as templates know it. It is shown as it is, so it may spell no control token."""
    told = "\n".join((tool.name, tool.description, tool.parameters))
    spelled = vocabulary.spells_control(told)
    if spelled is not None or private(told):
        raise TemplateRefused(f"the tool {tool.name[:64]!r} spells a control token, {spelled!r}")
    try:
        parameters = json.loads(tool.parameters)
    except (ValueError, RecursionError) as error:
        raise TemplateRefused(f"the parameters of tool {tool.name[:64]!r} are no JSON: {error}") from error
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


class _Stretch(NamedTuple):
    """Text between two control tokens."""

    parts: tuple[str | Slot, ...]
    start: bool
    """Nothing stands before it."""
    bare_left: bool
    """The token before it takes white space."""
    bare_right: bool


class Skeleton:
    """What a template makes of a shape, in tokens as far as they are known without the texts.

    `before`: the control token before it; `start`: nothing at all stands there.
    """

    __slots__ = ("_pieces", "slots")

    def __init__(
        self, vocabulary: Vocabulary, found: Sequence[str | Slot], start: bool, before: Control | None = None
    ) -> None:
        self.slots = tuple(part for part in found if isinstance(part, Slot))
        self._pieces: list[list[int] | _Stretch] = []
        self._build(vocabulary, found, start, before)

    def _build(
        self, vocabulary: Vocabulary, found: Sequence[str | Slot], start: bool, before: Control | None
    ) -> None:
        units: list[str | Slot | Control] = []
        for part in found:
            units.extend([part] if isinstance(part, Slot) else vocabulary.split(part))
        stretch: list[str | Slot] = []
        for unit in [*units, None]:
            if isinstance(unit, (str, Slot)):
                stretch.append(unit)
                continue
            if stretch:
                begins = start and not self._pieces
                takes_left = unit is not None and unit.takes_left
                made = _Stretch(tuple(stretch), begins, before is not None and before.takes_right, takes_left)
                known = all(isinstance(part, str) for part in stretch)
                self._pieces.append(_encoded(vocabulary, made, ()) if known else made)
                stretch = []
            if unit is not None:
                self._pieces.append([unit.id])
            before = unit

    def fill(self, vocabulary: Vocabulary, texts: Sequence[str]) -> list[int]:
        """The tokens of the conversation with these texts."""
        made: list[int] = []
        for piece in self._pieces:
            made.extend(piece if isinstance(piece, list) else _encoded(vocabulary, piece, texts))
        return made


def _encoded(vocabulary: Vocabulary, stretch: _Stretch, texts: Sequence[str]) -> list[int]:
    text = "".join([part if isinstance(part, str) else written(part, texts) for part in stretch.parts])
    if stretch.bare_left:
        text = text.lstrip()
    if stretch.bare_right:
        text = text.rstrip()
    return vocabulary.encode(text, stretch.start)


def written(slot: Slot, texts: Sequence[str]) -> str:
    text = texts[slot.text]
    for _ in range(slot.escaped):
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text
