"""The conversation format of a run's model, in tokens. Spec: `specs/envs/chat.md`.

    chat = load_chat(folder, "template", created)
    pieces = chat.prompt([Message("system", "Be brief."), Message("user", "2 + 2?")])
    pieces = chat.extend(tokens, [Message("user", "And 3 + 3?")])     behind what was sampled
    message = chat.parse(sampled)

What was sampled stays as it was sampled: see `bridge`. That what follows an answer does not depend on what
came before is shown when a format is loaded: see `prefix_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from nous_node.protocol.rollouts import Role

from .bridge import Bridge, Parts
from .environment import Chat, Message, Piece, Tool
from .errors import BadChat, EnvironmentFailed
from .prefix_checks import check
from .skeletons import Masked, Skeleton, mask
from .template_functions import TemplateRefused
from .tool_calls import Grammar

TEMPLATE: Final = "template"

KEPT: Final = 1 << 22
"""Characters of the shapes whose skeletons are kept; a conversation of ten messages has 600."""

_ROLES: Final = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT, "tool": Role.TOOL}

_ANOTHER_TIME: Final = 40 * 86_400_000 + 3_723_000
"""Ms from a run's creation to another month, day, hour, minute and second."""


def load_chat(folder: Path, form: str, created: int) -> Chat:
    """The format `form` of a run manifest, for the model in `folder`. `created`: the run's, ms since 1970.

    Raises BadChat: a format that is not known here, no template, or one that fails a check; it says which.
    """
    if form != TEMPLATE:
        raise BadChat(
            f"This node knows no conversation format {form[:64]!r}: update it, or take another run."
        )
    bridge = Bridge(folder, created)
    check(bridge, Bridge(folder, created + _ANOTHER_TIME, bridge.vocabulary))
    return TemplateChat(bridge)


class TemplateChat:
    """A model's own template behind the fixed-base bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self.vocabulary = bridge.vocabulary
        self.close = bridge.close
        """The token that ends an answer."""
        self._grammar = Grammar.of(bridge.source, bridge.opens_thinking())
        self._kept: dict[tuple[object, ...], Skeleton] = {}
        self._size = 0

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), /) -> list[Piece]:
        """See `Chat.prompt`: one piece, in the role of the last message."""
        _check(messages)
        tokens = self._filled(self._bridge.first, messages, tools, True)
        return [Piece(_ROLES[messages[-1].role], tokens)]

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = (), /
    ) -> list[Piece]:
        """See `Chat.extend`."""
        _check(messages)
        added = self._filled(self._bridge.later, messages, tools, False)
        closed = bool(tokens) and tokens[-1] == self.close
        pieces = [] if closed else [Piece(Role.ASSISTANT, [self.close])]
        return [*pieces, Piece(_ROLES[messages[-1].role], added)]

    def parse(self, tokens: Sequence[int], /) -> Message:
        """See `Chat.parse`."""
        ended = bool(tokens) and tokens[-1] in self._bridge.ends
        return self._grammar.parse(self.vocabulary.decode(tokens[:-1] if ended else tokens))

    def _filled(
        self,
        render: Callable[[Sequence[Message], Sequence[Tool]], tuple[Masked, Parts]],
        messages: Sequence[Message],
        tools: Sequence[Tool],
        start: bool,
    ) -> list[int]:
        masked = mask(messages, self._bridge.thinks)
        shape = repr(masked.data)
        key = (start, shape, tuple(tools))
        skeleton = self._kept.get(key)
        if skeleton is None:
            try:
                _, found = render(messages, tools)
            except TemplateRefused as error:
                raise EnvironmentFailed(
                    f"The conversation format of the run's model does not take these messages: {error}. Give "
                    "it others, or take another model."
                ) from error
            skeleton = Skeleton(self.vocabulary, found, start)
            self._keep(key, skeleton, len(shape) + sum(len(tool.parameters) for tool in tools))
        return skeleton.fill(self.vocabulary, masked.texts)

    def _keep(self, key: tuple[object, ...], skeleton: Skeleton, size: int) -> None:
        self._size += size
        if self._size > KEPT:
            self._kept.clear()
            self._size = size
        self._kept[key] = skeleton


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise EnvironmentFailed("A turn needs at least one message; mend the environment.")
    if messages[-1].role == "assistant":
        raise EnvironmentFailed("The last message is an answer already; mend the environment.")
