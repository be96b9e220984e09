"""What the live kit takes from a hostile client, how long it waits, and what it can be given at all."""

from __future__ import annotations

import os

import pytest
import trio
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from nous_node.node import live, live_peer
from nous_node.node.conformance_table import Outcome
from nous_node.node.gossip import MAX_TOPIC_CHARS
from nous_node.node.hardening import build_host
from nous_node.node.live_check import ANY, Check, Failed, make
from nous_node.node.live_forgery import new_identity
from nous_node.node.live_peer import CONNECTIONS, KitPeer
from nous_node.node.mesh import frame
from nous_node.node.network_errors import AddressError, UnreachableError
from nous_node.node.network_stats import NetworkStats
from nous_node.node.upload_limit import UploadLimit
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.identity import peer_id
from nous_node.protocol.runs import Invite


@pytest.fixture
def listener() -> KitPeer:
    """One that is connected to nobody: what it hears is put into its ear."""
    seed = os.urandom(32)
    host = build_host(seed, CONNECTIONS, NetworkStats(), UploadLimit(None))
    return KitPeer(host, seed, "/nowhere", peer_id(new_identity().key))


async def test_long_names_and_ids_are_not_kept(listener: KitPeer) -> None:
    long = "x" * 500_000
    rpc = rpc_pb2.RPC()
    rpc.subscriptions.add(subscribe=True, topicid=long)
    rpc.control.prune.add(topicID=long)
    rpc.publish.add(from_id=long.encode(), seqno=long.encode(), data=b"1", topicIDs=["a"])
    await listener._receive(rpc)
    assert {len(one) for one in (*listener.topics, *listener.pruned)} == {MAX_TOPIC_CHARS + 1}
    assert max(map(len, listener._seen)) <= 32
    rpc.subscriptions[0].subscribe = False
    await listener._receive(rpc)
    assert not listener.topics


async def test_content_and_topics_of_what_is_kept_are_bounded(
    listener: KitPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_peer, "KEPT_BYTES", 10_000)
    for number in range(50):
        rpc = rpc_pb2.RPC()
        topic = "y" * 900 + "/receipts"
        rpc.publish.add(from_id=b"f", seqno=number.to_bytes(8), data=b"d" * 100, topicIDs=[topic])
        await listener._receive(rpc)
    assert listener.total == 50
    assert sum(len(one.topic) + len(one.data) for one in listener.kept) <= 10_000
    assert listener.kept[-1].number == 50


@pytest.mark.parametrize("name", ["MAX_RPCS", "MAX_TOPICS", "MAX_HEARD"])
async def test_flood_is_noticed(listener: KitPeer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_peer, name, 20)
    for number in range(21):
        rpc = rpc_pb2.RPC()
        if name == "MAX_TOPICS":
            rpc.subscriptions.add(subscribe=True, topicid=str(number))
        elif name == "MAX_HEARD":
            rpc.publish.add(from_id=b"f", seqno=number.to_bytes(8), data=b"d", topicIDs=["a"])
        assert not listener.flooded
        await listener._receive(rpc)
    assert listener.flooded


class Wire:
    """A stream that brings these bytes and then nothing more."""

    def __init__(self, data: bytes) -> None:
        self.muxed_stream = self
        self._data = data

    async def read(self, size: int) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        if not data:
            raise MuxedStreamEOF
        return data

    async def reset(self) -> None:
        self._data = b""


@pytest.mark.parametrize(
    ("data", "garbled"),
    [
        (b"\x00\x00", ""),
        (frame(rpc_pb2.RPC()) + b"\x05\xff\xff\xff\xff\xff", "parsing"),
        (b"\xff" * 20, "varint"),
        (b"\xff\xff\xff\xff\x0f", "a frame of"),
    ],
)
async def test_what_is_no_rpc_is_noted(listener: KitPeer, data: bytes, garbled: str) -> None:
    await listener._listen(Wire(data))
    assert bool(listener.garbled) is bool(garbled)
    assert garbled in listener.garbled


class Patient:
    """A target that always answers to who did nothing wrong."""

    async def answers(self) -> bool:
        return True


async def test_all_checks_together_have_a_deadline(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may hang in each check and answer between them."""

    async def hangs(target: object) -> str:
        await trio.sleep_forever()
        return ""

    monkeypatch.setattr(live, "PLAY_S", 25.0)
    rows = []
    checks = [Check(str(number), ("NET-1",), ANY, 10.0, False, hangs) for number in range(5)]
    await live._in_turn(checks, Patient(), rows.append)  # type: ignore[arg-type]
    assert [row.outcome for row in rows] == [Outcome.FAIL] * 3 + [Outcome.UNTESTED] * 2
    assert "--only plays it alone" in rows[-1].note


async def test_a_check_ends_with_its_deadline_and_whatever_it_raises_is_a_row() -> None:
    async def hangs(target: None) -> str:
        await trio.sleep_forever()
        return ""

    async def breaks(target: None) -> str:
        async with trio.open_nursery():
            raise Failed("in a nursery")

    async def wrong(target: None) -> str:
        raise RemoteError(Code.WRONG_TYPE, "no map")

    rows = [
        await make(Check("x", ("NET-1",), ANY, 0.05, False, play), None) for play in (hangs, breaks, wrong)
    ]
    assert {row.outcome for row in rows} == {Outcome.FAIL}
    assert "not over within 0.05 s" in rows[0].note
    assert [row.note for row in rows[1:]] == ["in a nursery", "no map"]


def test_what_is_no_client_is_said_in_words() -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(new_identity().key)}"
    nobody = Invite(bytes(32), [address]).to_text()
    with pytest.raises(UnreachableError, match="Cannot reach"):
        live.play(nobody, None, (), print)
    with pytest.raises(AddressError, match="It looks like /ip4/"):
        live.play("localhost:4001", None, (), print)
    with pytest.raises(LocalError, match="64 hexadecimal digits"):
        live.play(address, "abc", (), print)
    with pytest.raises(LocalError, match="another run than --run"):
        live.play(nobody, "11" * 32, (), print)
    with pytest.raises(LocalError, match="No live check is called 'NET-99'"):
        live.play(nobody, None, ["NET-99"], print)
    with pytest.raises(RemoteError, match="no valid invite"):
        live.play("nous1junk", None, (), print)
