"""The groups that a host process works on, inside an event loop: many at once.

The first of several attaches the process to the loop, the last detaches it, so that each batch may have a
loop of its own.

A group's clock runs while its own code runs, or while it waits for something that is not the policy. At its
deadline, or when the process dies, the group whose code ran last is given up by name; the others begin anew
in another process, once, with what was sampled for them before.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from nous_node.protocol.rollouts import Trajectory

from .child import ChildEnded
from .environment import GenerateRequest, Policy, Task
from .errors import EnvError, EnvironmentFailed, Interrupted
from .host_answers import answered
from .host_failures import cannot_start, failure, refusal
from .host_messages import (
    Cancel,
    Collect,
    Collected,
    Failed,
    FromHost,
    GaveUp,
    Generate,
    Hello,
    Made,
    Question,
    Ready,
    Refused,
    Rules,
    Sampled,
    Working,
)
from .ledger import Ledger

if TYPE_CHECKING:
    from .host_process import HostProcess

TICK_S: Final = 0.25
"""Between looks at the clocks. No more than twice that is charged at once: longer pauses are the engine's."""
REPEATS: Final = 1
"""How often a group begins anew because of another one."""

GONE: Final = "Nobody waits for this group any more."

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


class Groups:
    """Those under way in one process."""

    def __init__(self, process: HostProcess) -> None:
        self._process = process
        self._running: dict[int, _Group] = {}
        self._working = 0
        """Whose code runs; 0: nobody's."""
        self._stray = 0.0
        """Seconds that code of a group runs that nobody waits for, since a group went on. What the process
        says of whose code runs ends none of it: it could say so for ever."""
        self._starts = 0
        """Environments that are being made: until then no group's clock runs."""
        self._starting = 0.0
        """Seconds that this takes so far."""
        self._looked = 0.0
        self._clock: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._running)

    def settled(self) -> None:
        """The process is new, or has said all that it had to say."""
        self._working, self._stray, self._starts, self._starting = 0, 0.0, 0, 0.0

    async def collect(self, slot: int, task: Task, policy: Policy, agents: int) -> list[Trajectory]:
        """A group's trajectories, checked. Raises EnvironmentFailed, CannotStart, what the policy raises."""
        outcome: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
        number = self._process.number()
        group = _Group(number, slot, self._process.names[slot], task, policy, Ledger(policy, agents), outcome)
        self._running[number] = group
        try:
            self._begin(group)
            return await outcome
        finally:
            self._leave(group)

    def _begin(self, group: _Group) -> None:
        if self._clock is not None and not self._process.alive:
            group.repeats -= 1  # the loop is about to tell of its end: what is under way begins anew
            return
        self._attach()
        if group.slot not in self._process.made:
            self._process.made.add(group.slot)
            self._starts += 1
            self._process.say(self._process.slots[group.slot])
            self._process.say(Hello(0))
        policy, task = group.policy, group.task
        rules = Rules(
            policy.group,
            policy.max_tokens,
            policy.context,
            policy.logprob_format,
            policy.tokenizer.eos_id,
            policy.chat is not None,
        )
        self._process.say(Collect(group.number, group.slot, task.seed, task.level, rules))

    def _leave(self, group: _Group) -> None:
        del self._running[group.number]
        for answer in group.answers:
            answer.cancel()
        group.ledger.close()
        self._process.unsettled = True
        self._process.say(Cancel(group.number))
        if not self._running:
            self.detach()
            if self._process.spoilt:
                self._process.close()

    def _attach(self) -> None:
        if self._clock is not None:
            return
        child = self._process.child
        if child is None or not child.alive:
            child = self._process.started()
        child.attach(self._heard, self._ended)
        loop = asyncio.get_running_loop()
        self._looked = loop.time()
        self._clock = loop.call_later(TICK_S, self._tick)

    def detach(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if self._process.child is not None:
            self._process.child.detach()

    def _heard(self, message: FromHost) -> None:
        match message:
            case Working(call):
                self._working = call
            case Ready():
                self._starts, self._starting = max(0, self._starts - 1), 0.0
            case Refused(slot, text, kind):
                self._refused(slot, text, kind)
            case Made():
                pass
            case Collected() | GaveUp() | Generate():
                group = self._running.get(message.call)
                if group is not None:
                    self._stray = 0.0
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
                group.fail(failure(group.name, text))
            case Collected(_, raw):
                self._take(group, raw)

    async def _generated(self, group: _Group, ask: int, requests: list[GenerateRequest]) -> None:
        child = self._process.child
        try:
            completions = await group.ledger.generate(requests)
        except EnvironmentFailed as error:
            group.fail(failure(group.name, error))
        except Exception as error:  # the policy's own
            group.fail(error)
        else:
            if child is self._process.child:
                self._process.say(Sampled(group.number, ask, completions))

    def _take(self, group: _Group, raw: msgspec.Raw) -> None:
        try:
            trajectories = _trajectories.decode(raw)
            group.ledger.check(trajectories)
        except msgspec.MsgspecError as error:
            group.fail(failure(group.name, f"it returned what is no trajectory: {error}."))
        except EnvironmentFailed as error:
            group.fail(failure(group.name, error))
        else:
            if not group.outcome.done():
                group.outcome.set_result(trajectories)

    def _answer(self, question: Question) -> None:
        """At once: the host waits. A group that nobody waits for has none."""
        group = self._running.get(question.call)
        if group is None:
            self._process.say(Failed(GONE))
            return
        began = time.monotonic()
        self._process.say(answered(question, group.policy))
        group.spent += time.monotonic() - began  # a flood of questions is the group's own work
        if group.spent > self._process.seconds:
            self._restart(group, f"it asked about texts for more than {self._process.seconds:g} s.")

    # --- what goes wrong -------------------------------------------------------------------------

    def _refused(self, slot: int, text: str, kind: str) -> None:
        """It was made before, and now cannot be: groups of it are not to blame."""
        self._process.made.discard(slot)
        for group in list(self._running.values()):
            if group.slot == slot:
                group.fail(refusal(f"environment {group.name}", text, "broken"))

    def _ended(self, error: ChildEnded) -> None:
        """The process died, or was ended for what it sent."""
        if self._starts:
            self._give_up(cannot_start(str(error)))
            return
        self._restart(self._running.get(self._working), str(error))

    def _give_up(self, error: EnvError) -> None:
        for group in self._running.values():
            group.fail(error)
        self._process.close()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        passed = min(loop.time() - self._looked, 2 * TICK_S)
        self._looked = loop.time()
        self._clock = loop.call_later(TICK_S, self._tick)
        if self._starts:
            self._starting += passed
            if self._starting > self._process.start:
                late = f"nothing was heard of it within {self._process.start:g} s."
                self._give_up(cannot_start(late))
        elif self._working:
            self._charge_working(passed)
        else:
            self._charge_waiting(passed)

    def _charge_working(self, passed: float) -> None:
        """Code runs, and nothing else in this process can."""
        group = self._running.get(self._working)
        if group is None:
            self._stray += passed
        else:
            group.spent += passed
        if (self._stray if group is None else group.spent) > self._process.seconds:
            self._restart(group, f"it did not end within {self._process.seconds:g} s.")

    def _charge_waiting(self, passed: float) -> None:
        """No code runs: each group waits for the policy, or for something else."""
        for group in list(self._running.values()):
            if not group.answers:
                group.spent += passed
                if group.spent > self._process.seconds:
                    self._process.spoilt = True
                    late = f"it neither asked for tokens nor ended within {self._process.seconds:g} s."
                    group.fail(failure(group.name, late))

    def _restart(self, guilty: _Group | None, cause: str) -> None:
        """A new process, in which all but the guilty begin anew."""
        self._process.close()
        if guilty is not None:
            guilty.fail(failure(guilty.name, cause))
        waiting = [group for group in self._running.values() if not group.outcome.done()]
        for group in waiting:
            self._again(group, cause, guilty)

    def _again(self, group: _Group, cause: str, guilty: _Group | None) -> None:
        if group.repeats == REPEATS:
            times = f"its process ended {REPEATS + 1} times while it was at work. The last time"
            if guilty is None:  # it may have been this one
                group.fail(failure(group.name, f"{times}: {cause}"))
            else:
                group.fail(Interrupted(f"A group of {group.name} is lost: {times} over {guilty.name}."))
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
