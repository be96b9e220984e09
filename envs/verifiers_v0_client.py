"""What verifiers (v0) asks a model, answered by a sample of ours. Imports the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
from verifiers.clients import Client
from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage, ResponseTokens, Usage
from verifiers.types import ToolCall as TheirCall

from .conversation import Player
from .environment import Message, Tool, ToolCall
from .errors import EnvironmentFailed
from .session import Session
from .transcripts import Reply

MODEL: Final = "policy"
"""The name of the model that an environment sees."""

PARAGRAPH: Final = "\n\n"
"""Between messages that are put as plain text, as the library's client of completion servers writes it."""

_ROLES: Final = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "text": "user"}

_LIMITS: Final = ("max_completion_tokens", "max_tokens")
"""The one sampling argument that is the environment's to choose; the others are the run's."""


class Turn(NamedTuple):
    """Where an answer stands."""

    session: Session
    tokens: int
    """How many were sampled."""


class Voice(Client):  # type: ignore[misc]  # the library is not installed where types are checked
    """The library's client of one sample."""

    def __init__(self, player: Player, form: str, chat: bool) -> None:
        """`form`: `chat`, `plain`, or empty for what the messages look like; `chat`: whether the run's model
        has a conversation format."""
        super().__init__(None)
        self.turns: list[Turn] = []
        """The answers so far; a response has its place here as its id."""
        self._said: set[str] = set()
        self._player = player
        self._form = form
        self._chat = chat

    async def get_response(
        self,
        prompt: Sequence[Any] | str,
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        **_: Any,
    ) -> Response:
        """Raises OverlongPromptError where no token can be sampled any more: environments end there."""
        offered = [_tool(tool) for tool in tools or ()]
        limit = _limit(sampling_args)
        if not self._is_plain(prompt):
            reply = await self._player.say(_messages(prompt), offered, max_tokens=limit)
        elif offered:
            raise EnvironmentFailed(
                "The environment offers tools, and the run's model has no conversation format to call them "
                "in: take a chat model."
            )
        else:
            reply = await self._player.go_on(self._text(_messages(prompt)), max_tokens=limit)
        if reply.session is None or not reply.tokens:
            raise OverlongPromptError("The conversation has reached a limit of the run.")
        self._said.add(reply.message.content)
        self.turns.append(Turn(reply.session, len(reply.tokens)))
        return _response(len(self.turns) - 1, reply)

    def _text(self, messages: Sequence[Message]) -> str:
        """Messages as text: paragraphs, but an answer stands right behind its prompt."""
        said = ""
        for message in messages:
            follows = message.role == "assistant" and message.content in self._said
            said += message.content if follows or not said else PARAGRAPH + message.content
        return said

    def _is_plain(self, prompt: Sequence[Any] | str) -> bool:
        if self._form:
            return self._form == "plain"
        return (
            not self._chat
            or isinstance(prompt, str)
            or all(_get(one, "role") == "text" for one in prompt[:1])
        )

    def _unused(self, *_: Any, **__: Any) -> NoReturn:
        raise EnvironmentFailed(
            "The environment wants a model server of its own; only `get_response` is one."
        )

    setup_client = to_native_tool = to_native_prompt = get_native_response = _unused
    raise_from_native_response = from_native_response = _unused

    async def close(self) -> None:
        """Nothing to close."""


def _response(number: int, reply: Reply) -> Response:
    message, finish, prompt, tokens, logprobs, _ = reply
    calls = [TheirCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls]
    return Response(
        id=str(number),
        created=0,
        model=MODEL,
        usage=Usage(
            prompt_tokens=len(prompt),
            reasoning_tokens=0,
            completion_tokens=len(tokens),
            total_tokens=len(prompt) + len(tokens),
        ),
        message=ResponseMessage(
            content=message.content,
            reasoning_content=message.reasoning or None,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls and finish == "stop" else finish,
            is_truncated=finish == "length",
            tokens=ResponseTokens(
                prompt_ids=prompt,
                prompt_mask=[0] * len(prompt),
                completion_ids=tokens,
                completion_mask=[1] * len(tokens),
                completion_logprobs=logprobs,
            ),
        ),
    )


def _messages(prompt: Sequence[Any] | str) -> list[Message]:
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    names: dict[str, str] = {}
    return [_message(one, names) for one in prompt]


def _message(one: Any, names: dict[str, str]) -> Message:
    """One message of theirs, pydantic or dict. `names`: tools by the ids of calls so far."""
    role = _ROLES.get(_get(one, "role"))
    if role is None:
        raise EnvironmentFailed(
            f"The environment writes a message of role {_get(one, 'role')!r}, which no model knows."
        )
    calls = tuple(
        ToolCall(_get(call, "id"), _get(call, "name"), _get(call, "arguments"))
        for call in _get(one, "tool_calls") or ()
    )
    names.update({call.id: call.name for call in calls})
    answered = _get(one, "tool_call_id") or ""
    return Message(
        role,  # type: ignore[arg-type]
        _text(_get(one, "content")),
        (_get(one, "reasoning_content") or "") if role == "assistant" else "",
        calls,
        answered,
        names.get(answered, ""),
    )


def _text(content: Any) -> str:
    """A message's text. Raises EnvironmentFailed for pictures and sounds."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content or ():
        if _get(part, "type") != "text":
            raise EnvironmentFailed(
                "The environment shows pictures or sounds; the run's model reads text only."
            )
        parts.append(_get(part, "text"))
    return "\n".join(parts)


def _tool(tool: Any) -> Tool:
    schema = msgspec.json.encode(dict(tool.parameters)).decode()
    return Tool(tool.name, tool.description, schema)


def _limit(sampling: Mapping[str, Any]) -> int | None:
    for name in _LIMITS:
        if isinstance(value := sampling.get(name), int):
            return value
    return None


def _get(one: Any, name: str) -> Any:
    return one.get(name) if isinstance(one, Mapping) else getattr(one, name, None)
