"""What a trainer checks of a rollout group before it learns from it. Spec: `specs/08-verification.md`.

Cheapest first:

    check    structure -> assignment -> replay of the environment: prompts, ends and rewards
             copies (`copies.py`) -> repetition
    measure  one prefill -> ends of sequence -> log-probs -> the seeded draw

A group that fails any of them is not trained on, not in part either. `examiner.py` puts them in order.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType

import numpy as np
from numpy.typing import NDArray

from nous_node.envs.environment import Environment, PolicySettings, Task, keeps_time
from nous_node.envs.replay import replay
from nous_node.protocol.constants import MAX_REFERENCED
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import RolloutGroup, Trajectory, unpack_floats, unpack_tokens
from nous_node.protocol.runs import RunManifest, Thresholds
from nous_node.protocol.structure import check_structure
from nous_node.protocol.tasks import Assignment, assign, task_seed
from nous_node.trainer.generate import uniforms
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recomputed, Recorded, prefill
from nous_node.trainer.tree import Tree

from .copies import Owner
from .learner_messages import Candidate
from .statistics import Figures, check_figures
from .token_checks import check_ends, check_repetition

REPLAY_SECONDS = 60.0
"""For the prompts and rewards of one group: no scorer takes a minute."""


@dataclass(frozen=True, slots=True)
class CheckedTrajectory:
    """One trajectory as arrays, with what the trainer computed itself."""

    tokens: NDArray[np.int64]
    """[T]"""
    trained: NDArray[np.bool_]
    """[T], true where the token was sampled."""
    logprobs: NDArray[np.float32]
    """[N] reported by the volunteer, one a trained token."""
    advantages: NDArray[np.float32] | None
    """[N] from the environment, where the run allows it."""
    advantage: float | None
    """The environment's for all trained tokens, likewise."""
    agent: str
    tree: Tree | None
    """Where attention is not plain causal."""
    key: bytes
    """Sampler key."""

    @property
    def sampled(self) -> NDArray[np.int64]:
        """[N]"""
        return self.tokens[self.trained]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a prefill says of a group."""

    recomputed: list[Recomputed]
    """Of each trajectory."""
    figures: Figures
    """Of all its trained tokens."""
    error: RemoteError | None
    """Why it is refused, if it is."""


@dataclass(frozen=True, slots=True)
class CheckedGroup:
    """A group that passed structure, assignment and replay."""

    candidate: Candidate
    trajectories: list[CheckedTrajectory]
    rewards: list[float]
    """Recomputed, one a trajectory."""
    correct: list[float]
    """The reward component `correct`, or the reward where there is none: for people."""
    environment: str
    level: int
    counter: int

    @property
    def owner(self) -> Owner:
        """Which group it is, whatever envelope brought it."""
        return self.candidate.key, self.candidate.checkpoint, self.counter

    @property
    def credit(self) -> int:
        return sum(len(one.logprobs) for one in self.trajectories)


class Verifier:
    """Checks groups of one run."""

    def __init__(self, run: bytes, manifest: RunManifest, environments: Sequence[Environment]) -> None:
        self.manifest = manifest
        self._run, self._environments = run, environments

    def check(self, candidate: Candidate, settings: PolicySettings) -> CheckedGroup:
        """Everything that needs no model. Raises RemoteError with the code of the first check that fails."""
        group = RolloutGroup.from_bytes(candidate.body, MAX_REFERENCED)
        check_structure(group, self.manifest)  # [VER-1]
        assignment = self._assignment(candidate, group)
        environment = self._environments[assignment.environment]
        level = candidate.levels.get(group.env, 0)
        with nullcontext() if keeps_time(environment) else deadline(REPLAY_SECONDS):
            task = _task(environment, assignment.task_seed, level)
            made = replay(environment, task, group, settings, self.manifest.thresholds.reward)  # [VER-3]
        trajectories = [
            _arrays(recorded, own, assignment.sampler_key(number), self.manifest.sampling.logprobs)
            for number, (recorded, own) in enumerate(zip(group.trajectories, made, strict=True))
        ]
        rewards = [one.reward for one in made]
        correct = [one.components.get("correct", one.reward) for one in made]
        return CheckedGroup(candidate, trajectories, rewards, correct, group.env, level, group.counter)

    def _assignment(self, candidate: Candidate, group: RolloutGroup) -> Assignment:
        """[VER-2]: the environment is the one that (run, checkpoint, beacon, key, counter) draws."""
        seed = task_seed(self._run, candidate.checkpoint, candidate.beacon, candidate.key, group.counter)
        assignment = assign(seed, self.manifest.weights, len(group.trajectories))
        assigned = self.manifest.environments[assignment.environment].id
        if group.env != assigned:
            raise RemoteError(
                Code.WRONG_ENVIRONMENT, f"The task belongs to {assigned}, the group to {group.env[:64]!r}."
            )
        return assignment

    def check_sampled(self, group: CheckedGroup) -> None:
        """What the sampled tokens show without a model. RemoteError(REPETITION) [VER-9]"""
        if self.manifest.sampling.mode == "free":
            for one in group.trajectories:
                check_repetition(one.sampled, self.manifest.sampling.stop)

    def recompute(self, policy: Policy, groups: Sequence[CheckedGroup]) -> list[list[Recomputed]]:
        """One prefill for all groups: what `policy` gives for each of their trajectories."""
        recorded = [
            Recorded(one.tokens, one.trained, uniforms(one.key, 0, len(one.logprobs)), one.tree)
            for group in groups
            for one in group.trajectories
        ]
        results = iter(prefill(policy, recorded, self.manifest.sampling.temperature))
        return [[next(results) for _ in group.trajectories] for group in groups]

    def measure(self, group: CheckedGroup, recomputed: list[Recomputed]) -> Measured:
        """Figures of a group, and whether they are an honest one's. [VER-8] [VER-4] [VER-5]"""
        rules, thresholds = self.manifest.sampling, self.manifest.thresholds
        seeded = rules.mode == "seeded"
        parts = [
            Figures.of(one.logprobs, found.logprobs, found.distances if seeded else None)
            for one, found in zip(group.trajectories, recomputed, strict=True)
        ]
        figures = Figures.together(parts)
        try:
            for one, found in zip(group.trajectories, recomputed, strict=True):
                check_ends(one.sampled, found.logprobs, rules.stop, thresholds.stop_probability)
            _check_figures(figures, parts, thresholds)
        except RemoteError as error:
            return Measured(recomputed, figures, error)
        return Measured(recomputed, figures, None)


def _task(environment: Environment, seed: bytes, level: int) -> Task:
    """Somebody else's code: whatever it raises refuses the group, and nothing more."""
    try:
        return environment.task(seed, level)
    except Exception as error:
        raise RemoteError(
            Code.ENVIRONMENT_FAILED,
            f"The environment {environment.info.id} failed: {type(error).__name__}: {error}",
        ) from error


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after `seconds`, and again each second, should it be swallowed.

    By SIGALRM, so in the main thread only (elsewhere nothing happens): a scorer that never returns to the
    interpreter is beyond it, and is ended with the whole process by the trainer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, late)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
        signal.signal(signal.SIGALRM, handler)


def _arrays(recorded: Trajectory, made: Trajectory, key: bytes, form: str) -> CheckedTrajectory:
    """What was sampled is as `recorded`; what the environment says of it as it was `made` again."""
    lengths = [segment.length for segment in recorded.segments]
    flags = [segment.trained for segment in recorded.segments]
    advantages = made.advantages
    return CheckedTrajectory(
        tokens=np.array(unpack_tokens(recorded.tokens), np.int64),
        trained=np.repeat(np.array(flags, np.bool_), lengths),
        logprobs=np.array(unpack_floats(recorded.logprobs, form), np.float32),
        advantages=None if advantages is None else np.array(unpack_floats(advantages), np.float32),
        advantage=made.advantage,
        agent=made.agent,
        tree=None if recorded.parents is None else Tree.of(lengths, recorded.parents),
        key=key,
    )


def _check_figures(figures: Figures, parts: Sequence[Figures], thresholds: Thresholds) -> None:
    if not figures.tokens:
        raise RemoteError(Code.SEGMENTS, "The group has no sampled token.")
    check_figures(figures, thresholds, "group")
    for part in parts:
        if part.tokens:
            check_figures(part, thresholds, "trajectory")
