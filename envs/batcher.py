"""Many tasks, one engine call: batches over all environments that run at the moment.

All tasks run on one asyncio loop. Whoever wants tokens waits until every running task does; then one call of
the engine serves them all, in the order of the jobs. A task that waits for something else (a server, a
sandbox) holds the others up for LINGER_S at most; without a request for PATIENCE_S it is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

from nous_node.protocol.errors import LocalError
from nous_node.protocol.rollouts import Trajectory, pack_floats, unpack_floats
from nous_node.protocol.tasks import Assignment

from .environment import Completion, Environment, GenerateRequest, PolicySettings, Task, keeps_time
from .errors import EnvironmentFailed

LINGER_S: Final = 0.05
"""How long requests wait for a task that waits for something else: a twentieth of a slow engine call."""

PATIENCE_S: Final = 60.0
"""How long a task may go without a request or an end: no scorer or server takes a minute."""

_QUIET: Final = 2
"""Passes of the loop without a new request before a batch is complete: a task that an environment starts
for each sample reaches its request one pass after its parent."""


class EngineRequest(NamedTuple):
    """A request together with what draws its tokens."""

    key: bytes
    """32-byte sampler key of the trajectory."""
    request: GenerateRequest


class Engine(Protocol):
    """Generates for many requests at once: one completion each, in their order."""

    def __call__(self, requests: Sequence[EngineRequest], /) -> Sequence[Completion]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One task to work on."""

    environment: Environment
    task: Task
    assignment: Assignment
    """Whence the sampler keys come."""


Outcome = list[Trajectory] | EnvironmentFailed
"""A group's trajectories, or why there are none."""


class Batcher:
    """Runs jobs against one engine. It owns an event loop, which `with` closes; deadlines are in seconds.
    `alive` is called now and then, as long as the loop turns: also while all wait for an environment.

    with Batcher(settings, engine) as batcher:
        outcomes = batcher.run(jobs)
    """

    def __init__(
        self,
        settings: PolicySettings,
        engine: Engine,
        *,
        linger: float = LINGER_S,
        patience: float = PATIENCE_S,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._alive = alive
        self._settings = settings
        self._engine = engine
        self._linger = linger
        self._patience = patience
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()

    def run(self, jobs: Sequence[Job], done: Callable[[int, Outcome], None] | None = None) -> list[Outcome]:
        """What became of each job, in their order; `done` hears of each as soon as it is known.

        What the engine or `done` raises is raised. What an environment raises is its job's outcome. Not to be
        called inside an event loop.
        """
        return self._runner.run(self._run(jobs, done))

    async def _run(self, jobs: Sequence[Job], done: Callable[[int, Outcome], None] | None) -> list[Outcome]:
        round_ = _Round(self._engine, self._linger, self._patience, self._alive)
        policies = [
            _BatchPolicy(self._settings, round_, job.assignment, index, keeps_time(job.environment))
            for index, job in enumerate(jobs)
        ]
        tasks = [
            asyncio.ensure_future(_outcome(job, policy, done))
            for job, policy in zip(jobs, policies, strict=True)
        ]
        for policy, task in zip(policies, tasks, strict=True):
            round_.add(policy, task)
        try:
            await round_.finished()
            return [task.result() for task in tasks]
        finally:
            await _cancelled(tasks)


async def _outcome(job: Job, policy: _BatchPolicy, done: Callable[[int, Outcome], None] | None) -> Outcome:
    outcome: Outcome
    try:
        outcome = await job.environment.collect_trajectories(job.task, policy)
    except EnvironmentFailed as error:
        outcome = error
    except asyncio.CancelledError:
        if not policy.given_up:
            raise
        outcome = EnvironmentFailed(
            f"The environment {job.environment.info.id} neither asked for tokens nor ended within its time; "
            "the task is given up."
        )
    except Exception as error:  # somebody else's code
        outcome = EnvironmentFailed(
            f"The environment {job.environment.info.id} failed: {type(error).__name__}: {error}"
        )
    if done is not None:
        done(policy.index, outcome)
    return outcome


class _BatchPolicy:
    """The policy that one job sees."""

    def __init__(
        self, settings: PolicySettings, round_: _Round, assignment: Assignment, index: int, timed: bool
    ) -> None:
        self.tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group = settings.group
        self.max_tokens = settings.max_tokens
        self.context = settings.context
        self.logprob_format = settings.logprob_format
        self.index = index
        self.waiting = 0
        """Calls of `generate` that are not answered yet."""
        self.moved = 0.0
        """Loop time at which it last had an answer, or was started."""
        self.given_up = False
        self.timed = timed
        """Whether somebody else looks at its clock."""
        self._vocabulary = settings.vocabulary
        self._round = round_
        self._assignment = assignment

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        if not requests:
            return []
        largest = max(max(request.tokens, default=0) for request in requests)
        if largest >= self._vocabulary:  # an engine on a GPU would end with the whole process
            raise EnvironmentFailed(
                f"The environment asks for tokens behind token {largest}, which is outside the model's "
                "vocabulary. Mend the environment."
            )
        keyed = [EngineRequest(self._assignment.sampler_key(one.trajectory), one) for one in requests]
        self.waiting += 1
        try:
            return [self._as_recorded(one) for one in await self._round.ask(self.index, keyed)]
        finally:
            self.waiting -= 1
            self.moved = asyncio.get_running_loop().time()

    def _as_recorded(self, completion: Completion) -> Completion:
        """With log-probs as a replay will hand them out: environments may look at them."""
        if self.logprob_format == "f32":  # an engine's own are no finer
            return completion
        packed = pack_floats(completion.logprobs, self.logprob_format)
        return completion._replace(logprobs=unpack_floats(packed, self.logprob_format))


class _Round:
    """The requests that wait, and when they go to the engine."""

    def __init__(self, engine: Engine, linger: float, patience: float, alive: Callable[[], None]) -> None:
        self._engine = engine
        self._alive = alive
        self._linger = linger
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._running: dict[_BatchPolicy, asyncio.Future[Outcome]] = {}
        self._pending: list[tuple[int, list[EngineRequest], asyncio.Future[list[Completion]]]] = []
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._settling = False
        self._deadline: asyncio.TimerHandle | None = None
        """When what is asked for goes to the engine, whoever may be missing."""
        self._clock: asyncio.TimerHandle | None = None

    def add(self, policy: _BatchPolicy, task: asyncio.Future[Outcome]) -> None:
        policy.moved = self._loop.time()
        self._running[policy] = task
        task.add_done_callback(lambda _: self._left(policy))

    async def finished(self) -> None:
        """Returns when every task has ended; raises what the engine raised."""
        if not self._running:
            return
        self._look_at_clocks()
        try:
            await self._end
        finally:
            for timer in (self._deadline, self._clock):
                if timer is not None:
                    timer.cancel()

    async def ask(self, job: int, requests: list[EngineRequest]) -> list[Completion]:
        answer: asyncio.Future[list[Completion]] = self._loop.create_future()
        self._pending.append((job, requests, answer))
        if self._deadline is None:
            self._deadline = self._loop.call_later(self._linger, self._flush)
        self._settle()
        return await answer

    def _left(self, policy: _BatchPolicy) -> None:
        del self._running[policy]
        if not self._running and not self._end.done():
            self._end.set_result(None)
        self._settle()

    def _settle(self) -> None:
        """Watches the loop until nothing new is asked for, once at a time."""
        if not self._settling:
            self._settling = True
            self._loop.call_soon(self._look, len(self._pending), 0)

    def _look(self, before: int, quiet: int) -> None:
        now = len(self._pending)
        quiet = quiet + 1 if now == before else 0
        if quiet < _QUIET:
            self._loop.call_soon(self._look, now, quiet)
            return
        self._settling = False
        if self._pending and all(policy.waiting for policy in self._running):
            self._flush()

    def _flush(self) -> None:
        """One call of the engine for all that waits, in the order of jobs and of their requests."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        pending = sorted(self._pending, key=lambda entry: entry[0])
        self._pending = []
        pending = [entry for entry in pending if not entry[2].done()]
        if not pending or self._end.done():
            return
        asked = [request for _, requests, _ in pending for request in requests]
        began = self._loop.time()
        try:
            completions = list(self._engine(asked))
            if len(completions) != len(asked):
                raise LocalError(f"The engine gave {len(completions)} completions for {len(asked)} requests.")
        except Exception as error:
            self._end.set_exception(error)
            return
        for policy in self._running:  # nothing could move while the engine worked
            policy.moved += self._loop.time() - began
        for _, requests, answer in pending:
            answer.set_result(completions[: len(requests)])
            del completions[: len(requests)]

    def _look_at_clocks(self) -> None:
        """Gives up every task that did not move for too long, and looks again later."""
        self._alive()
        late = self._loop.time() - self._patience
        for policy, task in self._running.items():
            if not policy.waiting and not policy.timed and policy.moved <= late:
                policy.given_up = True
                task.cancel()
        self._clock = self._loop.call_later(self._patience / 4, self._look_at_clocks)


async def _cancelled(tasks: Sequence[asyncio.Future[Outcome]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
