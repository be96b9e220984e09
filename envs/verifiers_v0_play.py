"""A verifiers package (v0) in play. Imports the library; `verifiers_v0` has the rules."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from nous_node.protocol.rollouts import Trajectory
from nous_node.protocol.runs import Setting

# Packages fetch datasets when they are made. There is no network here, and without these they would look for
# it again and again. They are read when the library is imported, hence above it.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")

import verifiers

from .conversation import Conversations, Player
from .determinism import seeded
from .environment import EnvironmentInfo, Policy, Task
from .errors import BadConfig, BrokenEnvironment, EnvironmentFailed
from .random_streams import Streams
from .session import Session
from .verifiers_v0 import row_of
from .verifiers_v0_client import MODEL, Turn, Voice
from .verifiers_v0_config import read_choices
from .verifiers_v0_rubrics import asks_model, refuse_judges, rubrics_of, scored, wants_model, watched

MAX_COMPONENTS: Final = 64
"""Metrics that go along with a trajectory: as many as a rollout has room for."""

MAX_NAME: Final = 256
"""Characters of a component's name."""

MAX_TOLD: Final = 400
"""Characters of somebody else's error in a sentence of ours."""


@dataclass(frozen=True, slots=True)
class _Worth:
    """What a sample is worth."""

    reward: float
    components: dict[str, float]
    advantages: dict[int, float]
    """Of its answers, by their number; empty where the group's own rule is to hold."""


class Played:
    """One package with its arguments."""

    levels: int = 0

    def __init__(self, info: EnvironmentInfo, member: str, config: Mapping[str, Setting]) -> None:
        self.info = info
        self._choices, arguments = read_choices(config)
        with seeded(0), _signals_kept():
            self._environment = _loaded(info.id, member, arguments)
            self._rows = _rows(info.id, self._environment, self._choices.split)
        for rubric in rubrics_of(self._environment.rubric):
            refuse_judges(info.id, rubric)
            rubric.funcs = [watched(function) for function in rubric.funcs]

    def task(self, seed: bytes, level: int) -> Task:
        """One row of the dataset. [VFR-2]"""
        return Task(seed, 0, self._rows[row_of(seed, len(self._rows))])

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        """Raises EnvironmentFailed."""
        streams = Streams(task.seed)
        conversations = Conversations(policy)
        played = await conversations.play(lambda player: streams.start(self._played(player, task, policy)))
        given = [_given(state) for state, _ in played]
        states = [state for state, _ in played]
        await streams.start(scored(self.info.id, self._score(states)))
        finished: dict[int, Trajectory] = {}
        for worth, (_, voice) in zip(self._worth(states, given), played, strict=True):
            for session in dict.fromkeys(turn.session for turn in voice.turns):
                finished[session.trajectory] = _finished(session, voice.turns, worth)
        if not finished:
            raise EnvironmentFailed(f"{self.info.id} asked the policy for nothing: mend the package.")
        return [finished[number] for number in sorted(finished)]

    async def _played(self, player: Player, task: Task, policy: Policy) -> tuple[Any, Voice]:
        """One sample: the library's `State`, and what was said."""
        environment = self._environment
        voice = Voice(player, self._choices.format, policy.chat is not None)
        state = await environment.rollout(
            deepcopy(task.payload), voice, MODEL, deepcopy(environment.sampling_args)
        )
        error = state.get("error")
        if error is not None and not isinstance(error, verifiers.ToolError):
            raise EnvironmentFailed(f"A sample of {self.info.id} failed: {_told(error)}")
        return state, voice

    async def _score(self, states: list[Any]) -> None:
        rubric = self._environment.rubric
        if self._environment.score_rollouts:
            await rubric.score_group(states)
        else:
            await rubric.dummy_score_group(states)
        for state in states:
            await rubric.cleanup(state)

    def _worth(self, states: list[Any], given: list[dict[int, float]]) -> list[_Worth]:
        rewards = [float(state["reward"]) for state in states]
        mean = sum(rewards) / len(rewards)
        worth = []
        for state, reward, own in zip(states, rewards, given, strict=True):
            credit = {}
            if self._choices.credit == "step":
                numbers = [int(step["response"].id) for step in state["trajectory"]]
                credit = {number: own.get(number, reward - mean) for number in numbers}
            worth.append(_Worth(reward, _components(state["metrics"]), credit))
        return worth


def _given(state: Any) -> dict[int, float]:
    """Advantages that the environment itself gave to answers: scoring fills in the others."""
    return {
        int(step["response"].id): float(step["advantage"])
        for step in state["trajectory"]
        if step["advantage"] is not None
    }


def _finished(session: Session, turns: Sequence[Turn], worth: _Worth) -> Trajectory:
    advantages = None
    if worth.advantages:
        advantages = [
            worth.advantages.get(number, 0.0)
            for number, turn in enumerate(turns)
            if turn.session is session
            for _ in range(turn.tokens)
        ]
    return session.finish(worth.reward, worth.components, advantages)


def _components(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    named = list((metrics or {}).items())[:MAX_COMPONENTS]
    return {str(name)[:MAX_NAME]: float(value) for name, value in named}


def _loaded(name: str, member: str, arguments: Mapping[str, Setting]) -> Any:
    try:
        return verifiers.load_environment(member, **arguments)
    except (Exception, SystemExit) as error:  # somebody else's code
        cause = error.__cause__ or error
        if wants_model(error):
            raise BrokenEnvironment(asks_model(name)) from error
        if isinstance(cause, TypeError) and "argument" in str(cause):
            raise BadConfig(f"{name} does not take these settings: {cause}.") from error
        if isinstance(cause, ImportError):
            raise BrokenEnvironment(
                f"{name} cannot be imported: {_told(cause)}. Install its package: `nous-node env install "
                f"verifiers-v0 --with {member}`."
            ) from error
        raise BrokenEnvironment(
            f"{name} cannot be made: {_told(cause)}. Packages that fetch data when they are made do not run "
            "here, where there is no network."
        ) from error


def _rows(name: str, environment: Any, split: str) -> Any:
    """The dataset from which tasks are taken."""
    try:
        rows = environment.build_dataset() if split != "eval" else environment.build_eval_dataset()
        if rows is None and not split:
            rows = environment.build_eval_dataset()
    except Exception as error:  # somebody else's code
        raise BrokenEnvironment(f"The dataset of {name} cannot be made: {_told(error)}.") from error
    if rows is None or len(rows) == 0:
        raise BadConfig(f"{name} has no dataset {split or 'with rows'!r}: choose another `nous.split`.")
    return rows


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The library takes SIGINT and SIGTERM over when an environment is made; they stay whose they were."""
    kept = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for which, handler in kept.items():
            signal.signal(which, handler)


def _told(error: object) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:MAX_TOLD].rstrip(".: ")
