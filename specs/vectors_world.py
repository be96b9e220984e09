"""The fixed run, keys and messages that the vectors are made of."""

from __future__ import annotations

import struct
from typing import Any

from nous_node.protocol.checkpoints import CheckpointManifest, file_entry, files_hash
from nous_node.protocol.constants import DOMAIN_ENVELOPE
from nous_node.protocol.encoding import decode, encode
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
    Bound,
    EnvironmentEntry,
    Limits,
    ModelFacts,
    RunManifest,
    SamplingRules,
    Thresholds,
    run_id,
)

NOW = 1_800_000_000_000
STOP = 258

SEEDS = {name: bytes([number]) * 32 for number, name in enumerate(("root", "trainer", "alice", "bob"), 1)}
ROOT, TRAINER, ALICE, BOB = (Identity.from_seed(seed) for seed in SEEDS.values())

FILES = [
    file_entry("config.json", [b"{}"], 16_384),
    file_entry("model.safetensors", [bytes(16_384), b"tail"], 16_384),
]
MANIFEST = RunManifest(
    name="vectors",
    created=NOW,
    protocol=[1, 1],
    root=ROOT.key,
    trainers=[TRAINER.key],
    base=files_hash(FILES),
    model=ModelFacts("llama", 147_968, 16_388, 259, 64, "float32"),
    environments=[
        EnvironmentEntry("sort-digits", "1", 3, {"length": 4}),
        EnvironmentEntry("own-advantages", "1", 1, {}, True),
    ],
    sampling=SamplingRules("seeded", 1.0, 8, [STOP], "f32"),
    group=2,
    staleness=2,
    shards=4,
    thresholds=Thresholds(
        logprobs=Bound(1e-5, 1e-5, 1e-4),
        distances=Bound(1e-6, 1e-6, 1e-5),
        distance_max=1e-3,
        tokens=40,
        drift_slack=2.0,
        drift_limit=20.0,
        stop_probability=1e-9,
        reward=1e-6,
        verifier="float32",
        calibrated="not calibrated",
    ),
    limits=Limits(0.05, 100_000),
)
RUN = run_id(MANIFEST.to_bytes())
BEACON = bytes(range(32))
BASE = CheckpointManifest(0, "full", FILES, {"weight": bytes(32)}, BEACON)
ENGINE = Engine("vectors", "1", "float32", "cpu")


def case(comment: str, requires: str, flags: str = "", **fields: Any) -> dict[str, Any]:
    """One case: why it exists, which requirements it serves (ids in one string), and its data."""
    return {"comment": comment, "flags": flags.split(), "requires": requires.split(), **fields}


def trajectory(**changes: Any) -> Trajectory:
    """Three prompt tokens and three sampled ones, the last of which is the stop token."""
    fields: dict[str, Any] = {
        "tokens": pack_tokens([53, 50, 61, 50, 53, STOP]),
        "segments": [Segment(3, Role.RAW, False), Segment(3, Role.ASSISTANT, True)],
        "logprobs": pack_floats([-0.5, -1.25, 0.0]),
        "reward": 0.5,
        "finish": "stop",
    }
    return Trajectory(**{**fields, **changes})


def group(**changes: Any) -> RolloutGroup:
    fields: dict[str, Any] = {
        "checkpoint": bytes(32),
        "counter": 0,
        "env": "sort-digits",
        "engine": ENGINE,
        "trajectories": [trajectory(), trajectory(reward=1.0)],
    }
    return RolloutGroup(**{**fields, **changes})


def head(sender: Identity, kind: str, body: bytes, seq: int = 0, /, **changes: Any) -> dict[str, Any]:
    """The signed map as plain values; a change to `None` drops a key."""
    fields = {
        "v": 1,
        "kind": kind,
        "run": RUN,
        "from": sender.key,
        "seq": seq,
        "ts": NOW,
        "exp": NOW + 60_000,
        "body": body,
        **changes,
    }
    return {key: value for key, value in fields.items() if value is not None}


def sealed(sender: Identity, kind: str, body: bytes, seq: int = 0, /, **changes: Any) -> bytes:
    """An envelope of whatever head, signed by `sender`. No compressor takes part: its output would change
    with its version."""
    signed = encode(head(sender, kind, body, seq, **changes))
    return encode({"sig": sender.sign(DOMAIN_ENVELOPE + signed), "signed": signed})


def forged(data: bytes) -> bytes:
    """The envelope with one bit of its signature flipped."""
    at = data.index(b"\xa3sig\xc4\x40") + 6
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def raw_frame(body: bytes) -> bytes:
    """A zstd frame of one raw block: what RFC 8878 calls a single-segment frame with 4 bytes of size."""
    block = ((len(body) << 3) | 1).to_bytes(3, "little") + body
    return bytes.fromhex("28b52ffda0") + struct.pack("<I", len(body)) + block


def run_length_frame(declared: int, blocks: int, window: int = 13) -> bytes:
    """A frame whose header says `declared` bytes; each of its blocks unfolds to 128 KiB of zeros."""
    frame = bytes.fromhex("28b52ffd80") + bytes([window << 3]) + struct.pack("<I", declared)
    for number in range(blocks):
        last = number == blocks - 1
        frame += ((131_072 << 3) | 2 | last).to_bytes(3, "little") + b"\0"
    return frame


def plain(structure: Any) -> dict[str, Any]:
    """A structure as the map that travels."""
    value = decode(encode(structure), 1 << 24)
    assert isinstance(value, dict)
    return value
