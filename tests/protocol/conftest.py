"""A run, its keys and well-formed messages of it, for all tests of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import settings

from nous_node.protocol.checkpoints import CheckpointManifest, file_entry, files_hash
from nous_node.protocol.envelope import Envelope, Kind, seal, unseal
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

# The same examples in every run, whatever the load of the machine.
settings.register_profile("deterministic", derandomize=True, database=None, deadline=None)
settings.load_profile("deterministic")

NOW = 1_800_000_000_000
STOP = 258


@dataclass(frozen=True)
class World:
    """One run as everybody sees it."""

    root: Identity
    trainer: Identity
    volunteer: Identity
    manifest: RunManifest
    base: CheckpointManifest
    run: bytes
    now: int = NOW

    def sealed(self, kind: Kind, body: bytes, sender: Identity, seq: int = 0, **times: int) -> bytes:
        return seal(sender, kind, self.run, body, seq=seq, ts=times.pop("ts", self.now), **times)

    def opened(self, kind: Kind, body: bytes, sender: Identity, seq: int = 0) -> Envelope:
        return unseal(self.sealed(kind, body, sender, seq))


def make_trajectory(**changes: Any) -> Trajectory:
    """Three prompt tokens and three sampled ones, the last of which is the stop token."""
    fields: dict[str, Any] = {
        "tokens": pack_tokens([115, 53, 61, 50, 53, STOP]),
        "segments": [Segment(3, Role.RAW, False), Segment(3, Role.ASSISTANT, True)],
        "logprobs": pack_floats([-0.5, -1.25, -0.0]),
        "reward": 0.5,
        "finish": "stop",
    }
    return Trajectory(**{**fields, **changes})


@pytest.fixture(scope="session")
def trajectory() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture(scope="session")
def group(world: World) -> Callable[..., RolloutGroup]:
    """A well-formed group; keyword arguments replace its fields."""

    def make(**changes: Any) -> RolloutGroup:
        fields: dict[str, Any] = {
            "checkpoint": bytes(32),
            "counter": 0,
            "env": "sort-digits",
            "engine": Engine("test", "1", "float32", "cpu"),
            "trajectories": [make_trajectory()] * world.manifest.group,
        }
        return RolloutGroup(**{**fields, **changes})

    return make


@pytest.fixture(scope="session")
def world() -> World:
    root, trainer, volunteer = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
    files = [file_entry("config.json", [b"{}"]), file_entry("model.safetensors", [b"weights"])]
    manifest = RunManifest(
        name="test",
        created=NOW,
        protocol=[1, 1],
        root=root.key,
        trainers=[trainer.key],
        base=files_hash(files),
        model=ModelFacts("llama", 147_968, 9, 259, 64, "float32"),
        environments=[EnvironmentEntry("sort-digits", "1", 3), EnvironmentEntry("free", "1", 1, {}, True)],
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
    base = CheckpointManifest(0, "full", files, {"w": bytes(32)}, bytes(32))
    return World(root, trainer, volunteer, manifest, base, run_id(manifest.to_bytes()))


@pytest.fixture(scope="session")
def replaced() -> Callable[..., Any]:
    return msgspec.structs.replace
