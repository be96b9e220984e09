"""The fixed-base bridge: what a template makes of whole conversations, and of what follows an answer.

What follows is rendered behind a base, a short conversation of our own, and cut behind the token that ends
the base's answer. So nothing that stands before it is ever made again. [CHT-4]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .chat_tokens import Control, Vocabulary, end_ids, template_source, token_names
from .environment import Message, Tool, ToolCall
from .errors import BadChat
from .skeletons import Masked, Slot, check_shown, filled, mask, parts, tool_data, written
from .template_functions import TemplateRefused
from .templates import Template

QUESTION: Final = Message("user", "question")
BASE: Final = (QUESTION, Message("assistant", "answer"))

Parts = list[str | Slot]


class Bridge:
    """A model's template and tokenizer. `created`: ms since 1970, the only clock that a template sees.

    Raises BadChat: no template, or one in which an answer does not end with a control token.
    """

    def __init__(self, folder: Path, created: int, vocabulary: Vocabulary | None = None) -> None:
        self.source = template_source(folder)
        if not self.source:
            raise BadChat(f"The model in {folder} has no chat template; give environments plain prompts.")
        self.thinks = "</think>" in self.source
        """Whether it knows thinking blocks."""
        self._template = Template(self.source, token_names(folder), created)
        self.vocabulary = vocabulary or Vocabulary(folder, self.source + self._spelled())
        self.close = self._find_close()
        """The token that ends an answer."""
        self._refused: dict[str, str] = {}
        self.ends = frozenset({self.close, *end_ids(folder, self.vocabulary)})

    def first(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Masked, Parts]:
        """A conversation from its beginning, up to where an answer begins. Raises TemplateRefused: also where
        a content is lost."""
        masked = mask(messages, self.thinks)
        found = self._rendered(masked, tools)
        check_shown(masked, messages, [part.text for part in found if isinstance(part, Slot)])
        return masked, found

    def later(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Masked, Parts]:
        """What follows the token that ends an answer, up to where the next one begins. Raises
        TemplateRefused."""
        for message in messages:
            if (why := self._refused.get(message.role)) is not None:
                raise TemplateRefused(why)
        calls = _calls(messages)
        if calls:
            try:
                return self.behind((QUESTION, Message("assistant", tool_calls=calls)), messages, tools)
            except TemplateRefused:  # it has answers of tools, but no calls: those are the model's own text
                pass
        return self.behind(BASE, messages, tools)

    def refuse(self, role: str, why: str) -> None:
        """From now on, no messages of this role behind an answer."""
        self._refused[role] = why

    def behind(
        self, before: Sequence[Message], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Masked, Parts]:
        """The same behind a conversation that ends with an answer or with calls of tools."""
        masked = mask([*before, *messages], self.thinks)
        known = len(mask(before, self.thinks).texts)
        found = self._rendered(masked, tools)
        at = max(
            (at for at, part in enumerate(found) if isinstance(part, Slot) and part.text < known), default=-1
        )
        last = found[at] if at >= 0 else None
        if not isinstance(last, Slot) or last.text != known - 1:
            raise TemplateRefused("it puts messages into another order, or leaves one out")
        rest = self._cut(found[at + 1 :], exact=not before[-1].tool_calls)
        asked = [index for index in masked.contents[len(before) :] if index is not None]
        shown = [part.text for part in rest if isinstance(part, Slot)]
        if [index for index in shown if index in asked] != asked:
            raise TemplateRefused("it leaves a message out, shows one twice, or changes their order")
        return masked, [
            part if isinstance(part, str) else Slot(part.text - known, part.escaped) for part in rest
        ]

    def _cut(self, found: Parts, exact: bool) -> Parts:
        head = found[0] if found else ""
        cut = self.vocabulary.behind(head, self.close) if isinstance(head, str) else None
        if cut is None or (exact and cut[0]):
            raise TemplateRefused("an answer does not always end with the same token")
        return [part for part in [cut[1], *found[1:]] if part != ""]

    def shows(self, messages: Sequence[Message]) -> bool:
        """Whether contents come out as they went in, but for the white space around them. Raises
        TemplateRefused."""
        masked = mask(messages, self.thinks)
        plain = [filled(one, masked.texts) for one in masked.data]
        text = self._template.render(plain, None, True)
        return text == "".join(
            part if isinstance(part, str) else written(part, masked.texts)
            for part in self._rendered(masked, ())
        )

    def _spelled(self) -> str:
        """What a template writes around contents, if it takes them: some put control tokens together."""
        told = Message("tool", "result", tool_call_id="call00000", name="tool")
        made = []
        for messages in (
            (QUESTION,),
            (*BASE, QUESTION),
            (QUESTION, Message("assistant", tool_calls=_calls([told])), told),
        ):
            try:
                made.append(self._template.render(mask(messages, self.thinks).data, None, True))
            except TemplateRefused:
                continue
        return "".join(made)

    def _rendered(self, masked: Masked, tools: Sequence[Tool], answer: bool = True) -> Parts:
        return parts(
            self._template.render(
                masked.data, [tool_data(self.vocabulary, tool) for tool in tools] or None, answer
            )
        )

    def _find_close(self) -> int:
        try:
            behind = self._behind_answer([*BASE, QUESTION], True)
            alone = self._behind_answer(BASE, False)
        except TemplateRefused as error:
            raise BadChat(
                f"The chat template cannot be used, since it does not go on behind an answer: {error}. Give "
                "environments plain prompts, or take another model."
            ) from error
        units = self.vocabulary.split(behind)
        if not units or not isinstance(units[0], Control) or self.vocabulary.split(alone)[:1] != units[:1]:
            shown = repr(behind[:32]) if units else "nothing"
            raise BadChat(
                "The chat template cannot be used, since an answer has to end with a control token of its "
                f"own. Here {shown} follows it, and {alone[:32]!r} where nothing comes next. Give "
                "environments plain prompts, or take another model."
            )
        return units[0].id

    def _behind_answer(self, messages: Sequence[Message], answer: bool) -> str:
        """The text between the base's answer and what comes next."""
        found = self._rendered(mask(messages, self.thinks), (), answer)
        at = next((at for at, part in enumerate(found) if isinstance(part, Slot) and part.text == 1), -1)
        if at < 0:
            raise TemplateRefused("it leaves an answer out")
        head = found[at + 1] if at < len(found) - 1 else ""
        return head if isinstance(head, str) else ""

    def opens_thinking(self) -> bool:
        """Whether an answer begins inside a thinking block. Raises TemplateRefused."""
        _, found = self.behind(BASE, (QUESTION,), ())
        last = found[-1] if found else ""
        return isinstance(last, str) and last.rstrip().endswith("<think>")


def _calls(messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """Calls that the tools' answers at the beginning could be answers to."""
    calls: list[ToolCall] = []
    for message in messages:
        if message.role != "tool":
            break
        calls.append(
            ToolCall(
                message.tool_call_id or f"call{len(calls):05}", message.name or "tool", '{"value": "text"}'
            )
        )
    return tuple(calls)
