"""Which task a node works on: derived, never chosen. Spec: `specs/06-tasks-and-sampling.md`.

seed   = SHA-256("nous/task/1\\0" || run_id || checkpoint_hash || beacon || node key || u64le(counter))
stream = SHAKE-256("nous/draw/1\\0" || seed)
stream[0:8]    chooses the environment by weight
stream[8:40]   is the environment's task seed
stream[40+32i : 72+32i]  is the sampler key of trajectory i
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .constants import DOMAIN_DRAW, DOMAIN_TASK, MAX_COUNTER, MAX_TRAJECTORIES
from .errors import LocalError

HASH_BYTES = 32
_ENVIRONMENT = slice(0, 8)
_TASK = slice(8, 40)
_KEYS = 40


@dataclass(frozen=True, slots=True)
class Assignment:
    """What (node, checkpoint, counter) has to do."""

    seed: bytes
    """32 bytes: the root of everything below."""
    environment: int
    """Index into the run manifest's environments."""
    task_seed: bytes
    """32 bytes for `Environment.task`."""
    stream: bytes
    """The XOF output as far as it was drawn; sampler keys are cut from it."""

    def sampler_key(self, trajectory: int) -> bytes:
        """The 32-byte ChaCha20 key of trajectory number `trajectory` of the group. [TSK-4]"""
        start = _KEYS + HASH_BYTES * trajectory
        if trajectory < 0 or start + HASH_BYTES > len(self.stream):
            raise LocalError(f"Trajectory {trajectory} is beyond the group's limit.")
        return self.stream[start : start + HASH_BYTES]


def task_seed(run_id: bytes, checkpoint: bytes, beacon: bytes, key: bytes, counter: int) -> bytes:
    """The 32-byte seed of one task; all arguments but the counter have 32 bytes."""
    for name, part in (
        ("run id", run_id),
        ("checkpoint", checkpoint),
        ("beacon", beacon),
        ("key", key),
    ):
        if len(part) != HASH_BYTES:
            raise LocalError(f"The {name} has {HASH_BYTES} bytes, not {len(part)}.")
    if not 0 <= counter < MAX_COUNTER:
        raise LocalError(f"A task counter is below {MAX_COUNTER}, not {counter}.")
    # [TSK-1]
    material = DOMAIN_TASK + run_id + checkpoint + beacon + key + counter.to_bytes(8, "little")
    return hashlib.sha256(material).digest()


def assign(seed: bytes, weights: Sequence[int], trajectories: int = MAX_TRAJECTORIES) -> Assignment:
    """Draws the environment, its task seed and the sampler keys of `trajectories` trajectories.

    `weights` are the positive integer weights of the run manifest, in its order.
    """
    if not weights or min(weights) < 1:
        raise LocalError("A run has at least one environment, each with a weight of 1 or more.")
    stream = hashlib.shake_256(DOMAIN_DRAW + seed).digest(_KEYS + HASH_BYTES * trajectories)
    word = int.from_bytes(stream[_ENVIRONMENT], "little")  # [TSK-3]
    ticket = (word * sum(weights)) >> 64  # unbiased to 2^-64, and exact in integers everywhere
    environment = 0
    while ticket >= weights[environment]:
        ticket -= weights[environment]
        environment += 1
    return Assignment(seed, environment, stream[_TASK], stream)
