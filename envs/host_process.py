"""A host process as the node sees it: environments in it, and a new process when it ends.

outside of a loop    make, ask, describe: one message, one answer, a deadline
inside one           collect: a group, one of many (`host_groups`)
"""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from typing import Final, TypeVar, cast

from nous_node.protocol.rollouts import Trajectory

from .access import DEFAULT_SECONDS
from .child import Child, ChildEnded
from .environment import Policy, Task
from .errors import BrokenEnvironment, EnvError, EnvironmentFailed
from .host_failures import cannot_start, refusal
from .host_groups import GONE, Groups
from .host_messages import (
    Aside,
    Describe,
    Described,
    Failed,
    FromHost,
    Hello,
    Made,
    Make,
    Question,
    Ready,
    Refused,
    ToHost,
)
from .sandbox import Launch

CALL_S: Final = float(DEFAULT_SECONDS)
START_S: Final = 180.0
"""Seconds until a process has started and an environment is made: libraries of 300 MB from a slow disk."""

A = TypeVar("A", bound=FromHost)


class HostProcess:
    """One process at a time, started when it is needed. For one thread at a time.

    `seconds`: of a call, instead of the launch's; `start`: until it has started.
    """

    def __init__(self, launch: Launch, seconds: float | None = None, start: float = START_S) -> None:
        self.launch, self.start = launch, start
        self.seconds = launch.seconds if seconds is None else seconds
        self.child: Child[ToHost, FromHost] | None = None
        self.slots: dict[int, Make] = {}
        """How each environment is made."""
        self.names: dict[int, str] = {}
        self.made: set[int] = set()
        """Those that the present process has, or is making."""
        self.unsettled = False
        """Whether messages of ended groups may still be in the pipe."""
        self.spoilt = False
        """Whether something is left running in it that nobody waits for."""
        self._played = 0
        """Groups that began in the present process."""
        self._numbers = itertools.count(1)
        self._groups = Groups(self)

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.alive

    def number(self) -> int:
        """One that was not used before, for an environment or a group."""
        return next(self._numbers)

    def make(self, name: str, make: Make) -> Made:
        """Makes an environment. Raises BadConfig, BrokenEnvironment, UnknownEnvironment, CannotStart."""
        self.names[make.slot], self.slots[make.slot] = name, make
        try:
            return self._make(make.slot)
        except EnvError:
            if not self.made:
                self.close()  # a run may name any number of what cannot be made
            raise

    def ask(self, message: ToHost, answer: type[A], slot: int) -> A:
        """About an environment that was made.

        Raises EnvironmentFailed where there is no answer in time or another one, and what `make` raises."""
        if not self.alive or slot not in self.made:
            self._make(slot)
        return self._asked(message, answer, self.seconds, f"environment {self.names[slot]}")

    def describe(self, describe: Describe) -> Described:
        """Raises UnknownEnvironment, BrokenEnvironment, CannotStart."""
        try:
            return self._asked(describe, Described, self.start, f"entry point {describe.value}")
        except EnvironmentFailed as error:
            raise BrokenEnvironment(str(error)) from error

    async def collect(self, slot: int, task: Task, policy: Policy, agents: int) -> list[Trajectory]:
        """A group's trajectories, checked. Raises EnvironmentFailed, CannotStart, what the policy raises."""
        self._played += 1
        return await self._groups.collect(slot, task, policy, agents)

    def renew(self) -> bool:
        """Ends the process where more than one group was played in it; whether it did. Outside of a loop."""
        if not self.alive or self._played < 2:
            return False
        self.close()
        return True

    def say(self, message: ToHost) -> None:
        """Inside a loop. Where the process is gone, the loop tells."""
        if self.child is not None:
            with suppress(ChildEnded):
                self.child.send(message)

    def started(self) -> Child[ToHost, FromHost]:
        """A new process. Raises CannotStart."""
        self.close()
        self.made.clear()
        self.spoilt = False
        self._played = 0
        self._groups.settled()
        try:
            child: Child[ToHost, FromHost] = Child(self.launch, cast("type[FromHost]", FromHost))
        except OSError as error:
            raise cannot_start(f"{error}.") from error
        self.child = child
        return child

    def close(self) -> None:
        """Ends the process."""
        self._groups.detach()
        if self.child is not None:
            self.child.kill()
            self.child = None

    def _make(self, slot: int) -> Made:
        name = f"environment {self.names[slot]}"
        try:
            made = self._asked(self.slots[slot], Made, self.start, name)
        except EnvironmentFailed as error:
            raise BrokenEnvironment(str(error)) from error
        self.made.add(slot)
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
                raise refusal(name, text, kind)
            case said if isinstance(said, answer):
                return said
            case _:
                child.kill()
                raise EnvironmentFailed(f"The {name} failed: its process answered with something else.")

    def _ready(self) -> Child[ToHost, FromHost]:
        """The process, with nothing unread in the pipe. Raises CannotStart."""
        child = self.child
        if child is None or not child.alive or self.spoilt:
            child = self.started()
        elif not self.unsettled:
            return child
        self.unsettled = False
        number, deadline = self.number(), time.monotonic() + self.start
        try:
            child.send(Hello(number))
            while _heard_from(child, deadline) != Ready(number):
                pass  # what was asked within a loop that is gone
        except ChildEnded as error:
            raise cannot_start(str(error)) from error
        self._groups.settled()
        return child


def _heard_from(child: Child[ToHost, FromHost], deadline: float) -> FromHost:
    """The next answer, past whatever groups that were cancelled still say."""
    while True:
        said = child.hear(deadline - time.monotonic())
        if not isinstance(said, Aside):
            return said
        if isinstance(said, Question):
            child.send(Failed(GONE))
