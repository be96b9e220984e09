"""Groups by reference over real libp2p: volunteer, relay and trainer in one process, 16 x 32,768 tokens."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import trio

from nous_node.node.blob_turns import BlobTurns
from nous_node.node.blobs import BlobIndex
from nous_node.node.bodies import Bodies
from nous_node.node.calibration import embedded_thresholds
from nous_node.node.following import now_ms
from nous_node.node.network import Network, NetworkConfig, open_network
from nous_node.node.passing import Passing
from nous_node.node.store import Journal, StoredGroup
from nous_node.node.stored_groups import group_of
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.gossip import GossipView, Judgement, Verdict, judge_rollout
from nous_node.protocol.identity import Identity
from nous_node.protocol.references import cut, pack
from nous_node.protocol.rollouts import (
    Engine,
    Reference,
    Role,
    RolloutGroup,
    Segment,
    Trajectory,
    pack_floats,
    pack_tokens,
    trained_tokens,
)
from nous_node.protocol.runs import (
    EnvironmentEntry,
    Limits,
    ModelFacts,
    RunManifest,
    SamplingRules,
    Topics,
    run_id,
)
from nous_node.protocol.streams import BLOB_PROTOCOL, MAX_BLOB_REPLY, MAX_REQUEST
from nous_node.protocol.structure import check_structure

CHECKPOINT = b"c" * 32
VOLUNTEER, RELAY, TRAINER = (Identity.from_seed(seed * 32) for seed in (b"v", b"y", b"t"))
LOCAL = ("/ip4/127.0.0.1/tcp/0",)
SAMPLES, TOKENS, PROMPT, STOP = 16, 32_768, 64, 258

MANIFEST = RunManifest(
    name="large",
    created=0,
    protocol=[1, 1],
    root=TRAINER.key,
    trainers=[TRAINER.key],
    base=bytes(32),
    model=ModelFacts("llama", 1, 1, STOP + 1, PROMPT + TOKENS, "float32"),
    environments=[EnvironmentEntry("sort-digits", "1", 1)],
    sampling=SamplingRules("seeded", 1.0, TOKENS, [STOP], "f32"),
    group=SAMPLES,
    staleness=2,
    shards=1,
    thresholds=embedded_thresholds(),
    limits=Limits(4.0, 1_000_000),
)
RUN = run_id(MANIFEST.to_bytes())


def large_group() -> RolloutGroup:
    rng = np.random.default_rng(0)
    segments = [Segment(PROMPT, Role.USER, False), Segment(TOKENS, Role.ASSISTANT, True)]
    trajectories = [
        Trajectory(
            pack_tokens(rng.integers(0, STOP, PROMPT + TOKENS).tolist()),
            segments,
            pack_floats((-rng.exponential(1.0, TOKENS)).tolist()),
            0.5,
            "length",
        )
        for _ in range(SAMPLES)
    ]
    return RolloutGroup(CHECKPOINT, 0, "sort-digits", Engine("test", "1", "float32", "cpu"), trajectories)


@dataclass
class Line:
    """A volunteer, a trainer, and a relay between them: neither knows the other."""

    volunteer: Network
    relay: Network
    trainer: Network
    held: BlobIndex
    """What the volunteer serves."""
    passed: BlobIndex


@asynccontextmanager
async def line() -> AsyncIterator[Line]:
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(open_network(RELAY.seed, NetworkConfig(listen=LOCAL)))
        volunteer, trainer = [
            await stack.enter_async_context(open_network(one.seed, NetworkConfig(listen=())))
            for one in (VOLUNTEER, TRAINER)
        ]
        held, passed = BlobIndex(lambda file: None), BlobIndex(lambda file: None)
        for network, index in ((volunteer, held), (relay, passed)):
            network.serve(
                BLOB_PROTOCOL,
                index.answer,
                max_request=MAX_REQUEST,
                max_response=MAX_BLOB_REPLY,
                turns=BlobTurns(index, None),
            )
        for network in (volunteer, trainer):
            await network.connect(relay.addresses[0])
        yield Line(volunteer, relay, trainer, held, passed)


async def test_16_rollouts_of_32768_tokens_come_through_a_relay_into_the_journal(tmp_path: Path) -> None:
    topic = Topics(RUN).rollouts(0)
    group = large_group()
    body = group.to_bytes()
    reference, frame = pack(CHECKPOINT, 0, body, MANIFEST.rollout_envelope_limit)
    arrived = trio.Event()

    def view() -> GossipView:
        made = GossipView(RUN, MANIFEST)
        made.learn(CHECKPOINT, 0)
        return made

    def failed(groups: list[StoredGroup], error: RemoteError) -> None:
        raise error

    def judged(judgement: Judgement) -> tuple[bytes, Reference]:
        assert judgement.envelope is not None
        assert isinstance(judgement.body, Reference)
        return judgement.envelope.id, judgement.body

    with Journal.open(tmp_path / "journal.sqlite") as journal:
        journal.hear(VOLUNTEER.key, "test", now_ms(), -1)
        async with line() as net, trio.open_nursery() as nursery:
            passing = Passing(net.relay, [TRAINER.key])
            relays, trainers = view(), view()
            net.passed.elsewhere = passing.chunk

            def arrive(groups: list[StoredGroup]) -> None:
                assert journal.add_many(groups) == [None]
                arrived.set()

            bodies = Bodies(
                net.trainer,
                journal,
                arrive,
                failed,
                trio.lowlevel.checkpoint,
                now_ms,
                random.Random(0),
            )

            def forward(data: bytes, forwarder: str) -> Verdict:
                judgement = judge_rollout(relays, 0, data, now_ms())
                passing.note(VOLUNTEER.key, judged(judgement)[1], forwarder)
                return judgement.verdict

            def take(data: bytes, forwarder: str) -> Verdict:
                judgement = judge_rollout(trainers, 0, data, now_ms())
                identity, said = judged(judgement)
                place = (VOLUNTEER.key, CHECKPOINT, 0, said.counter, said.hash)
                assert bodies.offer(StoredGroup(identity, *place, now_ms(), data), said, forwarder) is None
                return judgement.verdict

            net.relay.subscribe(topic, forward, 8)
            net.trainer.subscribe(topic, take, 8)
            for task in (passing.run, bodies.run):
                nursery.start_soon(task)
            for _, piece in cut(reference, frame):
                net.held.add_bytes(piece)
            await net.volunteer.wait_subscriber(topic)
            while len(net.relay.subscribers(topic)) < 1:  # noqa: ASYNC110
                await trio.sleep(0.01)
            data = seal(
                VOLUNTEER, Kind.REFERENCE, RUN, reference.to_bytes(), seq=1, ts=now_ms(), limit=1_000_000
            )
            assert len(data) < 1_000
            await net.volunteer.publish(topic, data)
            await arrived.wait()
            nursery.cancel_scope.cancel()
        (stored,) = journal.unused()
    assert stored.digest == sha256(body).digest()
    content, opened = group_of(stored.envelope, MANIFEST)
    assert (content, opened) == (body, group)
    check_structure(opened, MANIFEST)
    assert sum(map(trained_tokens, opened.trajectories)) == SAMPLES * TOKENS
    assert len(stored.envelope) < 6 * SAMPLES * TOKENS
