"""A host process as the node sees it: environments in it, many groups at once, and a new one when it ends.

    outside of a loop    ask: one message, one answer, a deadline
    inside one           collect: a group. The first of several attaches the process to the loop, the last
                         detaches it, so that each batch may have a loop of its own

A group's clock runs while its own code runs, or while it waits for something that is not the policy. At its
deadline, or when the process dies, the group whose code ran last is given up by name; the others begin anew
in another process, once, with what was sampled for them before.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast

import msgspec

from nous_node.protocol.rollouts import Trajectory

from .child import Child, ChildEnded
from .environment import GenerateRequest, Policy, Task
from .errors import BadConfig, BrokenEnvironment, CannotStart, EnvError, EnvironmentFailed, UnknownEnvironment
from .host_answers import answered
from .host_messages import (
    Aside,
    Cancel,
    Collect,
    Collected,
    Describe,
    Described,
    Failed,
    FromHost,
    GaveUp,
    Generate,
    Hello,
    Made,
    Make,
    Question,
    Ready,
    Refused,
    Rules,
    Sampled,
    ToHost,
    Working,
)
from .ledger import Ledger
from .sandbox import Launch

CALL_S: Final = 60.0
"""Seconds that an environment may take for one call: no prompt and no scorer takes a minute."""
START_S: Final = 180.0
"""Seconds until a process has started and an environment is made: libraries of 300 MB from a slow disk."""
TICK_S: Final = 0.25
"""Between looks at the clocks. No more than twice that is charged at once: longer pauses are the engine's."""
REPEATS: Final = 1
"""How often a group begins anew because of another one."""

GONE: Final = "Nobody waits for this group any more."

A = TypeVar("A", bound=FromHost)

_trajectories = msgspec.msgpack.Decoder(list[Trajectory])


@dataclass(eq=False, slots=True)
class _Group:
    """A call of `collect` under way."""

    number: int
    slot: int
    name: str
    task: Task
    policy: Policy
    ledger: Ledger
    outcome: asyncio.Future[list[Trajectory]]
    answers: set[asyncio.Task[None]] = field(default_factory=set)
    """Requests that the policy works on."""
    spent: float = 0.0
    """Seconds on its clock."""
    repeats: int = 0

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


class HostProcess:
    """One process at a time, started when it is needed. For one thread at a time.

    `seconds`: of a call; `start`: until it has started.
    """

    def __init__(self, launch: Launch, seconds: float = CALL_S, start: float = START_S) -> None:
        self._launch, self._seconds, self._start_seconds = launch, seconds, start
        self._child: Child[ToHost, FromHost] | None = None
        self._slots: dict[int, Make] = {}
        self._made: set[int] = set()
        """Slots of the present process."""
        self._names: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._groups: dict[int, _Group] = {}
        self._unsettled = False
        """Whether messages of ended groups may still be in the pipe."""
        self._spoilt = False
        """Whether something is left running in it that nobody waits for."""
        self._working = 0
        self._starts = 0
        """Environments that are being made within a loop: until then no group's clock runs."""
        self._starting = 0.0
        """Seconds that this takes so far."""
        self._stray = 0.0
        """Seconds that code of a group runs that nobody waits for."""
        self._looked = 0.0
        self._clock: asyncio.TimerHandle | None = None

    # --- outside of a loop -----------------------------------------------------------------------

    def next_slot(self) -> int:
        """A number for another environment."""
        return next(self._numbers)

    def make(self, name: str, make: Make) -> Made:
        """Makes an environment. Raises BadConfig, BrokenEnvironment, UnknownEnvironment, CannotStart."""
        self._names[make.slot], self._slots[make.slot] = name, make
        return self._make(make.slot)

    def ask(self, message: ToHost, answer: type[A], slot: int) -> A:
        """About an environment that was made.

        Raises EnvironmentFailed where there is no answer in time or another one, and what `make` raises."""
        if not self._alive or slot not in self._made:
            self._make(slot)
        return self._asked(message, answer, self._seconds, f"environment {self._names[slot]}")

    def describe(self, describe: Describe) -> Described:
        """Raises UnknownEnvironment, BrokenEnvironment, CannotStart."""
        try:
            return self._asked(describe, Described, self._start_seconds, f"entry point {describe.value}")
        except EnvironmentFailed as error:
            raise BrokenEnvironment(str(error)) from error

    def close(self) -> None:
        """Ends the process."""
        self._detach()
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _make(self, slot: int) -> Made:
        name = f"environment {self._names[slot]}"
        try:
            made = self._asked(self._slots[slot], Made, self._start_seconds, name)
        except EnvironmentFailed as error:
            raise BrokenEnvironment(str(error)) from error
        self._made.add(slot)
        return made

    def _asked(self, message: ToHost, answer: type[A], seconds: float, name: str) -> A:
        assert not self._groups, "A host is not asked while groups are under way."
        child = self._ready()
        try:
            child.send(message)
            said = _heard_from(child, time.monotonic() + seconds)
        except ChildEnded as error:
            raise EnvironmentFailed(f"The {name} failed: {error}") from error
        match said:
            case Refused(_, text, kind):
                raise _refusal(name, text, kind)
            case said if isinstance(said, answer):
                return said
            case _:
                child.kill()
                raise EnvironmentFailed(f"The {name} failed: its process answered with something else.")

    def _ready(self) -> Child[ToHost, FromHost]:
        """The process, with nothing unread in the pipe. Raises CannotStart."""
        child = self._child
        if child is None or not child.alive or self._spoilt:
            child = self._started()
        elif not self._unsettled:
            return child
        self._unsettled = False
        number = next(self._numbers)
        deadline = time.monotonic() + self._start_seconds
        try:
            child.send(Hello(number))
            while _heard_from(child, deadline) != Ready(number):
                pass  # what was asked within a loop that is gone
        except ChildEnded as error:
            raise CannotStart(f"The process for environments cannot be started here: {error}") from error
        return child

    def _started(self) -> Child[ToHost, FromHost]:
        self.close()
        self._made.clear()
        self._working, self._stray, self._spoilt = 0, 0.0, False
        self._starts, self._starting = 0, 0.0
        try:
            child: Child[ToHost, FromHost] = Child(self._launch, cast("type[FromHost]", FromHost))
        except OSError as error:
            raise CannotStart(f"The process for environments cannot be started here ({error}).") from error
        self._child = child
        return child

    # --- inside a loop ---------------------------------------------------------------------------

    async def collect(self, slot: int, task: Task, policy: Policy, agents: int) -> list[Trajectory]:
        """A group's trajectories, checked. Raises EnvironmentFailed, CannotStart, what the policy raises."""
        outcome: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        group = _Group(number, slot, self._names[slot], task, policy, Ledger(policy, agents), outcome)
        self._groups[number] = group
        try:
            self._begin(group)
            return await outcome
        finally:
            self._leave(group)

    def _begin(self, group: _Group) -> None:
        if self._clock is not None and not self._alive:
            group.repeats -= 1  # the loop is about to tell of its end: what is under way begins anew
            return
        self._attach()
        if group.slot not in self._made:
            self._made.add(group.slot)
            self._starts += 1
            self._say(self._slots[group.slot])
            self._say(Hello(0))
        policy, task = group.policy, group.task
        rules = Rules(
            policy.group,
            policy.max_tokens,
            policy.context,
            policy.logprob_format,
            policy.tokenizer.eos_id,
            policy.chat is not None,
        )
        self._say(Collect(group.number, group.slot, task.seed, task.level, rules))

    def _leave(self, group: _Group) -> None:
        del self._groups[group.number]
        for answer in group.answers:
            answer.cancel()
        group.ledger.close()
        self._unsettled = True
        self._say(Cancel(group.number))
        if not self._groups:
            self._detach()
            if self._spoilt:
                self.close()

    @property
    def _alive(self) -> bool:
        return self._child is not None and self._child.alive

    def _say(self, message: ToHost) -> None:
        """Where it is gone, the loop tells."""
        if self._child is not None:
            with suppress(ChildEnded):
                self._child.send(message)

    def _attach(self) -> None:
        if self._clock is not None:
            return
        child = self._child if self._child is not None and self._child.alive else self._started()
        child.attach(self._heard, self._ended)
        loop = asyncio.get_running_loop()
        self._looked = loop.time()
        self._clock = loop.call_later(TICK_S, self._tick)

    def _detach(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if self._child is not None:
            self._child.detach()

    def _heard(self, message: FromHost) -> None:
        match message:
            case Working(call):
                self._working, self._stray = call, 0.0
            case Ready():
                self._starts, self._starting = max(0, self._starts - 1), 0.0
            case Refused(slot, text, kind):
                self._refused(slot, text, kind)
            case Made():
                pass
            case Collected() | GaveUp() | Generate():
                group = self._groups.get(message.call)
                if group is not None:
                    self._told(group, message)
            case question if isinstance(question, Question):
                self._answer(question)
            case _:
                pass  # of a message that nobody waits for any more

    def _told(self, group: _Group, message: Collected | GaveUp | Generate) -> None:
        match message:
            case Generate(_, ask, requests):
                answer = asyncio.ensure_future(self._generated(group, ask, requests))
                group.answers.add(answer)
                answer.add_done_callback(group.answers.discard)
            case GaveUp(_, text):
                group.fail(_failure(group.name, text))
            case Collected(_, raw):
                self._take(group, raw)

    async def _generated(self, group: _Group, ask: int, requests: list[GenerateRequest]) -> None:
        child = self._child
        try:
            completions = await group.ledger.generate(requests)
        except EnvironmentFailed as error:
            group.fail(_failure(group.name, error))
        except Exception as error:  # the policy's own
            group.fail(error)
        else:
            if child is self._child:
                self._say(Sampled(group.number, ask, completions))

    def _take(self, group: _Group, raw: msgspec.Raw) -> None:
        try:
            trajectories = _trajectories.decode(raw)
            group.ledger.check(trajectories)
        except msgspec.MsgspecError as error:
            group.fail(_failure(group.name, f"it returned what is no trajectory: {error}."))
        except EnvironmentFailed as error:
            group.fail(_failure(group.name, error))
        else:
            if not group.outcome.done():
                group.outcome.set_result(trajectories)

    def _answer(self, question: Question) -> None:
        """At once: the host waits. A group that nobody waits for has none."""
        group = self._groups.get(question.call)
        if group is None:
            self._say(Failed(GONE))
            return
        began = time.monotonic()
        self._say(answered(question, group.policy))
        group.spent += time.monotonic() - began  # a flood of questions is the group's own work
        if group.spent > self._seconds:
            self._restart(group, f"it asked about texts for more than {self._seconds:g} s.")

    # --- what goes wrong -------------------------------------------------------------------------

    def _refused(self, slot: int, text: str, kind: str) -> None:
        """It was made before, and now cannot be: groups of it are not to blame."""
        self._made.discard(slot)
        for group in list(self._groups.values()):
            if group.slot == slot:
                group.fail(_refusal(f"environment {group.name}", text, "broken"))

    def _ended(self, error: ChildEnded) -> None:
        """The process died, or was ended for what it sent."""
        if self._starts:
            self._give_up(CannotStart(f"The process for environments cannot be started here: {error}"))
            return
        self._restart(self._groups.get(self._working), str(error))

    def _give_up(self, error: EnvError) -> None:
        for group in self._groups.values():
            group.fail(error)
        self.close()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        passed = min(loop.time() - self._looked, 2 * TICK_S)
        self._looked = loop.time()
        self._clock = loop.call_later(TICK_S, self._tick)
        if self._starts:
            self._starting += passed
            if self._starting > self._start_seconds:
                late = f"The process for environments did not start within {self._start_seconds:g} s."
                self._give_up(CannotStart(late))
        elif self._working:
            self._charge_working(passed)
        else:
            self._charge_waiting(passed)

    def _charge_working(self, passed: float) -> None:
        """Code runs, and nothing else in this process can."""
        group = self._groups.get(self._working)
        if group is None:
            self._stray += passed
        else:
            group.spent += passed
        if (self._stray if group is None else group.spent) > self._seconds:
            self._restart(group, f"it did not end within {self._seconds:g} s.")

    def _charge_waiting(self, passed: float) -> None:
        """No code runs: each group waits for the policy, or for something else."""
        for group in list(self._groups.values()):
            if not group.answers:
                group.spent += passed
                if group.spent > self._seconds:
                    self._spoilt = True
                    late = f"it neither asked for tokens nor ended within {self._seconds:g} s."
                    group.fail(_failure(group.name, late))

    def _restart(self, guilty: _Group | None, cause: str) -> None:
        """A new process, in which all but the guilty begin anew."""
        self.close()
        if guilty is not None:
            guilty.fail(_failure(guilty.name, cause))
        waiting = [group for group in self._groups.values() if not group.outcome.done()]
        for group in waiting:
            self._again(group, cause)

    def _again(self, group: _Group, cause: str) -> None:
        if group.repeats == REPEATS:
            again = f"its process ended {REPEATS + 1} times while it was at work. The last time: {cause}"
            group.fail(_failure(group.name, again))
            return
        group.repeats += 1
        group.spent = 0.0
        for answer in group.answers:
            answer.cancel()
        group.ledger.again()
        try:
            self._begin(group)
        except EnvError as error:
            group.fail(error)


def _heard_from(child: Child[ToHost, FromHost], deadline: float) -> FromHost:
    """The next answer, past whatever groups that were cancelled still say."""
    while True:
        said = child.hear(deadline - time.monotonic())
        if not isinstance(said, Aside):
            return said
        if isinstance(said, Question):
            child.send(Failed(GONE))


def _failure(name: str, cause: object) -> EnvironmentFailed:
    return EnvironmentFailed(f"The environment {name} failed: {cause}")


def _refusal(name: str, text: str, kind: str) -> EnvError:
    match kind:
        case "config":
            return BadConfig(text)
        case "unknown":
            return UnknownEnvironment(text)
        case "failed":
            return EnvironmentFailed(f"The {name} failed: {text}")
        case _:
            return BrokenEnvironment(f"The {name} cannot be used: {text}")
