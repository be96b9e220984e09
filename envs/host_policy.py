"""The policy that an environment sees in a host process: everything is asked of the node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from .environment import Completion, GenerateRequest, Message, Piece, Tool
from .errors import EnvironmentFailed
from .host_line import Line
from .host_messages import (
    ChatExtend,
    ChatParse,
    ChatPrompt,
    Decode,
    Encode,
    Failed,
    Ids,
    Pieces,
    Question,
    Rules,
    Said,
    Text,
)

REMEMBERED: Final = 256
"""Texts and ids whose counterpart is kept in a call: all samples of a group have the same prompt."""

Asked = Callable[[Sequence[GenerateRequest]], Awaitable[list[Completion]]]
A = TypeVar("A", Ids, Text, Pieces, Said)


def _answer(line: Line, question: Question, kind: type[A]) -> A:
    match line.ask(question):
        case Failed(text):
            raise EnvironmentFailed(text)
        case reply if isinstance(reply, kind):
            return reply
        case other:
            raise EnvironmentFailed(
                f"The node answered {type(question).__name__} with {type(other).__name__}."
            )


class HostTokenizer:
    """The run's tokenizer, which stays with the node."""

    def __init__(self, line: Line, call: int, eos_id: int) -> None:
        self._line, self._call = line, call
        self.eos_id = eos_id
        self._ids: dict[str, list[int]] = {}
        self._texts: dict[tuple[int, ...], str] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self._ids:
            found = _answer(self._line, Encode(self._call, text), Ids).ids
            _remember(self._ids, text, found)
        return self._ids[text].copy()

    def decode(self, ids: Sequence[int]) -> str:
        key = tuple(ids)
        if key not in self._texts:
            _remember(self._texts, key, _answer(self._line, Decode(self._call, list(key)), Text).text)
        return self._texts[key]


class HostChat:
    """The conversation format of the run's model, which stays with the node."""

    def __init__(self, line: Line, call: int) -> None:
        self._line, self._call = line, call

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Piece]:
        return _answer(self._line, ChatPrompt(self._call, list(messages), list(tools)), Pieces).pieces

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[Piece]:
        question = ChatExtend(self._call, list(tokens), list(messages), list(tools))
        return _answer(self._line, question, Pieces).pieces

    def parse(self, tokens: Sequence[int]) -> Message:
        return _answer(self._line, ChatParse(self._call, list(tokens)), Said).message


class HostPolicy:
    """What an environment is given; `asked` takes its requests to the node."""

    def __init__(self, line: Line, call: int, rules: Rules, asked: Asked) -> None:
        self.tokenizer = HostTokenizer(line, call, rules.eos_id)
        self.chat = HostChat(line, call) if rules.chat else None
        self.group = rules.group
        self.max_tokens = rules.max_tokens
        self.context = rules.context
        self.logprob_format = rules.logprob_format
        self._asked = asked

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return await self._asked(requests) if requests else []


class Asks:
    """Requests of one call that wait to be sent: all that it asks for before the loop rests go together."""

    def __init__(self, send: Callable[[int, list[GenerateRequest]], None]) -> None:
        self._send = send
        self._pending: list[tuple[list[GenerateRequest], asyncio.Future[list[Completion]]]] = []
        self._open: dict[int, list[tuple[int, asyncio.Future[list[Completion]]]]] = {}
        self._number = 0

    async def ask(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._pending.append((list(requests), answer))
        return await answer

    def flush(self) -> None:
        """Sends what was asked for since the last time."""
        pending = [(requests, answer) for requests, answer in self._pending if not answer.done()]
        self._pending = []
        if pending:
            self._number += 1
            self._open[self._number] = [(len(requests), answer) for requests, answer in pending]
            self._send(self._number, [request for requests, _ in pending for request in requests])

    def answered(self, ask: int, completions: list[Completion]) -> None:
        for count, answer in self._open.pop(ask, []):
            mine, completions = completions[:count], completions[count:]
            if not answer.done():
                answer.set_result(mine)


K = TypeVar("K")
V = TypeVar("V")


def _remember(memory: dict[K, V], key: K, value: V) -> None:
    if len(memory) >= REMEMBERED:
        memory.clear()
    memory[key] = value
