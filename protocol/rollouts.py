"""Rollout groups: all trajectories of one task, as literal tokens. Spec: `specs/07-rollouts.md`.

Arrays of numbers are `bin` in byte planes: all lowest bytes first, then all second bytes, and so on
(little-endian order of planes). Tokens are u32, log-probs f32 or f16 as the run says, advantages f32.
Planes cost nothing to make and let zstd see that the upper bytes hardly vary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .constants import (
    MAX_BODY,
    MAX_CHUNK,
    MAX_COUNTER,
    MAX_REFERENCED,
    MAX_TEXT,
    MAX_TOKENS,
    MAX_TRAJECTORIES,
    MIN_CHUNK,
)
from .encoding import encode, read
from .envelope import Hash
from .errors import Code, RemoteError

Name = Annotated[str, Meta(max_length=256)]

Ending = Literal["stop", "length", "cut"]
"""How a trajectory ends. [ROL-8]"""


class Role(IntEnum):
    """Who wrote a segment."""

    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    TOOL = 3
    RAW = 4
    """Text without a template: a base model's prompt."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of consecutive tokens: `[length, role, trained]`."""

    length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    role: Role
    trained: bool
    """True exactly where the tokens were sampled by the policy."""


class Trajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence of tokens with what the policy and the environment said of it."""

    tokens: bytes
    """u32 planes."""
    segments: Annotated[list[Segment], Meta(min_length=1)]
    """Lengths add up to the number of tokens."""
    logprobs: bytes
    """f32 or f16 planes, one a trained token: the behaviour policy's at the run's temperature."""
    reward: float
    finish: Ending
    """`stop`: the last token is a sampled end-of-sequence; `length`: the token limit was reached; `cut`: the
    environment ended it where neither did, which only a replay can tell."""
    components: Annotated[dict[str, float], Meta(max_length=64)] = {}
    """Named parts of the reward, for people; never used for training."""
    agent: Name = ""
    """Which player, where an environment has several."""
    advantages: bytes | None = None
    """f32 planes, one a trained token: replaces the group advantage where the run allows it."""
    advantage: float | None = None
    """Replaces the group advantage for all trained tokens, where the run allows it; never together with
    `advantages`. 0: the trajectory is not trained on, and its reward counts in the group's baseline."""
    parents: list[int] | None = None
    """Attention: for each segment the index of its parent segment, -1 for a root. A token attends to
    its own segment causally and to all ancestors. Absent: plain causal."""


class Engine(msgspec.Struct, frozen=True):
    """What made the tokens; said in receipts' advice, never trusted."""

    name: Name
    version: Name
    dtype: Name
    device: Name


class RolloutGroup(msgspec.Struct, frozen=True):
    """The body of a `rollout` envelope."""

    checkpoint: Hash
    """Hash of the checkpoint that generated it: the behaviour policy."""
    counter: Annotated[int, Meta(ge=0, lt=MAX_COUNTER)]
    """0, 1, 2, ... for each (node, checkpoint)."""
    env: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
    """Environment id; has to be the assigned one."""
    engine: Engine
    trajectories: Annotated[list[Trajectory], Meta(min_length=1, max_length=MAX_TRAJECTORIES)]

    def to_bytes(self) -> bytes:
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, limit: int = MAX_BODY) -> RolloutGroup:
        """Decodes the body; RemoteError otherwise. The structure is checked by `check_structure`."""
        return read(data, cls, limit)


class Reference(msgspec.Struct, frozen=True):
    """The body of a `reference` envelope: a rollout group that is too large for gossip, named by its hashes
    and fetched by its chunks from whoever passed the reference on. [ROL-15]"""

    checkpoint: Hash
    counter: Annotated[int, Meta(ge=0, lt=MAX_COUNTER)]
    """Both as in the group."""
    hash: Hash
    """SHA-256 of the group's bytes, as the body of a `rollout` envelope would be."""
    size: Annotated[int, Meta(ge=1, le=MAX_REFERENCED)]
    """Bytes of the group."""
    packed: Annotated[int, Meta(ge=1, le=MAX_REFERENCED)]
    """Bytes of the one zstd frame that holds it: what is fetched."""
    chunk: Annotated[int, Meta(ge=MIN_CHUNK, le=MAX_CHUNK)]
    """Bytes of every chunk of the frame but the last."""
    chunks: bytes
    """SHA-256 of each chunk, one behind the other."""

    def to_bytes(self) -> bytes:
        return encode(self)


def planes(data: bytes, width: int) -> bytes:
    """Little-endian words of `width` bytes each, regrouped into `width` byte planes. [ROL-10]"""
    return b"".join(data[plane::width] for plane in range(width))


def unplanes(data: bytes, width: int) -> bytes:
    """The inverse of `planes`; RemoteError where the length is no multiple of `width`."""
    count, rest = divmod(len(data), width)
    if rest:
        raise RemoteError(Code.WRONG_TYPE, f"{len(data)} bytes are no array of {width}-byte numbers.")
    words = bytearray(len(data))
    for plane in range(width):
        words[plane::width] = data[plane * count : (plane + 1) * count]
    return bytes(words)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return planes(struct.pack(f"<{len(tokens)}I", *tokens), 4)


def unpack_tokens(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", unplanes(data, 4)))


LOGPROB_FORMATS: dict[str, tuple[str, int]] = {"f32": ("f", 4), "f16": ("e", 2)}
"""Run setting -> (struct code, bytes)."""


def pack_floats(values: Sequence[float], form: str = "f32") -> bytes:
    code, width = LOGPROB_FORMATS[form]
    return planes(struct.pack(f"<{len(values)}{code}", *values), width)


def unpack_floats(data: bytes, form: str = "f32") -> list[float]:
    code, width = LOGPROB_FORMATS[form]
    return list(struct.unpack(f"<{len(data) // width}{code}", unplanes(data, width)))


def trained_tokens(trajectory: Trajectory) -> int:
    return sum(segment.length for segment in trajectory.segments if segment.trained)


def path_tokens(
    tokens: Sequence[int], segments: Sequence[Segment], parents: Sequence[int], last: int
) -> list[int]:
    """The tokens of the segments from a root down to `last`, which may be -1: what is seen of a trajectory
    behind that segment. [ROL-9]"""
    path = []
    while last >= 0:
        path.append(last)
        last = parents[last]
    starts = list(accumulate((segment.length for segment in segments), initial=0))
    return [token for one in reversed(path) for token in tokens[starts[one] : starts[one + 1]]]
