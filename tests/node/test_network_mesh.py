from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V12
from libp2p.pubsub.pb import rpc_pb2

from nous_node.node.frames import VarintFrames
from nous_node.node.gossip_memory import OutboundQueue, SeenMessages
from nous_node.node.gossip_signing import MESSAGE_ID_BYTES
from nous_node.node.mesh import DEGREE, HEARTBEAT_S, Mesh
from nous_node.node.network_stats import NetworkStats

PEERS = [f"peer-{number}" for number in range(10)]


def mesh_with(peers: list[str], topics: dict[str, set[str]]) -> Mesh:
    mesh = Mesh(NetworkStats())
    mesh.pubsub = SimpleNamespace(
        peer_queues={peer: OutboundQueue() for peer in peers},
        peers=dict.fromkeys(peers),
        peer_topics=topics,
    )
    for peer in peers:
        mesh.peer_protocol[peer] = PROTOCOL_ID_V12
    return mesh


async def sent(mesh: Mesh, peer: str) -> list:
    queue = mesh.pubsub.peer_queues[peer]
    queue.push_message(b"\x00")  # so that something comes
    frames = VarintFrames(100_000).feed(await queue.pop_batch(100_000))
    return [rpc_pb2.RPC.FromString(raw) for raw in frames if raw]


async def test_each_peer_gets_its_own_control_messages_once() -> None:
    mesh = mesh_with(PEERS, {})
    await mesh._emit_control_msgs(
        {"peer-0": ["a", "b"], "peer-1": ["a"], "peer-2": ["b"]},
        {"peer-2": ["a"], "peer-3": ["c"]},
        {"peer-3": {"a": [b"mid"]}, "peer-4": {"a": [b"mid"]}},
    )
    control = {peer: [rpc.control for rpc in await sent(mesh, peer)] for peer in PEERS[:6]}
    assert [len(control[peer]) for peer in PEERS[:6]] == [1, 1, 1, 1, 1, 0]
    assert [graft.topicID for graft in control["peer-0"][0].graft] == ["a", "b"]
    assert [graft.topicID for graft in control["peer-1"][0].graft] == ["a"]
    assert [graft.topicID for graft in control["peer-2"][0].graft] == ["b"]
    assert [prune.topicID for prune in control["peer-2"][0].prune] == ["a"]
    assert [prune.backoff for prune in control["peer-3"][0].prune] == [60]
    assert list(control["peer-4"][0].ihave[0].messageIDs) == [b"mid"]


async def test_the_heartbeat_comes_every_second_and_survives_a_bad_beat(autojump_clock, monkeypatch) -> None:
    mesh = mesh_with(PEERS, {"t": set(PEERS)})
    mesh.mesh["t"] = set()
    beats = []
    real = mesh.mesh_heartbeat

    def heartbeat():
        beats.append(trio.current_time())
        if len(beats) == 2:
            raise RuntimeError("a bad beat")
        return real()

    monkeypatch.setattr(mesh, "mesh_heartbeat", heartbeat)
    with trio.move_on_after(5.5 * HEARTBEAT_S):
        await mesh.run()
    assert len(beats) == 5
    assert mesh.stats.faults["heartbeat"] == 1
    assert len(mesh.mesh["t"]) == DEGREE


async def test_fanout_goes_to_subscribers_and_never_back() -> None:
    mesh = mesh_with(PEERS, {"t": set(PEERS[:3])})
    assert set(mesh.recipients("t", (), b"mid")) == set(PEERS[:3])
    assert set(mesh.recipients("t", ("peer-0",), b"mid")) == {"peer-1", "peer-2"}
    mesh.dont_send_message_ids["peer-1"] = {b"mid"}
    assert set(mesh.recipients("t", ("peer-0",), b"mid")) == {"peer-2"}
    mesh.pubsub.peer_topics["t"].discard("peer-2")
    assert set(mesh.recipients("t", (), b"other")) == {"peer-0", "peer-1"}
    assert mesh.recipients("nobody's", (), b"mid") == []


@pytest.mark.parametrize("count", [DEGREE, 10])
async def test_fanout_is_bounded_by_the_degree(count) -> None:
    mesh = mesh_with(PEERS, {"t": set(PEERS[:count])})
    assert len(mesh.recipients("t", (), b"mid")) == DEGREE


async def test_a_large_message_is_announced_to_the_mesh_but_not_to_its_sender() -> None:
    mesh = mesh_with(PEERS, {"t": set(PEERS[:3])})
    mesh.mesh["t"] = set(PEERS[:3])
    mesh.pubsub.peer_id_of = lambda raw: raw.decode()
    message = rpc_pb2.Message(from_id=b"peer-1", seqno=b"1", data=bytes(20_000), topicIDs=["t"])
    await mesh.forward("peer-0", message, b"mid", "t", 0.0)
    assert await sent(mesh, "peer-0") == []
    assert await sent(mesh, "peer-1") == []
    idontwant, publish = await sent(mesh, "peer-2")
    assert list(idontwant.control.idontwant[0].messageIDs) == [b"mid"]
    assert publish.publish[0].data == bytes(20_000)


@pytest.mark.parametrize("length", [0, MESSAGE_ID_BYTES - 1, MESSAGE_ID_BYTES + 1, 100_000])
async def test_ids_of_another_length_are_neither_remembered_nor_sent_back(length) -> None:
    mesh = mesh_with(PEERS, {"t": set(PEERS)})
    mesh.mesh["t"] = set(PEERS)
    mesh.pubsub.seen_messages = SeenMessages()
    good, bad = bytes(MESSAGE_ID_BYTES), bytes(length)
    control = rpc_pb2.ControlMessage()
    control.ihave.add(topicID="t", messageIDs=[bad, good])
    control.iwant.add(messageIDs=[bad])
    control.idontwant.add(messageIDs=[bad])
    control.idontwant.add(messageIDs=[good, bad])
    await mesh.handle_rpc(rpc_pb2.RPC(control=control), "peer-0")
    (rpc,) = await sent(mesh, "peer-0")
    assert [list(iwant.messageIDs) for iwant in rpc.control.iwant] == [[good]]
    assert mesh.dont_send_message_ids["peer-0"] == {good}
    assert mesh.stats.faults["gossip-bad-id"] == 4
