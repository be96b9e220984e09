"""Processes of its own for an environment that is checked: two alike, and one with another hash seed."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import psutil

from nous_node.envs.batcher import Batcher, Engine, Job, Outcome
from nous_node.envs.environment import Environment, PolicySettings
from nous_node.envs.host_process import HostProcess
from nous_node.envs.registry import Place
from nous_node.envs.remote import RemoteEnvironment, made_in
from nous_node.envs.sandbox import Launch
from nous_node.protocol.runs import Setting
from nous_node.protocol.tasks import assign

FIRST: Final = 0
SECOND: Final = 1
HASHED: Final = 2
"""With another hash seed than nodes use."""

BWRAP: Final = 2
"""Processes inside a sandbox before anything is started there: bubblewrap's own and the interpreter."""

MAX_FILES: Final = 1_000
"""Files that are counted."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What an environment left in its process."""

    stderr: str
    """The end of it, printable."""
    processes: tuple[str, ...]
    """Names of those that it started and that still run."""
    files: int
    """In its temporary folder; -1: that could not be looked into."""
    resident: int
    space: int
    """Bytes of memory and of address space."""


class Spot(NamedTuple):
    """Names a task."""

    seed: bytes
    level: int


class Hosts:
    """Started when they are needed; `with` ends them. For one thread at a time.

    `seconds`: of one call, instead of the node's.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._processes: dict[tuple[Launch, int], HostProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.close()

    def process(self, place: Place, number: int) -> HostProcess:
        """The same one for all environments of a family."""
        launch = replace(place.launch, hash_seed=1) if number == HASHED else place.launch
        if (launch, number) not in self._processes:
            made = HostProcess(launch) if self._seconds is None else HostProcess(launch, self._seconds)
            self._processes[launch, number] = made
        return self._processes[launch, number]

    def make(self, place: Place, config: Mapping[str, Setting], number: int) -> RemoteEnvironment:
        """Raises BadConfig, BrokenEnvironment, UnknownEnvironment, CannotStart."""
        return made_in(self.process(place, number), place.info, place.value, place.member, config)

    def output(self, place: Place) -> str:
        """The end of what the first process wrote so far, printable."""
        child = self.process(place, FIRST).child
        return "" if child is None else child.tail

    def traces(self, place: Place) -> Traces:
        """Of the first process."""
        child = self.process(place, FIRST).child
        if child is None:
            return Traces("", (), -1, 0, 0)
        outer = psutil.Process(child.pid)
        inside = [outer, *outer.children(recursive=True)]
        own = BWRAP + 1 if place.launch.sandboxed else 1
        host = inside[min(own, len(inside)) - 1]
        memory = host.memory_info()
        started = tuple(_name(one) for one in inside[own:])
        files = _files(host.pid) if place.launch.sandboxed else -1
        return Traces(child.tail, started, files, memory.rss, memory.vms)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "one that has ended"


def _files(pid: int) -> int:
    """Files in the sandbox's own folder for them, without what is mounted below it."""
    folder, count = Path(f"/proc/{pid}/root/tmp"), 0
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        for path in folder.rglob("*"):
            facts = path.lstat()
            count += stat.S_ISREG(facts.st_mode) and facts.st_dev == device
            if count == MAX_FILES:
                break
        return count
    return -1


def played(
    environment: Environment, settings: PolicySettings, engine: Engine, spots: Sequence[Spot]
) -> list[Outcome]:
    """A group of each task, all at once."""
    jobs = [Job(environment, environment.task(*spot), assign(spot.seed, [1])) for spot in spots]
    with Batcher(settings, engine) as batcher:
        return batcher.run(jobs)
