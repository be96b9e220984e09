"""`nous-node env try`: one rollout group, made as a volunteer makes one, and what a trainer learns from it.

tried = try_once(trial, environment, ...)      a Tried: every token with its role and log-prob
view(tried), page(tried)                       see `env_colours` and `env_page`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from nous_node.envs.batcher import Batcher, EngineRequest, Job
from nous_node.envs.environment import Completion, Environment, Tokenizer
from nous_node.envs.errors import EnvironmentFailed
from nous_node.protocol.errors import LocalError
from nous_node.protocol.rollouts import Role, Trajectory, unpack_floats, unpack_tokens
from nous_node.protocol.runs import AGENTS
from nous_node.protocol.tasks import Assignment
from nous_node.trainer.advantage import AdvantageKind, Baseline, group_advantages, has_signal
from nous_node.trainer.generate import Request, generate

from .env_policy import Trial

DOMAIN_TRY: Final = b"nous/env-try/1\x00"
"""Seeds of tasks that are tried: no run assigns them."""

MAX_SEED: Final = 1 << 63

LONGEST: Final = 4
"""Tokens of one character, at most: UTF-8 has four bytes."""

_UNUSED: Final = 40
"""Bytes of an assignment's stream before its sampler keys."""


class Token(msgspec.Struct, frozen=True):
    """One token, or several that make one character together."""

    ids: list[int]
    text: str
    logprobs: list[float]
    """One an id; empty where the policy did not sample it."""
    advantages: list[float]
    """What a trainer gives each, likewise."""


class Part(msgspec.Struct, frozen=True):
    """A segment of a trajectory."""

    role: str
    trained: bool
    parent: int | None
    """The segment that it goes on from, where that is not the one before; -1: it begins anew."""
    text: str
    tokens: list[Token]


class Sample(msgspec.Struct, frozen=True):
    """A trajectory."""

    agent: str
    reward: float
    components: dict[str, float]
    advantage: float | None
    """For all of its sampled tokens; None: the environment gives each its own."""
    own_advantage: bool
    """Whether the environment gave it, and not the group's rewards."""
    finish: str
    sampled: int
    tokens: int
    parts: list[Part]


class Tried(msgspec.Struct, frozen=True):
    """A group. With `--json` these are the keys."""

    environment: str
    version: str
    model: str
    seed: int
    level: int
    group: int
    temperature: float
    note: str
    """Why the model has no conversation format, where that may matter."""
    learns: bool
    """Whether a trainer learns anything from it."""
    samples: list[Sample]


def try_once(
    trial: Trial, environment: Environment, version: str, seed: int, level: int, temperature: float
) -> Tried:
    """Plays one group. Raises EnvironmentFailed, LocalError for a level or seed that there is not."""
    if not 0 <= level <= environment.levels:
        raise LocalError(f"--level is from 0 to {environment.levels} for {environment.info.id}, not {level}.")
    trajectories = _played(trial, environment, seed, level, temperature)
    advantages, learns = _advantages(trajectories)
    pairs = zip(trajectories, advantages, strict=True)
    return Tried(
        environment.info.id,
        version,
        "the embedded default" if trial.base.embedded else str(trial.base.source),
        seed,
        level,
        trial.settings.group,
        temperature,
        trial.note,
        learns,
        [_sample(trial.settings.tokenizer, trajectory, advantage) for trajectory, advantage in pairs],
    )


def task_seed(seed: int) -> bytes:
    """The task of `--seed N`: SHA-256(DOMAIN_TRY || u64le(N))."""
    if not 0 <= seed < MAX_SEED:
        raise LocalError(f"--seed is a whole number from 0 on, not {seed}.")
    return hashlib.sha256(DOMAIN_TRY + seed.to_bytes(8, "little")).digest()


def _played(
    trial: Trial, environment: Environment, seed: int, level: int, temperature: float
) -> list[Trajectory]:
    settings, root = trial.settings, task_seed(seed)
    task = environment.task(root, level)
    count = settings.group * max(AGENTS, environment.info.agents)
    stream = bytes(_UNUSED) + hashlib.shake_256(DOMAIN_TRY + root).digest(32 * count)
    policy, stop = trial.policy(), sorted(settings.stop)

    def sample(requests: Sequence[EngineRequest]) -> list[Completion]:
        wanted = [Request(r.tokens, key, r.start, r.max_tokens) for key, r in requests]
        made = generate(policy, wanted, temperature, stop)
        return [Completion(one.tokens, one.logprobs.tolist(), one.finish) for one in made]

    with Batcher(settings, sample) as batcher:
        (outcome,) = batcher.run([Job(environment, task, Assignment(root, 0, root, stream))])
    if isinstance(outcome, EnvironmentFailed):
        raise outcome
    return outcome


def _advantages(trajectories: Sequence[Trajectory]) -> tuple[list[float], bool]:
    """What GRPO gives each trajectory, and whether a trainer learns from the group."""
    rewards = np.array([one.reward for one in trajectories], np.float64)
    agents = [one.agent for one in trajectories]
    told = group_advantages(AdvantageKind.GRPO, rewards, Baseline(), agents)
    own = any(one.advantage is not None or one.advantages is not None for one in trajectories)
    return [float(one) for one in told], own or has_signal(AdvantageKind.GRPO, rewards, agents)


def _sample(tokenizer: Tokenizer, trajectory: Trajectory, advantage: float) -> Sample:
    own, each = trajectory.advantage, trajectory.advantages
    whole = None if each is not None else advantage if own is None else own
    logprobs = unpack_floats(trajectory.logprobs)
    weights = [whole or 0.0] * len(logprobs) if each is None else unpack_floats(each)
    parts = list(_parts(tokenizer, trajectory, logprobs, weights))
    return Sample(
        trajectory.agent,
        trajectory.reward,
        dict(trajectory.components),
        whole,
        own is not None or each is not None,
        trajectory.finish,
        len(logprobs),
        sum(segment.length for segment in trajectory.segments),
        parts,
    )


def _parts(
    tokenizer: Tokenizer, trajectory: Trajectory, logprobs: Sequence[float], weights: Sequence[float]
) -> Iterator[Part]:
    ids, position, sampled = unpack_tokens(trajectory.tokens), 0, 0
    for number, segment in enumerate(trajectory.segments):
        own = ids[position : position + segment.length]
        position += segment.length
        count = segment.length if segment.trained else 0
        said, given = logprobs[sampled : sampled + count], weights[sampled : sampled + count]
        sampled += count
        parent = number - 1 if trajectory.parents is None else trajectory.parents[number]
        yield Part(
            Role(segment.role).name.lower(),
            segment.trained,
            None if parent == number - 1 else parent,
            tokenizer.decode(own),
            list(_tokens(tokenizer, own, said, given)),
        )


def _tokens(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float], weights: Sequence[float]
) -> Iterator[Token]:
    start, before = 0, list[int]()
    for end in range(1, len(ids) + 1):
        text = _behind(tokenizer, before, ids[start:end])
        if text.endswith("\ufffd") and end - start < LONGEST and end < len(ids):
            continue  # part of a character
        yield Token(list(ids[start:end]), text, list(logprobs[start:end]), list(weights[start:end]))
        before, start = list(ids[start:end]), end


def _behind(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens where they stand: some decoders drop the space in front of a first word."""
    head, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids])
    return whole.removeprefix(head) if whole.startswith(head) else tokenizer.decode(ids)
