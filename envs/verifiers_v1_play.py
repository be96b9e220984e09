"""A verifiers taskset (v1) in play. Imports the library; `verifiers_v1` has the rules."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nous_node.protocol.rollouts import Trajectory

# Tasksets fetch data when they are loaded. There is no network here, and without these they would look for it
# again and again. They are read when the library is imported, hence above it.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")

from pydantic import ValidationError
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.rollout import Rollout, RolloutTimeouts
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.session import RolloutLimits
from verifiers.v1.utils.loaders import environment_class, load_taskset, taskset_config_type

from .conversation import Conversations, Player
from .determinism import seeded
from .environment import EnvironmentInfo, Policy, Task
from .errors import BadConfig, BrokenEnvironment, EnvironmentFailed
from .random_streams import Streams
from .verifiers_v0 import row_of
from .verifiers_v0_rubrics import asks_model
from .verifiers_v1 import ENDLESS, Choices
from .verifiers_v1_harness import MODEL, NOWHERE, Direct, InProcess
from .verifiers_v1_tools import Server, Tools

MAX_COMPONENTS: Final = 63
"""Rewards and metrics that go along with a trajectory: a rollout has room for 64, one is the task's hash."""

MAX_NAME: Final = 256
MAX_TOLD: Final = 400
"""Characters of somebody else's error in a sentence of ours."""

HASH_DIGITS: Final = 12
"""Hexadecimal digits of a task's hash that a component holds: 48 bits are exact in a float."""


class _Worth(NamedTuple):
    """What a sample is worth."""

    reward: float
    components: dict[str, float]


class Rolled:
    """One taskset with its config."""

    levels: int = 0

    def __init__(
        self, info: EnvironmentInfo, member: str, choices: Choices, settings: Mapping[str, Any]
    ) -> None:
        self.info = info
        self._choices = choices
        with seeded(0):
            taskset = _loaded(info.id, member, settings)
            self._tasks = _tasks(info.id, taskset, choices.tasks)
        _refuse(info.id, self._tasks[0])
        self._shared = [Server(toolset) for toolset in type(taskset).toolsets(taskset.config)]
        logging.getLogger("verifiers").setLevel(logging.ERROR)

    def task(self, seed: bytes, level: int) -> Task:
        """[VFR-7]"""
        return Task(seed, 0, self._tasks[row_of(seed, len(self._tasks))])

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        """Raises EnvironmentFailed."""
        streams = Streams(task.seed)
        conversations = Conversations(policy)
        worth = await conversations.play(lambda player: streams.start(self._played(player, task.payload)))
        return conversations.finish([one.reward for one in worth], [one.components for one in worth])

    async def _played(self, player: Player, task: Any) -> _Worth:
        own = [Server(toolset) for toolset in task.toolsets(task.config)]
        tools, direct = Tools([*self._shared, *own]), Direct()
        alone = copy.copy(task)
        alone.toolsets = lambda config: []  # served here, not by processes
        run = Rollout(
            task=alone,
            agent_config=AgentConfig(runtime=SubprocessConfig(), model=MODEL),
            harness=InProcess(player, direct, tools),
            ctx=ModelContext(MODEL, EvalClientConfig(base_url=NOWHERE, api_key_var="NONE")),
            runtime_config=SubprocessConfig(),
            timeouts=RolloutTimeouts(),
            limits=RolloutLimits(max_turns=self._choices.max_turns or None),
            interception=direct,
        )
        try:
            await tools.open(own, task.data)
            if await run.open():
                await run.step()
                if run.ok:
                    run.trace.stop("agent_completed")
            trace = await run.close()
        finally:
            for server in own:
                await server.close()
        if not trace.ok:
            raise _failure(self.info.id, run.failure)
        return _worth(trace)


def _worth(trace: Any) -> _Worth:
    told = {name: one.value for name, one in trace.rewards.items() if one is not None}
    told |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    named = {name[:MAX_NAME]: value for name, value in list(told.items())[:MAX_COMPONENTS]}
    return _Worth(float(trace.reward), {"task": float(int(trace.task.hash[:HASH_DIGITS], 16)), **named})


def _failure(name: str, error: BaseException | None) -> EnvironmentFailed:
    """Of a rollout: our own sentence, where the library has wrapped one."""
    cause = error
    while cause is not None:
        if isinstance(cause, EnvironmentFailed):
            return cause
        cause = cause.__cause__
    return EnvironmentFailed(f"A sample of {name} failed: {_told(error)}.")


def _loaded(name: str, member: str, settings: Mapping[str, Any]) -> Any:
    try:
        config = taskset_config_type(member).model_validate({**settings, "id": member})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadConfig(f"{name} does not take these settings: {place}: {first['msg']}.") from error
    except ModuleNotFoundError as error:
        raise BrokenEnvironment(
            f"{name} cannot be imported: {_told(error)}. Install its package: `nous-node env install "
            f"verifiers --with {member}`."
        ) from error
    except (Exception, SystemExit) as error:  # somebody else's code
        raise BrokenEnvironment(f"{name} is no taskset that can be used: {_told(error)}.") from error
    if environment_class(member) is not SingleAgentEnv:
        raise BrokenEnvironment(
            f"{name} brings an environment of its own, with several agents or its own rules: only tasksets "
            "of one agent are played here."
        )
    try:
        return load_taskset(config)
    except (Exception, SystemExit) as error:  # somebody else's code
        raise BrokenEnvironment(f"{name} cannot be made: {_told(error)}.") from error


def _tasks(name: str, taskset: Any, count: int) -> list[Any]:
    count = count or (0 if taskset.bounded else ENDLESS)
    try:
        tasks = list(taskset.take(count) if count else taskset)
    except (Exception, SystemExit) as error:  # somebody else's code
        raise BrokenEnvironment(
            f"The tasks of {name} cannot be loaded: {_told(error)}. Tasksets that fetch data do not run "
            "here, where there is no network."
        ) from error
    if not tasks:
        raise BadConfig(f"{name} has no tasks with these settings.")
    return tasks


def _refuse(name: str, task: Any) -> None:
    """Raises BrokenEnvironment for tasks that need what is not here."""
    if type(task).NEEDS_CONTAINER:
        raise BrokenEnvironment(f"{name} needs a container for each task, which is not offered here.")
    if task.config.judges:
        raise BrokenEnvironment(asks_model(name))
    if task.data.prompt is None:
        raise BrokenEnvironment(
            f"{name} waits for a user to begin; only tasks with a prompt are played here."
        )


def _told(error: object) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:MAX_TOLD].rstrip(".: ")
