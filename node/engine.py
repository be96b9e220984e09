"""The worker process as the volunteer sees it: orders in, groups out, and a new process when one dies.

A worker that hangs (no sign of life), grows beyond its memory or crashes is ended; the orders in work are
lost and the caller is told in one sentence. Nothing that happens in a worker ends the node, except that the
worker finds that what it makes would be refused.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import trio

from nous_node.protocol.errors import LocalError

from .child_log import open_log
from .pipe import ChildDied, ChildPipe, end_child, start_child
from .worker_messages import (
    Checked,
    Checking,
    Failed,
    FromWorker,
    Generate,
    Group,
    Load,
    Loaded,
    Made,
    Order,
    Prepare,
    Progress,
    ToWorker,
    Unfit,
)

START_SECONDS = 180.0
"""Until a new worker has imported torch and loaded a policy, on a slow disk."""

SILENCE_SECONDS = 120.0
"""A worker that samples no token for this long hangs: one step of the largest model on a CPU takes
seconds, and an environment's scorer has its own deadline well below."""

CHECK_SECONDS = 600.0
"""For a worker that verifies its first groups: the weights once more in float32, read on a CPU."""

MEMORY_CHECK_SECONDS = 1.0

WORKER = "nous_node.node.worker"
"""The module that a worker process runs."""


class WorkerError(LocalError):
    """The worker could not do its work; the orders in work are lost."""


class LoadError(WorkerError):
    """A policy could not be loaded; the worker lives on with the one that it had, if any."""


class UnfitEngineError(LocalError):
    """What is made on this machine would be refused by the run; the text says what to try."""


def _ignore(checked: Checked) -> None:
    pass


def _unheard(seconds: float, environments: float) -> None:
    pass


class Engine:
    """One worker process at a time, started when it is needed. `memory` in bytes; `silence`: seconds without
    a sign of life after which it is ended."""

    def __init__(
        self,
        *,
        memory: int,
        nice: int,
        threads: int,
        log: Path,
        module: str = WORKER,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self._memory, self._nice, self._threads, self._log = memory, nice, threads, log
        self._module, self._silence = module, silence
        self._pipe: ChildPipe[ToWorker, FromWorker] | None = None
        self._why = ""

    @property
    def pid(self) -> int | None:
        return None if self._pipe is None else self._pipe.process.pid

    async def start(self) -> None:
        """Lets the worker import torch while there is nothing to load yet."""
        if self._pipe is None:
            self._pipe = await self._start()

    async def load(self, load: Load) -> Loaded:
        """Gives the worker a policy, starting a process if there is none. Raises WorkerError; LoadError where
        only this policy is to blame."""
        async with self._conversation() as pipe:
            await pipe.send(load)
            match answer := await self._heard(pipe, START_SECONDS):
                case Loaded() | Failed():
                    pass
                case other:
                    raise WorkerError(_unexpected(other))
        if isinstance(answer, Failed):
            raise LoadError(answer.text)
        return answer

    async def prepare(self, prepare: Prepare) -> None:
        """Has the worker read a policy while it works; without a worker there is nothing to do. Must not be
        cancelled unless the worker is to end."""
        if self._pipe is not None:
            with suppress(ChildDied):  # whoever talks to it next is told
                await self._pipe.send(prepare)

    async def generate(
        self,
        orders: Sequence[Order],
        progress: Callable[[int], None],
        checked: Callable[[Checked], None] = _ignore,
        spent: Callable[[float, float], None] = _unheard,
    ) -> list[Group]:
        """Groups for all orders; `progress` hears of sampled tokens, `checked` of how the worker verified its
        first groups, `spent` of the seconds that they took and those of them in environments. Raises
        WorkerError, and UnfitEngineError where they would be refused."""
        async with self._conversation() as pipe:
            await pipe.send(Generate(list(orders)))
            silence = self._silence
            while True:
                match await self._answer(pipe, silence):
                    case Progress(tokens):
                        progress(tokens)
                    case Checking():
                        silence = CHECK_SECONDS
                    case Checked() as told:
                        checked(told)
                    case Made(groups, seconds, environments):
                        spent(seconds, environments)
                        return groups
                    case other:
                        raise WorkerError(_unexpected(other))

    async def watch_memory(self) -> None:
        """Kills a worker that grows beyond its limit, with all it started; runs beside the role."""
        while True:
            await trio.sleep(MEMORY_CHECK_SECONDS)
            pid = self.pid
            if pid is None:
                continue
            used = await trio.to_thread.run_sync(memory_of, pid)
            if used > self._memory and self._runs(pid):
                self._why = (
                    f"The worker used {used / 2**30:.1f} GiB of memory; {self._memory / 2**30:.1f} GiB "
                    "are allowed. Raise --memory, or take part in a run with a smaller model."
                )
                with suppress(ProcessLookupError):  # it leads a group: what it started ends with it
                    os.killpg(pid, signal.SIGKILL)

    def _runs(self, pid: int) -> bool:
        """Whether that is the worker's process, and not reaped: its id cannot be anybody else's."""
        return self._pipe is not None and self.pid == pid and self._pipe.process.returncode is None

    async def close(self) -> None:
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            await end_child(pipe.process)

    @asynccontextmanager
    async def _conversation(self) -> AsyncIterator[ChildPipe[ToWorker, FromWorker]]:
        """A pipe that is closed, with its process, unless the conversation ends well: after a failure or
        a cancellation nobody knows what the worker would say next."""
        await self.start()
        assert self._pipe is not None
        done = False
        try:
            yield self._pipe
            done = True
        except ChildDied as error:
            why, self._why = self._why or str(error), ""
            raise WorkerError(f"{why} The groups in work are made again; its log is {self._log}.") from error
        finally:
            if not done:
                await self.close()

    async def _start(self) -> ChildPipe[ToWorker, FromWorker]:
        threads = str(self._threads)
        with open_log(self._log) as log:
            return await start_child(
                self._module,
                FromWorker,  # type: ignore[arg-type]
                log.fileno(),
                {
                    "NOUS_NODE_WORKER_NICE": str(self._nice),
                    "OMP_NUM_THREADS": threads,
                    "MKL_NUM_THREADS": threads,
                    "TOKENIZERS_PARALLELISM": "false",
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONHASHSEED": "0",
                },
            )

    async def _answer(
        self, pipe: ChildPipe[ToWorker, FromWorker], seconds: float
    ) -> Loaded | Progress | Checking | Checked | Made:
        message = await self._heard(pipe, seconds)
        if isinstance(message, Failed):
            raise WorkerError(message.text)
        if isinstance(message, Unfit):
            raise UnfitEngineError(message.text)
        return message

    async def _heard(self, pipe: ChildPipe[ToWorker, FromWorker], seconds: float) -> FromWorker:
        with trio.move_on_after(seconds):
            return await pipe.receive()
        raise ChildDied(f"The worker gave no sign of life for {seconds:.0f} s and was ended.")


def memory_of(pid: int) -> int:
    """Bytes that a process and all it started take; pages that a child shares with it count once. 0 where it
    is gone."""
    try:
        process = psutil.Process(pid)
        used = int(process.memory_info().rss)
        children = process.children(recursive=True)
    except psutil.Error:
        return 0
    for child in children:
        with suppress(psutil.Error):
            used += int(child.memory_full_info().uss)
    return used


def _unexpected(message: object) -> str:
    return f"The worker answered with a {type(message).__name__}, which was not asked for."
