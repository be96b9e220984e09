"""Who is alive: pings that close dead connections, and dials that bring named peers back.

A peer whose machine loses power or whose NAT forgets it leaves a connection that looks open: there is
no keep-alive underneath, and libp2p's own ping only measures. Ours is a Yamux ping, which every
implementation must answer from its read loop.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import trio

from nous_node.protocol.errors import NousError

from .network_errors import AddressError

if TYPE_CHECKING:
    from .network import Network

# Re-dials wait this long at first, then twice as long each time up to the maximum, each +-30 % so that
# a thousand volunteers do not return to a restarted trainer in the same instant.
FIRST_RETRY_S = 0.5
MAX_RETRY_S = 15.0
JITTER = 0.3
# A connection that lasted this long was a good one: the next loss starts from the first wait again.
STABLE_S = 10.0


async def ping_connections(swarm: Any, interval: float, deadline: float) -> None:
    """Forever: ping connections silent for `interval` s, close those silent for `deadline` s more."""
    async with trio.open_nursery() as nursery:
        waiting: set[Any] = set()

        async def ping(connection: Any) -> None:
            try:
                with trio.move_on_after(deadline) as scope:
                    await connection.muxed_conn.ping()
                if scope.cancelled_caught:
                    swarm.stats.fault("peer-silent")
                    await connection.close()
            except Exception:
                return  # closed meanwhile
            finally:
                waiting.discard(connection)

        while True:
            await trio.sleep(interval / 2)
            now = trio.current_time()
            for connection in swarm.get_connections():
                idle = now - connection.muxed_conn.last_heard
                if idle >= interval and connection not in waiting:
                    waiting.add(connection)
                    nursery.start_soon(ping, connection)


async def stay_connected(network: Network, addresses: Iterable[str]) -> None:
    """Forever: dial every address, and dial it again when its peer is lost."""
    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(_stay_connected, network, address)


async def _stay_connected(network: Network, address: str) -> None:
    wait = FIRST_RETRY_S
    while True:
        start = trio.current_time()
        try:
            peer = await network.connect(address)
            await network.wait_lost(peer)
        except AddressError:
            return  # no later attempt will like it better
        except NousError:
            pass  # `network.peers()` shows who is missing
        if trio.current_time() - start > STABLE_S:
            wait = FIRST_RETRY_S
        await trio.sleep(wait * random.uniform(1 - JITTER, 1 + JITTER))
        wait = min(2 * wait, MAX_RETRY_S)
