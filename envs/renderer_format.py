"""Conversation formats of the library `renderers`, for models whose own template cannot be extended.

The library writes tokens without a template. It is given placeholders for contents, as templates are, and its
bridge is asked behind a short conversation of our own: what it adds there, it adds everywhere. [CHT-7]
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from .chat_tokens import Vocabulary, model_names
from .environment import Message, Tool, ToolCall
from .errors import BadChat
from .skeletons import Masked, Skeleton, Slot, check_shown, mask, parts, private, tool_data
from .template_functions import ESCAPED, PLACEHOLDER_END, TemplateRefused, strftime

RENDERERS: Final = "renderers"

_VERSION: Final = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,31}")

MAX_TEXTS: Final = 4096
"""Texts with placeholders that are remembered from one conversation to the next."""

_QUESTION: Final = Message("user", "question")
_HISTORIES: Final = (
    (_QUESTION,),
    (Message("system", "rules"), _QUESTION),
    (_QUESTION, Message("assistant", "answer"), _QUESTION),
    (
        _QUESTION,
        Message("assistant", "answer", "thought"),
        _QUESTION,
        Message("assistant", "answer"),
        _QUESTION,
    ),
)
_NEWS: Final = (
    (_QUESTION,),
    (Message("tool", "result", tool_call_id="call00000", name="look"),),
)


class RendererFormat:
    """One family of the library's. Raises BadChat: not installed in this version, a family that it does not
    know, another tokenizer than the family has, or a check that it fails."""

    def __init__(self, folder: Path, version: str, family: str, created: int) -> None:
        library = _library(version)
        self.vocabulary = Vocabulary(folder, None)
        self.thinks = True
        self._adapter = _Adapter(self.vocabulary, family)
        try:
            self._renderer = library.create_renderer(self._adapter, _settings(library, family, created))
            ends = self._renderer.get_stop_token_ids()
            self._before, self.close = self._base()
            self.ends = frozenset({self.close, *ends})
            self._check()
        except BadChat:
            raise
        except Exception as error:  # the library asserts what it needs of a tokenizer
            raise BadChat(
                f"The family {family[:32]!r} of the library {RENDERERS} does not fit this model: "
                f"{_told(error)}. Take another format."
            ) from error

    def first(self, messages: Sequence[Message], tools: Sequence[Tool], /) -> Recorded:
        """A conversation from its beginning. Raises TemplateRefused."""
        masked = mask(messages, True)
        ids = self._rendered(masked, tools)
        made = self._adapter.recorded(ids)
        check_shown(masked, messages, made.slots)
        return made

    def later(self, messages: Sequence[Message], tools: Sequence[Tool], /) -> Recorded:
        """What follows the token that ends an answer. Raises TemplateRefused."""
        return self._behind(self._before, messages, tools)

    def parse(self, tokens: Sequence[int], /) -> Message:
        """The library's reading of an answer; text alone where that fails."""
        ended = bool(tokens) and tokens[-1] in self.ends
        known = [one for one in tokens if self.vocabulary.knows(one)]
        try:
            parsed = self._renderer.parse_response(known)
            calls = [_call(number, call) for number, call in enumerate(parsed.tool_calls)]
            if any(call is None for call in calls):
                raise ValueError("a call is malformed")
            found = tuple(call for call in calls if call is not None)
            message = Message("assistant", str(parsed.content), str(parsed.reasoning_content or ""), found)
            msgspec.msgpack.encode(message)  # JSON may spell lone surrogates, which can be sent nowhere
            return message
        except Exception:  # on any ids that a policy can sample
            return Message("assistant", self.vocabulary.decode(tokens[:-1] if ended else tokens))

    def _base(self) -> tuple[list[int], int]:
        """A prompt of our own, and the token with which the library closes an answer that was cut short."""
        before = self._rendered(mask((_QUESTION,), True), ())
        answer = self.vocabulary.encode("answer", start=False)
        known = len(before) + len(answer)
        made = self._bridged(before, answer, mask((_QUESTION,), True), ())
        if len(made) <= known or made[known] < 0:
            raise TemplateRefused("the library does not close an answer that was cut short")
        return before, made[known]

    def _behind(self, before: list[int], messages: Sequence[Message], tools: Sequence[Tool]) -> Recorded:
        masked = mask(messages, True)
        answer = [*self.vocabulary.encode("answer", start=False), self.close]
        made = self._bridged(before, answer, masked, tools)
        known = [*before, *answer]
        if made[: len(known)] != known:
            raise TemplateRefused("the library writes anew what stands before them")
        recorded = self._adapter.recorded(made[len(known) :])
        check_shown(masked, messages, recorded.slots)
        return recorded

    def _check(self) -> None:
        """What follows does not depend on what stands before it. Raises TemplateRefused."""
        for news in _NEWS:
            try:
                expected = self.later(news, ())
            except TemplateRefused:
                if news == (_QUESTION,):
                    raise
                continue
            for history in _HISTORIES:
                before = self._rendered(mask(history, True), ())
                if self._behind(before, news, ()) != expected:
                    raise TemplateRefused(
                        f"what follows an answer depends on the {len(history)} messages before it"
                    )

    def _rendered(self, masked: Masked, tools: Sequence[Tool]) -> list[int]:
        data, shown = _written(masked), self._tools(tools)
        made = self._asked(lambda: self._renderer.render_ids(data, tools=shown, add_generation_prompt=True))
        return [int(one) for one in made]

    def _bridged(
        self, before: list[int], answer: list[int], masked: Masked, tools: Sequence[Tool]
    ) -> list[int]:
        data, shown = _written(masked), self._tools(tools)
        made = self._asked(lambda: self._renderer.bridge_to_next_turn(before, answer, data, tools=shown))
        if made is None:
            raise TemplateRefused("the library cannot put them behind an answer")
        return [int(one) for one in made.token_ids]

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:  # somebody else's code, on messages of an environment
            raise TemplateRefused(_told(error)) from error

    def _tools(self, tools: Sequence[Tool]) -> list[Any] | None:
        return [tool_data(self.vocabulary, tool)["function"] for tool in tools] or None


@dataclass(frozen=True, slots=True)
class Recorded:
    """Tokens, and between them texts that are not known yet."""

    pieces: tuple[int | Skeleton, ...]
    slots: tuple[int, ...]
    """Which texts are shown, in their order."""
    key: tuple[int | str, ...]
    """Equal where the pieces are."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recorded) and self.key == other.key

    def fill(self, vocabulary: Vocabulary, texts: Sequence[str], /) -> list[int]:
        made: list[int] = []
        for piece in self.pieces:
            made.extend([piece] if isinstance(piece, int) else piece.fill(vocabulary, texts))
        return made


class _Adapter:
    """Our tokenizer, as the library asks for one. A text with a placeholder becomes a number below zero."""

    def __init__(self, vocabulary: Vocabulary, family: str) -> None:
        self.name_or_path = family
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None
        self._vocabulary = vocabulary
        self._texts: list[str] = []
        self._marks: dict[str, int] = {}

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        if private(text):
            mark = self._marks.setdefault(text, len(self._texts))
            self._texts += [text] if mark == len(self._texts) else []
            return [-1 - mark]
        return Skeleton(self._vocabulary, [text], True).fill(self._vocabulary, ())

    def decode(self, ids: Any, *_: object, **__: object) -> str:
        return self._vocabulary.decode([ids] if isinstance(ids, int) else ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._vocabulary.id_of(tokens)
        return [self._vocabulary.id_of(one) for one in tokens]

    def recorded(self, ids: Sequence[int]) -> Recorded:
        """What the library made, with the texts behind its numbers. Raises TemplateRefused."""
        key = [one if one >= 0 else self._texts[-1 - one] for one in ids]
        found = [[] if isinstance(one, int) else parts(one) for one in key]
        pieces = [
            one if isinstance(one, int) else Skeleton(self._vocabulary, inside, True)
            for one, inside in zip(key, found, strict=True)
        ]
        slots = [part.text for inside in found for part in inside if isinstance(part, Slot)]
        if len(self._texts) > MAX_TEXTS:
            self._texts.clear()
            self._marks.clear()
        return Recorded(tuple(pieces), tuple(slots), tuple(key))


def known_form(folder: Path) -> str | None:
    """The form for a model that the installed library knows by name."""
    try:
        version = importlib.metadata.version(RENDERERS)
        known = importlib.import_module(f"{RENDERERS}.base").MODEL_RENDERER_MAP
    except (ImportError, AttributeError):
        return None
    families = [known[name] for name in model_names(folder) if name in known]
    return f"{RENDERERS}/{version}/{families[0]}" if families else None


def _library(version: str) -> Any:
    if _VERSION.fullmatch(version) is None:  # it is about to stand in a command for the user
        raise BadChat(f"{version[:32]!r} is no version of the library {RENDERERS}; take another run.")
    try:
        installed = importlib.metadata.version(RENDERERS)
        library = importlib.import_module(RENDERERS)
    except ImportError as error:
        raise BadChat(
            f"This run's conversations need the library {RENDERERS}, which is not installed: "
            f"pip install {RENDERERS}=={version[:32]}"
        ) from error
    if installed != version:
        raise BadChat(
            f"This run's conversations need {RENDERERS} {version[:32]}, and here is {installed}; another "
            f"release may write others. Use pip install {RENDERERS}=={version[:32]}"
        )
    return library


def _settings(library: Any, family: str, created: int) -> Any:
    """The family's own settings, but with its bridge behind every answer, and the run's date."""
    settings = library.config_from_name(family)
    if settings is None or family == "default":
        raise BadChat(f"The library {RENDERERS} knows no family {family[:32]!r}; take another format.")
    wanted = {"thinking_retention": "all"}
    if "date_string" in type(settings).model_fields:
        wanted["date_string"] = strftime("%d %b %Y", created)
    return type(settings)(**wanted)


def _written(masked: Masked) -> list[dict[str, Any]]:
    """Messages for the library: arguments as JSON, since it escapes no placeholders."""
    made = []
    for message in masked.data:
        one: dict[str, Any] = dict(message)
        for call in one.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                text = json.dumps(function["arguments"], ensure_ascii=False)
                function["arguments"] = text.replace(PLACEHOLDER_END, PLACEHOLDER_END + ESCAPED)
        made.append(one)
    return made


def _call(number: int, call: Any) -> ToolCall | None:
    if str(call.status) != "ok" or not isinstance(call.name, str):
        return None
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCall(call.id if isinstance(call.id, str) else f"call{number:05}", call.name, text)


def _told(error: BaseException) -> str:
    return (
        str(error)
        if isinstance(error, TemplateRefused)
        else f"{type(error).__name__}: {error}"[:300].rstrip(". ")
    )
