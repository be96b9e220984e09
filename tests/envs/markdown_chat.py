"""A conversation format that is easy to read."""

from __future__ import annotations

from collections.abc import Sequence

from nous_node.envs.environment import Message, Piece, Tool
from nous_node.protocol.rollouts import Role

END = 258
"""Ends a turn and a sample."""

ROLES = {"system": Role.SYSTEM, "user": Role.USER, "tool": Role.TOOL}


class Markdown:
    """A heading a message; thinking stands before dashes; tokens are bytes."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Piece]:
        told = [Piece(ROLES[one.role], list(f"# {one.role}\n{one.content}\n".encode())) for one in messages]
        return [*told, Piece(Role.ASSISTANT, list(b"# assistant\n"))]

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[Piece]:
        closed = [] if tokens[-1] == END else [Piece(Role.ASSISTANT, [END])]
        return [*closed, *self.prompt(messages, tools)]

    def parse(self, tokens: Sequence[int]) -> Message:
        said = bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
        thought, dashes, rest = said.partition("---")
        return Message("assistant", rest, reasoning=thought) if dashes else Message("assistant", said)
