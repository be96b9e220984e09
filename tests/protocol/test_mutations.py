"""Mutations of all positive vectors at every place where bytes of a peer come in: nothing but RemoteError."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nous_node.protocol.checkpoints import CheckpointManifest, check_files
from nous_node.protocol.encoding import decode, encode, read
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.gossip import GossipView, judge_checkpoint, judge_receipts, judge_rollout
from nous_node.protocol.receipts import Hello, Receipts
from nous_node.protocol.references import read_reference
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.runs import Invite, RunManifest, run_id
from nous_node.protocol.streams import read_blob
from nous_node.protocol.structure import check_structure

VECTORS = Path(__file__).parents[2] / "specs" / "vectors"
ROOM = 1 << 20
NOW = 1_800_000_000_000
CASES = 3000


def corpus() -> list[bytes]:
    found = []
    for path in sorted(VECTORS.glob("*.json")):
        for case in json.loads(path.read_text())["cases"]:
            fields = [
                case.get(name)
                for name in ("bytes", "envelope", "body", "manifest", "frame", "signed", "file")
            ]
            fields += [step.get("message") for step in case.get("steps", [])]
            if "code" not in case:
                found += [bytes.fromhex(field) for field in fields if isinstance(field, str) and field]
    return found


MANIFEST = read(
    bytes.fromhex(json.loads((VECTORS / "gossip.json").read_text())["manifest"]), RunManifest, ROOM
)
RUN = run_id(MANIFEST.to_bytes())
CORPUS = corpus()
TELLING = [0x80, 0x90, 0xC0, 0xC1, 0xCA, 0xCB, 0xDC, 0xDD, 0xDF, 0xFF]


def mutated(entropy: random.Random) -> bytes:
    data = bytearray(entropy.choice(CORPUS))
    for _ in range(entropy.randint(1, 4)):
        at = entropy.randrange(len(data) + 1)
        match entropy.randrange(5):
            case 0:
                data[at : at + 1] = bytes([entropy.choice(TELLING)])
            case 1:
                data[at : at + 1] = entropy.randbytes(1)
            case 2:
                del data[at : at + entropy.randint(1, 5)]
            case 3:
                data[at:at] = entropy.randbytes(entropy.randint(1, 5))
            case _:
                other = entropy.choice(CORPUS)
                data[at:] = other[entropy.randrange(len(other)) :]
    return bytes(data)


def again(data: bytes) -> None:
    assert encode(decode(data, ROOM)) == data


def view() -> GossipView:
    return GossipView(RUN, MANIFEST)


ENTRIES: list[Callable[[bytes], Any]] = [
    again,
    lambda data: unseal(data).content(),
    lambda data: check_structure(RolloutGroup.from_bytes(data), MANIFEST),
    lambda data: read_reference(data, MANIFEST.referenced_limit),
    lambda data: check_files(read(data, CheckpointManifest, ROOM)),
    lambda data: read(data, RunManifest, ROOM),
    lambda data: read(data, Receipts, ROOM),
    lambda data: read(data, Hello, ROOM),
    lambda data: Invite.from_text(data.decode("latin-1")),
    lambda data: read_blob(data),
    lambda data: judge_rollout(view(), 1, data, NOW),
    lambda data: judge_checkpoint(view(), data, NOW),
    lambda data: judge_receipts(view(), data, NOW),
]


@pytest.mark.parametrize("seed", range(2))
def test_no_mutation_gets_past_remote_errors(seed: int) -> None:
    entropy = random.Random(seed)
    taken = 0
    for _ in range(CASES // 2):
        data = mutated(entropy)
        for enter in ENTRIES:
            try:
                enter(data)
                taken += 1
            except RemoteError:
                continue
    assert taken > CASES  # the judges return, and some mutants are values: the mutations are no mere noise
