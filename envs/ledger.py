"""What the policy handed out for one group, and whether what comes back is that. Spec: [EVM-7], [EVM-8].

    ledger = Ledger(policy, agents)
    completions = await ledger.generate(requests)      only what a policy would be asked for
    ledger.check(trajectories)                         exactly these tokens and log-probs, in their places

An environment in another process may say anything. What a request or a trajectory may be is known here, so
that it can neither make the node generate more than the group's share nor have tokens published that the
policy did not sample. Each refusal is an EnvironmentFailed that names the cause.

What was sampled is remembered by request: `again` has a group begin anew, and whoever asks for the same gets
the same, without the policy. The policy is a pure function of the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from nous_node.protocol.constants import MAX_TRAJECTORIES
from nous_node.protocol.rollouts import (
    Trajectory,
    pack_floats,
    path_tokens,
    trained_tokens,
    unpack_floats,
    unpack_tokens,
)
from nous_node.protocol.runs import AGENTS
from nous_node.protocol.structure import MAX_REWARD

from .environment import Completion, Finish, GenerateRequest, Policy
from .errors import EnvironmentFailed

TOKEN_IDS: Final = 1 << 32
"""Ids are u32 on the wire."""

_Key = tuple[int, int, int, bytes]


@dataclass(frozen=True, slots=True)
class _Turn:
    """One answer of the policy."""

    seen: bytes
    """Digest of the tokens before it, as the policy saw them."""
    tokens: list[int]


@dataclass(slots=True)
class _Log:
    """One trajectory, as far as the policy knows it."""

    turns: list[_Turn] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = "length"
    open: bool = False
    """Whether it waits for the policy."""


class Ledger:
    """Of one group; `agents`: trajectories of one sample."""

    def __init__(self, policy: Policy, agents: int) -> None:
        self._policy = policy
        self._most = min(MAX_TRAJECTORIES, policy.group * max(agents, AGENTS))
        self._logs: dict[int, _Log] = {}
        self._memory: dict[_Key, tuple[asyncio.Task[list[Completion]], int]] = {}

    def again(self) -> None:
        """The group begins anew; what was sampled for it is remembered."""
        self._logs = {}

    def close(self) -> None:
        """Nobody waits for the policy any more."""
        for task, _ in self._memory.values():
            task.cancel()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Completions from memory or from the policy. Raises what `admit` raises, and whatever the policy
        does."""
        logs = self.admit(requests)
        try:
            completions = await self._found(requests)
        finally:
            for log in logs:
                log.open = False
        for log, request, completion in zip(logs, requests, completions, strict=True):
            log.turns.append(_Turn(_digest(request.tokens), completion.tokens))
            log.logprobs += completion.logprobs
            log.finish = completion.finish
        return completions

    def admit(self, requests: Sequence[GenerateRequest]) -> list[_Log]:
        """The trajectories that these are for, which wait from now on. Raises EnvironmentFailed where
        something is asked for that no trajectory may have."""
        return [self._admitted(request) for request in requests]

    async def _found(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        keys = [_key(request) for request in requests]
        missing = [place for place, key in enumerate(keys) if key not in self._memory]
        if missing:
            asked = asyncio.ensure_future(self._policy.generate([requests[place] for place in missing]))
            for number, place in enumerate(missing):
                self._memory[keys[place]] = asked, number
        found = [self._memory[key] for key in keys]
        # What is asked for goes on where this group begins anew, and will ask for it again.
        return [(await asyncio.shield(task))[number] for task, number in found]

    def _admitted(self, request: GenerateRequest) -> _Log:
        tokens, index, start, limit = request
        if not 0 <= index < self._most:
            raise _foul(f"asks for tokens of a trajectory {index}; a group has at most {self._most}")
        log = self._logs.setdefault(index, _Log())
        if log.open:
            raise _foul(f"asks for tokens of trajectory {index} while it waits for some")
        if start != len(log.logprobs):
            raise _foul(
                f"says that trajectory {index} has {start} sampled tokens; it has {len(log.logprobs)}"
            )
        if not tokens or not 0 <= min(tokens) <= max(tokens) < TOKEN_IDS:
            raise _foul(f"asks for tokens of trajectory {index} behind something that is no token id")
        room = min(self._policy.max_tokens - start, self._policy.context - len(tokens))
        if not 1 <= limit <= room:
            raise _foul(f"asks for {limit} tokens of trajectory {index}, which has room for {max(0, room)}")
        log.open = True
        return log

    # --- what comes back -------------------------------------------------------------------------

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises EnvironmentFailed for the first trajectory that is not what was handed out."""
        if not 1 <= len(trajectories) <= self._most:
            raise _foul(f"returned {len(trajectories)} trajectories; a group has 1 to {self._most}")
        lost = [index for index, log in self._logs.items() if log.turns and index >= len(trajectories)]
        if lost:
            raise _foul(f"asked for tokens of trajectory {lost[0]} and did not return it")
        for index, trajectory in enumerate(trajectories):
            log = self._logs.get(index, _Log())
            _check_parents(index, trajectory)
            self._check_tokens(index, trajectory, log)
            _check_end(index, trajectory, log)
            _check_numbers(index, trajectory)

    def _check_tokens(self, index: int, trajectory: Trajectory, log: _Log) -> None:
        count, rest = divmod(len(trajectory.tokens), 4)
        if rest or sum(segment.length for segment in trajectory.segments) != count:
            raise _foul(f"returned trajectory {index} with segments that do not add up to its tokens")
        if count > self._policy.context:
            raise _foul(
                f"returned trajectory {index} with {count} tokens; the context holds {self._policy.context}"
            )
        sampled = sum(segment.trained for segment in trajectory.segments)
        if sampled != len(log.turns) or _turns(trajectory) != log.turns:  # the first is cheap, the second not
            raise _foul(f"returned trajectory {index} with tokens that the policy did not sample there")
        if trajectory.logprobs != pack_floats(log.logprobs, self._policy.logprob_format):
            raise _foul(f"returned trajectory {index} with log-probs that are not the policy's")


def _check_parents(index: int, trajectory: Trajectory) -> None:
    parents = trajectory.parents
    if parents is None:
        return
    orderly = all(-1 <= parent < place for place, parent in enumerate(parents))
    if len(parents) != len(trajectory.segments) or not orderly:
        raise _foul(f"returned trajectory {index} with parents that are not its segments'")


def _check_end(index: int, trajectory: Trajectory, log: _Log) -> None:
    stopped = trajectory.segments[-1].trained and log.finish == "stop"
    if (trajectory.finish == "stop") != stopped:
        raise _foul(
            f"returned trajectory {index} with finish {trajectory.finish!r}, which is not how it ended"
        )


def _check_numbers(index: int, trajectory: Trajectory) -> None:
    if not abs(trajectory.reward) <= MAX_REWARD:  # also NaN
        raise _foul(f"returned the reward {trajectory.reward} for trajectory {index}")
    if not all(math.isfinite(value) for value in trajectory.components.values()):
        raise _foul(f"returned a component of the reward of trajectory {index} that is no number")
    advantages = [] if trajectory.advantage is None else [trajectory.advantage]
    if trajectory.advantages is not None:
        trained = trained_tokens(trajectory)
        if len(trajectory.advantages) != 4 * trained or advantages:
            raise _foul(f"returned other advantages than one for each sampled token of trajectory {index}")
        advantages = unpack_floats(trajectory.advantages)
    if not all(abs(value) <= MAX_REWARD for value in advantages):
        raise _foul(f"returned an advantage of trajectory {index} that is out of range")


def _turns(trajectory: Trajectory) -> list[_Turn]:
    """Its trained segments, each with what stands before it: all of the trajectory, or its path in a tree."""
    found: list[_Turn] = []
    tokens, segments, parents = unpack_tokens(trajectory.tokens), trajectory.segments, trajectory.parents
    seen, position = hashlib.sha256(), 0
    for place, segment in enumerate(segments):
        piece = tokens[position : position + segment.length]
        if segment.trained:
            if parents is None:
                before = seen.digest()
            else:
                before = _digest(path_tokens(tokens, segments, parents, parents[place]))
            found.append(_Turn(before, piece))
        seen.update(array("L", piece).tobytes())
        position += segment.length
    return found


def _key(request: GenerateRequest) -> _Key:
    tokens, index, start, limit = request
    return index, start, limit, _digest(tokens)


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(array("L", tokens).tobytes()).digest()


def _foul(what: str) -> EnvironmentFailed:
    return EnvironmentFailed(f"it {what}. Mend the environment.")
