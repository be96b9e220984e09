"""GossipSub's mesh as py-libp2p 0.8.1 keeps it, with its faults mended.

Kept: mesh and fanout membership, GRAFT, PRUNE, back-off, lazy gossip (IHAVE, IWANT). Changed:
- the heartbeat is 1 s rather than 120 s, adapts nothing (it would fall back to 30 s and more) and
  survives whatever goes wrong in one beat;
- an RPC is serialized once for all peers and carries no signed peer record (20 % of the CPU);
- IDONTWANT goes out only for large messages and never to who sent the message (8 % of the CPU);
- the equivocation memory (500 full messages), the per-forwarder rate limit and peer exchange are off;
- GRAFT and PRUNE for topics that we are not in leave no trace; IHAVE and IWANT are bounded, and each
  message is resent to a peer a bounded number of times;
- control messages of one peer no longer contain those of all peers before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import trio
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, PROTOCOL_ID_V12, GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.score import ScoreParams
from libp2p.utils.varint import encode_uvarint

from .gossip_memory import RecentMessages
from .gossip_signing import MESSAGE_ID_BYTES
from .network_stats import NetworkStats

HEARTBEAT_S = 1.0
DEGREE, DEGREE_LOW, DEGREE_HIGH = 6, 4, 12  # GossipSub v1.1's own
# Seconds that a fanout outlives the last publish.
FANOUT_S = 60
GOSSIP_WINDOW, GOSSIP_HISTORY = 3, 5  # heartbeats, GossipSub v1.1's own

# Below this a duplicate costs less than telling others that we have the message.
IDONTWANT_MIN_BYTES = 16 * 1024
IDONTWANT_PER_PEER = 1000  # ids of one heartbeat that we remember for a peer

MAX_IHAVE_IDS = 5000  # ids in one IHAVE, out and in: GossipSub v1.1's own
MAX_IWANT_PER_HEARTBEAT = 1000  # ids that one peer may make us ask for
MAX_RESENT_BYTES = 8 * 1024 * 1024  # that one peer may make us send again in a heartbeat
MAX_RESENDS = 3  # of one message to one peer: GossipSub v1.1's own


def frame(rpc: Any) -> bytes:
    """An RPC as it goes on the wire."""
    raw: bytes = rpc.SerializeToString()
    return bytes(encode_uvarint(len(raw))) + raw


class Mesh(GossipSub):  # type: ignore[misc]  # untyped base
    """The router: who gets which message. `Gossip` does streams, signatures and subscriptions."""

    def __init__(self, stats: NetworkStats) -> None:
        super().__init__(
            protocols=[PROTOCOL_ID_V12, PROTOCOL_ID_V11],
            degree=DEGREE,
            degree_low=DEGREE_LOW,
            degree_high=DEGREE_HIGH,
            time_to_live=FANOUT_S,
            gossip_window=GOSSIP_WINDOW,
            gossip_history=GOSSIP_HISTORY,
            heartbeat_interval=HEARTBEAT_S,
            do_px=False,
            score_params=ScoreParams(accept_px_threshold=math.inf),
            max_idontwant_messages=IDONTWANT_PER_PEER,
            adaptive_gossip_enabled=False,
            spam_protection_enabled=False,
            eclipse_protection_enabled=False,
            max_pending_messages_per_peer=0,
        )
        self.mcache = RecentMessages(GOSSIP_WINDOW, GOSSIP_HISTORY)
        self.stats = stats
        self._asked: Counter[Any] = Counter()  # peer -> ids asked for in this heartbeat
        self._resent_bytes: Counter[Any] = Counter()  # peer -> bytes resent in this heartbeat
        self._resends: Counter[tuple[Any, bytes]] = Counter()

    # Sending

    def recipients(self, topic: str, exclude: Iterable[Any], mid: bytes) -> list[Any]:
        """The peers that a message goes to: the mesh, or the fanout of a topic we are not in."""
        subscribed = self.pubsub.peer_topics.get(topic)
        if not subscribed:
            return []
        chosen = self.mesh.get(topic)
        if not chosen:  # not in the topic, or in it and not yet grafted to anybody
            chosen = self.fanout.setdefault(topic, set())
            chosen &= subscribed
            if len(chosen) < DEGREE:
                chosen.update(
                    self._get_in_topic_gossipsub_peers_from_minus(topic, DEGREE - len(chosen), chosen)
                )
        unwanted = self.dont_send_message_ids
        return [peer for peer in chosen if peer not in exclude and mid not in unwanted.get(peer, ())]

    def note_published(self, topic: str, message: Any, now: float) -> None:
        """Remember an own or forwarded message for IWANT, and keep the fanout alive."""
        self.mcache.put(message)
        self.time_since_last_publish[topic] = int(now)

    async def forward(self, forwarder: Any, message: Any, mid: bytes, topic: str, now: float) -> None:
        """Hand a validated message on; waits for full queues within their patience, then counts the loss.

        The caller reads the forwarder's stream, so waiting slows the forwarder down.
        """
        self.note_published(topic, message, now)
        exclude = (forwarder, self.pubsub.peer_id_of(message.from_id))
        if len(message.data) >= IDONTWANT_MIN_BYTES:
            self._tell_idontwant(topic, exclude, mid)
        peers = self.recipients(topic, exclude, mid) if topic in self.mesh else []
        if not peers:
            return
        wire = frame(rpc_pb2.RPC(publish=[message]))
        counters = self.stats.topic(topic)
        for peer in peers:
            queue = self.pubsub.peer_queues.get(peer)
            if queue is not None and await queue.push_patiently(wire):
                counters.forwarded += 1
            else:
                counters.not_forwarded += 1

    def _tell_idontwant(self, topic: str, exclude: Iterable[Any], mid: bytes) -> None:
        peers = [
            peer
            for peer in self.mesh.get(topic, ())
            if peer not in exclude and self.peer_protocol.get(peer) == PROTOCOL_ID_V12
        ]
        if peers:
            control = rpc_pb2.ControlMessage()
            control.idontwant.add().messageIDs.append(mid)
            wire = frame(rpc_pb2.RPC(control=control))
            for peer in peers:
                self.send_frame(peer, wire)

    def send_frame(self, peer: Any, wire: bytes) -> None:
        """Queue a control RPC."""
        queue = self.pubsub.peer_queues.get(peer)
        if queue is not None and not queue.push_control(wire):
            self.stats.control_dropped += 1

    async def emit_control_message(self, control_msg: Any, to_peer: Any) -> None:
        self.send_frame(to_peer, frame(rpc_pb2.RPC(control=control_msg)))

    async def publish(self, msg_forwarder: Any, pubsub_msg: Any) -> None:
        raise NotImplementedError("messages go through Gossip.publish and Mesh.forward")

    async def flush_pending_messages(self, peer_id: Any) -> None:
        """Nothing waits for a peer: `Gossip.publish` says so when nobody is subscribed."""

    async def send_recent_messages(self, peer_id: Any, topic: str) -> None:
        """Offer, rather than send, what a new subscriber has missed in the last heartbeats."""
        recent = self.mcache.window(topic)
        if recent:
            await self.emit_ihave(topic, recent[-MAX_IHAVE_IDS:], peer_id)

    # Receiving

    async def handle_rpc(self, rpc: Any, sender_peer_id: Any) -> None:
        control = rpc.control
        for ihave in control.ihave:
            await self.handle_ihave(ihave, sender_peer_id)
        for iwant in control.iwant:
            await self.handle_iwant(iwant, sender_peer_id)
        for graft in control.graft:
            await self.handle_graft(graft, sender_peer_id)
        for prune in control.prune:
            await self.handle_prune(prune, sender_peer_id)
        for idontwant in control.idontwant:
            await self.handle_idontwant(idontwant, sender_peer_id)

    async def handle_ihave(self, ihave_msg: Any, sender_peer_id: Any) -> None:
        if ihave_msg.topicID not in self.mesh:
            return
        left = MAX_IWANT_PER_HEARTBEAT - self._asked[sender_peer_id]
        seen = self.pubsub.seen_messages
        offered = self._ids(ihave_msg)
        wanted = [mid for mid in offered if not seen.has(mid)][: max(left, 0)]
        if wanted:
            self._asked[sender_peer_id] += len(wanted)
            await self.emit_iwant(wanted, sender_peer_id)

    async def handle_iwant(self, iwant_msg: Any, sender_peer_id: Any) -> None:
        queue = self.pubsub.peer_queues.get(sender_peer_id)
        if queue is None:
            return
        for mid in self._ids(iwant_msg):
            message = self.mcache.get(mid)
            if message is None or self._resends[sender_peer_id, mid] >= MAX_RESENDS:
                continue
            if self._resent_bytes[sender_peer_id] > MAX_RESENT_BYTES or not queue.has_room:
                self.stats.fault("iwant-over-limit")
                return
            self._resends[sender_peer_id, mid] += 1
            self._resent_bytes[sender_peer_id] += len(message.data)
            queue.push_message(frame(rpc_pb2.RPC(publish=[message])))

    async def handle_idontwant(self, msg: Any, sender_peer_id: Any) -> None:
        wellformed = self._ids(msg)
        if wellformed:
            idontwant = rpc_pb2.ControlIDontWant(messageIDs=wellformed)
            await super().handle_idontwant(idontwant, sender_peer_id)

    def _ids(self, control: Any) -> list[bytes]:
        """Message ids of a control message, as many as we look at; what cannot be one is left out, so that
        nothing of any other length is remembered, or sent back."""
        listed = control.messageIDs[:MAX_IHAVE_IDS]
        ids = [mid for mid in listed if len(mid) == MESSAGE_ID_BYTES]
        if len(ids) < len(listed):
            self.stats.fault("gossip-bad-id")
        return ids

    async def handle_graft(self, graft_msg: Any, sender_peer_id: Any) -> None:
        if graft_msg.topicID in self.mesh:
            await super().handle_graft(graft_msg, sender_peer_id)

    async def handle_prune(self, prune_msg: Any, sender_peer_id: Any) -> None:
        if prune_msg.topicID in self.mesh:
            await super().handle_prune(prune_msg, sender_peer_id)

    # Keeping

    def _perform_opportunistic_grafting(self, topic: str, peers_to_graft: Any) -> int:
        """Without score weights every peer looks better than the mesh, and all would be grafted."""
        return 0

    async def run(self) -> None:
        """The heartbeat, until cancelled."""
        while True:
            await trio.sleep(self.heartbeat_interval)
            try:
                await self._beat()
            except Exception:
                self.stats.fault("heartbeat")

    async def _beat(self) -> None:
        graft, prune = self.mesh_heartbeat()
        self.fanout_heartbeat()
        await self._emit_control_msgs(graft, prune, self.gossip_heartbeat())
        self.mcache.shift()
        self._prune_idontwant_entries()
        self._periodic_security_cleanup()
        self._asked.clear()
        self._resent_bytes.clear()
        live = self.mcache.msgs
        for key in [key for key in self._resends if key[1] not in live]:
            del self._resends[key]

    async def _emit_control_msgs(
        self,
        peers_to_graft: dict[Any, list[str]],
        peers_to_prune: dict[Any, list[str]],
        peers_to_gossip: dict[Any, dict[str, list[bytes]]],
    ) -> None:
        for peer in {*peers_to_graft, *peers_to_prune, *peers_to_gossip}:
            control = rpc_pb2.ControlMessage()
            for topic in peers_to_graft.get(peer, ()):
                control.graft.add().topicID = topic
            for topic in peers_to_prune.get(peer, ()):
                pruned = control.prune.add()
                pruned.topicID = topic
                pruned.backoff = self.prune_back_off
            for topic, mids in peers_to_gossip.get(peer, {}).items():
                ihave = control.ihave.add()
                ihave.topicID = topic
                ihave.messageIDs.extend(mids[-MAX_IHAVE_IDS:])
            await self.emit_control_message(control, peer)
