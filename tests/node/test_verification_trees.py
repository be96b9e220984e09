"""Groups whose trajectories are trees: made, checked, recomputed and learnt from as any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from nous_node.envs.batcher import Batcher, EngineRequest, Job
from nous_node.envs.environment import Completion, PolicySettings, Task
from nous_node.envs.environment import Policy as Player
from nous_node.envs.session import Session, sample_all
from nous_node.envs.sort_digits import SortDigits
from nous_node.node.learner_messages import Candidate
from nous_node.node.runfolder import RunFolder
from nous_node.node.verification import CheckedGroup, Verifier
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import (
    Engine,
    Role,
    RolloutGroup,
    Segment,
    Trajectory,
    pack_floats,
    pack_tokens,
    unpack_floats,
    unpack_tokens,
)
from nous_node.protocol.tasks import assign, task_seed
from nous_node.trainer.generate import Request, generate, uniforms
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recorded, prefill

CHECKPOINT, BEACON, KEY = bytes(32), b"b" * 32, b"v" * 32


class Branching:
    """Three answers to one prompt; a hint behind the first, and another answer behind that."""

    info = SortDigits.info
    levels = 0

    def task(self, seed: bytes, level: int) -> Task:
        return Task(seed, level, "".join(str(byte % 10) for byte in seed[:5]))

    async def collect_trajectories(self, task: Task, policy: Player) -> list[Trajectory]:
        sessions = [Session(policy, index) for index in range(policy.group)]
        encode = policy.tokenizer.encode
        for session in sessions:
            session.append(encode(f"sort {task.payload}="), Role.USER)
        for _ in range(3):
            await sample_all(policy, sessions, 3)
            for session in sessions:
                session.branch(0)
        for session in sessions:
            session.branch(1)
            session.append(encode(" again="), Role.TOOL)
        await sample_all(policy, sessions, 2)
        return [session.finish(float(session.tokens.count(ord("3"))), advantage=-0.5) for session in sessions]


class Tried:
    """A run whose environment branches, and an honest group of it."""

    def __init__(self, folder: RunFolder, policy: Policy) -> None:
        entries = [msgspec.structs.replace(one, advantages=True) for one in folder.manifest.environments]
        self.manifest = msgspec.structs.replace(folder.manifest, environments=entries)
        self.policy = policy
        self.settings = PolicySettings.of(self.manifest, policy.tokenizer)
        self.verifier = Verifier(folder.run, self.manifest, [Branching()] * len(entries))
        self.run = folder.run
        self.group = self._made()

    def _made(self) -> RolloutGroup:
        environment = Branching()
        seed = task_seed(self.run, CHECKPOINT, BEACON, KEY, 0)
        assignment = assign(seed, self.manifest.weights, self.manifest.group)
        job = Job(environment, environment.task(assignment.task_seed, 0), assignment)
        with Batcher(self.settings, self._engine) as batcher:
            (outcome,) = batcher.run([job])
        assert isinstance(outcome, list)
        env = self.manifest.environments[assignment.environment].id
        return RolloutGroup(CHECKPOINT, 0, env, Engine("test", "1", "float32", "cpu"), outcome)

    def _engine(self, requests: Sequence[EngineRequest]) -> list[Completion]:
        asked = [
            Request(one.request.tokens, one.key, one.request.start, one.request.max_tokens)
            for one in requests
        ]
        rules = self.manifest.sampling
        made = generate(self.policy, asked, rules.temperature, rules.stop)
        return [Completion(one.tokens, one.logprobs.tolist(), one.finish) for one in made]

    def check(self, group: RolloutGroup) -> CheckedGroup:
        candidate = Candidate(bytes(32), group.to_bytes(), KEY, 0, CHECKPOINT, BEACON, {}, False)
        return self.verifier.check(candidate, self.settings)

    def code(self, group: RolloutGroup) -> Code | None:
        """What a trainer says of it, None where it takes it."""
        try:
            checked = self.check(group)
        except RemoteError as error:
            return error.code
        (recomputed,) = self.verifier.recompute(self.policy, [checked])
        error = self.verifier.measure(checked, recomputed).error
        return None if error is None else error.code

    def edited(self, **changes: Any) -> RolloutGroup:
        one, *others = self.group.trajectories
        return msgspec.structs.replace(
            self.group, trajectories=[msgspec.structs.replace(one, **changes), *others]
        )


@pytest.fixture(scope="module")
def tried(base_run: RunFolder, base_policy: Policy) -> Tried:
    return Tried(base_run, base_policy)


def test_an_honest_group_of_trees_is_taken(tried: Tried) -> None:
    assert tried.group.trajectories[0].parents == [-1, 0, 0, 0, 1, 4]
    assert tried.code(tried.group) is None
    checked = tried.check(tried.group)
    assert all(one.tree is not None and one.advantage == -0.5 for one in checked.trajectories)


def test_one_pass_over_a_group_says_what_each_path_alone_says(tried: Tried) -> None:
    checked = tried.check(tried.group)
    (together,) = tried.verifier.recompute(tried.policy, [checked])
    temperature = tried.manifest.sampling.temperature
    for one, found in zip(checked.trajectories, together, strict=True):
        assert one.tree is not None
        drawn, numbers = uniforms(one.key, 0, len(one.logprobs)), np.cumsum(one.trained) - 1
        for places, fresh in one.tree.paths(one.trained):
            own = numbers[places[fresh]]
            (alone,) = prefill(tried.policy, [Recorded(one.tokens[places], fresh, drawn[own])], temperature)
            np.testing.assert_allclose(found.logprobs[own], alone.logprobs, atol=1e-4)
            np.testing.assert_allclose(found.distances[own], alone.distances, atol=1e-4)
        np.testing.assert_allclose(found.logprobs, one.logprobs, atol=1e-4)


def exchanged(tried: Tried) -> RolloutGroup:
    """The second and the third answer in each other's place: the same text, other draws."""
    for number, one in enumerate(tried.group.trajectories):
        tokens, said = unpack_tokens(one.tokens), unpack_floats(one.logprobs)
        lengths = [segment.length for segment in one.segments]
        ends = np.cumsum([0, *lengths]).tolist()
        second, third = tokens[ends[2] : ends[3]], tokens[ends[3] : ends[4]]
        if second == third:
            continue
        first, a, b = lengths[1], lengths[1] + lengths[2], lengths[1] + lengths[2] + lengths[3]
        segments = [*one.segments[:2], one.segments[3], one.segments[2], *one.segments[4:]]
        changed = msgspec.structs.replace(
            one,
            tokens=pack_tokens([*tokens[: ends[2]], *third, *second, *tokens[ends[4] :]]),
            segments=segments,
            logprobs=pack_floats([*said[:first], *said[a:b], *said[first:a], *said[b:]]),
        )
        others = tried.group.trajectories
        return msgspec.structs.replace(
            tried.group, trajectories=[*others[:number], changed, *others[number + 1 :]]
        )
    raise AssertionError("all answers are the same")


def test_branches_that_are_exchanged_are_not_what_their_key_draws(tried: Tried) -> None:
    assert tried.code(exchanged(tried)) is Code.SAMPLING_MISMATCH


@pytest.mark.parametrize(
    ("parents", "code"),
    [
        ([-1, 0, 0, 0, 2, 4], Code.PROMPT_MISMATCH),
        ([-1, 0, 1, 0, 1, 4], Code.PROMPT_MISMATCH),
        (None, Code.PROMPT_MISMATCH),
        ([-1, 0, 0, 0, 1, 5], Code.SEGMENTS),
        ([-1, 0, 0, -1, 1, 4], Code.SEGMENTS),
    ],
)
def test_another_tree_than_the_environments_is_refused(tried: Tried, parents: Any, code: Code) -> None:
    assert tried.code(tried.edited(parents=parents)) is code


def test_an_answer_that_was_copied_into_a_new_branch_is_refused(tried: Tried) -> None:
    one = tried.group.trajectories[0]
    tokens, said = unpack_tokens(one.tokens), unpack_floats(one.logprobs)
    start = one.segments[0].length
    copied, length = tokens[start : start + one.segments[1].length], one.segments[1].length
    more = tried.edited(
        tokens=pack_tokens([*tokens, *copied]),
        segments=[*one.segments, Segment(length, Role.ASSISTANT, True)],
        logprobs=pack_floats([*said, *said[:length]]),
        parents=[*(one.parents or []), 0],
        finish="stop" if copied[-1] in tried.manifest.sampling.stop else "cut",
    )
    assert tried.code(more) in {Code.PROMPT_MISMATCH, Code.SEGMENTS}


def test_another_advantage_than_the_environments_is_refused(tried: Tried) -> None:
    for changes in ({"advantage": 0.5}, {"advantage": None}):
        assert tried.code(tried.edited(**changes)) is Code.ADVANTAGES
    near = tried.check(tried.edited(advantage=-0.5 + 1e-9))
    assert near.trajectories[0].advantage == -0.5  # the one that was made again
