"""What an Atropos environment asks of a model server and of a tokenizer, answered in the policy's own tokens.

Atropos goes from messages to text, from text to tokens, and back. Here the policy's conversation format makes
tokens of messages, once, and everything else is remembered: the text of a rendered conversation leads back to
its messages, a conversation that ends with an answer has exactly the tokens that were sampled. So an
environment that renders, encodes and decodes as it likes ends up with literal tokens. [ATR-3]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .atropos_labels import Line
from .conversation import Player
from .environment import Message, Policy, Tool
from .errors import EnvironmentFailed
from .openai_messages import read_messages, read_tools
from .transcripts import Ask, Reply

MAX_ANSWERS: Final = 1024
"""Answers of one call: far more than any group has samples."""


class Rendered(NamedTuple):
    """A conversation up to where the policy answers, or with its answer."""

    tokens: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """One answer of the policy."""

    said: tuple[Message, ...] | None
    """The conversation before it; None where it goes on with plain text."""
    text: str
    """What was before it, as text."""
    prompt: list[int]
    """The same in tokens."""
    tokens: list[int]
    """As they were sampled, the stop token included."""
    logprobs: list[float]
    content: str
    """Their text without the stop token, cut before the call's stop texts."""
    message: Message
    """The same, with thinking and calls of tools apart."""
    ended: bool
    """Whether the stop token was sampled."""
    trajectory: int

    @property
    def all(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    def says(self, message: Message) -> bool:
        """Whether a message is this answer."""
        ours = {self.content.strip(), self.message.content.strip()}
        return message.role == "assistant" and message.content.strip() in ours


class Speech:
    """All that is said in one group. It plays as one sample: Atropos does not tell its samples apart."""

    def __init__(self, player: Player, policy: Policy) -> None:
        self.policy = policy
        self.failure: Exception | None = None
        """The first error of a call, for the case that the environment swallows it."""
        self.spoken: list[Spoken] = []
        self._player = player
        self._rendered: dict[str, tuple[tuple[Message, ...], tuple[Tool, ...]]] = {}
        self._contents: dict[tuple[int, ...], str] = {}

    # --- the server ------------------------------------------------------------------------------

    async def chat(self, arguments: Mapping[str, Any]) -> list[Spoken]:
        """Answers to `messages`. Raises EnvironmentFailed."""
        messages = read_messages(arguments.get("messages") or ())
        return await self._ask(messages, read_tools(arguments.get("tools")), None, arguments)

    async def complete(self, arguments: Mapping[str, Any]) -> list[Spoken]:
        """What follows `prompt`, or `input_ids` where there is none. Raises EnvironmentFailed."""
        prompt = arguments.get("prompt")
        if isinstance(prompt, str) and prompt:
            known = self._rendered.get(prompt)
            if known is not None:
                return await self._ask(*known, prompt, arguments)
            tokens = self._prefilled(prompt)
            return await self._ask(prompt if tokens is None else tokens, (), prompt, arguments)
        ids = arguments.get("input_ids") or prompt
        if not ids:
            raise EnvironmentFailed("The environment asks for an answer to nothing; mend it.")
        tokens = tuple(int(one) for one in ids)
        return await self._ask(tokens, (), self.policy.tokenizer.decode(tokens), arguments)

    async def _ask(
        self,
        said: tuple[Message, ...] | str | tuple[int, ...],
        tools: tuple[Tool, ...],
        text: str | None,
        arguments: Mapping[str, Any],
    ) -> list[Spoken]:
        messages = tuple(one for one in said if isinstance(one, Message)) or None
        count = int(arguments.get("n") or 1)
        if not 1 <= count <= MAX_ANSWERS:
            raise EnvironmentFailed(f"The environment asks for {count} answers at once; mend it.")
        if messages is not None and text is None:
            text = self.render(messages, tools, answer=True).text
        limit = arguments.get("max_tokens") or arguments.get("max_completion_tokens")
        stop = self._stop(arguments.get("stop"))
        most = None if limit is None or int(limit) < 1 else int(limit)
        replies = await self._player.ask(Ask(said, messages is not None, tools, count, most, (), ""))
        made = [self._spoken(messages, text or "", stop, reply) for reply in replies]
        self.spoken += [one for one in made if one.tokens]
        return made

    def _spoken(
        self, messages: tuple[Message, ...] | None, text: str, stop: Sequence[str], reply: Reply
    ) -> Spoken:
        ended = reply.finish == "stop"
        tokens = reply.tokens
        content = self.policy.tokenizer.decode(tokens[:-1] if ended else tokens)
        self._contents[tuple(tokens)] = content
        places = [place for place in map(content.find, stop) if place >= 0]
        content = content[: min(places)] if places else content
        index = -1 if reply.session is None else reply.session.trajectory
        return Spoken(
            messages, text, reply.prompt, tokens, reply.logprobs, content, reply.message, ended, index
        )

    def _stop(self, stop: Any) -> list[str]:
        """Texts that end an answer; the stop tokens of the run do so anyway."""
        if stop is None:
            return []
        ends = self.policy.tokenizer.decode([self.policy.tokenizer.eos_id])
        return [
            one for one in ([stop] if isinstance(stop, str) else stop) if isinstance(one, str) and one != ends
        ]

    # --- the tokenizer ---------------------------------------------------------------------------

    def render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], *, answer: bool) -> Rendered:
        """A conversation in tokens and text. `answer`: up to where the policy answers, whatever comes last.

        Raises EnvironmentFailed for one that ends with an answer that the policy did not give.
        """
        if not answer and messages and messages[-1].role == "assistant":
            return self._answered(messages)
        made = self._prompt(messages, tools)
        self._rendered[made.text] = (messages, tools)
        return made

    def _answered(self, messages: tuple[Message, ...]) -> Rendered:
        for one in self.spoken:
            if one.said == messages[:-1] and one.says(messages[-1]):
                return Rendered(one.all, self._text(one))
        raise EnvironmentFailed(
            "The environment renders a conversation that ends with an answer that the policy did not give: "
            f"{messages[-1].content[:80]!r}. Give answers back as they came."
        )

    def _prompt(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Rendered:
        chat = self.policy.chat
        if chat is None:
            raise EnvironmentFailed(
                "The environment speaks in messages, and the run's model has no conversation format that "
                "can be extended token by token: take a chat model."
            )
        for one in self.spoken:
            if one.said == messages:
                return Rendered(one.prompt, one.text)
        before = self._longest(messages)
        if before is None:
            tokens = [token for piece in chat.prompt(messages, tools) for token in piece.tokens]
            return Rendered(tokens, self.policy.tokenizer.decode(tokens))
        new = messages[len(before.said or ()) + 1 :]
        added = [token for piece in chat.extend(before.all, new, tools) for token in piece.tokens]
        return Rendered([*before.all, *added], self._text(before) + self.policy.tokenizer.decode(added))

    def _longest(self, messages: tuple[Message, ...]) -> Spoken | None:
        """The answer after which a conversation has nothing but what is new."""
        fitting = [
            one
            for one in self.spoken
            if one.said is not None
            and len(one.said) + 1 < len(messages)
            and messages[: len(one.said)] == one.said
            and one.says(messages[len(one.said)])
            and all(message.role != "assistant" for message in messages[len(one.said) + 1 :])
        ]
        return max(fitting, key=lambda one: len(one.said or ()), default=None)

    def _text(self, spoken: Spoken) -> str:
        """A conversation with its answer, the stop token spelled out."""
        whole = self.content(spoken.tokens)
        stop = self.policy.tokenizer.decode(spoken.tokens[-1:]) if spoken.ended else ""
        return spoken.text + (spoken.content if whole is None else whole) + stop

    def content(self, tokens: Sequence[int]) -> str | None:
        """The text of an answer without its stop token; None for tokens that are no answer."""
        return self._contents.get(tuple(tokens))

    def encoded(self, text: str) -> list[int]:
        """Tokens of a rendered conversation, with or without text behind it, or of plain text."""
        known = self._rendered.get(text)
        if known is not None:
            return self.render(*known, answer=True).tokens
        prefilled = self._prefilled(text)
        return self.policy.tokenizer.encode(text) if prefilled is None else list(prefilled)

    def _prefilled(self, text: str) -> tuple[int, ...] | None:
        """Tokens of a rendered conversation with the beginning of an answer behind it."""
        start = max((one for one in self._rendered if text.startswith(one)), key=len, default=None)
        if start is None:
            return None
        tokens = self.render(*self._rendered[start], answer=True).tokens
        return (*tokens, *self.policy.tokenizer.encode(text[len(start) :]))

    # --- what came of it -------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        """The trajectories of the group, by index."""
        made: dict[int, Line] = {}
        for one in self.spoken:
            line = made.setdefault(one.trajectory, Line([], [], []))
            line.tokens[:] = one.all
            line.spans.append((len(one.prompt), len(one.prompt) + len(one.tokens)))
            line.logprobs.extend(one.logprobs)
        return [made[index] for index in sorted(made)]
