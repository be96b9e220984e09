"""A relay among peers of memory: what it forwards, what it follows, and what it serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from nous_node.node.blobs import BlobIndex
from nous_node.node.create import folder_entries
from nous_node.node.events import Event, RelayStatus, RunReady, from_line, to_line
from nous_node.node.following import Following, now_ms
from nous_node.node.home import Home
from nous_node.node.joined import JoinedFolder
from nous_node.node.network_stats import NetworkStats
from nous_node.node.relay import _Relay
from nous_node.node.runfolder import RunFolder
from nous_node.node.upload_limit import UploadLimit
from nous_node.protocol.checkpoints import FULL, CheckpointManifest
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.gossip import Verdict
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Hello, Receipts, accepted
from nous_node.protocol.references import pack
from nous_node.protocol.rollouts import Engine
from nous_node.protocol.runs import Invite, Topics
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HEAD_PROTOCOL,
    MAX_HEAD_REPLY,
    BlobRequest,
    HeadReply,
    HeadRequest,
    read_blob,
)

ADDRESS = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWMbbPVGsZYh3ChQjue712NHHGNybRRXwnuSpezYjGbCDS"
VOLUNTEER = Identity.from_seed(b"v" * 32)
HELLO = Hello("test", Engine("test", "1", "float32", "cpu")).to_bytes()

Handler = Callable[[str, bytes], Awaitable[bytes]]
Judge = Callable[[bytes, str], Verdict]


class Peer:
    peer_id = "trainer"
    address = ADDRESS


class Net:
    """What a node asks of its network; `trainer` answers requests for chunks."""

    def __init__(self, trainer: BlobIndex) -> None:
        self.trainer = trainer
        self.peer_id = "relay"
        self.stats = NetworkStats()
        self.addresses = [ADDRESS]
        self.upload = UploadLimit(None)
        self.handlers: dict[str, Handler] = {}
        self.turns: dict[str, Any] = {}
        self.judges: dict[str, Judge] = {}
        self.inboxes: list[Any] = []

    def serve(self, protocol: str, handler: Handler, **bounds: Any) -> None:
        self.handlers[protocol] = handler
        self.turns[protocol] = bounds.get("turns")

    def subscribe(self, topic: str, judge: Judge, capacity: int) -> Any:
        self.judges[topic] = judge
        sending, inbox = trio.open_memory_channel[tuple[bytes, str]](capacity)
        self.inboxes.append(sending)
        return inbox

    def peers(self) -> list[Peer]:
        return [Peer()]

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        assert protocol == BLOB_PROTOCOL
        return b"".join(await self.trainer.answer("relay", payload))

    async def refuse(self, peer: str, fault: str) -> None:
        raise AssertionError("the trainer is honest")


class Bench:
    def __init__(self, path: Path, run: RunFolder, root: Identity) -> None:
        self.run, self.root = run, root
        self.files = folder_entries(run.checkpoint(0))
        trainer = BlobIndex(lambda file: None)
        trainer.add(run.checkpoint(0), self.files)
        self.net = Net(trainer)
        self.events: list[Event] = []
        folder = JoinedFolder.of(Home.open(path / "home"), run.run)
        network: Any = self.net
        following = Following.of(run.run, run.envelope)
        self.relay = _Relay(folder, network, following, 1 << 30, self.events.append)
        self.topics = Topics(run.run)
        self.seq = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.relay.run, stop)
            while not self.events:  # noqa: ASYNC110
                await trio.sleep(0.01)
            yield
            stop.set()

    def sealed(self, identity: Identity, kind: Kind, body: bytes) -> bytes:
        self.seq += 1
        return seal(identity, kind, self.run.run, body, seq=self.seq, ts=now_ms())

    def head(self, version: int = 3) -> bytes:
        manifest = CheckpointManifest(version, FULL, self.files, {"w": bytes(32)}, bytes(32), b"p" * 32)
        return self.sealed(self.root, Kind.CHECKPOINT, manifest.to_bytes())

    def hears(self, topic: str, data: bytes) -> Verdict:
        return self.net.judges[topic](data, "peer")

    async def asked(self, protocol: str, request: Any) -> bytes:
        data, turns = encode(request), self.net.turns[protocol]
        if turns is not None:
            async with turns.turn("peer", data) as turn:
                if turn.answer is not None:
                    return turn.answer
        answer = await self.net.handlers[protocol]("peer", data)
        return answer if isinstance(answer, bytes) else b"".join(answer)


@pytest.fixture
def bench(tmp_path: Path, base_run: RunFolder, root: Identity) -> Bench:
    return Bench(tmp_path, base_run, root)


async def test_a_relay_says_where_it_can_be_reached(bench: Bench) -> None:
    async with bench.open():
        ready = bench.events[0]
        assert isinstance(ready, RunReady)
        assert Invite.from_text(ready.invite) == Invite(bench.run.run, [ADDRESS])
        assert (ready.run, ready.name) == (bench.run.run.hex(), "run")


async def test_genuine_messages_of_every_topic_are_forwarded(bench: Bench) -> None:
    async with bench.open():
        receipts = Receipts([accepted(bytes(32), VOLUNTEER.key, 1)]).to_bytes()
        for topic, data in (
            (bench.topics.rollouts(0), bench.sealed(VOLUNTEER, Kind.HELLO, HELLO)),
            (bench.topics.receipts, bench.sealed(bench.root, Kind.RECEIPTS, receipts)),
            (bench.topics.checkpoints, bench.head()),
        ):
            assert bench.hears(topic, data) is Verdict.ACCEPT
        status = bench.relay.status()
        assert (status.forwarded, status.refused) == (3, {})


async def test_what_is_not_genuine_is_stopped_here_and_counted(bench: Bench) -> None:
    async with bench.open():
        hello = bench.sealed(VOLUNTEER, Kind.HELLO, HELLO)
        assert bench.hears(bench.topics.rollouts(0), b"junk") is Verdict.REJECT
        assert bench.hears(bench.topics.checkpoints, hello) is Verdict.REJECT
        assert bench.hears(bench.topics.rollouts(0), hello) is Verdict.ACCEPT
        assert bench.hears(bench.topics.rollouts(0), hello) is Verdict.IGNORE
        forged = bench.sealed(VOLUNTEER, Kind.CHECKPOINT, bench.head())
        assert bench.hears(bench.topics.checkpoints, forged) is Verdict.REJECT
        status = bench.relay.status()
        assert status.forwarded == 1
        assert status.refused == {"malformed": 1, "wrong-kind": 1, "duplicate": 1, "wrong-role": 1}
        assert from_line(to_line(status)) == status
        assert bench.relay.following.head is None


async def test_checkpoints_are_followed_fetched_and_served(bench: Bench) -> None:
    async with bench.open():
        data = bench.head()
        bench.hears(bench.topics.checkpoints, data)
        while bench.relay.holdings.newest is None:
            await bench.relay.holdings.changed()
        reply = read(await bench.asked(HEAD_PROTOCOL, HeadRequest(bench.run.run)), HeadReply, MAX_HEAD_REPLY)
        assert (reply.run, reply.checkpoint) == (bench.run.envelope, data)
        for entry in bench.files:
            parts = [
                read_blob(await bench.asked(BLOB_PROTOCOL, BlobRequest(digest))) for digest in entry.hashes()
            ]
            assert b"".join(parts) == (bench.run.checkpoint(0) / entry.path).read_bytes()
        status = bench.relay.status()
        assert (status.version, status.peers) == (3, 1)
        assert status.chunks == len({digest for entry in bench.files for digest in entry.hashes()})


async def test_chunks_of_a_forwarded_reference_are_had_from_whoever_forwarded_it(bench: Bench) -> None:
    checkpoint = b"c" * 32
    bench.relay.following.view.learn(checkpoint, 0)
    reference, frame = pack(checkpoint, 0, b"group" * 100, 100_000)
    digest = bench.net.trainer.add_bytes(frame)
    async with bench.open():
        with pytest.raises(RemoteError, match="does not hold"):
            read_blob(await bench.asked(BLOB_PROTOCOL, BlobRequest(digest)))
        data = bench.sealed(VOLUNTEER, Kind.REFERENCE, reference.to_bytes())
        assert bench.hears(bench.topics.rollouts(0), data) is Verdict.ACCEPT
        assert read_blob(await bench.asked(BLOB_PROTOCOL, BlobRequest(digest))) == frame


async def test_a_relay_without_a_checkpoint_says_so(bench: Bench) -> None:
    async with bench.open():
        reply = read(await bench.asked(HEAD_PROTOCOL, HeadRequest(bench.run.run)), HeadReply, MAX_HEAD_REPLY)
        assert (reply.run, reply.checkpoint) == (bench.run.envelope, None)
        with pytest.raises(RemoteError, match="does not hold"):
            read_blob(await bench.asked(BLOB_PROTOCOL, BlobRequest(bytes(32))))


async def test_status_comes_every_second_and_the_summary_at_the_end(
    bench: Bench, autojump_clock: object
) -> None:
    async with bench.open():
        bench.hears(bench.topics.rollouts(0), bench.sealed(VOLUNTEER, Kind.HELLO, HELLO))
        await trio.sleep(4.5)
    states = [event for event in bench.events if isinstance(event, RelayStatus)]
    assert len(states) == 5
    assert states[-1].forwarded == 1
    summary = bench.relay.summary()
    assert summary.text.startswith("Forwarded 1 messages of run in ")
    assert from_line(to_line(summary)) == summary
