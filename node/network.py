"""The network of a node: connections, gossip, requests. The rest of the node sees libp2p only through this.

    async with open_network(seed, NetworkConfig()) as network:
        await network.connect("/ip4/192.0.2.7/tcp/4001/p2p/12D3Koo...")
        inbox = network.subscribe(topic, judge, capacity=64)     # (data, forwarder) of what is accepted
        await network.publish(topic, data)                       # no subscription needed
        network.serve("/nous/blob/1", handler, max_request=1024, max_response=1 << 20)
        answer = await network.request(peer, "/nous/blob/1", b"...", max_response=1 << 20)

Noise and Yamux over TCP, GossipSub with StrictSign. What py-libp2p 0.8.1 gets wrong is mended in
`hardening.py` (host, swarm), `muxer.py` (Yamux), `gossip.py` and `mesh.py` (pubsub).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import trio
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.rcmgr import Direction
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.address_validation import expand_wildcard_address
from multiaddr import Multiaddr

from nous_node.protocol.errors import RemoteError
from nous_node.protocol.gossip import Verdict
from nous_node.protocol.identity import key_of

from . import liveness, requests
from .connection_watch import ConnectionWatch
from .gossip import MAX_PUBLISH_BYTES, Gossip, Judge, Lost
from .hardening import HardenedHost, HardenedSwarm, build_host
from .listener import open_port
from .network_errors import (
    AddressError,
    ListenError,
    NotConnectedError,
    UnreachableError,
)
from .network_stats import NetworkStats, Offender
from .requests import Handler, Server, Service, Turns
from .upload_limit import UploadLimit

__all__ = [
    "MAX_PUBLISH_BYTES",
    "ConnectedPeer",
    "Handler",
    "Judge",
    "Network",
    "NetworkConfig",
    "Verdict",
    "open_network",
]

# 128 connections of a trainer are 128 volunteers; a relay sets more. Each costs two tasks and, at the
# very worst, 8 MiB of unread bytes.
DEFAULT_MAX_CONNECTIONS = 128
DIAL_S = 10.0  # TCP, Noise and Yamux: a dozen round trips on the worst link
PING_INTERVAL_S = 10.0  # silence after which a connection is pinged
PING_DEADLINE_S = 15.0  # silence after a ping that closes it: beyond any pause of a loaded machine
FLUSH_S = 1.0  # for sending what is published at the end
CLOSE_S = 2.0  # for saying goodbye to all peers after that

DEFAULT_REQUEST_S = 30.0  # a 1 MiB chunk at 35 KB/s
DEFAULT_PER_PEER = 8  # requests of one peer at once: chunks in flight of a busy downloader
DEFAULT_TOTAL = 32  # handlers at once, all peers


@dataclass(frozen=True)
class NetworkConfig:
    """What a person may set; see the constants for the reasons."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)  # multiaddrs; port 0: any free one; (): dial only
    announce: tuple[str, ...] = ()  # more multiaddrs under which we are reachable, without /p2p
    max_connections: int = DEFAULT_MAX_CONNECTIONS
    upload_limit: float | None = None  # bytes/s over all connections; None: unlimited
    ping_interval: float = PING_INTERVAL_S  # seconds
    ping_deadline: float = PING_DEADLINE_S  # seconds


@dataclass(frozen=True)
class ConnectedPeer:
    """One live connection."""

    peer_id: str
    address: str  # multiaddr of the other end of the socket, "" if unknown
    inbound: bool
    topics: tuple[str, ...]  # that the peer reads


class Network:
    """An open network; made by `open_network`. Peers are named by their peer id text."""

    def __init__(
        self,
        host: HardenedHost,
        gossip: Gossip,
        config: NetworkConfig,
        stats: NetworkStats,
        upload: UploadLimit,
    ) -> None:
        self.peer_id = str(host.get_id())
        self.stats = stats
        self.upload = upload  # for whatever else this node sends
        self._host = host
        self._swarm: HardenedSwarm = host.get_network()
        self._gossip = gossip
        self._config = config
        self._changed = trio.Event()  # replaced whenever a connection has come or gone
        self._swarm.register_notifee(ConnectionWatch(self._note_change, self._note_change))

    # Connections

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs with real ports and our peer id; a wildcard becomes one address an interface."""
        found: dict[str, None] = dict.fromkeys(self._config.announce)  # first: invites hold only some
        for listener in self._swarm.listeners.values():
            for bound in listener.get_addrs():
                found.update((str(address), None) for address in expand_wildcard_address(bound))
        return tuple(f"{address}/p2p/{self.peer_id}" for address in found)

    async def connect(self, address: str) -> str:
        """Connect to `.../p2p/<peer id>` unless we are; returns the peer id.

        Raises AddressError (not such an address, or our own) or UnreachableError, within DIAL_S.
        """
        transport, peer = parse_address(address)
        if peer == self.peer_id:
            raise AddressError(address, "it is our own")
        if self._is_connected(peer):
            return peer
        reason = f"no answer within {DIAL_S:g} s"
        with trio.move_on_after(DIAL_S):
            try:
                await self._swarm._dial_addr_single_attempt(transport, ID.from_base58(peer))
                return peer
            except Exception as error:
                reason = _innermost(error)
        raise UnreachableError(address, reason)

    async def disconnect(self, peer: str) -> None:
        """Close all connections to a peer, if there are any."""
        await self._swarm.close_peer(ID.from_base58(peer))

    async def refuse(self, peer: str, fault: str) -> None:
        """Disconnect a peer that did what no honest one does, and take no connection of it for a while; kept
        under the name of its fault. [REP-3]"""
        peer_id = ID.from_base58(peer)
        self._gossip.offences.refuse(peer_id, fault)
        await self._swarm.close_peer(peer_id)

    def peers(self) -> tuple[ConnectedPeer, ...]:
        """The live connections, one entry a peer."""
        topics = self._gossip.peer_topics
        return tuple(
            ConnectedPeer(
                peer_id=str(peer),
                address=_remote_address(live[-1]),
                inbound=live[-1].direction is Direction.INBOUND,
                topics=tuple(sorted(topic for topic, readers in topics.items() if peer in readers)),
            )
            for peer, connections in list(self._swarm.connections.items())
            if (live := [connection for connection in connections if not connection.is_closed])
        )

    def _is_connected(self, peer: str) -> bool:
        connections = self._swarm.connections.get(parse_peer_id(peer), [])
        return any(not connection.is_closed for connection in connections)

    async def wait_lost(self, peer: str) -> None:
        """Until we are not connected to a peer."""
        while self._is_connected(peer):
            await self._changed.wait()

    def _note_change(self, peer: Any) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def stay_connected(self, addresses: Iterable[str]) -> None:
        """Run in a nursery, forever: dial the addresses, and again with back-off whenever one is lost."""
        await liveness.stay_connected(self, addresses)

    # Gossip

    def subscribe(
        self, topic: str, judge: Judge, capacity: int, lost: Lost = lambda data: None
    ) -> trio.MemoryReceiveChannel[tuple[bytes, str]]:
        """Enter a topic; returns the channel of `(data, forwarder's peer id)` that `judge` accepted.

        `judge(data, forwarder)` runs in the gossip path, so it takes milliseconds. ACCEPT delivers and
        forwards; IGNORE does neither; REJECT counts against the forwarder, who is refused for a while
        after many. If it raises, the message is ignored and counted. Own messages are not delivered.
        With `capacity` messages unread the peers are slowed down; a message that waits for 2 s is given
        up and counted in `stats.topics[topic].consumer_slow`; then `lost(data)` takes back what `judge`
        remembers of it, since another peer may bring it again. Raises TopicTakenError.
        """
        return self._gossip.join(topic, judge, capacity, lost).receive

    async def unsubscribe(self, topic: str) -> None:
        """Leave a topic; its channel ends after what is in it."""
        await self._gossip.leave(topic)

    async def publish(self, topic: str, data: bytes) -> None:
        """Sign and send to the topic's readers; returns when it is queued for each of them.

        Waits while their queues are full (64 messages or 4 MiB a peer). While some have room, one peer's
        full queue is waited for during 5 s, and a tenth of the time in the long run; then it is left out
        and counted. Raises OversizePublishError or NoSubscribersError; in both cases nothing was sent.
        """
        await self._gossip.publish(topic, data)

    def subscribers(self, topic: str) -> tuple[str, ...]:
        """The connected peers that read a topic and that we can write to."""
        readers = self._gossip.peer_topics.get(topic, ())
        return tuple(str(peer) for peer in readers if peer in self._gossip.peers)

    async def wait_subscriber(self, topic: str) -> None:
        """Until at least one connected peer reads a topic, so that `publish` can succeed."""
        while not self.subscribers(topic):
            await self._gossip.subscribers_changed.wait()

    def offenders(self) -> list[Offender]:
        """What peers did wrong since this was last asked, for whoever keeps it."""
        return self._gossip.offences.take()

    # Requests

    def serve(
        self,
        protocol: str,
        handler: Handler,
        *,
        max_request: int,
        max_response: int,
        per_peer: int = DEFAULT_PER_PEER,
        total: int = DEFAULT_TOTAL,
        deadline: float = DEFAULT_REQUEST_S,
        turns: Turns | None = None,
    ) -> None:
        """Answer requests with `await handler(peer, request)`; see `requests.Service` for the bounds.

        An exception of the handler, a longer answer, a request that is too long or too slow: the stream
        is reset and the fault counted.
        """
        service = Service(protocol, handler, max_request, max_response, per_peer, total, deadline, turns)
        self._host.set_stream_handler(protocol, Server(service, self.stats).handle)

    def take_streams(self, protocol: str, handle: Callable[[Any], Awaitable[None]]) -> None:
        """Hand over each stream of a protocol as it comes: for a peer that is to break the rules."""
        self._host.set_stream_handler(protocol, handle)

    async def request(
        self,
        peer: str,
        protocol: str,
        payload: bytes,
        *,
        max_response: int,
        deadline: float = DEFAULT_REQUEST_S,
    ) -> bytes:
        """Ask a connected peer; returns its answer of at most `max_response` bytes.

        Raises NotConnectedError, or RequestFailedError: UnsupportedProtocolError, RequestTimeoutError,
        OversizeResponseError, or itself where the peer ended the stream early.
        """
        peer_id = parse_peer_id(peer)
        if not self._is_connected(peer):
            raise NotConnectedError(peer)
        return await requests.request(
            self._host, peer_id, protocol, payload, max_response=max_response, deadline=deadline
        )

    # Life

    async def _listen(self) -> None:
        for address in self._config.listen:
            multiaddr = await _check_free(address)
            if not await self._swarm.listen(multiaddr):
                raise ListenError(address, "the system refused it")

    async def _close(self) -> None:
        with trio.CancelScope(deadline=trio.current_time() + FLUSH_S, shield=True):
            await self._gossip.flush()
        with trio.CancelScope(deadline=trio.current_time() + CLOSE_S, shield=True):
            async with trio.open_nursery() as nursery:
                for connection in self._swarm.get_connections():
                    nursery.start_soon(connection.close)


@asynccontextmanager
async def open_network(
    seed: bytes, config: NetworkConfig, offenders: Iterable[Offender] = ()
) -> AsyncIterator[Network]:
    """Listen and run until the block ends. `seed`: the 32-byte Ed25519 private key of the node. `offenders`:
    peers that an earlier life of it refused.

    Raises ListenError or AddressError before the block starts.
    """
    silence_libp2p()
    stats = NetworkStats()
    upload = UploadLimit(config.upload_limit)
    host = build_host(seed, config.max_connections, stats, upload)
    gossip = Gossip(host, seed, stats)
    gossip.offences.resume(offenders)
    network = Network(host, gossip, config, stats, upload)
    swarm = host.get_network()
    failure: Exception | None = None
    async with background_trio_service(swarm), trio.open_nursery() as nursery:
        try:
            await nursery.start(gossip.run)
            nursery.start_soon(liveness.ping_connections, swarm, config.ping_interval, config.ping_deadline)
            await network._listen()
            yield network
        except Exception as error:  # raised below, outside the nurseries, so that it is not wrapped
            failure = error
        finally:
            await network._close()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def silence_libp2p() -> None:
    """It logs what peers do wrong, which we count, and some of it through the root logger, which then
    sets itself up to print over our display."""
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())


@lru_cache(maxsize=1024)
def parse_peer_id(peer: str) -> Any:
    """The libp2p id of a peer id text; raises AddressError unless it holds an Ed25519 key."""
    try:
        key_of(peer)
    except RemoteError as error:
        raise AddressError(peer, "its peer id is not that of an Ed25519 key") from error
    return ID.from_base58(peer)


def parse_address(address: str) -> tuple[Any, str]:
    """(multiaddr without the peer, peer id); raises AddressError."""
    try:
        parsed = Multiaddr(address)
        peer = parsed.value_for_protocol("p2p")
        transport = parsed.decapsulate(Multiaddr(f"/p2p/{peer}"))
        names = [protocol.name for protocol in transport.protocols()]
    except Exception as error:
        raise AddressError(address, "it is not a multiaddr that ends in /p2p/<peer id>") from error
    if len(names) != 2 or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or names[1] != "tcp":
        raise AddressError(address, "only TCP addresses can be dialled")
    parse_peer_id(str(peer))
    return transport, str(peer)


async def _check_free(address: str) -> Any:
    """The multiaddr to listen on. The swarm swallows why it cannot, so try before it does."""
    try:
        parsed = Multiaddr(address)
        names = [protocol.name for protocol in parsed.protocols()]
        if names not in (["ip4", "tcp"], ["ip6", "tcp"]):
            raise ValueError(address)
    except Exception as error:
        raise AddressError(address, "one listens on an IP address and a TCP port") from error
    try:
        for listener in await open_port(parsed):
            await listener.aclose()
    except OSError as error:
        raise ListenError(address, (error.strerror or str(error)).lower()) from error
    return parsed


def _remote_address(connection: Any) -> str:
    addresses = connection.get_transport_addresses()
    return str(addresses[0]) if addresses else ""


def _innermost(error: BaseException) -> str:
    """What really happened: libp2p wraps it several times."""
    while error.__cause__ is not None and not isinstance(error, OSError):
        error = error.__cause__
    if isinstance(error, SwarmException) and not str(error):
        return "the connection failed"
    return (str(error) or type(error).__name__).rstrip(".")
