"""Verification by replay: the same environment, with a policy that hands out the recorded tokens.

What the environment returns is compared with the record. Prompts, answers to turns, masks, ends and rewards
are all covered by this one comparison, and only the recomputed rewards are used. [VER-3]

`protocol.structure.check_structure` comes first. Then this, which needs no model.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import math
import threading
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import (
    RolloutGroup,
    Trajectory,
    path_tokens,
    unpack_floats,
    unpack_tokens,
)

from .environment import (
    Completion,
    Environment,
    Finish,
    GenerateRequest,
    PolicySettings,
    Task,
    keeps_time,
    renewed,
)
from .errors import BrokenEnvironment, CannotStart

T = TypeVar("T")

DEADLINE_S: Final = 60.0
"""Seconds a replay may await something: it has no engine to wait for, only its environment's scorer."""


class _Record:
    """The recorded tokens of one trajectory and how far they were handed out."""

    __slots__ = ("_parents", "_segments", "ends", "logprobs", "sampled", "starts", "tokens", "turn", "turns")

    def __init__(self, trajectory: Trajectory, form: str) -> None:
        self.tokens = unpack_tokens(trajectory.tokens)
        self.logprobs = unpack_floats(trajectory.logprobs, form)
        self._segments, self._parents = trajectory.segments, trajectory.parents
        self.turns: list[int] = []
        """The segments that were sampled, and where these start and end."""
        self.starts: list[int] = []
        self.ends: list[int] = []
        position = 0
        for number, segment in enumerate(trajectory.segments):
            end = position + segment.length
            if segment.trained:
                self.turns.append(number)
                self.starts.append(position)
                self.ends.append(end)
            position = end
        self.turn = 0
        self.sampled = 0

    def seen(self) -> list[int]:
        """The tokens that the policy saw before the next turn."""
        if self._parents is None:
            return self.tokens[: self.starts[self.turn]]
        parent = self._parents[self.turns[self.turn]]
        return path_tokens(self.tokens, self._segments, self._parents, parent)


class ReplayPolicy:
    """A policy that returns what was recorded, or raises where something else is asked for.

    `error` is the first RemoteError that it raised, for the case that the environment swallows it.
    """

    def __init__(self, settings: PolicySettings, trajectories: Sequence[Trajectory]) -> None:
        self.tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group = settings.group
        self.max_tokens = settings.max_tokens
        self.context = settings.context
        self.logprob_format = settings.logprob_format
        self.error: RemoteError | None = None
        self._stop = settings.stop
        self._records = [_Record(trajectory, settings.logprob_format) for trajectory in trajectories]

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Raises RemoteError: GROUP_SIZE, SEGMENTS, PROMPT_MISMATCH or FINISH."""
        try:
            return [self._next(request) for request in requests]
        except RemoteError as error:
            self.error = self.error or error
            raise

    def _next(self, request: GenerateRequest) -> Completion:
        index = request.trajectory
        if not 0 <= index < len(self._records):
            raise RemoteError(
                Code.GROUP_SIZE,
                f"The environment makes a trajectory {index}; the group has {len(self._records)}.",
                measured=len(self._records),
                threshold=index + 1,
            )
        record = self._records[index]
        if record.turn == len(record.starts):
            raise RemoteError(
                Code.SEGMENTS,
                f"Trajectory {index} ends after {record.turn} turns where the environment goes on.",
                measured=record.turn,
                threshold=record.turn + 1,
            )
        start, end = record.starts[record.turn], record.ends[record.turn]
        _check_equal(index, record.seen(), request.tokens)
        finish = self._finish(index, record.tokens[start:end], request.max_tokens)
        sampled = record.sampled
        record.sampled += end - start
        record.turn += 1
        return Completion(record.tokens[start:end], record.logprobs[sampled : record.sampled], finish)

    def _finish(self, index: int, tokens: list[int], limit: int) -> Finish:
        """How a turn ended; it may only end where the engine would have ended it."""
        if len(tokens) > limit:
            raise RemoteError(
                Code.FINISH,
                f"A turn of trajectory {index} has {len(tokens)} tokens; the environment asks for {limit}.",
                measured=len(tokens),
                threshold=limit,
            )
        if tokens[-1] in self._stop:
            return "stop"
        if len(tokens) < limit:
            raise RemoteError(
                Code.FINISH,
                f"A turn of trajectory {index} stops after {len(tokens)} of {limit} tokens without a stop "
                "token.",
                measured=len(tokens),
                threshold=limit,
            )
        return "length"


def replay(
    environment: Environment,
    task: Task,
    group: RolloutGroup,
    settings: PolicySettings,
    threshold: float,
) -> list[Trajectory]:
    """A group's trajectories, made again; their rewards and components are the only ones to be used.

    `threshold`: largest absolute difference of a claimed reward or advantage (`Thresholds.reward`).
    Raises RemoteError: PROMPT_MISMATCH, SEGMENTS, FINISH, GROUP_SIZE, ADVANTAGES, REWARD_MISMATCH, or
    ENVIRONMENT_FAILED where the environment raises; BrokenEnvironment or CannotStart where this machine
    cannot run it, whatever the group holds. Where an environment executes what policies wrote, a refusal is
    looked at again in a new process: texts of other groups may have changed the old one. [EVM-12] Not for
    use inside an event loop.
    """
    try:
        return _replayed(environment, task, group, settings, threshold)
    except RemoteError:
        if not renewed(environment):
            raise
        return _replayed(environment, task, group, settings, threshold)


def _replayed(
    environment: Environment,
    task: Task,
    group: RolloutGroup,
    settings: PolicySettings,
    threshold: float,
) -> list[Trajectory]:
    returned = _collected(environment, task, group, settings)
    recorded = group.trajectories
    if len(returned) != len(recorded):
        raise RemoteError(
            Code.GROUP_SIZE,
            f"The environment returns {len(returned)} trajectories; the group has {len(recorded)}.",
            measured=len(recorded),
            threshold=len(returned),
        )
    for index, (ours, theirs) in enumerate(zip(returned, recorded, strict=True)):
        _compare(index, ours, theirs)
        _compare_numbers(index, ours, theirs, threshold)
    return returned


def _collected(
    environment: Environment, task: Task, group: RolloutGroup, settings: PolicySettings
) -> list[Trajectory]:
    policy = ReplayPolicy(settings, group.trajectories)
    try:
        deadline = None if keeps_time(environment) else DEADLINE_S
        returned = _finished(environment.collect_trajectories(task, policy), deadline)
    except (BrokenEnvironment, CannotStart):  # this machine's fault, and so no verdict on the group
        raise
    except Exception as error:  # somebody else's code, on text that somebody else wrote
        raise policy.error or RemoteError(
            Code.ENVIRONMENT_FAILED,
            f"The environment {environment.info.id} failed: {type(error).__name__}: {error}",
        ) from error
    if policy.error is not None:
        raise policy.error
    return returned


def _finished(work: Awaitable[T], deadline: float | None) -> T:
    """Waits for an environment; whatever it left running is cancelled."""
    loop = _loop(threading.get_ident())

    async def bounded() -> T:
        async with asyncio.timeout(deadline):
            return await work

    try:
        return loop.run_until_complete(bounded())
    finally:
        abandoned = asyncio.all_tasks(loop)
        for each in abandoned:
            each.cancel()
        if abandoned:
            loop.run_until_complete(asyncio.gather(*abandoned, return_exceptions=True))


@functools.cache
def _loop(thread: int) -> asyncio.AbstractEventLoop:
    """The event loop of a thread: kept, since making one costs more than replaying a small group."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def _check_equal(index: int, recorded: list[int], asked: list[int]) -> None:
    if recorded == asked:
        return
    pairs = zip(recorded, asked, strict=False)
    position = next(
        (place for place, (theirs, ours) in enumerate(pairs) if theirs != ours),
        min(len(recorded), len(asked)),
    )
    raise RemoteError(
        Code.PROMPT_MISMATCH,
        f"Trajectory {index} differs from what the environment asks at token {position}.",
        measured=position,
        threshold=len(asked),
    )


def _compare(index: int, ours: Trajectory, theirs: Trajectory) -> None:
    """Everything but numbers: equal, or the code of the first part that is not."""
    if ours.tokens != theirs.tokens:
        _check_equal(index, unpack_tokens(theirs.tokens), unpack_tokens(ours.tokens))
    if ours.segments != theirs.segments or ours.parents != theirs.parents:
        raise RemoteError(Code.SEGMENTS, f"Trajectory {index} has other segments than its environment makes.")
    if ours.agent != theirs.agent:
        raise RemoteError(
            Code.SEGMENTS,
            f"Trajectory {index} is of agent {theirs.agent[:64]!r}, not {ours.agent[:64]!r}.",
        )
    if ours.finish != theirs.finish:
        raise RemoteError(
            Code.FINISH, f"Trajectory {index} ends with {ours.finish!r}, not {theirs.finish!r}."
        )


def _compare_numbers(index: int, ours: Trajectory, theirs: Trajectory, threshold: float) -> None:
    difference = abs(ours.reward - theirs.reward)
    if not difference <= threshold:
        raise RemoteError(
            Code.REWARD_MISMATCH,
            f"The reward of trajectory {index} is {ours.reward:g}, not {theirs.reward:g}.",
            measured=difference,
            threshold=threshold,
        )
    kind, our_values = _advantages(ours)
    other, their_values = _advantages(theirs)
    finite = all(map(math.isfinite, our_values))  # `max` would pass over what is no number
    if kind != other or len(our_values) != len(their_values) or not finite:
        raise RemoteError(Code.ADVANTAGES, f"Trajectory {index} and its environment differ about advantages.")
    pairs = zip(our_values, their_values, strict=True)
    difference = max((abs(our - their) for our, their in pairs), default=0.0)
    if not difference <= threshold:
        raise RemoteError(
            Code.ADVANTAGES,
            f"An advantage of trajectory {index} is off by {difference:g}.",
            measured=difference,
            threshold=threshold,
        )


def _advantages(trajectory: Trajectory) -> tuple[str, list[float]]:
    """What a trajectory says instead of its group's advantage: nothing, one number for all of its trained
    tokens, or one for each."""
    if trajectory.advantages is not None:
        return "each", unpack_floats(trajectory.advantages)
    return ("none", []) if trajectory.advantage is None else ("all", [trajectory.advantage])
