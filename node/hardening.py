"""py-libp2p 0.8.1's host and swarm, made to survive hostile peers.

Each class below mends named faults of that release, on our own instances only:

- `BoundedCommunicator`: protocol negotiation reads a length of up to 2^63 and buffers that much; text
  that is no UTF-8 escapes as an exception that ends the process.
- `BoundedSelector`, `NoiseYamuxUpgrader`: by default TLS, SECIO and PLAINTEXT are offered beside Noise,
  and Yamux is hard-wired to a class without flow control.
- `HardenedSwarm`: an inbound connection holds its slot until the process ends, so the 301st connection
  of a node's life is refused; half-open sockets hold all slots for 10 s; nothing replaces the dead
  connection of a peer that came back; the auto-connector dials every known address and the pruner
  closes live connections.
- `HardenedHost`: an exception of a stream handler cancels the whole swarm; opening a stream may dial;
  identify runs by itself and fills the peer store with addresses that a peer claims.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.identify import identify_handler_for
from libp2p.io.utils import read_exactly
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.exceptions import (
    MultiselectClientError,
    MultiselectCommunicatorError,
    MultiselectError,
)
from libp2p.protocol_muxer.generic_selector import GenericMultistreamSelector
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.transport.exceptions import MuxerUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils import encode_delim

from .listener import ExclusiveTCP
from .muxer import Muxer
from .muxer_stream import MuxerStream
from .network_stats import NetworkStats
from .upload_limit import UploadLimit

MULTISTREAM = MULTISELECT_PROTOCOL_ID.encode()

# Protocol names are a few dozen bytes; go-libp2p reads at most 1 KiB, too.
MAX_NEGOTIATION_LINE = 1024
# A negotiation or a handshake is three round trips: 5 s even on a bad link.
NEGOTIATION_S = 5
HANDSHAKE_S = 5.0
# Handshakes under way. When a new one comes on top, the oldest is dropped: half-open sockets lose to
# peers that speak, and an honest handshake is over in a fraction of a second.
MAX_HANDSHAKES = 32
# Both sides may dial at once, and a restarted peer comes back before its old connection is known dead.
MAX_CONNECTIONS_PER_PEER = 2
# Reads before the muxer: at most one Noise message at a time, so that a claimed length buys no memory.
RAW_READ_LIMIT = 64 * 1024


PING_PROTOCOL = "/ipfs/ping/1.0.0"
PING_BYTES = 32
# A ping stream may stay open between pings; a silent one is given up.
PING_IDLE_S = 60.0


async def answer_pings(stream: Any) -> None:
    """libp2p's ping: 32 bytes, sent back. Other implementations watch their connections with it."""
    muxed = stream.muxed_stream
    try:
        while True:
            with trio.fail_after(PING_IDLE_S):
                payload = b""
                while len(payload) < PING_BYTES:
                    payload += await muxed.read(PING_BYTES - len(payload))
                await muxed.write(payload)
    except (trio.TooSlowError, MuxedStreamError):
        await stream.reset()


class BoundedCommunicator(MultiselectCommunicator):  # type: ignore[misc]
    """multistream-select lines, with a limit and without stray exceptions."""

    async def read(self) -> str:
        try:
            size = await self._read_length()
            line = await read_exactly(self.read_writer, size)
            if not line.endswith(b"\n"):
                raise MultiselectCommunicatorError("a negotiation line does not end in a newline")
            return str(line[:-1].decode())
        except MultiselectCommunicatorError:
            raise
        except Exception as error:
            raise MultiselectCommunicatorError("cannot read a negotiation line") from error

    async def _read_length(self) -> int:
        first = (await read_exactly(self.read_writer, 1))[0]
        size = first & 0x7F
        if first & 0x80:
            size |= (await read_exactly(self.read_writer, 1))[0] << 7
        if not 0 < size <= MAX_NEGOTIATION_LINE:
            raise MultiselectCommunicatorError(
                f"a negotiation line of {size} bytes, the limit is {MAX_NEGOTIATION_LINE}"
            )
        return int(size)

    async def write(self, msg_str: str) -> None:
        try:
            await super().write(msg_str)
        except MultiselectCommunicatorError:
            raise
        except Exception as error:
            raise MultiselectCommunicatorError("cannot write a negotiation line") from error


async def _consent(lines: BoundedCommunicator, protocol: str) -> None:
    """Reads what a peer says to a protocol that it has spoken before."""
    with trio.move_on_after(NEGOTIATION_S):
        try:
            said = await lines.read(), await lines.read()
        except MultiselectCommunicatorError as error:
            raise MultiselectClientError("the negotiation broke off") from error
        if said != (MULTISTREAM.decode(), protocol):
            raise MultiselectClientError(f"protocols not supported any more: {protocol}")
        return
    raise MultiselectClientError("the peer does not answer to the negotiation")


class BoundedSelector(GenericMultistreamSelector):  # type: ignore[misc]
    """Negotiates over `BoundedCommunicator`."""

    async def select(self, conn: Any, is_initiator: bool, negotiate_timeout: int = NEGOTIATION_S) -> Any:
        communicator = BoundedCommunicator(conn)
        if is_initiator:
            protocol = await self.multiselect_client.select_one_of(
                tuple(self.handlers), communicator, negotiate_timeout
            )
        else:
            protocol, _ = await self.multiselect.negotiate(communicator, negotiate_timeout)
        if protocol is None:
            raise MultiselectError("no protocol was selected")
        return protocol, self.handlers[protocol]


class NoiseYamuxUpgrader(TransportUpgrader):  # type: ignore[misc]
    """Noise and our `Muxer`, nothing else."""

    def __init__(self, key_pair: Any, stats: NetworkStats, upload: UploadLimit) -> None:
        super().__init__({}, {})
        noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
        security = BoundedSelector()
        security.add_handler(NOISE, noise)
        self.security_multistream._selector = security
        self._muxers = BoundedSelector()
        self._muxers.add_handler(YAMUX, Muxer)
        self._stats = stats
        self._upload = upload

    async def upgrade_connection(self, conn: Any, peer_id: Any) -> Muxer:
        try:
            await self._muxers.select(conn, conn.is_initiator)
        except (MultiselectError, MultiselectClientError) as error:
            raise MuxerUpgradeFailure("the peer does not speak Yamux") from error
        return Muxer(conn, peer_id, self._stats, self._upload)


class BoundedRawConnection(RawConnection):  # type: ignore[misc]
    """Never asks the socket for more than a Noise message, whatever length a peer has claimed."""

    async def read(self, n: int | None = None) -> bytes:
        limit = RAW_READ_LIMIT if n is None else min(n, 2 * RAW_READ_LIMIT)
        return bytes(await super().read(limit))


class _NoAutoConnector:
    """Takes the place of the auto-connector: we dial what the run names, nothing else."""

    def __init__(self) -> None:
        self._is_connecting = True  # `Swarm._schedule_auto_connect` then returns at once

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def run_background_task(self, nursery: trio.Nursery) -> None: ...

    def record_disconnect(self, peer_id: Any) -> None: ...


class HardenedSwarm(Swarm):  # type: ignore[misc]
    """A swarm with bounded handshakes, connections and connections a peer."""

    def __init__(self, key_pair: Any, max_connections: int, stats: NetworkStats, upload: UploadLimit) -> None:
        peer_id = ID.from_pubkey(key_pair.public_key)
        peerstore = PeerStore()
        peerstore.add_key_pair(peer_id, key_pair)
        super().__init__(
            peer_id,
            peerstore,
            NoiseYamuxUpgrader(key_pair, stats, upload),
            transports=[ExclusiveTCP()],
            retry_config=RetryConfig(max_retries=0),
            connection_config=ConnectionConfig(
                max_connections=max_connections + MAX_HANDSHAKES,  # ours below counts first
                high_watermark=max_connections + MAX_HANDSHAKES,
                min_connections=0,
                low_watermark=0,
                max_connections_per_peer=MAX_CONNECTIONS_PER_PEER,
                inbound_upgrade_timeout=HANDSHAKE_S,
                outbound_upgrade_timeout=HANDSHAKE_S,
                outbound_stream_protocol_negotiation_timeout=NEGOTIATION_S,
                inbound_stream_protocol_negotiation_timeout=NEGOTIATION_S,
            ),
        )
        self.stats = stats
        self.max_connections = max_connections
        self._admitting = 0
        self.auto_connector = _NoAutoConnector()
        self.refused_peers: dict[Any, float] = {}  # peer id -> trio time until which it is refused
        self._handshakes: OrderedDict[trio.CancelScope, None] = OrderedDict()

    async def notify_opened_stream(self, stream: Any) -> None:
        """Nobody wants to know, and to start a task for each who does not costs as much as the stream."""

    async def notify_closed_stream(self, stream: Any) -> None:
        """The same; nothing is counted that would have to be given back."""

    def _schedule_prune(self) -> None:
        """Nothing is pruned: the limit refuses newcomers instead of closing what works."""

    async def _handle_inbound_connection(self, read_write_closer: Any, maddr: Any) -> None:
        """Handshake, then stay until this very connection is closed (the caller closes the socket)."""
        if self._is_full():
            self.stats.connections_refused += 1
            return
        if len(self._handshakes) >= MAX_HANDSHAKES:
            oldest, _ = self._handshakes.popitem(last=False)
            oldest.cancel()
            self.stats.fault("handshake-flood")
        muxer = None
        with trio.CancelScope() as scope:
            self._handshakes[scope] = None
            try:
                raw = BoundedRawConnection(read_write_closer, False)
                muxer = await self.upgrade_inbound_raw_conn(raw, maddr)
            except SwarmException:
                self.stats.fault("handshake-failed")
            except Exception:  # bytes that Noise or its protobufs do not like
                self.stats.fault("handshake-garbage")
            finally:
                self._handshakes.pop(scope, None)
        if muxer is not None:
            await muxer.event_closed.wait()

    async def add_conn(self, muxed_conn: Any, direction: str = "unknown") -> Any:
        """Admit a connection, or close it and raise SwarmException."""
        peer_id = muxed_conn.peer_id
        if self.refused_peers.get(peer_id, 0.0) > trio.current_time():
            await self._refuse(muxed_conn, f"{peer_id} is refused for now: it broke the rules")
        live = [c for c in self.connections.get(peer_id, []) if not c.is_closed]
        if not live and self._is_full():
            await self._refuse(muxed_conn, f"all {self.max_connections} connections are taken")
        while len(live) >= MAX_CONNECTIONS_PER_PEER:
            await live.pop(0).close()
        self._admitting += 1  # it is in `connections` only after several checkpoints
        try:
            return await super().add_conn(muxed_conn, direction)
        finally:
            self._admitting -= 1

    def _is_full(self) -> bool:
        return len(self.get_connections()) + self._admitting >= self.max_connections

    async def _refuse(self, muxed_conn: Any, reason: str) -> None:
        self.stats.connections_refused += 1
        await muxed_conn.close()
        raise SwarmException(reason)


class HardenedHost(BasicHost):  # type: ignore[misc]
    """A host whose handlers cannot end the process and that never dials by itself."""

    def __init__(self, swarm: HardenedSwarm, stats: NetworkStats) -> None:
        super().__init__(
            swarm,
            default_protocols=OrderedDict({PING_PROTOCOL: answer_pings}),
            negotiate_timeout=NEGOTIATION_S,
            disable_identify_address_discovery=True,
        )
        self.stats = stats
        # js- and go-libp2p ask for it before they gossip; our own side never asks.
        self.set_stream_handler(IDENTIFY, identify_handler_for(self))

    def _schedule_identify(self, peer_id: Any, *, reason: str) -> None:
        """We learn addresses from invites and mDNS, not from what a peer claims."""

    async def _push_identify_to_all_peers(self) -> None:
        """Nobody needs our addresses pushed."""

    async def new_stream(self, peer_id: Any, protocol_ids: Sequence[str]) -> Any:
        """Open a stream on an existing connection.

        Raises SwarmException without one, MultiselectClientError if the peer does not speak any of
        the protocols, muxer errors if the connection breaks.
        """
        stream = await self._live(peer_id).new_stream()
        try:
            protocol = await self.multiselect_client.select_one_of(
                tuple(protocol_ids), BoundedCommunicator(stream), NEGOTIATION_S
            )
        except BaseException:
            with trio.CancelScope(shield=True):
                await stream.reset()
            raise
        stream.set_protocol(protocol)
        return stream

    async def ask(self, peer_id: Any, protocol: str, request: bytes) -> MuxerStream:
        """Open a stream, write all that is to be asked, and close our side; the answer is next on it.

        A peer that spoke the protocol on this connection before gets everything at once, without a wait for
        its consent. libp2p keeps no record of the stream: to tell of it costs more than a small request.
        Raises as `new_stream`.
        """
        muxer = self._live(peer_id).muxed_conn
        muxed: MuxerStream = await muxer.open_stream()
        lines = BoundedCommunicator(muxed)
        try:
            if protocol in muxer.spoken:
                await muxed.write(encode_delim(MULTISTREAM) + encode_delim(protocol.encode()) + request)
                await muxed.close_write()
                await _consent(lines, protocol)
            else:
                await self.multiselect_client.select_one_of((protocol,), lines, NEGOTIATION_S)
                await muxed.write(request)
                await muxed.close_write()
                muxer.spoken.add(protocol)
        except BaseException:
            muxer.spoken.discard(protocol)
            with trio.CancelScope(shield=True):
                await muxed.reset()
            raise
        return muxed

    def _live(self, peer_id: Any) -> Any:
        live = [c for c in self._network.connections.get(peer_id, []) if not c.is_closed]
        if not live:
            raise SwarmException(f"not connected to {peer_id}")
        return live[-1]

    async def _swarm_stream_handler(self, net_stream: Any) -> None:
        """Negotiate and run a handler. Whatever it raises ends this stream and nothing else."""
        try:
            protocol, handler = await self.multiselect.negotiate(
                BoundedCommunicator(net_stream.muxed_stream), NEGOTIATION_S
            )
            if handler is None:
                raise MultiselectError("no protocol was selected")
            net_stream.set_protocol(protocol)
            await handler(net_stream)
        except MultiselectError:
            self.stats.fault("stream-negotiation")
            await net_stream.reset()
        except Exception:
            self.stats.fault("stream-handler")
            await net_stream.reset()


def build_host(seed: bytes, max_connections: int, stats: NetworkStats, upload: UploadLimit) -> HardenedHost:
    """A host that is not listening yet, with the identity of a 32-byte Ed25519 seed."""
    key_pair = create_new_key_pair(seed)
    return HardenedHost(HardenedSwarm(key_pair, max_connections, stats, upload), stats)
