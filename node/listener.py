"""A TCP listener that has its port to itself.

libp2p 0.8.1 listens with SO_REUSEPORT (for hole punching): a second node on the same port would silently
get half of the first one's connections. Its sockets also lack SO_REUSEADDR, so a node that was killed
could not have its port back for a minute.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from libp2p.abc import IListener
from libp2p.io.trio import TrioTCPStream
from libp2p.transport.tcp.tcp import TCP
from libp2p.utils.multiaddr_utils import multiaddr_from_socket


async def open_port(multiaddr: Any) -> Sequence[trio.SocketListener]:
    """Listen on the IP address and port of a multiaddr; raises OSError."""
    host = next(
        multiaddr.value_for_protocol(name)
        for name in ("ip4", "ip6")
        if name in [protocol.name for protocol in multiaddr.protocols()]
    )
    return await trio.open_tcp_listeners(int(multiaddr.value_for_protocol("tcp")), host=host)


class ExclusiveListener(IListener):  # type: ignore[misc]  # untyped base
    """Accepts until closed, in the nursery that the swarm gives it."""

    background_nursery: trio.Nursery  # set by the swarm

    def __init__(self, handler: Callable[[Any], Awaitable[None]]) -> None:
        self._handler = handler
        self._listeners: list[trio.SocketListener] = []
        self._scope = trio.CancelScope()

    async def listen(self, maddr: Any) -> None:
        listeners = await open_port(maddr)
        self._listeners += listeners
        self.background_nursery.start_soon(self._run, listeners)

    async def _run(self, listeners: Sequence[trio.SocketListener]) -> None:
        with self._scope:
            await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, stream: trio.SocketStream) -> None:
        await self._handler(TrioTCPStream(stream))

    def get_addrs(self) -> tuple[Any, ...]:
        return tuple(multiaddr_from_socket(listener.socket) for listener in self._listeners)

    async def close(self) -> None:
        self._scope.cancel()
        while self._listeners:
            await self._listeners.pop().aclose()


class ExclusiveTCP(TCP):  # type: ignore[misc]  # untyped base
    """libp2p's TCP transport with our listener."""

    def create_listener(self, handler_function: Any) -> ExclusiveListener:
        return ExclusiveListener(handler_function)
