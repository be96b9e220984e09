"""What a trainer checks of a rollout group before it learns from it. Spec: `specs/08-verification.md`.

Cheapest first: structure -> assignment -> replay of the environment (prompts and rewards) -> one prefill
(log-probs and the seeded draw). A group that fails any of them is not trained on, not in part either.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import numpy as np
from numpy.typing import NDArray

from nous_node.envs.environment import Environment, PolicySettings, Task
from nous_node.envs.replay import replay
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import RolloutGroup, unpack_floats, unpack_tokens
from nous_node.protocol.runs import RunManifest, Thresholds
from nous_node.protocol.structure import check_structure
from nous_node.protocol.tasks import Assignment, assign, task_seed
from nous_node.trainer.generate import uniforms
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recomputed, Recorded, prefill

from .learner_messages import Candidate
from .statistics import Figures, check_figures

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
    key: bytes
    """Sampler key."""


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
        group = RolloutGroup.from_bytes(candidate.body)
        check_structure(group, self.manifest)  # [VER-1]
        assignment = self._assignment(candidate, group)
        environment = self._environments[assignment.environment]
        level = candidate.levels.get(group.env, 0)
        with deadline(REPLAY_SECONDS):
            task = _task(environment, assignment.task_seed, level)
            made = replay(environment, task, group, settings, self.manifest.thresholds.reward)  # [VER-3]
        trajectories = [
            _arrays(group, number, assignment, self.manifest.sampling.logprobs)
            for number in range(len(group.trajectories))
        ]
        rewards = [one.reward for one in made]
        correct = [one.components.get("correct", one.reward) for one in made]
        return CheckedGroup(candidate, trajectories, rewards, correct, group.env, level)

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

    def check_sampling(self, policy: Policy, groups: Sequence[CheckedGroup]) -> list[RemoteError | None]:
        """One prefill under the behaviour policy for all groups of one checkpoint: for each group None, or
        why it is refused. [VER-4] [VER-5]"""
        rules, thresholds = self.manifest.sampling, self.manifest.thresholds
        recorded = [
            Recorded(one.tokens, one.trained, uniforms(one.key, 0, len(one.logprobs)))
            for group in groups
            for one in group.trajectories
        ]
        results = iter(prefill(policy, recorded, rules.temperature))
        outcomes: list[RemoteError | None] = []
        for group in groups:
            mine = [next(results) for _ in group.trajectories]
            outcomes.append(_outcome(group, mine, thresholds, seeded=rules.mode == "seeded"))
        return outcomes


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


def _arrays(group: RolloutGroup, number: int, assignment: Assignment, form: str) -> CheckedTrajectory:
    trajectory = group.trajectories[number]
    lengths = [segment.length for segment in trajectory.segments]
    flags = [segment.trained for segment in trajectory.segments]
    advantages = trajectory.advantages
    return CheckedTrajectory(
        tokens=np.array(unpack_tokens(trajectory.tokens), np.int64),
        trained=np.repeat(np.array(flags, np.bool_), lengths),
        logprobs=np.array(unpack_floats(trajectory.logprobs, form), np.float32),
        advantages=None if advantages is None else np.array(unpack_floats(advantages), np.float32),
        key=assignment.sampler_key(number),
    )


def _figures(group: CheckedGroup, recomputed: Sequence[Recomputed], *, seeded: bool) -> list[Figures]:
    """Of each trajectory."""
    return [
        Figures.of(one.logprobs, found.logprobs, found.distances if seeded else None)
        for one, found in zip(group.trajectories, recomputed, strict=True)
    ]


def _check(group: CheckedGroup, parts: Sequence[Figures], thresholds: Thresholds) -> None:
    figures = Figures.together(parts)
    if not figures.tokens:
        raise RemoteError(Code.SEGMENTS, "The group has no sampled token.")
    check_figures(figures, thresholds, "group")
    for part in parts:
        if part.tokens:
            check_figures(part, thresholds, "trajectory")


def _outcome(
    group: CheckedGroup, recomputed: Sequence[Recomputed], thresholds: Thresholds, *, seeded: bool
) -> RemoteError | None:
    try:
        _check(group, _figures(group, recomputed, seeded=seeded), thresholds)
    except RemoteError as error:
        return error
    return None
