"""Whether a rollout group is well-formed for its run: numbers only, no model. Spec: `specs/07`."""

from __future__ import annotations

import math

from .constants import MAX_TOKENS
from .errors import Code, RemoteError
from .rollouts import (
    LOGPROB_FORMATS,
    RolloutGroup,
    Trajectory,
    trained_tokens,
    unpack_floats,
    unpack_tokens,
)
from .runs import RunManifest

MAX_REWARD = 1e6
"""Rewards and advantages beyond it are a scorer gone wrong; gradients would lose all precision."""


def check_structure(group: RolloutGroup, manifest: RunManifest) -> None:
    """Raises RemoteError with the code of the first rule that the group breaks. [ROL-*]

    The number of trajectories is at least the run's group size: an environment with several agents
    returns several for one sample.
    """
    if len(group.trajectories) < manifest.group:  # [ROL-1]
        raise RemoteError(
            Code.GROUP_SIZE,
            f"The group has {len(group.trajectories)} trajectories; this run asks for {manifest.group}.",
            measured=len(group.trajectories),
            threshold=manifest.group,
        )
    entries = {entry.id: entry for entry in manifest.environments}
    if group.env not in entries:  # [ROL-12]
        raise RemoteError(Code.WRONG_ENVIRONMENT, f"This run has no environment {group.env[:64]!r}.")
    for trajectory in group.trajectories:
        _check_trajectory(trajectory, manifest, entries[group.env].advantages)


def _check_trajectory(trajectory: Trajectory, manifest: RunManifest, advantages: bool) -> None:
    _check_length(len(trajectory.tokens) // 4, trajectory, manifest)
    tokens = unpack_tokens(trajectory.tokens)
    if max(tokens) >= manifest.model.vocabulary:  # [ROL-2]
        raise RemoteError(
            Code.TOKEN_RANGE,
            f"Token {max(tokens)} is outside the vocabulary of {manifest.model.vocabulary}.",
            measured=max(tokens),
            threshold=manifest.model.vocabulary - 1,
        )
    _check_logprobs(trajectory, manifest.sampling.logprobs)
    _check_advantages(trajectory, advantages)
    _check_finish(tokens, trajectory, manifest)
    _check_parents(trajectory)
    if not abs(trajectory.reward) <= MAX_REWARD:  # [ROL-11]
        raise RemoteError(
            Code.OUT_OF_RANGE,
            "A reward is out of range.",
            measured=trajectory.reward,
            threshold=MAX_REWARD,
        )


def _check_length(count: int, trajectory: Trajectory, manifest: RunManifest) -> None:
    if not count or sum(segment.length for segment in trajectory.segments) != count:  # [ROL-3]
        raise RemoteError(Code.SEGMENTS, f"The segments do not add up to {count} tokens.")
    if trajectory.segments[0].trained:  # [ROL-3]
        raise RemoteError(
            Code.SEGMENTS, "The first token of a trajectory cannot be sampled: nothing precedes it."
        )
    limit = min(manifest.model.context, MAX_TOKENS)
    if count > limit:  # [ROL-4]
        raise RemoteError(
            Code.TOO_LONG,
            f"A trajectory has {count} tokens; the context holds {limit}.",
            measured=count,
            threshold=limit,
        )


def _check_logprobs(trajectory: Trajectory, form: str) -> None:
    trained, width = trained_tokens(trajectory), LOGPROB_FORMATS[form][1]
    if len(trajectory.logprobs) != width * trained:  # [ROL-5]
        raise RemoteError(
            Code.LOGPROBS,
            f"{trained} trained tokens need {width * trained} bytes of {form} log-probs, "
            f"not {len(trajectory.logprobs)}.",
            measured=len(trajectory.logprobs),
            threshold=width * trained,
        )
    logprobs = unpack_floats(trajectory.logprobs, form)
    if not all(math.isfinite(value) for value in logprobs):  # [ROL-6]
        raise RemoteError(Code.NOT_FINITE, "A log-prob is NaN or infinite.")
    if logprobs and max(logprobs) > 0:  # [ROL-6]
        raise RemoteError(Code.LOGPROBS, "A log-prob is positive.", measured=max(logprobs), threshold=0.0)


def _check_advantages(trajectory: Trajectory, allowed: bool) -> None:
    if trajectory.advantages is None and trajectory.advantage is None:
        return
    if not allowed:  # [ROL-7]
        raise RemoteError(Code.ADVANTAGES, "This run does not take advantages from this environment.")
    largest = 0.0
    for value in _claimed_advantages(trajectory):
        if not math.isfinite(value):
            raise RemoteError(Code.NOT_FINITE, "An advantage is NaN or infinite.")
        largest = max(largest, abs(value))
    if largest > MAX_REWARD:
        raise RemoteError(
            Code.OUT_OF_RANGE, "An advantage is out of range.", measured=largest, threshold=MAX_REWARD
        )


def _claimed_advantages(trajectory: Trajectory) -> list[float]:
    if trajectory.advantages is None:
        return [] if trajectory.advantage is None else [trajectory.advantage]
    if trajectory.advantage is not None:
        raise RemoteError(Code.ADVANTAGES, "A trajectory has one advantage, or one a token, never both.")
    if len(trajectory.advantages) != 4 * trained_tokens(trajectory):
        raise RemoteError(Code.ADVANTAGES, "There is one f32 advantage for each trained token.")
    return unpack_floats(trajectory.advantages)


def _check_finish(tokens: list[int], trajectory: Trajectory, manifest: RunManifest) -> None:
    """`stop` ends in a sampled stop token, `length` in exactly the limit, `cut` in neither and with a sampled
    token, and no stop token stands within a sampled segment that goes on. [ROL-8]"""
    stops, limit = set(manifest.sampling.stop), manifest.sampling.max_tokens
    trained, position = trained_tokens(trajectory), 0
    if trained > limit:
        raise RemoteError(
            Code.TOO_LONG,
            f"A trajectory has {trained} sampled tokens; the run's limit is {limit}.",
            measured=trained,
            threshold=limit,
        )
    for segment in trajectory.segments:
        end = position + segment.length
        if segment.trained and stops.intersection(tokens[position : end - 1]):
            raise RemoteError(Code.FINISH, "Sampled tokens go on behind a stop token.")
        position = end
    ended = trajectory.segments[-1].trained and tokens[-1] in stops
    full = trained == limit or len(tokens) == manifest.model.context
    fits = {"stop": ended, "length": full and not ended, "cut": trained > 0 and not full and not ended}
    if not fits[trajectory.finish]:
        raise RemoteError(
            Code.FINISH,
            f"The finish {trajectory.finish!r} does not fit: {trained} of {limit} tokens were sampled"
            f"{' and the last is a stop token' if ended else ''}.",
            measured=trained,
            threshold=limit,
        )


def _check_parents(trajectory: Trajectory) -> None:
    """A tree in order: every parent stands before its child, and the policy answers something. [ROL-9]"""
    parents = trajectory.parents
    if parents is None:
        return
    if len(parents) != len(trajectory.segments) or any(
        not -1 <= parent < index for index, parent in enumerate(parents)
    ):
        raise RemoteError(Code.SEGMENTS, "The attention parents are no tree over the segments.")
    if any(
        parent < 0 and segment.trained for parent, segment in zip(parents, trajectory.segments, strict=True)
    ):
        raise RemoteError(Code.SEGMENTS, "The first token of a path cannot be sampled: nothing precedes it.")
