"""Held-out accuracy: tasks that no run assigns, played and scored as rollouts are, one sample each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from nous_node.envs.batcher import Batcher, EngineRequest, Job, Outcome
from nous_node.envs.environment import Completion, Environment, HeldOut, PolicySettings, Task
from nous_node.envs.errors import EnvironmentFailed
from nous_node.envs.single_turn import DOMAIN_HELD_OUT, held_out_seed
from nous_node.protocol.rollouts import trained_tokens
from nous_node.protocol.tasks import Assignment
from nous_node.trainer.errors import LogitsError
from nous_node.trainer.generate import Request, generate
from nous_node.trainer.policy import Policy

GREEDY_TEMPERATURE: Final = 1e-6
"""Any logit gap above 1e-4 becomes certainty: the seeded draw then takes the most probable token."""

AT_ONCE: Final = 512
"""Tasks that are played together: what one call of the engine takes."""

AGENTS: Final = 64
"""Sampler keys of one task: trajectories of one sample, rewritten histories included."""

_UNUSED: Final = 40
"""Bytes of an assignment's stream before its sampler keys."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Held-out tasks with a full score, of those that were asked."""

    right: int
    asked: int

    @property
    def share(self) -> float:
        return self.right / self.asked


@dataclass(slots=True)
class Played:
    """What became of held-out tasks of one environment."""

    rewards: list[float] = field(default_factory=list)
    """Of each trajectory."""
    right: int = 0
    """Tasks all of whose trajectories have a full score."""
    asked: int = 0
    sampled: int = 0
    """Tokens of all trajectories that the policy sampled."""
    failed: list[str] = field(default_factory=list)
    """Why tasks have no score."""


def held_out_accuracy(
    policy: Policy,
    environments: Sequence[Environment],
    settings: PolicySettings,
    tasks: int,
    temperature: float = GREEDY_TEMPERATURE,
) -> Accuracy | None:
    """Of held-out tasks of level 0, `tasks` of each environment in which a policy plays alone; None where
    there is none. A policy whose weights are broken has none right, and neither has one whose environment
    fails."""
    alone = [environment for environment in environments if environment.info.agents == 1]
    played = [play(policy, environment, settings, tasks, temperature) for environment in alone]
    asked = sum(one.asked for one in played)
    return Accuracy(sum(one.right for one in played), asked) if asked else None


def play(
    policy: Policy,
    environment: Environment,
    settings: PolicySettings,
    count: int,
    temperature: float = GREEDY_TEMPERATURE,
    told: Callable[[int], None] = lambda done: None,
) -> Played:
    """Plays `count` held-out tasks of level 0, one sample each whatever the run's group is; the uniforms of a
    task follow from its seed. `told` hears how many are done."""
    stop = sorted(settings.stop)

    def sample(requests: Sequence[EngineRequest]) -> list[Completion]:
        wanted = [Request(r.tokens, key, r.start, r.max_tokens) for key, r in requests]
        made = generate(policy, wanted, temperature, stop)
        return [Completion(one.tokens, one.logprobs.tolist(), one.finish) for one in made]

    played = Played()
    jobs = [Job(environment, task, _keys(task)) for task in held_out_tasks(environment, count)]
    with Batcher(replace(settings, group=1), sample) as batcher:
        for start in range(0, len(jobs), AT_ONCE):
            part = jobs[start : start + AT_ONCE]
            try:
                outcomes: list[Outcome] = batcher.run(part)
            except LogitsError as error:
                outcomes = [EnvironmentFailed(str(error))] * len(part)
            for outcome in outcomes:
                _count(played, outcome)
            told(played.asked)
    return played


def held_out_tasks(environment: Environment, count: int) -> list[Task]:
    """The environment's own, or those of seeds that no run assigns."""
    if isinstance(environment, HeldOut):
        return environment.held_out(count)
    return [environment.task(held_out_seed(environment.info.id, index), 0) for index in range(count)]


def _keys(task: Task) -> Assignment:
    stream = hashlib.shake_256(DOMAIN_HELD_OUT + task.seed).digest(32 * AGENTS)
    return Assignment(task.seed, 0, task.seed, bytes(_UNUSED) + stream)


def _count(played: Played, outcome: Outcome) -> None:
    played.asked += 1
    if isinstance(outcome, EnvironmentFailed):
        played.failed.append(str(outcome))
        return
    played.rewards += [one.reward for one in outcome]
    played.sampled += sum(map(trained_tokens, outcome))
    played.right += bool(outcome) and all(one.components.get("correct", one.reward) >= 1.0 for one in outcome)
