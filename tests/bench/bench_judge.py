"""CPU of the gossip path for one message: judged as accepted, and as everything that is turned away.

    python tests/bench/bench_judge.py [--kilobytes 50] [--messages 200]

A rollout group whose envelope has about as many kilobytes as asked for; milliseconds of CPU a message
(`process_time`, the median of ten parts), and each refusal as a ratio of the accepted message of the same
run. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable

from nous_node.node.calibration import embedded_thresholds
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.gossip import GossipView, Verdict, judge_rollout
from nous_node.protocol.identity import Identity
from nous_node.protocol.rollouts import Engine, RolloutGroup, Segment, Trajectory, pack_floats, pack_tokens
from nous_node.protocol.runs import (
    EnvironmentEntry,
    Limits,
    ModelFacts,
    RunManifest,
    SamplingRules,
)

RUN = hashlib.sha256(b"run").digest()
CHECKPOINT = hashlib.sha256(b"checkpoint").digest()
NOW = 1_750_000_000_000
SENDER = Identity.from_seed(hashlib.sha256(b"sender").digest())
PARTS = 10

MANIFEST = RunManifest(
    name="bench",
    created=NOW,
    protocol=[1, 1],
    root=bytes(32),
    trainers=[bytes(32)],
    base=bytes(32),
    model=ModelFacts("llama", 1, 1, 50_000, 32_768, "float32"),
    environments=[EnvironmentEntry("sort-digits", "1", 1)],
    sampling=SamplingRules("seeded", 1.0, 16_384, [0], "f32"),
    group=8,
    staleness=4,
    shards=1,
    thresholds=embedded_thresholds(),
    limits=Limits(1e6, 1_000_000),
)


def group(counter: int, kilobytes: int) -> bytes:
    """Eight trajectories with as many random tokens as make about that many kilobytes (6 bytes a token)."""
    draw = random.Random(counter)
    tokens = max(2, kilobytes * 1000 // (8 * 6))
    trajectories = []
    for _ in range(8):
        ids = [draw.randrange(1, 50_000) for _ in range(tokens)]
        logprobs = [-draw.expovariate(1.0) for _ in range(tokens - 1)]
        segments = [Segment(1, 1, False), Segment(tokens - 1, 2, True)]  # type: ignore[arg-type]
        trajectories.append(Trajectory(pack_tokens(ids), segments, pack_floats(logprobs), 0.5, "length"))
    engine = Engine("bench", "1", "float32", "cpu")
    return RolloutGroup(CHECKPOINT, counter, "sort-digits", engine, trajectories).to_bytes()


def view() -> GossipView:
    made = GossipView(RUN, MANIFEST)
    made.learn(CHECKPOINT, 3)
    return made


def milliseconds(messages: list[bytes], make: Callable[[], GossipView], expected: str) -> float:
    """Median CPU of one judgement; every message has to get the expected code."""
    took = []
    for part in range(PARTS):
        judge, some, codes = make(), messages[part::PARTS], []
        began = time.process_time()
        for data in some:
            judgement = judge_rollout(judge, 0, data, NOW)
            refused = judgement.verdict is not Verdict.ACCEPT
            codes.append(str(judgement.error and judgement.error.code) if refused else "")
        took.append(1000 * (time.process_time() - began) / len(some))
        assert set(codes) == {expected}, codes
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kilobytes", type=int, default=50)
    parser.add_argument("--messages", type=int, default=200)
    options = parser.parse_args()
    bodies = [group(number, options.kilobytes) for number in range(options.messages)]

    def sealed(
        body: bytes, number: int, identity: Identity = SENDER, run: bytes = RUN, ts: int = NOW
    ) -> bytes:
        return seal(identity, Kind.ROLLOUT, run, body, seq=number, ts=ts)

    good = [sealed(body, number) for number, body in enumerate(bodies)]

    def in_quarantine() -> GossipView:
        made = view()
        made.quarantined[SENDER.key] = NOW + 1000
        return made

    def moved_on() -> GossipView:
        made = view()
        made.learn(bytes(32), 20)
        return made

    def bomb(number: int) -> bytes:
        """Eight megabytes of zeros in a kilobyte: as much as a body may have."""
        return sealed(bytes(MANIFEST.rollout_body_limit), number)

    cases: dict[str, tuple[list[bytes], Callable[[], GossipView]]] = {
        "bad-signature": ([data[:20] + bytes([data[20] ^ 1]) + data[21:] for data in good], view),
        "wrong-run": ([sealed(body, n, run=bytes(32)) for n, body in enumerate(bodies)], view),
        "expired": ([sealed(body, n, ts=NOW - 10_000_000) for n, body in enumerate(bodies)], view),
        "quarantined": (good, in_quarantine),
        "stale": (good, moved_on),
        "malformed": ([data[:-1] for data in good], view),
        "wrong-type": (
            [
                sealed(encode({"checkpoint": CHECKPOINT, "counter": n, "pad": body}), n)
                for n, body in enumerate(bodies)
            ],
            view,
        ),
        "malformed (bomb)": ([bomb(number) for number in range(options.messages)], view),
        "oversize": ([bytes(1_000_001)] * options.messages, view),
    }
    accepted = milliseconds(good, view, "")
    result: dict[str, object] = {
        "bench": "judge",
        "envelope_bytes": round(statistics.mean(map(len, good))),
        "accepted_ms": round(accepted, 3),
        "accepted_bytes_of_body": len(bodies[0]),
    }
    for code, (messages, make) in cases.items():
        result[f"{code} / accepted"] = round(milliseconds(messages, make, code.split()[0]) / accepted, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
