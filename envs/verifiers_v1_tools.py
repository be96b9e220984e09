"""Tools of a verifiers taskset (v1), called in this process. Imports the library.

The library runs each toolset as a server of its own and carries the rollout's state to it and back over HTTP.
Here a tool sees the rollout's state itself. Names, schemas and texts of answers are those of its servers.
"""

from __future__ import annotations

import contextvars
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mcp.server.mcpserver import MCPServer
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.types import Tool, ToolCall, ToolMessage

from .errors import BrokenEnvironment

_state: contextvars.ContextVar[Any] = contextvars.ContextVar("state")
"""The state of the rollout for which a tool is called."""


class Server:
    """One toolset."""

    def __init__(self, toolset: Any) -> None:
        if getattr(toolset.config, "url", None):
            raise BrokenEnvironment(
                "A toolset of the package is a server elsewhere, and there is no network."
            )
        self._toolset = toolset
        self._mcp: MCPServer | None = None

    async def open(self, task: Any) -> None:
        """`task`: data of the rollout's task; None for tools that all tasks share."""
        if self._mcp is not None:
            return
        toolset = self._toolset
        toolset._pull_state, toolset._push_state = _pulled, _pushed
        await toolset.setup()
        if task is not None:
            await toolset.setup_task(task)
        self._mcp = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(self._mcp)

    async def close(self) -> None:
        self._mcp = None
        await self._toolset._exit_stack.aclose()

    async def offered(self) -> list[tuple[str, str, Tool]]:
        """Full name, own name and description of each tool."""
        assert self._mcp is not None
        prefix = self._toolset.server_name
        found = []
        for tool in await self._mcp.list_tools():
            name = f"{prefix}_{tool.name}" if prefix else tool.name
            shown = Tool(name=name, description=tool.description or "", parameters=tool.input_schema)
            found.append((name, tool.name, shown))
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The content of the answer; what a tool raises is its answer."""
        assert self._mcp is not None
        try:
            result = await self._mcp.call_tool(name, dict(arguments))
        except Exception as error:  # as the server tells it
            return str(error)
        return mcp_content_to_chat_content(result.content)


class Tools:
    """All tools of a rollout."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._places: dict[str, tuple[Server, str]] = {}
        self.offered: list[Tool] = []

    async def open(self, own: Sequence[Server], task: Any) -> None:
        """`own`: those of the servers that are this rollout's alone."""
        for server in self._servers:
            await server.open(task if server in own else None)
            for name, inner, tool in await server.offered():
                if name in self._places:
                    raise BrokenEnvironment(f"Two tools of the package are called {name!r}.")
                self._places[name] = server, inner
                self.offered.append(tool)

    async def call(self, call: ToolCall, state: Any) -> ToolMessage:
        """The answer to a call, as the library's chat loop gives it."""
        found = self._places.get(call.name)
        arguments = _arguments(call.arguments)
        if isinstance(arguments, str):
            content: Any = arguments
        elif found is None:
            content = f"error: unknown tool {call.name!r}"
        else:
            before = _state.set(state)
            try:
                content = await found[0].call(found[1], arguments)
            finally:
                _state.reset(before)
        return answered(call, content)


def answered(call: ToolCall, content: Any) -> ToolMessage:
    """A message with what a tool said, cut as the library cuts it."""
    said = {"role": "tool", "tool_call_id": call.id, "content": content, "name": call.name}
    return ToolMessage.model_validate(bound_tool_message(said))


def _arguments(text: str) -> dict[str, Any] | str:
    """A call's arguments, or what is wrong with them in the library's words."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
    return arguments


async def _pulled() -> Any:
    return _state.get()


async def _pushed(before: bytes) -> None:
    """What a tool changed is the rollout's own state already."""
