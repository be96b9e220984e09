"""Connections that come and go, as plain callbacks.

libp2p's pubsub is told through a channel of capacity 0 and so blocks whoever closes a connection until
pubsub listens, which at shutdown is never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libp2p.abc import INotifee


class ConnectionWatch(INotifee):  # type: ignore[misc]  # untyped base
    """Calls `came(peer)` after a connection was opened and `went(peer)` after one was closed."""

    def __init__(self, came: Callable[[Any], None], went: Callable[[Any], None]) -> None:
        self._came = came
        self._went = went

    async def connected(self, network: Any, conn: Any) -> None:
        self._came(conn.muxed_conn.peer_id)

    async def disconnected(self, network: Any, conn: Any) -> None:
        self._went(conn.muxed_conn.peer_id)

    async def opened_stream(self, network: Any, stream: Any) -> None: ...

    async def closed_stream(self, network: Any, stream: Any) -> None: ...

    async def listen(self, network: Any, multiaddr: Any) -> None: ...

    async def listen_close(self, network: Any, multiaddr: Any) -> None: ...
