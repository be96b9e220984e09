"""A session: the append-only token log of one trajectory, with masks.

    session = Session(policy, trajectory)
    session.append(prompt, Role.RAW)           not trained: the environment wrote it
    completion = await session.sample()        trained: the policy wrote it
    trajectory = session.finish(reward)

One `append` is one segment and one completion is one segment. Text is never tokenised twice: what the
policy sampled stays as it was sampled, and an environment that rewrites a history starts a new session.

A trajectory may be a tree: several answers to one prompt, each with what comes of it.

    root = session.last                        the segment added last
    await session.sample()
    session.branch(root)                       what comes next goes on from there
    await session.sample()                     sees the prompt, and nothing of the first answer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nous_node.protocol.errors import LocalError
from nous_node.protocol.rollouts import (
    Ending,
    Role,
    Segment,
    Trajectory,
    pack_floats,
    pack_tokens,
    path_tokens,
)
from nous_node.protocol.structure import MAX_REWARD

from .environment import Completion, Finish, GenerateRequest, Message, Policy, Tool
from .errors import EnvironmentFailed


class Session:
    """The tokens of trajectory number `trajectory` of a group, in the order in which they came."""

    __slots__ = (
        "_asked",
        "_at",
        "_branched",
        "_context",
        "_finish",
        "_limit",
        "_logprob_format",
        "_logprobs",
        "_parents",
        "_policy",
        "_segments",
        "_tokens",
        "agent",
        "trajectory",
    )

    def __init__(self, policy: Policy, trajectory: int, agent: str = "") -> None:
        self.trajectory = trajectory
        self.agent = agent
        self._policy = policy
        self._limit = policy.max_tokens
        self._context = policy.context
        self._logprob_format = policy.logprob_format
        self._tokens: list[int] = []
        self._segments: list[Segment] = []
        self._parents: list[int] = []
        self._at = -1
        self._branched = False
        self._logprobs: list[float] = []
        self._asked = 0
        self._finish: Finish = "length"

    @property
    def tokens(self) -> list[int]:
        """A copy of all tokens so far."""
        return self._tokens.copy()

    @property
    def path(self) -> list[int]:
        """A copy of the tokens that the policy sees: all of them, where nothing branched."""
        if not self._branched and self._at == len(self._segments) - 1:
            return self._tokens.copy()
        return path_tokens(self._tokens, self._segments, self._parents, self._at)

    @property
    def last(self) -> int:
        """The segment that the next one goes on from: the one added last, unless `branch` named another; -1
        at first."""
        return self._at

    @property
    def sampled(self) -> int:
        """Sampled tokens so far."""
        return len(self._logprobs)

    @property
    def room(self) -> int:
        """Tokens that can still be sampled; a session without room is over."""
        return max(0, min(self._limit - len(self._logprobs), self._context - len(self._tokens)))

    def branch(self, segment: int) -> None:
        """What is added next goes on from `segment` (`last`, when it was that) and sees it and all that it
        goes on from, and nothing else; -1: it begins anew. Raises EnvironmentFailed for a segment that is
        not there."""
        self._check_idle()
        if not -1 <= segment < len(self._segments):
            raise EnvironmentFailed(
                f"Trajectory {self.trajectory} has no segment {segment} to go on from; mend the environment."
            )
        self._at = segment

    def append(self, tokens: Sequence[int], role: Role) -> None:
        """Adds a segment that the policy did not write.

        What does not fit the context is cut off, and the session is over: the trajectory then ends with
        finish `length`, on the verifier exactly as here.
        """
        self._check_idle()
        fitting = tokens[: self._context - len(self._tokens)]
        if fitting:
            self._tokens.extend(fitting)
            self._add(Segment(len(fitting), role, False))

    def converse(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Adds messages in the model's own conversation format, up to where the policy answers: the whole
        conversation at first, what is new later. Raises EnvironmentFailed where the run's model has none."""
        chat = self._policy.chat
        if chat is None:
            raise EnvironmentFailed(
                "The run's model has no conversation format that can be extended token by token: give the "
                "environment a plain prompt, or take a chat model."
            )
        path = self.path
        pieces = chat.extend(path, messages, tools) if path else chat.prompt(messages, tools)
        for role, tokens in pieces:
            self.append(tokens, role)

    def request(self, max_tokens: int | None = None) -> GenerateRequest:
        """Asks for the next turn: at most `max_tokens` tokens, and never more than there is room for.

        Raises EnvironmentFailed where there is no room: look at `room` before another turn.
        """
        self._check_idle()
        room, path = self.room, self.path
        if not path or room == 0:
            what = "no room for another turn" if path else "no prompt yet"
            raise EnvironmentFailed(f"Trajectory {self.trajectory} has {what}; mend the environment.")
        self._asked = room if max_tokens is None else min(room, max(1, max_tokens))
        return GenerateRequest(path, self.trajectory, len(self._logprobs), self._asked)

    def take(self, completion: Completion) -> None:
        """Adds what the policy sampled for the open request. Raises LocalError where it does not fit it."""
        tokens, logprobs, finish = completion
        count = len(tokens)
        if not 1 <= count <= self._asked or len(logprobs) != count:
            raise LocalError(
                f"The engine returned {count} tokens and {len(logprobs)} log-probs where 1 to {self._asked} "
                "of each were asked for; this is an error in the engine."
            )
        if finish == "length" and count != self._asked:
            raise LocalError(
                f"The engine stopped after {count} of {self._asked} tokens without a stop token."
            )
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        self._add(Segment(count, Role.ASSISTANT, True))
        self._finish = finish
        self._asked = 0

    async def sample(self, max_tokens: int | None = None) -> Completion:
        """One turn of this session alone."""
        (completion,) = await sample_all(self._policy, [self], max_tokens)
        return completion

    def finish(
        self,
        reward: float,
        components: Mapping[str, float] | None = None,
        advantages: Sequence[float] | None = None,
        advantage: float | None = None,
    ) -> Trajectory:
        """The trajectory, as it goes into the rollout group.

        `advantages` has one number a sampled token, `advantage` is one for all of them; at most one of both
        is given, and only where the run allows it. Raises EnvironmentFailed where the trajectory could not
        be sent: a number out of range, or nothing that the policy sampled.
        """
        self._check_idle()
        _check_reward(self.trajectory, reward)
        _check_advantages(self.trajectory, advantages, advantage, len(self._logprobs))
        return Trajectory(
            tokens=pack_tokens(self._tokens),
            segments=self._segments.copy(),
            logprobs=pack_floats(self._logprobs, self._logprob_format),
            reward=float(reward),
            finish=self._ending(),
            components=dict(components) if components else {},
            agent=self.agent,
            advantages=None if advantages is None else pack_floats(advantages),
            advantage=None if advantage is None else float(advantage),
            parents=self._parents.copy() if self._branched else None,
        )

    def _add(self, segment: Segment) -> None:
        self._branched = self._branched or self._at != len(self._segments) - 1
        self._parents.append(self._at)
        self._at = len(self._segments)
        self._segments.append(segment)

    def _ending(self) -> Ending:
        """[ROL-8]"""
        if not self._segments:
            raise EnvironmentFailed(f"Trajectory {self.trajectory} has no tokens; mend the environment.")
        if self._segments[-1].trained and self._finish == "stop":
            return "stop"
        if self.room == 0:
            return "length"
        if not self._logprobs:
            raise EnvironmentFailed(
                f"Trajectory {self.trajectory} has no sampled token: ask the policy for one before the end, "
                "or leave the trajectory out. Mend the environment."
            )
        return "cut"

    def _check_idle(self) -> None:
        if self._asked:
            raise EnvironmentFailed(
                f"Trajectory {self.trajectory} waits for the policy; mend the environment, which goes on "
                "without its answer."
            )


async def sample_all(
    policy: Policy, sessions: Iterable[Session], max_tokens: int | None = None
) -> list[Completion]:
    """One turn of many sessions in one call of the policy: batches are where throughput comes from."""
    waiting = list(sessions)
    if not waiting:
        return []
    completions = await policy.generate([session.request(max_tokens) for session in waiting])
    for session, completion in zip(waiting, completions, strict=True):
        session.take(completion)
    return completions


def _check_reward(trajectory: int, reward: float) -> None:
    if not abs(reward) <= MAX_REWARD:  # also NaN
        raise EnvironmentFailed(f"The reward {reward} of trajectory {trajectory} is out of range.")


def _check_advantages(
    trajectory: int, advantages: Sequence[float] | None, advantage: float | None, count: int
) -> None:
    if advantages is not None and advantage is not None:
        raise EnvironmentFailed(
            f"Trajectory {trajectory} has one advantage and one a token; mend the environment, which gives "
            "both."
        )
    if advantage is not None and not abs(advantage) <= MAX_REWARD:
        raise EnvironmentFailed(f"The advantage {advantage} of trajectory {trajectory} is out of range.")
    if advantages is None:
        return
    if len(advantages) != count or not all(abs(value) <= MAX_REWARD for value in advantages):
        raise EnvironmentFailed(
            f"Trajectory {trajectory} needs one finite advantage for each of its {count} sampled tokens."
        )
