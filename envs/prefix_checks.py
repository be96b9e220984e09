"""What a conversation format has to fulfil before a run may use it, tried on many shapes of conversations.

Turns follow each other without touching what stands before them: what follows an answer depends neither on
the conversation before it nor on the clock, and what begins an answer is always the same. [CHT-5]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

from .bridge import BASE, Bridge, Parts
from .environment import Message, Tool, ToolCall
from .errors import BadChat
from .skeletons import Slot
from .template_functions import TemplateRefused

TURNS: Final = 4
"""Longest history that is tried, in questions."""

_TOOL: Final = Tool(
    "look", "Looks something up.", '{"type": "object", "properties": {"at": {"type": "string"}}}'
)
_CALL: Final = ToolCall("call00000", "look", '{"at": "here"}')

_ODD: Final = (
    "Ab cd  ef\n\n\tgh \"i\" 'j' <b>k</b> &amp; {l} {{ m }} \\n 1,234.50 \u00e9\u65e5\n- o\n"
    + 40 * "long enough. "
)

_SYSTEM: Final = Message("system", "rules")
_ASKS: Final = Message("user", "question")
_SAYS: Final = Message("assistant", "answer")
_THINKS: Final = Message("assistant", "answer", "thought")
_CALLS: Final = Message("assistant", tool_calls=(_CALL,))
_TOLD: Final = Message("tool", "result", tool_call_id=_CALL.id, name=_CALL.name)

NEWS: Final = ((_ASKS,), (_TOLD,), (_TOLD, _TOLD), (_TOLD, _ASKS), (_SYSTEM, _ASKS))
"""What may follow an answer."""


def check(bridge: Bridge, another_time: Bridge) -> None:
    """Raises BadChat with the property that a template lacks. `another_time`: the same at another time."""
    try:
        _, after = bridge.behind(BASE, (_ASKS,), ())
    except TemplateRefused as error:
        _refuse(f"{error}")
    _check_clock(bridge, another_time, after)
    _check_contents(bridge)
    for news in NEWS:
        _check_history(bridge, news)
    _check_prompts(bridge, after)
    _check_kept(bridge)


def histories() -> Iterator[tuple[list[Message], tuple[Tool, ...]]]:
    """Conversations that end with an answer or with a call, and the tools that they have."""
    for system in ([], [_SYSTEM]):
        for tools in ((), (_TOOL,)):
            for turns in range(1, TURNS + 1):
                for says in (_SAYS, _THINKS):
                    yield [*system, *[_ASKS, says] * turns], tools
                yield [*system, *[_ASKS, _SAYS] * (turns - 1), _ASKS, _CALLS], tools
                yield [*system, *[_ASKS, _CALLS, _TOLD, _SAYS] * turns], tools
                yield [*system, _ASKS, *[_CALLS, _TOLD] * turns, _CALLS], tools


def _check_clock(bridge: Bridge, another_time: Bridge, after: Parts) -> None:
    if another_time.behind(BASE, (_ASKS,), ())[1] != after:
        _refuse("what follows an answer depends on the clock")


def _check_contents(bridge: Bridge) -> None:
    """Contents are shown as they are: here is some text that a template might mend, cut, or escape."""
    asks, says = Message("user", _ODD), Message("assistant", _ODD)
    for messages in (
        [asks],
        [asks, says, asks],
        [Message("system", _ODD), asks],
        [asks, _CALLS, Message("tool", _ODD)],
    ):
        try:
            shown = bridge.shows(messages)
        except TemplateRefused:
            continue  # not refused with other contents: `_check_history` says so
        if not shown:
            _refuse("it changes what a message says")


def _check_history(bridge: Bridge, news: Sequence[Message]) -> None:
    """What follows is the same behind every history that the template takes. If it is not, a format without
    such news is left; without questions there is none."""
    fault = _fault(bridge, news)
    others = [message.role for message in news if message.role != "user"]
    if fault and others:
        bridge.refuse(others[0], fault)
    elif fault:
        _refuse(fault)


def _fault(bridge: Bridge, news: Sequence[Message]) -> str:
    """How what follows depends on what came before; empty where it does not."""
    for history, tools in histories():
        if bool(history[-1].tool_calls) != (news[0].role == "tool"):
            continue
        try:
            _, expected = bridge.later(news, tools)
        except TemplateRefused:
            continue  # so an environment cannot send such messages either
        try:
            _, found = bridge.behind(history, news, tools)
        except TemplateRefused as error:
            if _optional(history, tools):
                continue
            return f"{error}, after {len(history)} messages"
        if found != expected:
            return f"what follows an answer depends on the {len(history)} messages before it"
    return ""


def _optional(history: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Whether a template may refuse a history: it need not know systems, tools or thinking."""
    plain = all(message in (_ASKS, _SAYS) for message in history)
    return not plain or bool(tools)


def _check_prompts(bridge: Bridge, after: Parts) -> None:
    """An answer to a question begins in the same way, wherever the question stands."""
    begins = _tail(after)
    for turns in range(TURNS):
        for system in ([], [_SYSTEM]):
            messages = [*system, *[_ASKS, _SAYS] * turns, _ASKS]
            try:
                _, found = bridge.first(messages, ())
            except TemplateRefused as error:
                if system:
                    continue
                _refuse(f"{error}")
            if _tail(found) != begins:
                _refuse("what begins an answer is not always the same")


def _check_kept(bridge: Bridge) -> None:
    """A question stays as it was when the conversation goes on, and so does what stands before it."""
    for system in ([], [_SYSTEM]):
        messages = [*system, *[_ASKS, _SAYS] * TURNS, _ASKS]
        try:
            _, whole = bridge.first(messages, ())
        except TemplateRefused:
            continue  # `_check_history` has refused it, or it knows no systems
        for turns in range(TURNS):
            _, found = bridge.first(messages[: len(system) + 2 * turns + 1], ())
            last = max(at for at, part in enumerate(found) if isinstance(part, Slot))
            if found[: last + 1] != whole[: last + 1]:
                _refuse("a question looks different once the conversation has gone on")


def _tail(found: Parts) -> str:
    """The text behind the last content."""
    return found[-1] if found and isinstance(found[-1], str) else ""


def _refuse(why: str) -> NoReturn:
    raise BadChat(
        f"The chat template cannot be extended token by token, since {why}. Give environments plain prompts, "
        "or take another model."
    )
