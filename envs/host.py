"""The process in which environments run that are not ours: it has no weights, no keys and no network.

    python -m nous_node.envs.host

It makes the environments that the node names, and runs them on one event loop: many groups at once. Its
policy is the node's, asked through the pipe. Whatever an environment raises becomes a sentence. It runs in
the interpreter of the environment's library, so it imports little: this package, the protocol's structures,
msgspec, msgpack, cryptography, zstandard.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from nous_node.protocol.rollouts import Trajectory

from .environment import Environment, EnvironmentInfo, GenerateRequest, Task
from .environment import HeldOut as WithHeldOut
from .errors import BadConfig, BrokenEnvironment, EnvError, EnvironmentFailed, UnknownEnvironment
from .host_line import CALL, CallLoop, Line
from .host_messages import (
    MAX_SAID,
    Cancel,
    Collect,
    Collected,
    Describe,
    Described,
    FromHost,
    GaveUp,
    Generate,
    HeldOut,
    Hello,
    Made,
    Make,
    Prompt,
    Ready,
    Refused,
    Sampled,
    ScoreAll,
    Scores,
    Tasks,
    Text,
    ToHost,
    Working,
)
from .host_policy import Asks, HostPolicy


@dataclass(slots=True)
class Slot:
    """An environment that was made."""

    name: str
    environment: Environment
    held_out: dict[tuple[int, int], dict[bytes, Task]] = field(default_factory=dict)
    """(count, level) -> its held-out tasks by seed."""

    def evaluated(self, count: int, level: int) -> dict[bytes, Task]:
        if (count, level) not in self.held_out:
            environment = cast(WithHeldOut, self.environment)
            self.held_out[count, level] = {task.seed: task for task in environment.held_out(count, level)}
        return self.held_out[count, level]

    def task(self, seed: bytes, level: int, held_out: int) -> Task:
        if held_out and (found := self.evaluated(held_out, level).get(seed)) is not None:
            return found
        return self.environment.task(seed, level)


@dataclass(slots=True)
class Call:
    """A group under way."""

    asks: Asks
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Its own and all that it started."""


class Host:
    """The environments of this process and the groups under way."""

    def __init__(self, line: Line, loop: CallLoop) -> None:
        self._line, self._loop = line, loop
        self._slots: dict[int, Slot] = {}
        self._calls: dict[int, Call] = {}
        self._told = 0
        loop.working, loop.idle = self._working, self._idle
        loop.set_task_factory(cast(Any, self._task))  # typeshed knows no factory that takes a context

    def act(self, message: ToHost) -> None:
        match message:
            case Hello(number):
                self._line.send(Ready(number))
            case Describe():
                self._answer(0, lambda: _described(message))
            case Make():
                self._answer(message.slot, lambda: self._made(message))
            case HeldOut(slot, count, level):
                self._answer(slot, lambda: Tasks(list(self._slots[slot].evaluated(count, level))))
            case Prompt() | ScoreAll():
                self._answer(message.slot, lambda: self._looked_at(message))
            case Collect():
                self._begin(message)
            case Cancel(call):
                self._end(call)
            case Sampled(call, ask, completions):
                if call in self._calls:
                    self._calls[call].asks.answered(ask, completions)
            case _:
                pass  # an answer that nobody waits for any more

    def _answer(self, slot: int, work: Callable[[], FromHost]) -> None:
        try:
            answer = work()
            self._line.send(answer)
        except BaseException as error:  # somebody else's code, which may also try to leave
            self._line.send(Refused(slot, told(error), _kind(error)))

    def _made(self, make: Make) -> Made:
        loaded = load(make.value)
        if make.member:
            environment = cast(Environment, loaded.make(make.member, make.config))
        else:
            environment = cast(Environment, loaded(make.config))
        self._slots[make.slot] = Slot(environment.info.id, environment)
        return Made(make.slot, int(environment.levels), isinstance(environment, WithHeldOut))

    def _looked_at(self, message: Prompt | ScoreAll) -> Text | Scores:
        slot = self._slots[message.slot]
        environment = cast(WithHeldOut, slot.environment)
        task = slot.task(message.seed, message.level, message.held_out)
        if isinstance(message, Prompt):
            return Text(environment.prompt(task))
        return Scores([environment.score(task, one.text, one.ended) for one in message.answers])

    # --- groups ----------------------------------------------------------------------------------

    def _begin(self, collect: Collect) -> None:
        def send(ask: int, requests: list[GenerateRequest]) -> None:
            self._line.send(Generate(collect.call, ask, requests))

        self._calls[collect.call] = Call(Asks(send))
        context = contextvars.copy_context()
        context.run(CALL.set, collect.call)
        context.run(self._loop.create_task, self._worked(collect))

    async def _worked(self, collect: Collect) -> None:
        """Runs one group, and says how it ended."""
        try:
            self._line.send(Collected(collect.call, msgspec.Raw(await self._collected(collect))))
        except asyncio.CancelledError as error:
            if collect.call in self._calls:  # not by the node: by the environment
                self._line.send(GaveUp(collect.call, told(error)))
        except BaseException as error:  # somebody else's code, which may also try to leave
            self._line.send(GaveUp(collect.call, told(error)))
        finally:
            self._end(collect.call)

    async def _collected(self, collect: Collect) -> bytes:
        slot = self._slots[collect.slot]
        policy = HostPolicy(self._line, collect.call, collect.rules, self._calls[collect.call].asks.ask)
        task = slot.task(collect.seed, collect.level, 0)
        returned = await slot.environment.collect_trajectories(task, policy)
        return packed(returned)

    def _end(self, call: int) -> None:
        """Cancels whatever a call has left running."""
        ended = self._calls.pop(call, None)
        if ended is not None:
            for task in ended.tasks:
                if task is not asyncio.current_task(self._loop):
                    task.cancel()

    # --- what the loop tells ---------------------------------------------------------------------

    def _task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        context: contextvars.Context | None = None,
        **named: Any,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, context=context, **named)
        call = self._calls.get(CALL.get() if context is None else context.get(CALL, 0))
        if call is not None:
            call.tasks.add(task)
            task.add_done_callback(call.tasks.discard)
        return task

    def _working(self, call: int) -> None:
        if call != self._told:
            self._told = call
            self._line.send(Working(call))

    def _idle(self) -> None:
        for call in list(self._calls.values()):
            call.asks.flush()
        self._working(0)


def load(value: str) -> Any:
    """What an entry point names."""
    module, _, path = value.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def _described(describe: Describe) -> Described:
    loaded = load(describe.value)
    if isinstance(getattr(loaded, "info", None), EnvironmentInfo) and callable(loaded):
        return Described(loaded.info)
    if not all(callable(getattr(loaded, name, None)) for name in ("members", "facts", "make")):
        raise BrokenEnvironment(f"{describe.value} is no environment: it has no `info`. Remove its package.")
    if describe.member:
        return Described(loaded.facts(describe.member))
    return Described(None, list(loaded.members()))


def packed(returned: object) -> bytes:
    """Trajectories as msgpack. Raises EnvironmentFailed for anything else."""
    if not isinstance(returned, list):
        raise EnvironmentFailed(
            f"The environment returned {_named(returned)} where a list of trajectories belongs."
        )
    for one in returned:
        if not isinstance(one, Trajectory):
            raise EnvironmentFailed(
                f"The environment returned a list with {_named(one)} in it, not trajectories."
            )
    try:
        return msgspec.msgpack.encode(returned)
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFailed(
            f"The environment returned trajectories that cannot be sent: {error}."
        ) from error


def _named(value: object) -> str:
    return {str: "a text", bytes: "bytes", type(None): "nothing"}.get(
        type(value), f"a {type(value).__name__}"
    )


def told(error: BaseException) -> str:
    """An error as one sentence: an EnvError's own, else its type and text."""
    try:
        text = str(error)
    except Exception:  # somebody else's class
        text = ""
    if not isinstance(error, EnvError):
        text = f"{type(error).__name__}: {text}".rstrip(".: ") + "."
    return text[:MAX_SAID]


def _kind(error: BaseException) -> Any:
    match error:
        case UnknownEnvironment():
            return "unknown"
        case BadConfig():
            return "config"
        case EnvironmentFailed():
            return "failed"
        case _:
            return "broken"


def main() -> None:
    line = Line.take_over()
    loop = CallLoop()
    asyncio.set_event_loop(loop)
    line.serve(loop, Host(line, loop).act)
    loop.run_forever()
    os._exit(0)  # threads of an environment may never end


if __name__ == "__main__":
    main()
