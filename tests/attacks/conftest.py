"""Hostile clients, and the proof that a node outlives them.

`victim` opens a node that reads one topic and serves one protocol; after every attack,
`victim.still_serves()` brings a fresh honest node that asks and publishes. Hostile sides use py-libp2p as
it comes (its own Noise, its own Yamux) or a bare socket.

`arena` is a trainer with a line to it; `honest` a volunteer's key that it knows. What a `Forger` says is well
signed and well sent, and wrong.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from multiaddr import Multiaddr

from nous_node.node.network import Network, NetworkConfig, Verdict, open_network

from .tally import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_itemcollected,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)

if TYPE_CHECKING:
    from .arena import Arena
    from .forger import Forger

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_itemcollected",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
]

LOCAL = "/ip4/127.0.0.1/tcp/0"
TOPIC = "/nous/1/run/rollouts/0"
ECHO = "/nous/echo/1"
MAX_ECHO = 64 * 1024
LIARS = 100
"""More than there are tests that take one."""
YAMUX_HEADER = struct.Struct(">BBHII")


async def echo(peer: str, request: bytes) -> bytes:
    return request


@dataclass
class Victim:
    """A node under attack."""

    network: Network
    inbox: trio.MemoryReceiveChannel[tuple[bytes, str]]

    @property
    def address(self) -> str:
        return self.network.addresses[0]

    @property
    def port(self) -> int:
        return int(self.address.split("/")[4])

    @property
    def faults(self) -> Any:
        return self.network.stats.faults

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that has no event of its own is so."""
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.002)

    async def fault(self, name: str, times: int = 1) -> None:
        """Wait until a fault of this name was counted."""
        await self.until(lambda: self.faults[name] >= times)

    async def alone(self) -> None:
        """Wait until nobody is connected."""
        await self.until(lambda: not self.network.peers())

    async def still_serves(self) -> None:
        """An honest node connects, asks and publishes, and all of it works."""
        async with open_network(b"h" * 32, NetworkConfig(listen=())) as honest:
            with trio.fail_after(10):
                peer = await honest.connect(self.address)
                answer = await honest.request(peer, ECHO, b"alive?", max_response=MAX_ECHO)
                assert answer == b"alive?"
                await honest.wait_subscriber(TOPIC)
                await honest.publish(TOPIC, b"honest")
                while (await self.inbox.receive())[0] != b"honest":
                    pass


Opener = Callable[..., Any]


@pytest.fixture
def victim() -> Opener:
    @asynccontextmanager
    async def open_victim(
        judge: Callable[[bytes, str], Verdict] = lambda data, peer: Verdict.ACCEPT,
        handler: Callable[[str, bytes], Any] = echo,
        capacity: int = 1000,
        **settings: Any,
    ) -> AsyncIterator[Victim]:
        config = NetworkConfig(listen=(LOCAL,), **settings)
        async with open_network(b"v" * 32, config) as network:
            network.serve(ECHO, handler, max_request=MAX_ECHO, max_response=MAX_ECHO, deadline=5.0)
            yield Victim(network, network.subscribe(TOPIC, judge, capacity))

    return open_victim


@dataclass
class StockPeer:
    """A py-libp2p host as it comes: connected, nothing hardened."""

    host: Any
    target: Any

    async def stream(self, protocol: str) -> Any:
        """A negotiated stream; what is written to it is up to the test."""
        return await self.host.new_stream(self.target, [protocol])


@pytest.fixture
def stock_peer() -> Opener:
    @asynccontextmanager
    async def connect(address: str, seed: bytes = b"s" * 32) -> AsyncIterator[StockPeer]:
        key_pair = create_new_key_pair(seed)
        noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
        host = new_host(key_pair=key_pair, sec_opt={NOISE: noise})
        async with host.run(listen_addrs=[]):
            info = info_from_p2p_addr(Multiaddr(address))
            await host.connect(info)
            try:
                yield StockPeer(host, info.peer_id)
            finally:
                with trio.CancelScope(shield=True):  # its own way out leaves the socket open
                    await host.get_network().close_peer(info.peer_id)

    return connect


@dataclass
class RawYamux:
    """A Noise session on which Yamux was agreed: every byte after that is the test's own."""

    session: Any

    async def frame(self, kind: int, flags: int, stream: int, length: int, body: bytes = b"") -> None:
        await self.session.write(YAMUX_HEADER.pack(0, kind, flags, stream, length) + body)

    async def wait_closed(self) -> None:
        """Until the other side has closed the connection."""
        try:
            while await self.session.read(1):
                pass
        except Exception:
            return


@pytest.fixture
def raw_yamux() -> Opener:
    @asynccontextmanager
    async def connect(address: str, seed: bytes = b"r" * 32) -> AsyncIterator[RawYamux]:
        parts = address.split("/")
        key_pair = create_new_key_pair(seed)
        noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
        async with await trio.open_tcp_stream(parts[2], int(parts[4])) as socket:
            raw = RawConnection(TrioTCPStream(socket), True)
            await agree(raw, NOISE)
            session = await noise.secure_outbound(raw, ID.from_base58(parts[6]))
            await agree(session, YAMUX)
            yield RawYamux(session)

    return connect


async def agree(conn: Any, protocol: str) -> None:
    """multistream-select one protocol, or raise."""
    await MultiselectClient().select_one_of([protocol], MultiselectCommunicator(conn), 5)


@pytest.fixture(scope="session")
def make_arena(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    from .arena import Arena  # imports torch, which the attacks on libp2p need not wait for

    @contextmanager
    def opened(
        learning: dict[str, Any], pause: float = 0.0, rules: dict[str, Any] | None = None
    ) -> Iterator[Arena]:
        """`pause`: seconds between renewed beacons; none, so that no test waits for another one's."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nous_node.node.trainer.STATUS_SECONDS", 0.05)
            arena = Arena(tmp_path_factory.mktemp("arena"), learning, pause, rules)
            try:
                yield arena
            finally:
                arena.stop()

    return opened


@pytest.fixture(scope="session")
def arena(make_arena: Callable[..., Any]) -> Iterator[Arena]:
    """A trainer whose policy stays as it is: an update would need more groups than all tests send."""
    with make_arena({"groups": 1000}) as arena:
        yield arena


@pytest.fixture(scope="session")
def honest(arena: Arena) -> Forger:
    """A key that counts in the arena."""
    return arena.known("honest")


@pytest.fixture(scope="session")
def liars(arena: Arena) -> Iterator[Forger]:
    """Keys that count in the arena, and have done nothing yet."""
    return iter(arena.crowd(LIARS))


@pytest.fixture
def liar(liars: Iterator[Forger]) -> Forger:
    """One for this test: who cheats is soon in quarantine."""
    return next(liars)


@pytest.fixture(scope="session")
def court(make_arena: Callable[..., Any]) -> Iterator[Arena]:
    """A trainer that never comes to an update, audits half of what trusted keys send, and whose versions are
    soon stale."""
    with make_arena({"groups": 1000, "audit": 0.5}, rules={"staleness": 1}) as arena:
        yield arena
