"""A session with what its environment knows of it: messages, or text. Which calls go on with it?

A call goes on with a session where the session's history, answers included, begins what the call brings, and
the rest holds no answer that the policy did not give. An answer is known again by its content or by its calls
of tools: whether an environment sends thinking back does not matter, the tokens have it. [CHT-8]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nous_node.protocol.rollouts import Role

from .environment import Completion, Finish, Message, Policy, Tool
from .errors import EnvironmentFailed
from .session import Session

Said = tuple[Message, ...] | str | tuple[int, ...]
"""A conversation, or text or tokens to be continued."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of a player."""

    said: Said
    chat: bool
    """Whether `said` is a conversation."""
    tools: tuple[Tool, ...]
    count: int
    """Answers that are asked for."""
    max_tokens: int | None
    stop: tuple[str, ...]
    agent: str


class Reply(NamedTuple):
    """What the policy said to one call."""

    message: Message
    """Content, thinking and calls apart; the content is cut before the first of the call's stop texts."""
    finish: Finish
    """`length` also where there was no room for a single token: then `tokens` is empty."""
    prompt: list[int]
    """All tokens before the answer."""
    tokens: list[int]
    """The answer as it was sampled, its stop token included."""
    logprobs: list[float]
    session: Session | None
    """None where a new conversation did not fit the context."""


@dataclass(slots=True, eq=False)
class Transcript:
    """One session, what its environment has seen of it, and whose it is."""

    session: Session
    agent: str
    policy: Policy
    chat: bool
    history: list[Message] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)
    """For the place of an answer in the history: its text before it was taken apart."""
    text: str = ""
    """Of a session without a conversation format."""

    def goes_on(self, ask: Ask) -> bool:
        """Whether a call goes on where this session stands."""
        if ask.agent != self.agent or ask.chat != self.chat:
            return False
        said = ask.said
        if isinstance(said, str):
            return said.startswith(self.text)
        if not self.chat:
            tokens = self.session.tokens
            return list(said[: len(tokens)]) == tokens
        known = len(self.history)
        new = _messages(said)[known:]
        return (
            bool(new)
            and all(message.role != "assistant" for message in new)
            and all(self._knows(at, message) for at, message in enumerate(_messages(said)[:known]))
        )

    def add(self, ask: Ask) -> None:
        """Puts what is new behind what is there. Raises EnvironmentFailed where the run's model has no
        conversation format, or one that does not take such messages."""
        said = ask.said
        if isinstance(said, str):
            new = said[len(self.text) :]
            self.session.append(self.policy.tokenizer.encode(new), Role.RAW)
            self.text = said
        elif not self.chat:
            fresh = _tokens(said)[len(self.session.tokens) :]
            self.session.append(fresh, Role.RAW)
            self.text += self.policy.tokenizer.decode(fresh)
        else:
            new_messages = _messages(said)[len(self.history) :]
            self.session.converse(new_messages, ask.tools)
            self.history.extend(new_messages)

    def reply(self, ask: Ask, prompt: list[int], completion: Completion) -> Reply:
        """What the policy said, which from now on belongs to the history."""
        tokens, logprobs, finish = completion
        ended = finish == "stop" and bool(tokens)
        text = self.policy.tokenizer.decode(tokens[:-1] if ended else tokens)
        self.text += text
        chat = self.policy.chat
        message = chat.parse(tokens) if self.chat and chat is not None else Message("assistant", text)
        message, cut = _cut(message, ask.stop)
        self.answers[len(self.history)] = text
        self.history.append(message)
        return Reply(message, "stop" if cut else finish, prompt, tokens, logprobs, self.session)

    def _knows(self, at: int, message: Message) -> bool:
        ours = self.history[at]
        if ours.role != message.role:
            return False
        if at not in self.answers:
            return ours.content == message.content
        content = message.content.strip()
        if content not in (ours.content.strip(), self.answers[at].strip()):
            return False
        names = [call.name for call in message.tool_calls]
        return not names or names == [call.name for call in ours.tool_calls]


def begun(policy: Policy, trajectory: int, ask: Ask) -> Transcript | None:
    """A session that begins with a call; None where that does not fit the context."""
    session = Session(policy, trajectory, ask.agent)
    made = Transcript(session, ask.agent, policy, ask.chat)
    made.add(ask)
    if not session.tokens:
        raise EnvironmentFailed("An answer to nothing was asked for; mend the environment.")
    return made if session.room else None


def _messages(said: Said) -> tuple[Message, ...]:
    return tuple(one for one in said if isinstance(one, Message))


def _tokens(said: Said) -> list[int]:
    return [one for one in said if isinstance(one, int)]


def _cut(message: Message, stop: Sequence[str]) -> tuple[Message, bool]:
    places = [at for at in (message.content.find(one) for one in stop if one) if at >= 0]
    if not places:
        return message, False
    content = message.content[: min(places)]
    return Message("assistant", content, message.reasoning, message.tool_calls), True
