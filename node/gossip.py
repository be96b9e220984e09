"""Pubsub over py-libp2p 0.8.1: streams, signatures, verdicts and back-pressure.

Replaces what in that release lets a peer end the process or lose messages silently:
- every inbound message became a task of its own, with at most 10 validators at once and no IGNORE:
  here a peer's messages are judged in order in its reader, which waits for a slow consumer, and that
  fills the peer's window: back-pressure from the consumer to the publisher;
- three places wrote to a peer's stream at once: here one task a peer is, and joins small frames;
- bytes that are no protobuf, keys that are no keys, callbacks that raise: counted, the stream reset;
- the length prefix was read byte by byte, each with a window update: here from a buffer;
- own messages came back through the own subscription: they do not.

Spec: https://github.com/libp2p/specs/blob/master/pubsub/README.md, StrictSign.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError

from nous_node.protocol.gossip import Verdict

from .connection_watch import ConnectionWatch
from .frames import FrameError, VarintFrames
from .gossip_memory import OutboundQueue, SeenMessages
from .gossip_signing import is_signed, sign_message
from .mesh import Mesh, frame
from .network_errors import NoSubscribersError, OversizePublishError, TopicTakenError
from .network_stats import NetworkStats
from .offences import Offences

Judge = Callable[[bytes, str], Verdict]
Lost = Callable[[bytes], None]

# Other implementations refuse RPCs above 1 MiB; 1 KiB is left for signature, key, ids and topic.
MAX_RPC_BYTES = 1024 * 1024
MAX_PUBLISH_BYTES = MAX_RPC_BYTES - 1024

MAX_TOPIC_CHARS = 256  # ours are under 100
MAX_TOPICS_PER_PEER = 64  # a trainer of a large run reads a few dozen shards

# Until a message is given up for a slow consumer: stock py-libp2p takes a stream for dead after 5 s.
CONSUMER_PATIENCE_S = 2.0
# A peer that takes nothing for this long while its queue is full is disconnected.
WRITE_STALL_S = 30.0
WRITE_BATCH = 64 * 1024  # one Noise message, one system call

_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)


class Subscription:
    """A topic that we are in: its judge, the channel of what was accepted, and who hears what is lost."""

    def __init__(self, judge: Judge, capacity: int, lost: Lost) -> None:
        self.judge, self.lost = judge, lost
        self.send, self.receive = trio.open_memory_channel[tuple[bytes, str]](capacity)


class Gossip(Pubsub):  # type: ignore[misc]  # untyped base
    """Pubsub of one node. `run()` until cancelled; the rest may be called meanwhile."""

    def __init__(self, host: Any, seed: bytes, stats: NetworkStats) -> None:
        self.mesh = Mesh(stats)
        super().__init__(
            host,
            self.mesh,
            max_subscriptions_per_peer=MAX_TOPICS_PER_PEER,
            max_inbound_rpc_size=MAX_RPC_BYTES,
        )
        swarm = host.get_network()
        swarm.remove_notifee(swarm.notifees[-1])  # libp2p's own, which blocks; see ConnectionWatch
        swarm.register_notifee(ConnectionWatch(self._peer_came, self._peer_went))
        self.seen_messages.stop()  # a thread
        self.seen_messages: Any = SeenMessages()
        # Sequence numbers of a restarted node must not meet those of its last life. libp2p counts up from
        # the time in seconds, which 200 messages/s outrun.
        self.counter = time.time_ns()
        self.stats = stats
        self.subscriptions: dict[str, Subscription] = {}
        self.subscribers_changed = trio.Event()  # replaced at each change of `peer_topics`
        self._signer = Ed25519PrivateKey.from_private_bytes(seed)
        self._my_bytes = host.get_id().to_bytes()
        self._readers: dict[Any, trio.CancelScope] = {}
        self._registering: set[Any] = set()
        self.offences = Offences(swarm, stats)
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Start it with `nursery.start`: nothing works before."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.mesh.run)
            nursery.start_soon(self.offences.run)
            task_status.started()

    # Peers

    def _peer_came(self, peer: Any) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._serve_peer, peer)

    def _peer_went(self, peer: Any) -> None:
        if not self._peer_is_connected(peer):
            self._forget(peer)
            self._forget_all_subscriptions(peer)
            self._note_subscribers()

    async def _serve_peer(self, peer: Any) -> None:
        """The only writer towards a peer, for as long as it stays connected."""
        if peer in self._registering:
            return
        self._registering.add(peer)
        try:
            attempt = 0
            while self._peer_is_connected(peer):
                try:
                    await self._write_to(peer)
                    attempt = 0
                except MultiselectClientError:
                    pass  # the peer has no gossip, or not yet
                except Exception:
                    self.stats.fault("gossip-stream-broken")
                self._forget(peer)
                await trio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
                attempt += 1
        finally:
            self._registering.discard(peer)

    async def _write_to(self, peer: Any) -> None:
        stream = await self.host.new_stream(peer, self.protocols)
        self.mesh.add_peer(peer, stream.get_protocol())
        queue = OutboundQueue()
        self.peers[peer], self.peer_queues[peer] = stream, queue
        queue.push_control(frame(self.get_hello_packet()))
        for topic in [t for t, peers in self.peer_topics.items() if peer in peers]:
            await self.mesh.on_peer_subscribed(peer, topic)
        self._note_subscribers()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_close_with, stream.muxed_stream, queue)
            await self._pump(peer, stream.muxed_stream, queue)
            nursery.cancel_scope.cancel()

    async def _pump(self, peer: Any, muxed: Any, queue: OutboundQueue) -> None:
        while batch := await queue.pop_batch(WRITE_BATCH):
            with trio.move_on_after(WRITE_STALL_S) as scope:
                await muxed.write(batch)
            if scope.cancelled_caught:
                self.stats.fault("gossip-writer-stalled")
                await self.host.get_network().close_peer(peer)
                return

    def _forget(self, peer: Any) -> None:
        queue = self.peer_queues.pop(peer, None)
        if queue is not None:
            queue.close()
        if self.peers.pop(peer, None) is not None:
            self.mesh.remove_peer(peer)

    def _handle_dead_peer(self, peer_id: Any) -> None:
        self._forget(peer_id)

    def get_hello_packet(self) -> Any:
        packet = rpc_pb2.RPC()
        for topic in self.subscriptions:
            packet.subscriptions.add(subscribe=True, topicid=topic)
        return packet

    def peer_id_of(self, raw: bytes) -> Any:
        return ID(raw)

    # Receiving

    async def stream_handler(self, stream: Any) -> None:
        """Read one peer's RPCs; a newer stream of the same peer takes over."""
        peer = stream.muxed_conn.peer_id
        if peer in self._readers:
            self._readers[peer].cancel()
        with trio.CancelScope() as scope:
            self._readers[peer] = scope
            try:
                await self._read_from(peer, stream.muxed_stream)
            finally:
                if self._readers.get(peer) is scope:
                    del self._readers[peer]
        with trio.CancelScope(shield=True):
            await stream.reset()

    async def _read_from(self, peer: Any, muxed: Any) -> None:
        frames = VarintFrames(MAX_RPC_BYTES)
        while True:
            try:
                for raw in frames.feed(await muxed.read(WRITE_BATCH)):
                    await self._receive(peer, raw)
            except (MuxedStreamError, MuxedConnUnavailable):
                return  # the stream is over
            except DecodeError:
                self.offences.add(peer, "gossip-garbage")
                return
            except FrameError:
                self.offences.add(peer, "gossip-bad-frame")
                return
            except Exception:
                self.offences.add(peer, "gossip-reader")
                return

    async def _receive(self, peer: Any, raw: bytes) -> None:
        rpc = rpc_pb2.RPC()
        rpc.ParseFromString(raw)
        for option in rpc.subscriptions:
            await self._subscription_of(peer, option)
        for message in rpc.publish:
            await self.push_msg(peer, message)
        if rpc.HasField("control"):
            await self.mesh.handle_rpc(rpc, peer)

    async def _subscription_of(self, peer: Any, option: Any) -> None:
        topic = option.topicid
        if not option.subscribe:
            self._forget_subscription(peer, topic)
            self._note_subscribers()
            return
        if peer in self.peer_topics.get(topic, ()):
            return
        count = self._peer_subscription_count.get(peer, 0)
        if count >= MAX_TOPICS_PER_PEER or len(topic) > MAX_TOPIC_CHARS:
            self.stats.fault("gossip-too-many-topics")
            return
        self.peer_topics.setdefault(topic, set()).add(peer)
        self._peer_subscription_count[peer] = count + 1
        self._note_subscribers()
        if peer in self.peers:
            await self.mesh.on_peer_subscribed(peer, topic)
            await self._replay_recent_messages(peer, topic)

    def _note_subscribers(self) -> None:
        self.subscribers_changed.set()
        self.subscribers_changed = trio.Event()

    async def push_msg(self, msg_forwarder: Any, msg: Any) -> None:
        """Judge one message from a peer; deliver and forward it if it is accepted."""
        topics = msg.topicIDs
        subscription = self.subscriptions.get(topics[0]) if len(topics) == 1 else None
        if subscription is None:
            return  # not ours: not read, not forwarded
        topic = topics[0]
        counters = self.stats.topic(topic)
        mid = msg.from_id + msg.seqno
        if self.seen_messages.has(mid):
            counters.duplicates += 1
            return
        if msg.from_id == self._my_bytes:
            return  # our own, come back
        if not is_signed(msg):
            self.offences.add(msg_forwarder, "gossip-bad-signature")
            return
        self.seen_messages.add(mid)
        data = msg.data
        match self._judge(subscription, data, msg_forwarder):
            case Verdict.ACCEPT:
                counters.accepted += 1
                delivered = False
                try:
                    await self.mesh.forward(msg_forwarder, msg, mid, topic, trio.current_time())
                    delivered = await self._deliver(subscription, data, msg_forwarder)
                finally:  # also where the peer's reader is cancelled meanwhile
                    if not delivered:
                        counters.consumer_slow += 1
                        self.seen_messages.discard(mid)  # gossip may bring it again
                        subscription.lost(data)
            case Verdict.IGNORE:
                counters.ignored += 1
            case Verdict.REJECT:
                counters.rejected += 1
                self.offences.add(msg_forwarder, "gossip-rejected")

    def _judge(self, subscription: Subscription, data: bytes, forwarder: Any) -> Verdict:
        try:
            return subscription.judge(data, str(forwarder))
        except Exception:  # a fault of ours: nobody is punished for it
            self.stats.fault("judge-raised")
            return Verdict.IGNORE

    async def _deliver(self, subscription: Subscription, data: bytes, forwarder: Any) -> bool:
        item = (data, str(forwarder))
        try:
            subscription.send.send_nowait(item)
            return True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False  # the consumer has left
        except trio.WouldBlock:
            pass
        with trio.move_on_after(CONSUMER_PATIENCE_S) as patience:
            try:
                await subscription.send.send(item)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
        return not patience.cancelled_caught

    # Our own side

    def join(self, topic: str, judge: Judge, capacity: int, lost: Lost) -> Subscription:
        """Enter a topic; raises TopicTakenError if we are in it already."""
        if topic in self.subscriptions:
            raise TopicTakenError(topic)
        subscription = self.subscriptions[topic] = Subscription(judge, capacity, lost)
        self.stats.topic(topic)
        self._announce(topic, subscribe=True)
        assert self._nursery is not None
        self._nursery.start_soon(self.mesh.join, topic)
        return subscription

    async def leave(self, topic: str) -> None:
        subscription = self.subscriptions.pop(topic, None)
        if subscription is not None:
            subscription.send.close()
            self._announce(topic, subscribe=False)
            await self.mesh.leave(topic)

    def _announce(self, topic: str, *, subscribe: bool) -> None:
        option = rpc_pb2.RPC.SubOpts(subscribe=subscribe, topicid=topic)
        wire = frame(rpc_pb2.RPC(subscriptions=[option]))
        for peer in self.peer_queues:
            self.mesh.send_frame(peer, wire)

    async def publish(self, topic_id: str, data: bytes) -> None:
        """Sign and queue for every recipient; waits for room. Errors: see `Network.publish`."""
        if len(data) > MAX_PUBLISH_BYTES:
            raise OversizePublishError(len(data), MAX_PUBLISH_BYTES)
        message = sign_message(self._signer, self._my_bytes, self._next_seqno(), topic_id, data)
        mid = message.from_id + message.seqno
        queues = await self._wait_for_room(topic_id, mid)
        self.seen_messages.add(mid)
        self.mesh.note_published(topic_id, message, trio.current_time())
        wire = frame(rpc_pb2.RPC(publish=[message]))
        for queue in queues:
            queue.push_message(wire)
        self.stats.topic(topic_id).published += 1
        await trio.lowlevel.checkpoint()

    async def flush(self) -> None:
        """Until what was published has been handed to the connections."""
        for queue in list(self.peer_queues.values()):
            await queue.wait_written()

    async def _wait_for_room(self, topic: str, mid: bytes) -> list[OutboundQueue]:
        """The recipients' queues, each with room; at least one."""
        while True:
            queues = [
                self.peer_queues[peer]
                for peer in self.mesh.recipients(topic, (), mid)
                if peer in self.peer_queues
            ]
            if not queues:
                raise NoSubscribersError(topic)
            ready = [queue for queue in queues if queue.has_room]
            late = [queue for queue in queues if not queue.has_room and queue.patience > 0]
            if ready and not late:
                self.stats.publish_skipped_slow_peer += len(queues) - len(ready)
                return ready
            if not ready:
                await _first_room(queues)
                continue
            start = trio.current_time()
            with trio.move_on_after(min(queue.patience for queue in late)):
                await _first_room(late)
            for queue in late:
                queue.spend(trio.current_time() - start)


async def _close_with(muxed: Any, queue: OutboundQueue) -> None:
    """Nothing comes back on the stream that we write to; its end tells us before a message is lost."""
    try:
        while await muxed.read(1024):
            pass
    except (MuxedStreamError, MuxedConnUnavailable):
        queue.close()


async def _first_room(queues: list[OutboundQueue]) -> None:
    """Until one of the queues has room or is closed."""
    if len(queues) == 1:
        await queues[0].wait_room()
        return
    async with trio.open_nursery() as nursery:

        async def wait(queue: OutboundQueue) -> None:
            await queue.wait_room()
            nursery.cancel_scope.cancel()

        for queue in queues:
            nursery.start_soon(wait, queue)
