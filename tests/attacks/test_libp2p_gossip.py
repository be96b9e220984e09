"""Attacks on gossip: bytes, signatures, floods, and our own callbacks."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.pubsub.pb import rpc_pb2

from nous_node.node.gossip import MAX_RPC_BYTES, MAX_TOPICS_PER_PEER
from nous_node.node.gossip_signing import sign_message
from nous_node.node.mesh import MAX_RESENDS, frame
from nous_node.node.network import NetworkConfig, Verdict, open_network
from nous_node.node.offences import MAX_OFFENCES
from nous_node.protocol.identity import PEER_ID_PREFIX

TOPIC = "/nous/1/run/rollouts/0"
MESHSUB = "/meshsub/1.1.0"
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
ORIGIN = PEER_ID_PREFIX + KEY.public_key().public_bytes_raw()


def signed(number: int, data: bytes = b"payload", topic: str = TOPIC):
    return sign_message(KEY, ORIGIN, number.to_bytes(8, "big"), topic, data)


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (varint(5) + b"\xff\xff\xff\xff\xff", "gossip-garbage"),
        (varint(3) + b"\x12\x7fx", "gossip-garbage"),
        (varint(MAX_RPC_BYTES + 1) + b"x", "gossip-bad-frame"),
        (varint(2**63) + b"x", "gossip-bad-frame"),
        (b"\xff" * 64, "gossip-bad-frame"),
        (b"\x80" * 10, "gossip-bad-frame"),
    ],
    ids=["no-protobuf", "cut-protobuf", "oversize", "huge", "endless-varint", "ten-continuations"],
)
@pytest.mark.attack("gossip frames that are none", "")
async def test_bytes_that_are_no_rpc_end_only_the_stream(victim, stock_peer, sent, fault) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        stream = await peer.stream(MESHSUB)
        await stream.write(sent)
        await node.fault(fault)
        await node.still_serves()


@pytest.mark.attack("gossip frame that never ends", "")
async def test_a_frame_that_never_ends_is_held_and_then_forgotten(victim, stock_peer) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        stream = await peer.stream(MESHSUB)
        await stream.write(varint(MAX_RPC_BYTES) + bytes(200_000))
        await node.still_serves()
        await stream.reset()
        await node.still_serves()


async def test_a_second_gossip_stream_replaces_the_first(victim, stock_peer) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        for number in range(20):
            stream = await peer.stream(MESHSUB)
            await stream.write(frame(rpc_pb2.RPC(publish=[signed(number)])) + varint(MAX_RPC_BYTES))
            assert (await node.inbox.receive())[0] == b"payload"
        await node.until(lambda: len(node.network._gossip._readers) == 1)
        await node.still_serves()


def junk_key():
    """The message that ended the process: a hashed peer id, and a key that is none."""
    message = signed(1)
    message.from_id = b"\x12\x20" + hashlib.sha256(b"whoever").digest()
    message.key = b"\xff\xff\xff junk"
    return message


def changed(**fields):
    message = signed(1)
    for name, value in fields.items():
        setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    "message",
    [
        junk_key(),
        changed(signature=b""),
        changed(signature=bytes(64)),
        changed(data=b"another payload"),
        changed(seqno=b""),
        changed(seqno=b"\x00" * 9),
        changed(from_id=b""),
        changed(from_id=PEER_ID_PREFIX + b"\xff" * 32),
        changed(from_id=ORIGIN + b"\x00"),
    ],
    ids=[
        "junk-key",
        "unsigned",
        "zero-signature",
        "other-data",
        "no-seqno",
        "long-seqno",
        "no-origin",
        "no-point",
        "long-origin",
    ],
)
@pytest.mark.attack("forged publisher of a gossip message", "")
async def test_a_message_without_a_good_signature_is_dropped(victim, stock_peer, message) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        stream = await peer.stream(MESHSUB)
        await stream.write(frame(rpc_pb2.RPC(publish=[message])))
        await node.fault("gossip-bad-signature")
        # A forgery does not make the genuine message count as seen.
        await stream.write(frame(rpc_pb2.RPC(publish=[signed(1)])))
        assert (await node.inbox.receive())[0] == b"payload"
        await node.still_serves()


@pytest.mark.attack("gossip of other topics", "")
async def test_messages_of_other_or_several_topics_are_not_read(victim, stock_peer) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        both = signed(2)
        both.topicIDs.append("/other")
        none = signed(3)
        del none.topicIDs[:]
        stream = await peer.stream(MESHSUB)
        await stream.write(frame(rpc_pb2.RPC(publish=[signed(1, topic="/other"), both, none])))
        await node.still_serves()
        assert node.network.stats.topics[TOPIC].accepted == 1  # the honest one


@pytest.mark.attack("gossip message replayed", "")
async def test_replays_are_counted_and_delivered_once(victim, stock_peer) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        stream = await peer.stream(MESHSUB)
        await stream.write(frame(rpc_pb2.RPC(publish=[signed(1)])) * 50)
        await node.until(lambda: node.network.stats.topics[TOPIC].duplicates == 49)
        assert node.network.stats.topics[TOPIC].accepted == 1
        await node.still_serves()


async def test_a_message_in_our_own_name_is_dropped(victim, stock_peer) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        ours = Ed25519PrivateKey.from_private_bytes(b"v" * 32)
        origin = PEER_ID_PREFIX + ours.public_key().public_bytes_raw()
        message = sign_message(ours, origin, bytes(8), TOPIC, b"echo of ourselves")
        stream = await peer.stream(MESHSUB)
        await stream.write(frame(rpc_pb2.RPC(publish=[message])))
        await node.still_serves()
        assert node.network.stats.topics[TOPIC].accepted == 1


async def test_a_judge_that_raises_ignores_the_message(victim, stock_peer) -> None:
    def judge(data: bytes, forwarder: str) -> Verdict:
        if data == b"honest":
            return Verdict.ACCEPT
        raise RuntimeError("a fault of ours")

    async with victim(judge=judge) as node, stock_peer(node.address) as peer:
        stream = await peer.stream(MESHSUB)
        for number in range(2 * MAX_OFFENCES):
            await stream.write(frame(rpc_pb2.RPC(publish=[signed(number)])))
        await node.fault("judge-raised", 2 * MAX_OFFENCES)
        assert not node.faults["peer-refused"]  # nobody is punished for our fault
        await node.still_serves()


@pytest.mark.attack("forwarder of what no correct node forwards", "")
async def test_many_rejected_messages_get_their_forwarder_refused(victim, stock_peer) -> None:
    def judge(data: bytes, forwarder: str) -> Verdict:
        return Verdict.ACCEPT if data == b"honest" else Verdict.REJECT

    async with victim(judge=judge) as node:
        async with stock_peer(node.address) as peer:
            stream = await peer.stream(MESHSUB)
            for number in range(MAX_OFFENCES):
                await stream.write(frame(rpc_pb2.RPC(publish=[signed(number)])))
            await node.fault("peer-refused")
            await node.alone()
        async with open_network(b"s" * 32, NetworkConfig(listen=())) as again:  # the same peer id
            await again.connect(node.address)
            await node.until(lambda: node.network.stats.connections_refused > 0)
        await node.still_serves()


async def test_many_ignored_messages_cost_their_forwarder_nothing(victim, stock_peer) -> None:
    def judge(data: bytes, forwarder: str) -> Verdict:
        return Verdict.ACCEPT if data == b"honest" else Verdict.IGNORE

    async with victim(judge=judge) as node, stock_peer(node.address) as peer:
        stream = await peer.stream(MESHSUB)
        for number in range(3 * MAX_OFFENCES):
            await stream.write(frame(rpc_pb2.RPC(publish=[signed(number)])))
        counters = node.network.stats.topics[TOPIC]
        await node.until(lambda: counters.ignored == 3 * MAX_OFFENCES)
        assert len(node.network.peers()) == 1
        await node.still_serves()


@pytest.mark.attack("flood of gossip control messages", "")
async def test_control_floods_leave_no_traces(victim, stock_peer) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        stream = await peer.stream(MESHSUB)
        for number in range(500):
            rpc = rpc_pb2.RPC()
            topic = f"/made-up/{number}"
            rpc.subscriptions.add(subscribe=True, topicid=topic)
            rpc.control.graft.add().topicID = topic
            rpc.control.prune.add(topicID=topic, backoff=2**60)
            rpc.control.ihave.add(topicID=topic, messageIDs=[b"x" * 46])
            rpc.control.ihave.add(topicID=TOPIC, messageIDs=[bytes([number % 256]) * 46] * 100)
            rpc.control.iwant.add(messageIDs=[b"\xff\x00"] * 100)
            rpc.control.idontwant.add(messageIDs=[number.to_bytes(4, "big")])
            await stream.write(frame(rpc))
        await node.still_serves()
        gossip, mesh = node.network._gossip, node.network._gossip.mesh
        assert len(gossip.peer_topics) <= MAX_TOPICS_PER_PEER + 1
        assert set(mesh.back_off) <= {TOPIC}
        assert node.faults["gossip-too-many-topics"] > 0
        assert all(topic == TOPIC for limits in mesh.graft_flood_tracking.values() for topic in limits)


@pytest.mark.attack("peer exchange that leads to a trap", "")
async def test_a_prune_with_peers_makes_us_dial_nobody(victim, stock_peer) -> None:
    async with victim() as node, stock_peer(node.address) as peer:
        trap = await trio.open_tcp_listeners(0, host="127.0.0.1")
        try:
            rpc = rpc_pb2.RPC()
            prune = rpc.control.prune.add(topicID=TOPIC)
            prune.peers.add(peerID=ORIGIN, signedPeerRecord=b"whatever")
            stream = await peer.stream(MESHSUB)
            await stream.write(frame(rpc))
            await node.still_serves()
            assert {p.peer_id for p in node.network.peers()} == {str(peer.host.get_id())}
        finally:
            for listener in trap:
                await listener.aclose()


@pytest.mark.attack("asking for a message again and again", "")
async def test_a_message_is_resent_a_few_times_only(victim, stock_peer) -> None:
    async with victim() as node:
        async with open_network(b"o" * 32, NetworkConfig(listen=())) as origin:
            await origin.connect(node.address)
            await origin.wait_subscriber(TOPIC)
            await origin.publish(TOPIC, bytes(100_000))
            await node.inbox.receive()
        (mid,) = node.network._gossip.mesh.mcache.msgs
        async with stock_peer(node.address) as peer:

            async def drain(stream) -> None:
                with contextlib.suppress(Exception):
                    while await stream.read(65536):
                        pass

            peer.host.set_stream_handler(MESHSUB, drain)
            stream = await peer.stream(MESHSUB)
            await node.until(lambda: node.network._gossip.peer_queues)
            out = node.network.stats.bytes_out
            rpc = rpc_pb2.RPC()
            rpc.control.iwant.add(messageIDs=[mid] * 1000)
            await stream.write(frame(rpc) * 3)
            await node.still_serves()
            assert node.network.stats.bytes_out - out < (MAX_RESENDS + 1) * 110_000


async def test_a_subscriber_may_join_while_large_messages_flow(victim) -> None:
    """Unpatched, two writers interleaved on one stream and the receiver's process ended."""
    async with victim() as node, open_network(b"p" * 32, NetworkConfig(listen=())) as publisher:
        await publisher.connect(node.address)
        await publisher.wait_subscriber(TOPIC)
        joined = trio.Event()
        sent, received = [], []

        async def collect() -> None:
            while not received or received[-1] != b"last":
                received.append((await node.inbox.receive())[0])

        async def join_and_read() -> None:
            async with open_network(b"j" * 32, NetworkConfig(listen=())) as late:
                inbox = late.subscribe(TOPIC, lambda data, peer: Verdict.ACCEPT, capacity=100)
                await late.connect(node.address)
                data, _ = await inbox.receive()
                assert data in sent
                joined.set()
                while data != b"last":
                    data, _ = await inbox.receive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            while len(sent) < 20 or not joined.is_set():
                sent.append(len(sent).to_bytes(2, "big") * 75_000)
                await publisher.publish(TOPIC, sent[-1])
                if len(sent) == 10:
                    nursery.start_soon(join_and_read)
            await publisher.publish(TOPIC, b"last")
        assert received == [*sent, b"last"]
        await node.still_serves()


async def test_a_slow_consumer_slows_its_peers_and_loses_nothing_silently(victim) -> None:
    async with victim(capacity=1) as node:
        async with open_network(b"p" * 32, NetworkConfig(listen=())) as publisher:
            await publisher.connect(node.address)
            await publisher.wait_subscriber(TOPIC)
            total = 300
            received = []

            async def consume() -> None:
                while len(received) < total:
                    received.append(int.from_bytes((await node.inbox.receive())[0][:4], "big"))
                    await trio.sleep(0.001)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(consume)
                for number in range(total):
                    await publisher.publish(TOPIC, number.to_bytes(4, "big") + bytes(25_000))
            assert received == list(range(total))
        assert node.network.stats.topics[TOPIC].consumer_slow == 0
        await node.still_serves()
