"""Rollout groups of ten volunteers made in one batch, honest ones and forged ones.

A forged group is made from the honest one of the same task, and counts as forged only where it is another
group: a policy that is sure of its answer gives greedy sampling the same tokens as the assigned randomness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

from nous_node.envs.batcher import Batcher, EngineRequest, Job
from nous_node.envs.environment import Completion, PolicySettings, Task
from nous_node.envs.registry import make_entry
from nous_node.node.following import Head
from nous_node.node.runfolder import RunFolder
from nous_node.node.versions import folder_tensors
from nous_node.protocol.rollouts import Engine, RolloutGroup, pack_floats, trained_tokens
from nous_node.protocol.tasks import Assignment, assign, task_seed
from nous_node.trainer.generate import Request, generate
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recorded, prefill

SAME = 1e-5
"""Log-probs that differ by less are those of an honest engine."""

TRIES = 4
"""Samples from which best-of-N takes the best."""

GREEDY = 1e-4


class Style(StrEnum):
    """What a volunteer does about a task."""

    HONEST = "honest"
    FALSE_REWARD = "false reward"
    RIGHT_ANSWER = "edited tokens, log-probs recomputed"
    BEST_OF_N = "best of 4 keys"
    GREEDY = "greedy"
    COOLER = "temperature 0.9"
    PREVIOUS = "previous checkpoint"
    WITHHELD = "unlucky tasks withheld"
    COPIED = "copy of another's group"
    OTHER_PROMPT = "prompt of another task"
    SHORTENED = "forged end"
    FABRICATED = "fabricated log-probs"


ATTACKS = [style for style in Style if style is not Style.HONEST]
_SAID = Engine("nous-torch", "1", "float32", "cpu")


@dataclass(frozen=True, slots=True)
class Order:
    """One task of one volunteer."""

    key: bytes
    counter: int
    style: Style


@dataclass(frozen=True, slots=True)
class Made:
    """The group of an order."""

    order: Order
    body: bytes
    forged: bool
    """Whether it is another group than the honest one."""
    reward: float
    """Mean, as claimed."""


@dataclass
class _Work:
    """An order on its way."""

    order: Order
    task: Task
    assignment: Assignment
    other_task: bool
    completions: dict[int, Completion] = field(default_factory=dict)
    """Honest ones, by sample."""


class Workshop:
    """One engine for all volunteers."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._manifest = folder, folder.manifest
        self._policy = Policy.load(folder.checkpoint(0), "float32", threads=1)
        self._before = Policy.load(folder.checkpoint(0), "float32")
        self._files: object = None
        self._environment = make_entry(self._manifest.environments[0])
        self._name = self._manifest.environments[0].id
        self._settings = PolicySettings.of(self._manifest, self._policy.tokenizer)
        self._head: Head | None = None

    def load(self, head: Head, place: Path) -> None:
        """Takes up a version; the weights before it stay at hand."""
        self._head = head
        if head.manifest.files != self._files:
            self._files = head.manifest.files
            self._before.load_tensors(self._policy.tensors())
            self._policy.load_tensors(folder_tensors(place))

    def make(self, orders: Sequence[Order]) -> list[Made]:
        works = [self._work(order) for order in orders]
        by_key = {
            work.assignment.sampler_key(sample): work
            for work in works
            for sample in range(self._manifest.group)
        }
        with Batcher(self._settings, lambda requests: self._engine(requests, by_key)) as batcher:
            outcomes = batcher.run([Job(self._environment, work.task, work.assignment) for work in works])
        groups = []
        for work, outcome in zip(works, outcomes, strict=True):
            assert isinstance(outcome, list), outcome
            assert self._head is not None
            groups.append(RolloutGroup(self._head.hash, work.order.counter, self._name, _SAID, outcome))
        return [self._made(work, group, groups) for work, group in zip(works, groups, strict=True)]

    def _work(self, order: Order) -> _Work:
        head = self._head
        assert head is not None
        level = head.manifest.levels.get(self._name, 0)

        def seed(counter: int) -> bytes:
            return task_seed(self._folder.run, head.hash, head.manifest.beacon, order.key, counter)

        assignment = assign(seed(order.counter), self._manifest.weights, self._manifest.group)
        task = self._environment.task(assignment.task_seed, level)
        if order.style is not Style.OTHER_PROMPT:
            return _Work(order, task, assignment, other_task=False)
        other = assign(seed(order.counter + 1000), self._manifest.weights, 1)
        wrong = self._environment.task(other.task_seed, level)
        return _Work(order, wrong, assignment, other_task=wrong.payload != task.payload)

    # --- the engine ------------------------------------------------------------------------------

    def _engine(self, requests: Sequence[EngineRequest], by_key: dict[bytes, _Work]) -> list[Completion]:
        """What each order's style answers."""
        made = self._sample(self._policy, requests, 1.0)
        for request, one in zip(requests, made, strict=True):
            by_key[request.key].completions[request.request.trajectory] = one
        other: dict[Style, Callable[[list[EngineRequest], list[Completion]], list[Completion]]] = {
            Style.GREEDY: lambda asked, _: self._scored(asked, self._sample(self._policy, asked, GREEDY)),
            Style.COOLER: lambda asked, _: self._scored(asked, self._sample(self._policy, asked, 0.9)),
            Style.PREVIOUS: lambda asked, _: self._sample(self._before, asked, 1.0),
            Style.BEST_OF_N: self._best,
            Style.RIGHT_ANSWER: self._right,
            Style.SHORTENED: self._shortened,
        }
        for style, answer in other.items():
            places = [n for n, one in enumerate(requests) if by_key[one.key].order.style is style]
            if places:
                answers = answer([requests[n] for n in places], [made[n] for n in places])
                for place, one in zip(places, answers, strict=True):
                    made[place] = one
        return made

    def _sample(
        self, policy: Policy, requests: Sequence[EngineRequest], temperature: float
    ) -> list[Completion]:
        wanted = [Request(r.request.tokens, r.key, r.request.start, r.request.max_tokens) for r in requests]
        made = generate(policy, wanted, temperature, self._manifest.sampling.stop)
        return [Completion(one.tokens, one.logprobs.tolist(), one.finish) for one in made]

    def _scored(self, requests: Sequence[EngineRequest], made: list[Completion]) -> list[Completion]:
        """The same tokens with the log-probs that the checkpoint gives them."""
        recorded = []
        for request, one in zip(requests, made, strict=True):
            tokens = np.array([*request.request.tokens, *one.tokens], np.int64)
            trained = np.arange(len(tokens)) >= len(request.request.tokens)
            recorded.append(Recorded(tokens, trained, np.zeros(len(one.tokens))))
        found = prefill(self._policy, recorded, 1.0)
        return [one._replace(logprobs=true.logprobs.tolist()) for one, true in zip(made, found, strict=True)]

    def _best(self, requests: list[EngineRequest], made: list[Completion]) -> list[Completion]:
        """Of samples with other keys, those with the best reward."""
        best = made
        for number in range(1, TRIES):
            renewed = [
                one._replace(key=hashlib.sha256(one.key + number.to_bytes(1)).digest()) for one in requests
            ]
            again = self._sample(self._policy, renewed, 1.0)
            best = [
                max(old, new, key=lambda one, request=request: self._reward(request, one))
                for request, old, new in zip(requests, best, again, strict=True)
            ]
        return best

    def _right(self, requests: list[EngineRequest], made: list[Completion]) -> list[Completion]:
        """The right answer in every other sample: a group of them alone would teach nothing."""
        answers = [
            Completion([*self._tokens(self._solution(request)), self._stop], [], "stop")
            if request.request.trajectory % 2
            else one
            for request, one in zip(requests, made, strict=True)
        ]
        return self._scored(requests, answers)

    def _shortened(self, requests: list[EngineRequest], made: list[Completion]) -> list[Completion]:
        """The first half of each answer, ended where the policy did not end it."""
        cut = [Completion([*one.tokens[: len(one.tokens) // 2], self._stop], [], "stop") for one in made]
        return self._scored(requests, cut)

    @property
    def _stop(self) -> int:
        return self._manifest.sampling.stop[0]

    def _tokens(self, text: str) -> list[int]:
        return self._policy.tokenizer.encode(text)

    def _solution(self, request: EngineRequest) -> str:
        prompt = self._policy.tokenizer.decode(request.request.tokens)
        return "".join(sorted(letter for letter in prompt if letter.isdigit()))

    def _reward(self, request: EngineRequest, one: Completion) -> float:
        if one.finish != "stop":
            return 0.0
        solution, answer = self._solution(request), self._policy.tokenizer.decode(one.tokens[:-1])
        right = sum(a == b for a, b in zip(answer, solution, strict=False))
        return right / max(len(solution), len(answer))

    # --- groups ----------------------------------------------------------------------------------

    def _made(self, work: _Work, group: RolloutGroup, groups: Sequence[RolloutGroup]) -> Made:
        match work.order.style:
            case Style.FALSE_REWARD:
                forged = _with_rewards(group)
                differs = forged != group
            case Style.FABRICATED:
                forged, differs = _with_logprobs(group, -0.1), True
            case Style.COPIED:
                other = groups[0] if groups[0] is not group else groups[-1]
                forged = msgspec.structs.replace(other, counter=group.counter)
                differs = other is not group
            case Style.OTHER_PROMPT:
                forged, differs = group, work.other_task
            case _:
                forged, differs = group, self._differs(work, group)
        rewards = [one.reward for one in forged.trajectories]
        return Made(work.order, forged.to_bytes(), differs, float(np.mean(rewards)))

    def _differs(self, work: _Work, group: RolloutGroup) -> bool:
        """Whether the tokens, or their log-probs, are not those that the assigned randomness draws."""
        for sample, one in enumerate(group.trajectories):
            honest = work.completions[sample]
            tokens = np.frombuffer(_unplaned(one.tokens), "<u4")[-trained_tokens(one) :]
            logprobs = np.frombuffer(_unplaned(one.logprobs), "<f4")
            if honest.tokens != tokens.tolist() or np.abs(logprobs - honest.logprobs).max() > SAME:
                return True
        return False


def _unplaned(data: bytes) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(4, -1).T.tobytes()


def _with_rewards(group: RolloutGroup) -> RolloutGroup:
    """All answers are called right, or where they are, half of them wrong."""
    rewards = [one.reward for one in group.trajectories]
    if min(rewards) < 1:
        claimed = [1.0] * len(rewards)
        claimed[0] = 0.0  # a group of equal rewards would teach nothing
    else:
        claimed = [float(number % 2) for number in range(len(rewards))]
    return msgspec.structs.replace(
        group,
        trajectories=[
            msgspec.structs.replace(one, reward=reward)
            for one, reward in zip(group.trajectories, claimed, strict=True)
        ],
    )


def _with_logprobs(group: RolloutGroup, value: float) -> RolloutGroup:
    made = [
        msgspec.structs.replace(one, logprobs=pack_floats([value] * trained_tokens(one)))
        for one in group.trajectories
    ]
    return msgspec.structs.replace(group, trajectories=made)
