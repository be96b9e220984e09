"""An environment in a host process, which is used like any other.

    environment = remote("reasoning-gym/leg_counting", make, launch, facts)

Environments of one family or package share a process. The task of a seed is made over there: here it is the
seed and the level, and `payload` is None. Methods without `async` are not for use inside an event loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from nous_node.protocol.rollouts import Trajectory
from nous_node.protocol.runs import Setting
from nous_node.protocol.structure import MAX_REWARD

from .environment import EnvironmentInfo, Policy, Score, Task
from .errors import EnvironmentFailed
from .host_messages import Answered, Describe, Described, HeldOut, Make, Prompt, ScoreAll, Scores, Tasks, Text
from .host_process import HostProcess
from .sandbox import Launch

_SEED_BYTES = 32


class RemoteEnvironment:
    """Implements `Environment`."""

    keeps_time = True

    def __init__(self, process: HostProcess, slot: int, info: EnvironmentInfo, levels: int) -> None:
        self.info = info
        self.levels = levels
        self._process, self._slot = process, slot

    def task(self, seed: bytes, level: int) -> Task:
        """Raises EnvironmentFailed for what is no seed."""
        if len(seed) != _SEED_BYTES or level < 0:
            raise EnvironmentFailed(f"A task has a seed of {_SEED_BYTES} bytes and a level of 0 or more.")
        return Task(seed, min(level, self.levels), None)

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        """Raises EnvironmentFailed with its cause, CannotStart, and whatever the policy raises."""
        return await self._process.collect(self._slot, task, policy, self.info.agents)

    def renew(self) -> bool:
        """Ends its process, unless there is none, or one that was started for the last group: another begins
        when it is needed. False: nothing was ended."""
        return self._process.renew()


class RemoteHeldOut(RemoteEnvironment):
    """Implements `HeldOut` as well."""

    _held_out = 0

    def held_out(self, count: int, level: int = 0) -> list[Task]:
        tasks = self._process.ask(HeldOut(self._slot, count, level), Tasks, self._slot)
        if len(tasks.seeds) > count:
            raise EnvironmentFailed(
                f"The environment {self.info.id} gave {len(tasks.seeds)} held-out tasks, not {count}."
            )
        self._held_out = count
        return [Task(seed, level, None) for seed in tasks.seeds]

    def prompt(self, task: Task) -> str:
        asked = Prompt(self._slot, task.seed, task.level, self._held_out)
        return self._process.ask(asked, Text, self._slot).text

    def score(self, task: Task, answer: str, ended: bool) -> Score:
        return self.score_all(task, [(answer, ended)])[0]

    def score_all(self, task: Task, answers: Sequence[tuple[str, bool]]) -> list[Score]:
        """Scores of answers to one task, each with whether it ended by itself: one round trip for all."""
        asked = [Answered(text, ended) for text, ended in answers]
        message = ScoreAll(self._slot, task.seed, task.level, self._held_out, asked)
        scores = self._process.ask(message, Scores, self._slot).scores
        if len(scores) != len(asked):
            raise EnvironmentFailed(
                f"The environment {self.info.id} scored {len(scores)} of {len(asked)} answers."
            )
        for reward, components in scores:
            if not abs(reward) <= MAX_REWARD or not all(map(math.isfinite, components.values())):  # also NaN
                raise EnvironmentFailed(f"The environment {self.info.id} scored an answer with {reward}.")
        return scores


def remote(
    launch: Launch, info: EnvironmentInfo, value: str, member: str, config: Mapping[str, Setting]
) -> RemoteEnvironment:
    """Makes an environment in the process of this launch. `value`: its entry point; `member`: of a family.

    Raises BadConfig, BrokenEnvironment, UnknownEnvironment, CannotStart.
    """
    return made_in(process_of(launch), info, value, member, config)


def made_in(
    process: HostProcess, info: EnvironmentInfo, value: str, member: str, config: Mapping[str, Setting]
) -> RemoteEnvironment:
    """The same in this process. Raises as `remote`."""
    slot = process.number()
    made = process.make(info.id, Make(slot, value, member, dict(config)))
    kind = RemoteHeldOut if made.held_out else RemoteEnvironment
    return kind(process, slot, info, made.levels)


def describe(launch: Launch, value: str, member: str = "") -> Described:
    """What an entry point is, from a process of this launch: its module is not imported here."""
    return process_of(launch).describe(Describe(value, member))


def close_all() -> None:
    """Ends all host processes, as the end of this process does; whoever uses an environment later starts one
    again."""
    for process in _PROCESSES:
        process.close()


@functools.cache
def process_of(launch: Launch) -> HostProcess:
    """The process that environments of one launch share."""
    process = HostProcess(launch)
    _PROCESSES.append(process)
    return process


_PROCESSES: list[HostProcess] = []
