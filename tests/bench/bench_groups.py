"""Rollout groups of 8 x 512 tokens from one publisher process into one trainer's journal; one JSON line.

    python tests/bench/bench_groups.py [--groups 1500]

`groups_per_second`: sealed, published, judged (signature, strict decode, replay memory) and journalled, over
real libp2p between two processes on 127.0.0.1. `own_ms`: CPU milliseconds of our part alone, that is without
libp2p, measured in one process: `seal` at the publisher, `judge` and `journal` at the trainer.
`bytes_per_token`: of the envelope on the wire, per trained token; tokens are drawn from a Zipf distribution
over 49,152 ids and log-probs are random floats, which no real text exceeds in entropy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
import trio

from nous_node.node.calibration import embedded_thresholds
from nous_node.node.following import now_ms
from nous_node.node.network import NetworkConfig, open_network
from nous_node.node.store import Journal, StoredGroup
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.gossip import GossipView, Judgement, Verdict, judge_rollout
from nous_node.protocol.identity import Identity
from nous_node.protocol.rollouts import (
    Engine,
    Role,
    RolloutGroup,
    Segment,
    Trajectory,
    pack_floats,
    pack_tokens,
)
from nous_node.protocol.runs import (
    EnvironmentEntry,
    Limits,
    ModelFacts,
    RunManifest,
    SamplingRules,
    Topics,
)

GROUP, TOKENS, PROMPT, VOCABULARY = 8, 512, 64, 49_152
RUN, CHECKPOINT = b"r" * 32, b"c" * 32
VOLUNTEER, TRAINER = Identity.from_seed(b"v" * 32), Identity.from_seed(b"t" * 32)
LOCAL = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",))
TOPIC = Topics(RUN).rollouts(0)
DIFFERENT = 16
"""Bodies made beforehand; each is sent many times under new counters."""


def bodies() -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    chance = 1 / np.arange(1, VOCABULARY + 1)
    ids = rng.permutation(VOCABULARY)

    def words(count: int) -> list[int]:
        return [int(i) for i in ids[rng.choice(VOCABULARY, size=count, p=chance / chance.sum())]]

    def group() -> RolloutGroup:
        prompt = words(PROMPT)
        segments = [Segment(PROMPT, Role.USER, False), Segment(TOKENS, Role.ASSISTANT, True)]
        trajectories = [
            Trajectory(
                pack_tokens(prompt + words(TOKENS)),
                segments,
                pack_floats([float(x) for x in -rng.exponential(1.0, TOKENS)]),
                0.5,
                "length",
            )
            for _ in range(GROUP)
        ]
        return RolloutGroup(CHECKPOINT, 0, "bench", Engine("bench", "1", "bfloat16", "cpu"), trajectories)

    return [group() for _ in range(DIFFERENT)]


def manifest() -> RunManifest:
    return RunManifest(
        name="bench",
        created=0,
        protocol=[1, 1],
        root=TRAINER.key,
        trainers=[TRAINER.key],
        base=b"b" * 32,
        model=ModelFacts("llama", 1, 1, VOCABULARY, 8192, "bfloat16"),
        environments=[EnvironmentEntry("bench", "1", 1)],
        sampling=SamplingRules("seeded", 1.0, TOKENS, [0], "f32"),
        group=GROUP,
        staleness=4,
        shards=1,
        thresholds=embedded_thresholds(),
        limits=Limits(1e6, 1_000_000),
    )


def view() -> GossipView:
    made = GossipView(RUN, manifest())
    made.learn(CHECKPOINT, 0)
    return made


def sealed(group: RolloutGroup, counter: int) -> bytes:
    body = RolloutGroup(group.checkpoint, counter, group.env, group.engine, group.trajectories).to_bytes()
    return seal(VOLUNTEER, Kind.ROLLOUT, RUN, body, seq=counter, ts=now_ms())


def stored(data: bytes, judgement: Judgement) -> StoredGroup:
    envelope, group = judgement.envelope, judgement.body
    digest = hashlib.sha256(envelope.content()).digest()
    return StoredGroup(envelope.id, VOLUNTEER.key, CHECKPOINT, 0, group.counter, digest, now_ms(), data)


def open_journal(folder: str) -> Journal:
    journal = Journal.open(Path(folder) / "journal.sqlite")
    journal.hear(VOLUNTEER.key, "bench", now_ms(), -1)
    return journal


async def _receive(address: object, groups: int, answer: object) -> None:
    seen, journalled, judged = view(), 0, {}

    def judge(data: bytes, forwarder: str) -> Verdict:
        judgement = judge_rollout(seen, 0, data, now_ms())
        if judgement.verdict is Verdict.ACCEPT:
            judged[data] = judgement
        return judgement.verdict

    with tempfile.TemporaryDirectory() as folder, open_journal(folder) as journal:
        async with open_network(TRAINER.seed, LOCAL) as network:
            inbox = network.subscribe(TOPIC, judge, 32)
            address.send(network.addresses[0])
            started = cpu = 0.0
            async for first, _ in inbox:
                if not started:
                    started, cpu = time.perf_counter(), time.process_time()
                batch = [first]
                while True:
                    try:
                        batch.append(inbox.receive_nowait()[0])
                    except trio.WouldBlock:
                        break
                found = [(data, judged.pop(data)) for data in batch]
                errors = journal.add_many([stored(data, judgement) for data, judgement in found])
                assert not any(errors), errors
                journalled += len(batch)
                if journalled >= groups:
                    break
            answer.send((time.perf_counter() - started, time.process_time() - cpu))


def receiver(address: object, groups: int, answer: object) -> None:
    trio.run(_receive, address, groups, answer)


async def publish(address: str, groups: int) -> float:
    made = bodies()
    async with open_network(VOLUNTEER.seed, LOCAL) as network:
        await network.connect(address)
        await network.wait_subscriber(TOPIC)
        cpu = time.process_time()
        for counter in range(groups):
            await network.publish(TOPIC, sealed(made[counter % DIFFERENT], counter))
        spent = time.process_time() - cpu
        await network.wait_lost(network.peers()[0].peer_id)  # the trainer leaves when it has all
        return spent


def own_part(groups: int) -> dict[str, float]:
    made, seen = bodies(), view()
    begin = time.process_time()
    envelopes = [sealed(made[counter % DIFFERENT], counter) for counter in range(groups)]
    seal_s = time.process_time() - begin
    begin = time.process_time()
    judged = [judge_rollout(seen, 0, data, now_ms()) for data in envelopes]
    judge_s = time.process_time() - begin
    with tempfile.TemporaryDirectory() as folder, open_journal(folder) as journal:
        begin = time.process_time()
        rows = [stored(data, judgement) for data, judgement in zip(envelopes, judged, strict=True)]
        for start in range(0, groups, 8):
            journal.add_many(rows[start : start + 8])
        journal_s = time.process_time() - begin
    parts = {"seal": seal_s, "judge": judge_s, "journal": journal_s}
    figures = {name: round(1000 * seconds / groups, 3) for name, seconds in parts.items()}
    size = sum(map(len, envelopes)) / groups
    return figures | {"sum": round(sum(figures.values()), 3), "bytes": round(size)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=1500)
    groups = parser.parse_args().groups
    context = multiprocessing.get_context("spawn")
    address, address_out = context.Pipe(duplex=False)
    answer, answer_out = context.Pipe(duplex=False)
    process = context.Process(target=receiver, args=(address_out, groups, answer_out), daemon=True)
    process.start()
    publisher_cpu = trio.run(publish, address.recv(), groups)
    seconds, trainer_cpu = answer.recv()
    own = own_part(400)
    size = own.pop("bytes")
    print(
        json.dumps(
            {
                "bench": "groups",
                "groups_per_second": round(groups / seconds, 1),
                "publisher_cpu_ms": round(1000 * publisher_cpu / groups, 3),
                "trainer_cpu_ms": round(1000 * trainer_cpu / groups, 3),
                "own_ms": own,
                "envelope_bytes": size,
                "bytes_per_token": round(size / (GROUP * TOKENS), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
