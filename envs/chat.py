"""The conversation format of a run's model, in tokens. Spec: `specs/envs/chat.md`.

    chat = load_chat(folder, "template", created)
    pieces = chat.prompt([Message("system", "Be brief."), Message("user", "2 + 2?")])
    pieces = chat.extend(tokens, [Message("user", "And 3 + 3?")])     behind what was sampled
    message = chat.parse(sampled)

What was sampled stays as it was sampled: see `bridge`. That what follows an answer does not depend on what
came before is shown when a format is loaded: see `prefix_checks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from nous_node.protocol.rollouts import Role

from .bridge import Bridge
from .chat_tokens import Vocabulary
from .environment import Message, Piece, Tool
from .errors import BadChat, EnvironmentFailed
from .prefix_checks import check
from .renderer_format import RENDERERS, RendererFormat, known_form
from .skeletons import Skeleton, mask
from .template_functions import TemplateRefused
from .tool_calls import Grammar

TEMPLATE: Final = "template"

KEPT: Final = 1 << 22
"""Characters of the shapes whose skeletons are kept; a conversation of ten messages has 600."""

_ROLES: Final = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT, "tool": Role.TOOL}

_ANOTHER_TIME: Final = 40 * 86_400_000 + 3_723_000
"""Ms from a run's creation to another month, day, hour, minute and second."""


def load_chat(folder: Path, form: str, created: int) -> ModelChat:
    """The format `form` of a run manifest, for the model in `folder`. `created`: the run's, ms since 1970.

    Raises BadChat: a format that is not known here, no template, or one that fails a check; it says which.
    """
    if form == TEMPLATE:
        bridge = Bridge(folder, created)
        check(bridge, Bridge(folder, created + _ANOTHER_TIME, bridge.vocabulary))
        return ModelChat(TemplateFormat(bridge))
    library, _, rest = form.partition("/")
    version, _, family = rest.partition("/")
    if library == RENDERERS and family:
        return ModelChat(RendererFormat(folder, version, family, created))
    raise BadChat(f"This node knows no conversation format {form[:64]!r}: update it, or take another run.")


def recommend(folder: Path, created: int) -> tuple[str, str]:
    """The form that fits a model folder, and why. The form is empty where there is none."""
    try:
        load_chat(folder, TEMPLATE, created)
    except BadChat as error:
        refused = str(error)
    else:
        return TEMPLATE, "The model's own chat template can be extended token by token."
    form = known_form(folder)
    if form is None:
        return "", refused
    try:
        load_chat(folder, form, created)
    except BadChat as error:
        return "", f"{refused} {error}"
    return form, f"The library renderers knows this model. {refused}"


class Shape(Protocol):
    """What a format makes of messages without their texts."""

    def fill(self, vocabulary: Vocabulary, texts: Sequence[str], /) -> list[int]:
        """The tokens with these texts."""
        ...


class Format(Protocol):
    """A way of writing conversations whose extensions do not depend on what stands before them."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def close(self) -> int:
        """The token that ends an answer."""
        ...

    @property
    def thinks(self) -> bool:
        """Whether it knows thinking blocks."""
        ...

    def first(self, messages: Sequence[Message], tools: Sequence[Tool], /) -> Shape:
        """Raises TemplateRefused."""
        ...

    def later(self, messages: Sequence[Message], tools: Sequence[Tool], /) -> Shape:
        """What follows `close`. Raises TemplateRefused."""
        ...

    def parse(self, tokens: Sequence[int], /) -> Message: ...


class TemplateFormat:
    """A model's own template behind the fixed-base bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self.vocabulary = bridge.vocabulary
        self.close = bridge.close
        self.thinks = bridge.thinks
        self._bridge = bridge
        self._closing = next(one for one in bridge.vocabulary.controls.values() if one.id == bridge.close)
        self._grammar = Grammar.of(bridge.source, bridge.opens_thinking())

    def first(self, messages: Sequence[Message], tools: Sequence[Tool], /) -> Skeleton:
        return Skeleton(self.vocabulary, self._bridge.first(messages, tools)[1], True)

    def later(self, messages: Sequence[Message], tools: Sequence[Tool], /) -> Skeleton:
        return Skeleton(self.vocabulary, self._bridge.later(messages, tools)[1], False, self._closing)

    def parse(self, tokens: Sequence[int], /) -> Message:
        ended = bool(tokens) and tokens[-1] in self._bridge.ends
        return self._grammar.parse(self.vocabulary.decode(tokens[:-1] if ended else tokens))


class ModelChat:
    """A format with what it has made of shapes so far."""

    def __init__(self, form: Format) -> None:
        self.vocabulary = form.vocabulary
        self.close = form.close
        """The token that ends an answer: one of the run's stop tokens, if a turn shall ever end by itself."""
        self._format = form
        self._kept: dict[tuple[object, ...], Shape] = {}
        self._size = 0

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), /) -> list[Piece]:
        """See `Chat.prompt`: one piece, in the role of the last message."""
        _check(messages)
        return [Piece(_ROLES[messages[-1].role], self._filled(True, messages, tools))]

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = (), /
    ) -> list[Piece]:
        """See `Chat.extend`."""
        _check(messages)
        added = Piece(_ROLES[messages[-1].role], self._filled(False, messages, tools))
        closed = bool(tokens) and tokens[-1] == self.close
        return [added] if closed else [Piece(Role.ASSISTANT, [self.close]), added]

    def parse(self, tokens: Sequence[int], /) -> Message:
        """See `Chat.parse`."""
        return self._format.parse(tokens)

    def _filled(self, first: bool, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        masked = mask(messages, self._format.thinks)
        data = repr(masked.data)
        key = (first, data, tuple(tools))
        shape = self._kept.get(key)
        if shape is None:
            try:
                shape = (self._format.first if first else self._format.later)(messages, tools)
            except TemplateRefused as error:
                raise EnvironmentFailed(
                    f"The conversation format of the run's model does not take these messages: {error}. Give "
                    "it others, or take another model."
                ) from error
            self._keep(key, shape, len(data) + sum(_length(tool) for tool in tools))
        return shape.fill(self.vocabulary, masked.texts)

    def _keep(self, key: tuple[object, ...], shape: Shape, size: int) -> None:
        self._size += size
        if self._size > KEPT:
            self._kept.clear()
            self._size = size
        self._kept[key] = shape


def _length(tool: Tool) -> int:
    return len(tool.name) + len(tool.description) + len(tool.parameters)


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise EnvironmentFailed("A turn needs at least one message; mend the environment.")
    if messages[-1].role == "assistant":
        raise EnvironmentFailed("The last message is an answer already; mend the environment.")
