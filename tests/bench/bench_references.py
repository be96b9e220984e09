"""Groups of 16 x 32,768 tokens, by reference, from one process into another's journal; one JSON line.

    python tests/bench/bench_references.py [--groups 3] [--tokens 32768]

`seconds`: from the moment at which a trainer accepts the reference until the group is in its journal, fetched
in chunks over real libp2p on 127.0.0.1, unpacked, hashed, decoded; median. `pack_seconds`: what its sender
needs to encode, pack and cut one. `open_seconds`: what it takes out of the journal again. `extra_mb`: how far
the trainer's memory grew at most beyond what it had before the first group. `bytes_per_token`: envelope and
frame, per trained token; `inline_bytes_per_token`: the same of groups of 8 x 512 tokens of the same text in
envelopes of their own, in the same run (see `bench_groups.py`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import msgspec
import numpy as np
import trio
from bench_groups import (
    CHECKPOINT,
    GROUP,
    LOCAL,
    PROMPT,
    RUN,
    TOKENS,
    TOPIC,
    TRAINER,
    VOCABULARY,
    VOLUNTEER,
    bodies,
    manifest,
    open_journal,
    sealed,
)

from nous_node.node.blobs import BlobIndex
from nous_node.node.bodies import Bodies
from nous_node.node.following import now_ms
from nous_node.node.network import open_network
from nous_node.node.store import Journal, StoredGroup
from nous_node.node.stored_groups import body_of
from nous_node.protocol.constants import MAX_REFERENCED
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.gossip import GossipView, Verdict, judge_rollout
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
)
from nous_node.protocol.runs import RunManifest
from nous_node.protocol.streams import BLOB_PROTOCOL, MAX_BLOB_REPLY, MAX_REQUEST

SAMPLES = 16


def rules(tokens: int) -> RunManifest:
    """A run whose groups are of this size."""
    made = manifest()
    model = msgspec.structs.replace(made.model, context=tokens + PROMPT)
    sampling = msgspec.structs.replace(made.sampling, max_tokens=tokens)
    return msgspec.structs.replace(made, model=model, sampling=sampling, group=SAMPLES)


def group(tokens: int, counter: int) -> RolloutGroup:
    """Text and log-probs as `bench_groups.bodies` makes them."""
    rng = np.random.default_rng(counter)
    chance = 1 / np.arange(1, VOCABULARY + 1)
    ids = rng.permutation(VOCABULARY)
    segments = [Segment(PROMPT, Role.USER, False), Segment(tokens, Role.ASSISTANT, True)]
    trajectories = [
        Trajectory(
            pack_tokens(ids[rng.choice(VOCABULARY, size=PROMPT + tokens, p=chance / chance.sum())].tolist()),
            segments,
            pack_floats((-rng.exponential(1.0, tokens)).tolist()),
            0.5,
            "length",
        )
        for _ in range(SAMPLES)
    ]
    return RolloutGroup(CHECKPOINT, counter, "bench", Engine("bench", "1", "bfloat16", "cpu"), trajectories)


def resident_mb() -> float:
    """The most that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1 << 20 if sys.platform == "darwin" else 1024
    )


class Trainer:
    """Takes references in and has their groups fetched, as a trainer does."""

    def __init__(self, network: Any, journal: Journal, tokens: int) -> None:
        self.view = GossipView(RUN, rules(tokens))
        self.view.learn(CHECKPOINT, 0)
        self.journal, self.offered = journal, {}
        self.seconds: list[float] = []
        self.bodies = Bodies(network, journal, self.arrived, self.failed, trio.lowlevel.checkpoint, now_ms)
        self.more = trio.Event()

    def judge(self, data: bytes, forwarder: str) -> Verdict:
        judgement = judge_rollout(self.view, 0, data, now_ms())
        assert judgement.verdict is Verdict.ACCEPT, judgement.error
        envelope, reference = judgement.envelope, judgement.body
        assert envelope is not None
        assert isinstance(reference, Reference)
        place = (VOLUNTEER.key, CHECKPOINT, 0, reference.counter, reference.hash)
        stored = StoredGroup(envelope.id, *place, now_ms(), data)
        self.offered[envelope.id] = time.perf_counter()
        error = self.bodies.offer(stored, reference, forwarder)
        assert error is None, error
        return judgement.verdict

    def arrived(self, groups: list[StoredGroup]) -> None:
        assert self.journal.add_many(groups) == [None]
        self.seconds.append(time.perf_counter() - self.offered[groups[0].id])
        self.more.set()

    def failed(self, groups: list[StoredGroup], error: Exception) -> None:
        raise error


async def _receive(pipe: Any, groups: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder, open_journal(folder) as journal:
        async with open_network(TRAINER.seed, LOCAL) as network, trio.open_nursery() as nursery:
            trainer = Trainer(network, journal, tokens)
            network.subscribe(TOPIC, trainer.judge, 32)
            nursery.start_soon(trainer.bodies.run)
            before = resident_mb()
            pipe.send(network.addresses[0])
            while len(trainer.seconds) < groups:
                await trainer.more.wait()
                trainer.more = trio.Event()
                pipe.send("next")
            extra = resident_mb() - before
            nursery.cancel_scope.cancel()
        stored = journal.unused(1)[0]
        started = time.perf_counter()
        RolloutGroup.from_bytes(body_of(stored.envelope, rules(tokens)), MAX_REFERENCED)
        opened = time.perf_counter() - started
        pipe.send((statistics.median(trainer.seconds), extra, opened, len(stored.envelope)))


def receive(pipe: Any, groups: int, tokens: int) -> None:
    trio.run(_receive, pipe, groups, tokens)


async def _publish(pipe: Any, groups: int, tokens: int) -> dict[str, Any]:
    address = await trio.to_thread.run_sync(pipe.recv)
    index = BlobIndex(lambda file: None)
    packing = []
    async with open_network(VOLUNTEER.seed, LOCAL) as network:
        network.serve(BLOB_PROTOCOL, index.answer, max_request=MAX_REQUEST, max_response=MAX_BLOB_REPLY)
        await network.connect(address)
        await network.wait_subscriber(TOPIC)
        for counter, made in enumerate([group(tokens, counter) for counter in range(groups)]):
            started = time.perf_counter()
            body = made.to_bytes()
            reference, frame = pack(CHECKPOINT, counter, body, 1_000_000)
            for _, piece in cut(reference, frame):
                index.add_bytes(piece)
            packing.append(time.perf_counter() - started)
            data = seal(VOLUNTEER, Kind.REFERENCE, RUN, reference.to_bytes(), seq=counter, ts=now_ms())
            await network.publish(TOPIC, data)
            await trio.to_thread.run_sync(pipe.recv)
        seconds, extra, opened, stored = await trio.to_thread.run_sync(pipe.recv)
    return {
        "group_bytes": len(body),
        "stored_bytes": stored,
        "bytes_per_token": round(stored / (SAMPLES * tokens), 2),
        "pack_seconds": round(statistics.median(packing), 3),
        "seconds": round(seconds, 3),
        "mb_per_second": round(stored / seconds / 1e6, 1),
        "open_seconds": round(opened, 3),
        "extra_mb": round(extra, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32_768)
    arguments = parser.parse_args()
    inline = [len(sealed(one, number)) for number, one in enumerate(bodies())]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs, arguments.groups, arguments.tokens))
    child.start()
    found = trio.run(_publish, ours, arguments.groups, arguments.tokens)
    child.join()
    print(
        json.dumps(
            {
                "bench": "references",
                "groups": arguments.groups,
                "samples": SAMPLES,
                "tokens": arguments.tokens,
                **found,
                "inline_bytes_per_token": round(statistics.mean(inline) / (GROUP * TOKENS), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
