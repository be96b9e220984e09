"""A peer of the kit: a key that nobody has seen before, connected to the client under test.

It asks as an honest node does, opens streams whose bytes are up to the check, and speaks pubsub by hand: what
it publishes may be wrong in any way, and it keeps what the client sends it, up to a limit.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError
from libp2p.tools.anyio_service import background_trio_service

from nous_node.protocol.encoding import read
from nous_node.protocol.streams import BLOB_PROTOCOL, MAX_BLOB_REPLY, MAX_REQUEST, BlobRequest, blob_reply

from . import requests
from .following import now_ms
from .frames import FrameError, VarintFrames
from .gossip import MAX_RPC_BYTES, MAX_TOPIC_CHARS
from .gossip_signing import SIGNING_PREFIX, is_signed
from .hardening import HardenedHost, build_host
from .live_check import Failed
from .live_wire import Pace
from .mesh import MAX_IWANT_PER_HEARTBEAT, frame
from .muxer_stream import MuxerStream
from .network import DIAL_S, parse_address
from .network_errors import UnreachableError
from .network_stats import NetworkStats
from .upload_limit import UploadLimit

MESHSUB = ("/meshsub/1.2.0", "/meshsub/1.1.0")
MAX_HEARD = 200_000
"""Messages of the client within a test of some minutes: several times what the busiest run brings."""
KEPT_BYTES = 64 << 20
"""Of messages whose content is kept, the oldest of which are dropped."""
MAX_TOPICS = 10_000
MAX_RPCS = 1_000_000
"""Some are empty: a client that sends nothing else would keep the kit busy for ever."""
CONNECTIONS = 8
"""A kit's peer is dialled by nobody."""
CLOSE_S = 2.0
BLOBS_AT_ONCE = 16


class Heard(NamedTuple):
    """A pubsub message that the client sent."""

    number: int
    topic: str
    data: bytes
    own: bool
    """Published by the client itself."""
    now: int
    """Unix milliseconds when it came."""

    @property
    def size(self) -> int:
        return len(self.topic) + len(self.data)


class KitPeer:
    """Made by `kit_peer`."""

    def __init__(self, host: HardenedHost, seed: bytes, address: str, target: str) -> None:
        self.address, self.target = address, target
        self.peer_id = str(host.get_id())
        self.origin: bytes = host.get_id().to_bytes()
        self.topics: set[str] = set()
        """That the client reads."""
        self.pruned: set[str] = set()
        """Topics in whose mesh the client does not want this peer now."""
        self.kept: deque[Heard] = deque()
        """What trainers and the client itself published, the latest last."""
        self.total = self.own = self.unsigned = 0
        """Messages that came: all, those that the client published itself, those that break NET-5."""
        self.flooded = False
        self.garbled = ""
        """Why what it wrote on a pubsub stream is no RPC, where it is none."""
        self._rpcs = 0
        self._host, self._target = host, ID.from_base58(target)
        self._signer = Ed25519PrivateKey.from_private_bytes(seed)
        self._seqno = time.time_ns()
        self._bytes = 0
        self._digests: Counter[bytes] = Counter()
        self._seen: set[bytes] = set()
        self._mine: set[str] = set()
        self._writer: MuxerStream | None = None
        self._changed = trio.Event()
        for protocol in MESHSUB:
            host.set_stream_handler(protocol, self._listen)

    # Streams

    @property
    def connected(self) -> bool:
        connections = self._host.get_network().connections.get(self._target, [])
        return any(not one.is_closed for one in connections)

    async def lost(self, seconds: float) -> bool:
        """Whether the client closes the connection within this time."""
        with trio.move_on_after(seconds):
            while self.connected:  # noqa: ASYNC110
                await trio.sleep(0.02)
        return not self.connected

    async def stream(self, *protocols: str) -> MuxerStream:
        """A negotiated stream. Raises MultiselectClientError where the client speaks none of them."""
        stream = await self._host.new_stream(self._target, protocols)
        muxed: MuxerStream = stream.muxed_stream
        return muxed

    async def ask(self, protocol: str, payload: bytes, limit: int, seconds: float = 10.0) -> bytes:
        """One request, as honest nodes make it. Raises as `Network.request` does."""
        return await requests.request(
            self._host, self._target, protocol, payload, max_response=limit, deadline=seconds
        )

    def serve_blobs(self, blobs: Mapping[bytes, bytes]) -> None:
        """Answers /nous/blob/1: for a hash with these bytes, right or wrong."""

        async def answer(peer: str, request: bytes) -> bytes:
            return blob_reply(blobs.get(read(request, BlobRequest, MAX_REQUEST).hash))

        service = requests.Service(
            BLOB_PROTOCOL,
            answer,
            max_request=MAX_REQUEST,
            max_response=MAX_BLOB_REPLY,
            per_peer=BLOBS_AT_ONCE,
            total=BLOBS_AT_ONCE,
            deadline=requests.STALL_S,
        )
        server = requests.Server(service, NetworkStats())
        self._host.set_stream_handler(BLOB_PROTOCOL, server.handle)

    # Pubsub, out

    def signed(self, topic: str, data: bytes) -> Any:
        """A message of this peer, in protobuf that is made here by hand and not by the library that reads it
        at most nodes. [NET-5]"""
        self._seqno += 1
        fields = (
            (1, self.origin),
            (2, data),
            (3, self._seqno.to_bytes(8, "big")),
            (4, topic.encode()),
        )
        body = b"".join(field(number, value) for number, value in fields)
        body += field(5, self._signer.sign(SIGNING_PREFIX + body))
        return rpc_pb2.Message.FromString(body)

    async def publish(self, topic: str, *data: bytes) -> None:
        await self.publish_raw(*(self.signed(topic, one) for one in data))

    async def publish_raw(self, *messages: Any) -> None:
        """Each in an RPC of its own."""
        for message in messages:
            await self.say(frame(rpc_pb2.RPC(publish=[message])))

    async def subscribe(self, topics: Iterable[str]) -> None:
        """Reads topics, as a member of the mesh where the client lets it in."""
        fresh = sorted(set(topics) - self._mine)
        if not fresh:
            return
        self._mine.update(fresh)
        rpc = rpc_pb2.RPC()
        for topic in fresh:
            rpc.subscriptions.add(subscribe=True, topicid=topic)
            rpc.control.graft.add().topicID = topic
        await self.say(frame(rpc))

    async def say(self, data: bytes) -> None:
        """Bytes on the pubsub stream."""
        if self._writer is None:
            self._writer = await self.stream(*MESHSUB)
        try:
            await self._writer.write(data)
        except (MuxedStreamError, MuxedConnUnavailable) as error:
            raise Failed("It ended the pubsub stream of a peer that had done nothing wrong.") from error

    async def pubsub_ends(self, seconds: float) -> bool:
        """Whether the client ends the stream on which this peer writes its RPCs, or the connection."""
        with trio.move_on_after(seconds):
            try:
                while self._writer is not None:
                    await self._writer.read(4096)
            except (MuxedStreamError, MuxedConnUnavailable):
                return True
        return not self.connected

    # Pubsub, in

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether something becomes so that depends on what is heard."""
        with trio.move_on_after(seconds):
            while not condition():
                await self._changed.wait()
        return condition()

    async def hears(self, data: bytes, seconds: float) -> bool:
        """Whether a message with this content comes."""
        return await self.until(lambda: self.times(data) > 0, seconds)

    def times(self, data: bytes) -> int:
        """How often a message with this content has come."""
        return self._digests[_digest(data)]

    async def _listen(self, stream: Any) -> None:
        """The stream on which the client writes its RPCs."""
        frames = VarintFrames(MAX_RPC_BYTES)
        with suppress(MuxedStreamError, MuxedConnUnavailable):
            try:
                while not self.flooded:
                    for raw in frames.feed(await stream.muxed_stream.read(1 << 16)):
                        await self._receive(rpc_pb2.RPC.FromString(raw))
            except (FrameError, DecodeError) as error:
                self.garbled = self.garbled or str(error)
        await stream.reset()

    async def _receive(self, rpc: Any) -> None:
        self._rpcs += 1
        for option in rpc.subscriptions:
            (self.topics.add if option.subscribe else self.topics.discard)(_name(option.topicid))
        for message in rpc.publish:
            self._note(message)
        self.pruned.difference_update(_name(one.topicID) for one in rpc.control.graft)
        self.pruned.update(_name(one.topicID) for one in rpc.control.prune)
        told = (one for ihave in rpc.control.ihave for one in ihave.messageIDs)
        wanted = [one for one in told if _digest(one) not in self._seen]
        self.flooded |= len(self.topics) + len(self.pruned) > MAX_TOPICS or self._rpcs > MAX_RPCS
        self._changed.set()
        self._changed = trio.Event()
        if wanted and self._writer is not None:
            ask = rpc_pb2.RPC()
            ask.control.iwant.add(messageIDs=wanted[:MAX_IWANT_PER_HEARTBEAT])
            with suppress(Failed):
                await self.say(frame(ask))

    def _note(self, message: Any) -> None:
        if self.total >= MAX_HEARD:
            self.flooded = True
            return
        self.total += 1
        self._seen.add(_digest(message.from_id + message.seqno))
        self._digests[_digest(message.data)] += 1
        own = message.from_id == self._target.to_bytes()
        self.own += own
        self.unsigned += not is_signed(message)
        topic = message.topicIDs[0] if len(message.topicIDs) == 1 else ""
        if own or topic.endswith(("/receipts", "/checkpoints")):
            self._keep(Heard(self.total, topic, message.data, own, now_ms()))

    def _keep(self, message: Heard) -> None:
        self.kept.append(message)
        self._bytes += message.size
        while self._bytes > KEPT_BYTES:
            self._bytes -= self.kept.popleft().size


def _name(topic: str) -> str:
    """As much of a topic's name as shows that it is too long."""
    return topic[: MAX_TOPIC_CHARS + 1]


def _digest(data: bytes) -> bytes:
    """What is kept of content and message ids, which may be long."""
    return hashlib.sha256(data).digest()


def field(number: int, value: bytes) -> bytes:
    """A protobuf field of bytes."""
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


@asynccontextmanager
async def kit_peer(address: str, pace: Pace) -> AsyncIterator[KitPeer]:
    """Connected until the block ends. Raises UnreachableError."""
    transport, target = parse_address(address)
    seed = os.urandom(32)
    host = build_host(seed, CONNECTIONS, NetworkStats(), UploadLimit(None))
    peer = KitPeer(host, seed, address, target)
    swarm = host.get_network()
    failure: Exception | None = None
    async with background_trio_service(swarm):
        try:
            await pace.turn()
            await _dial(swarm, transport, target, address)
            yield peer
        except Exception as error:  # raised below, outside the nursery, so that it is not wrapped
            failure = error
        finally:
            with trio.CancelScope(deadline=trio.current_time() + CLOSE_S, shield=True):
                await swarm.close_peer(ID.from_base58(target))
    if failure is not None:
        raise failure


async def _dial(swarm: Any, transport: Any, target: str, address: str) -> None:
    reason = f"no answer within {DIAL_S:g} s"
    with trio.move_on_after(DIAL_S):
        try:
            await swarm._dial_addr_single_attempt(transport, ID.from_base58(target))
            return
        except Exception as error:
            reason = (str(error) or type(error).__name__).rstrip(".")
    raise UnreachableError(address, reason)
