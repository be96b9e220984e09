"""The library's chat loop (verifiers v1) in this process, with a player as its model. Imports the library.

Its null harness is a program that talks HTTP to a server in the environment's process, which asks a model and
records the turn. Here the loop asks directly; the same hooks, limits and records apply. [VFR-8]
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from verifiers.v1 import graph
from verifiers.v1.harnesses.null.harness import NullHarness, NullHarnessConfig
from verifiers.v1.interception.base import Interception
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import ModelCall, TimeSpan
from verifiers.v1.types import (
    AssistantMessage,
    Request,
    Response,
    SystemMessage,
    ToolMessage,
    TurnTokens,
    Usage,
    UserMessage,
    content_text,
)
from verifiers.v1.types import ToolCall as TheirCall

from .conversation import Player
from .environment import Message, Tool, ToolCall
from .errors import EnvironmentFailed
from .verifiers_v1_tools import Tools, answered

MODEL: Final = "policy"
"""The name of the model that a taskset sees."""

NOWHERE: Final = "http://policy.invalid"
"""Where the library believes its model to be: a name that no resolver knows."""


class Direct(Interception):  # type: ignore[misc]  # the library is not installed where types are checked
    """Hands the session of a rollout to its harness: nothing listens anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.session: RolloutSession | None = None

    async def start(self) -> None:
        """Nothing to start."""

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[tuple[str, str, str]]:
        self.session = session
        yield NOWHERE, "", ""


class InProcess(NullHarness):  # type: ignore[misc]  # as above
    """The chat loop of one rollout."""

    def __init__(self, player: Player, direct: Direct, tools: Tools) -> None:
        super().__init__(NullHarnessConfig(id="null"))
        self._player, self._direct, self._tools = player, direct, tools

    async def setup(self, runtime: Any) -> None:
        """No program is installed."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        **_: Any,
    ) -> ProgramResult:
        """Until a reply without calls of tools, a stop, or the end of all room."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [SystemMessage(content=system)] if system else []
        messages += [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        while (said := await self._turn(messages)) is not None:
            messages.append(said)
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                messages.append(await self._called(call, trace))
                if trace.stop_condition is not None:
                    break
        return ProgramResult(0, "", "")

    async def _turn(self, messages: Sequence[Any]) -> AssistantMessage | None:
        """One answer, recorded; None where there is none any more."""
        session = self._direct.session
        assert session is not None
        if session.stopped or await session.refused() is not None:
            return None
        request, rewrites, stopped = await session.rewrite_request(
            Request(messages=list(messages), tools=self._tools.offered or None)
        )
        session.trace.request_rewrites.extend(rewrites)
        if stopped is not None:
            session.trace.stop(stopped)
            return None
        turn = graph.prepare_turn(session.trace, request.messages, request.tools)
        started = time.time()
        response = await self._response(request)
        if response is None:
            session.trace.stop("max_total_tokens")
            return None
        return await self._committed(session, turn, response, started)

    async def _committed(
        self, session: RolloutSession, turn: Any, response: Response, started: float
    ) -> AssistantMessage | None:
        response, rewrites, stopped = await session.rewrite_response(response)
        if session.stopped:
            return None
        node = turn.commit(response)
        session.consume_prepared(turn.tail)
        session.trace.response_rewrites.extend(rewrites)
        session.trace.calls.append(
            ModelCall(
                node=node,
                model=MODEL,
                finish_reason=response.finish_reason,
                usage=response.usage,
                time=TimeSpan(start=started, end=time.time()),
            )
        )
        stopped = stopped or await session.gate_tool_calls(node)
        if stopped is not None:
            session.trace.stop(stopped)
            return None
        return response.message

    async def _response(self, request: Request) -> Response | None:
        """What the policy says; None where no token can be sampled any more."""
        reply = await self._player.say(
            _messages(request.messages), [_tool(tool) for tool in request.tools or ()]
        )
        if reply.session is None or not reply.tokens:
            return None
        said = reply.message
        calls = [TheirCall(id=call.id, name=call.name, arguments=call.arguments) for call in said.tool_calls]
        return Response(
            id=str(len(reply.prompt)),
            created=0,
            model=MODEL,
            message=AssistantMessage(
                content=said.content or None,
                reasoning_content=said.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason="tool_calls" if calls and reply.finish == "stop" else reply.finish,
            usage=Usage(prompt_tokens=len(reply.prompt), completion_tokens=len(reply.tokens)),
            tokens=TurnTokens.model_construct(
                prompt_ids=reply.prompt, completion_ids=reply.tokens, completion_logprobs=reply.logprobs
            ),
        )

    async def _called(self, call: TheirCall, trace: Any) -> ToolMessage:
        session = self._direct.session
        assert session is not None
        if session.request_interceptors or session.request_stops:
            decision = await session.decide_tool(call.id, call.name, _read(call.arguments))
            if decision["action"] != "allow":
                denied = decision.get("message") or {}
                return answered(call, denied.get("content", ""))
        return await self._tools.call(call, trace.state)


def _messages(messages: Sequence[Any]) -> list[Message]:
    names: dict[str, str] = {}
    return [_message(one, names) for one in messages]


def _message(one: Any, names: dict[str, str]) -> Message:
    """`names`: tools by the ids of calls so far."""
    if not isinstance(one.content, str | None) and any(part.type != "text" for part in one.content):
        raise EnvironmentFailed("The taskset shows pictures; the run's model reads text only.")
    calls = tuple(
        ToolCall(call.id, call.name, call.arguments) for call in getattr(one, "tool_calls", None) or ()
    )
    names.update({call.id: call.name for call in calls})
    answers = getattr(one, "tool_call_id", "")
    return Message(
        one.role,
        content_text(one.content),
        getattr(one, "reasoning_content", None) or "",
        calls,
        answers,
        names.get(answers, ""),
    )


def _tool(tool: Any) -> Tool:
    return Tool(tool.name, tool.description, msgspec.json.encode(tool.parameters).decode())


def _read(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
