"""The model server that an Atropos environment sees. Imports the library."""

from __future__ import annotations

import copy
from typing import Any, Final, NoReturn

from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from openai.types.chat.chat_completion import ChatCompletion, Choice
from openai.types.chat.chat_completion_message import ChatCompletionMessage
from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice

from .atropos_speech import Speech, Spoken
from .errors import EnvironmentFailed
from .openai_messages import write_message

MODEL: Final = "policy"
"""The name of the model that an environment sees."""

AT_ONCE: Final = 1 << 20
"""Requests that the library lets through at a time: the policy makes batches of its own."""


def server_config() -> APIServerConfig:
    return APIServerConfig(
        model_name=MODEL,
        base_url="",
        api_key="none",
        health_check=False,
        num_max_requests_at_once=AT_ONCE,
        num_requests_for_eval=AT_ONCE,
    )


class PolicyServer(APIServer):  # type: ignore[misc]  # the library is not installed where types are checked
    """Answers with the policy, which `speech` knows. No retries: what fails once fails always."""

    speech: Speech

    async def chat_completion(self, **arguments: Any) -> ChatCompletion:
        spoken = await self._guarded(self.speech.chat(arguments))
        tools = bool(arguments.get("tools"))
        choices = [_choice(index, one, tools=tools) for index, one in enumerate(spoken)]
        return ChatCompletion(id="0", created=0, model=MODEL, object="chat.completion", choices=choices)

    async def completion(self, **arguments: Any) -> Completion:
        spoken = await self._guarded(self.speech.complete(arguments))
        choices = [
            CompletionChoice(finish_reason=_finish(one), index=index, text=one.content)
            for index, one in enumerate(spoken)
        ]
        return Completion(id="0", created=0, model=MODEL, object="text_completion", choices=choices)

    async def tokens_and_logprobs_completion(
        self, **arguments: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        spoken = await self._guarded(self.speech.complete(arguments))
        return (
            spoken[0].prompt,
            [one.tokens for one in spoken],
            [one.logprobs for one in spoken],
            [_finish(one) for one in spoken],
        )

    async def _guarded(self, asked: Any) -> list[Spoken]:
        try:
            answers: list[Spoken] = await asked
        except Exception as error:
            self.speech.failure = self.speech.failure or error
            raise
        return answers

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """It is always there."""

    async def _unused(self, **_: Any) -> NoReturn:
        raise EnvironmentFailed(
            "The environment asks the server for log-probs of a prompt, or goes around it; neither is there."
        )

    _chat_completion_wrapper = _completion_wrapper = _tokens_and_logprobs_completion_wrapper = _unused
    _get_logprobs_wrapper = get_logprobs = _unused


def bound(manager: ServerManager, speech: Speech) -> ServerManager:
    """A manager like `manager` whose server speaks in a group."""
    made = copy.copy(manager)
    server = PolicyServer(server_config())
    server.speech = speech
    made.servers = [server]
    return made


def _choice(index: int, spoken: Spoken, *, tools: bool) -> Choice:
    """With tools, calls apart; else the text as it came, thinking included."""
    if not tools:
        message = ChatCompletionMessage(role="assistant", content=spoken.content)
        return Choice(index=index, finish_reason=_finish(spoken), message=message)
    written = {
        key: value for key, value in write_message(spoken.message).items() if key != "reasoning_content"
    }
    called = bool(spoken.message.tool_calls) and spoken.ended
    return Choice(
        index=index,
        finish_reason="tool_calls" if called else _finish(spoken),
        message=ChatCompletionMessage.model_validate(written),
    )


def _finish(spoken: Spoken) -> Any:
    return "stop" if spoken.ended else "length"
