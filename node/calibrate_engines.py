"""Honest rollouts of a calibration, made and judged under every set of vector instructions of this machine.

    worker processes make groups  ->  the native judge sees all, others see some, and some singly

Other sums are other roundings: kernels for other instructions, thread counts and batch sizes differ among
themselves as the machines of volunteers do. A process takes its instructions from its environment when it
starts, so there is one for each set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from nous_node.envs.access import NONE, Access
from nous_node.envs.registry import make_entry
from nous_node.protocol.errors import LocalError
from nous_node.protocol.tasks import task_seed

from .calibrate_figures import Observation
from .calibrate_messages import Begin, Begun, FromJudge, Judge, Seen, ToJudge, Unfit
from .child_log import open_log
from .learner_messages import Candidate
from .pipe import ChildPipe, Received, Sent, end_child, start_child
from .runfolder import RunFolder
from .worker_messages import (
    Failed,
    FromWorker,
    Generate,
    Group,
    Load,
    Loaded,
    Made,
    Order,
    Progress,
    ToWorker,
)

WORKER = "nous_node.node.worker"
JUDGE = "nous_node.node.calibrate_judge"

CALLS = (8, 1, 16, 2, 32, 4)
"""Groups of one call of the engine, again and again; as rollouts end, rows leave a batch down to one."""

JUDGED = 16
"""Groups of one call of a judge."""

OTHERS_EVERY, SINGLE_EVERY, STRANGE = 8, 16, 8
"""Every which group other instructions judge as well, and every which is recomputed trajectory by trajectory;
groups that are judged under other sampler keys. Each costs as much as judging it first."""

KEY, BEACON, CHECKPOINT = b"calibrate".ljust(32), bytes(32), bytes(32)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A set of vector instructions and a number of threads."""

    name: str
    threads: int
    weight: int
    """Of each 16 groups it makes so many."""
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        threads = str(self.threads)
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            **dict(self.settings),
        }


def kernels(capability: str, threads: int) -> list[Kernel]:
    """Of a machine with this capability (`torch.backends.cpu.get_cpu_capability()`), the native one first.

    Few groups of the smallest sets: bfloat16 is many times slower there."""
    older = {
        "AVX512": (("avx2", "AVX2", "AVX2", 3), ("default", "SSE41", "SSE4_2", 1)),
        "AVX2": (("default", "SSE41", "SSE4_2", 2),),
    }.get(capability, ())
    found = [
        Kernel(
            name,
            1,
            weight,
            (
                ("ATEN_CPU_CAPABILITY", name),
                ("ONEDNN_MAX_CPU_ISA", onednn),
                ("MKL_ENABLE_INSTRUCTIONS", mkl),
            ),
        )
        for name, onednn, mkl, weight in older
    ]
    rest = 16 - sum(kernel.weight for kernel in found)
    return [Kernel(capability.lower(), threads, rest), *found]


@dataclass(frozen=True, slots=True)
class Sights:
    """What judges saw: of honest groups, and of the same tokens under other sampler keys."""

    honest: list[Observation]
    strange: list[Observation]


@dataclass(slots=True)
class Course:
    """A calibration under way. `told` hears of groups made and groups judged, one call after the other."""

    run: RunFolder
    kernels: Sequence[Kernel]
    groups: int
    log: Path
    access: Access = NONE
    told: Callable[[int, int], object] = lambda made, judged: None

    async def measure(self) -> Sights:
        """Makes all groups and judges them. Raises LocalError, ChildDied among them."""
        made: dict[int, tuple[Kernel, Candidate]] = {}
        for kernel, counters in zip(self.kernels, self._shares(), strict=True):
            for counter, candidate in zip(counters, await self._made(kernel, counters), strict=True):
                made[counter] = kernel, candidate
        sights = Sights([], [])
        for judge, sessions in self._sessions():
            await self._judged(judge, made, sessions, sights)
        return sights

    @property
    def judgements(self) -> int:
        """Groups that judges will have seen in the end, one seen twice counted twice."""
        return sum(len(counters) for _, sessions in self._sessions() for counters, _ in sessions)

    def _sessions(self) -> list[tuple[Kernel, list[tuple[list[int], Judge]]]]:
        """Which groups each kernel judges, and how."""
        every = range(self.groups)
        native = [
            (list(every), Judge([])),
            ([n for n in every if n % SINGLE_EVERY == 0], Judge([], single=True)),
            (list(every[:STRANGE]), Judge([], strange=True)),
        ]
        others = [
            [([n for n in every if n % OTHERS_EVERY == place], Judge([]))]
            for place in range(1, len(self.kernels))
        ]
        return list(zip(self.kernels, [native, *others], strict=True))

    def _shares(self) -> list[list[int]]:
        """The counters of each kernel: in every 16 its weight, spread over them."""
        turns = [place for place, kernel in enumerate(self.kernels) for _ in range(kernel.weight)]
        order = [turns[(5 * n) % 16] for n in range(16)]  # 5 has no factor in common with 16
        return [
            [n for n in range(self.groups) if order[n % 16] == place] for place in range(len(self.kernels))
        ]

    async def _made(self, kernel: Kernel, counters: Sequence[int]) -> list[Candidate]:
        manifest = self.run.manifest
        highest = {entry.id: make_entry(entry, self.access).levels for entry in manifest.environments}
        levels = {n: {name: n % (top + 1) for name, top in highest.items()} for n in counters}
        orders = [Order(n, task_seed(self.run.run, CHECKPOINT, BEACON, KEY, n), levels[n]) for n in counters]
        received = cast("type[FromWorker]", FromWorker)
        bodies: list[bytes] = []
        with open_log(self.log) as log:
            pipe: ChildPipe[ToWorker, FromWorker] = await start_child(
                WORKER, received, log.fileno(), kernel.environment
            )
        try:
            load = Load(
                str(self.run.checkpoint(0)),
                CHECKPOINT,
                "cpu",
                kernel.threads,
                manifest.to_bytes(),
                access=self.access,
            )
            await _asked(pipe, load, Loaded)
            for call in _calls(orders):
                made = await _asked(pipe, Generate(call), Made)
                bodies += [_body(one) for one in sorted(made.groups, key=_counter)]
                self.told(len(call), 0)
        finally:
            await end_child(pipe.process)
        return [
            Candidate(
                hashlib.sha256(body).digest(), body, KEY, 0, CHECKPOINT, BEACON, levels[order.counter], False
            )
            for order, body in zip(orders, bodies, strict=True)
        ]

    async def _judged(
        self,
        judge: Kernel,
        made: Mapping[int, tuple[Kernel, Candidate]],
        sessions: Sequence[tuple[list[int], Judge]],
        sights: Sights,
    ) -> None:
        """One process judges the groups of these counters, and adds what it sees to `sights`."""
        received = cast("type[FromJudge]", FromJudge)
        with open_log(self.log) as log:
            pipe: ChildPipe[ToJudge, FromJudge] = await start_child(
                JUDGE, received, log.fileno(), judge.environment
            )
        try:
            begin = Begin(str(self.run.path), str(self.run.checkpoint(0)), judge.threads, self.access)
            await _asked(pipe, begin, Begun)
            for counters, how in sessions:
                seen = sights.strange if how.strange else sights.honest
                for start in range(0, len(counters), JUDGED):
                    part = [made[n] for n in counters[start : start + JUDGED]]
                    message = msgspec.structs.replace(how, groups=[candidate for _, candidate in part])
                    found = (await _asked(pipe, message, Seen)).groups
                    seen += [
                        msgspec.structs.replace(one, kernel=kernel.name)
                        for (kernel, _), one in zip(part, found, strict=True)
                    ]
                    self.told(0, len(part))
        finally:
            await end_child(pipe.process)


async def _asked(pipe: ChildPipe[Sent, Received], message: Sent, answer: type[T]) -> T:
    """Its answer to a message. Raises LocalError with what it could not do, ChildDied."""
    await pipe.send(message)
    while True:
        match await pipe.receive():
            case Progress():
                continue
            case Failed(text) | Unfit(text):
                raise LocalError(f"The calibration cannot go on: {text}")
            case said if isinstance(said, answer):
                return said
            case other:
                raise LocalError(f"A child process said {type(other).__name__}, which was not asked.")


def _calls(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """The orders in calls of different sizes."""
    start = 0
    for size in cycle(CALLS):
        if start >= len(orders):
            return
        yield list(orders[start : start + size])
        start += size


def _counter(group: Group) -> int:
    return group.counter


def _body(group: Group) -> bytes:
    if group.failure:
        raise LocalError(f"The calibration cannot go on: {group.failure}")
    return group.body
