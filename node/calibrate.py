"""`nous-node calibrate`: thresholds for a model, from honest rollouts of it that this machine makes.

    a run in a temporary folder -> worker processes -> judging processes -> thresholds -> a file for `init`

The run is made as `init` makes one, and its groups are made and checked by what volunteers and trainers run:
what is measured is what a run will see.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from nous_node.protocol.checkpoints import weights_hash
from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import Identity

from .calibrate_engines import Course, Kernel, Sights, kernels
from .calibrate_figures import BFLOAT16, FLOAT32, thresholds
from .calibration import EMBEDDED_NAME, Calibration, write_calibration
from .cli_commands import access_of, home_hint, home_path
from .config import default_threads
from .create import base_tensors, create_run
from .home import Home, disk_errors
from .pipe import ChildDied
from .plan import DEFAULT_MODEL, Dtype, RunPlan, read_plan, with_environments
from .runfolder import RunFolder
from .wording import duration, printable

IDENTITY, CREATED = Identity.from_seed(b"calibrate".ljust(32)), 1
"""Of the run: fixed, so that the same release draws the same tasks. Nothing of it leaves this machine."""

DTYPES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16"}

MAX_SAID = 256
"""Characters of `calibrated` in a manifest."""

TOLD_SECONDS = 30.0
"""Between lines where nobody looks at a terminal."""


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What the command line says."""

    model: Path | None
    env: list[str]
    dtype: str | None
    rollouts: int
    max_tokens: int | None
    out: Path | None
    home: Path | None
    json: bool
    trusted: list[str] | None = None
    """Environments that run without the sandbox."""
    config: Path | None = None
    """Settings of the run that is meant; what stands above goes over them."""


def run_calibrate(options: CalibrateOptions) -> None:
    """Measures, writes the file and says what to do with it. Raises LocalError, ModelError, an EnvError."""
    plan = _plan(options)
    home = Home.open(home_path(options.home))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nous-calibrate-") as folder:
        place, access = Path(folder) / "runs" / "calibration", access_of(home, options.trusted)
        run = create_run(place, "calibration", IDENTITY, plan, CREATED, access)
        engines = kernels(_capability(), _threads())
        groups = math.ceil(options.rollouts / run.manifest.group)
        course = Course(run, engines, groups, home.path / "calibrate.log", access)
        sights = _measured(course, quiet=options.json)
        made = msgspec.structs.replace(_calibration(run, sights, engines, groups), name=_name(options.model))
    file = options.out or home.path / "calibrations" / f"{made.name}-{made.dtype}.json"
    with disk_errors(file):
        write_calibration(file, made)
    if options.json:
        print(msgspec.json.encode({"file": str(file), "calibration": made}).decode())
        return
    _print(made, sights, file, options, time.monotonic() - began)


def _plan(options: CalibrateOptions) -> RunPlan:
    dtype = None if options.dtype is None else DTYPES.get(options.dtype)
    if options.dtype is not None and dtype is None:
        raise LocalError(f"--dtype is {' or '.join(DTYPES)}, not {printable(options.dtype)!r}.")
    model = None if options.model is None else str(options.model)
    said = {"model": model, "dtype": dtype, "max_tokens": options.max_tokens}
    plan = msgspec.structs.replace(
        read_plan(options.config),
        thresholds=None,
        uncalibrated=True,
        **{name: value for name, value in said.items() if value is not None},
    )
    return with_environments(plan, options.env)


def _capability() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


def _threads() -> int:
    """Those of the environment, where it says so."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) else default_threads()


def _measured(course: Course, *, quiet: bool) -> Sights:
    """With a progress bar on stderr, or a line now and then where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    live = console.is_terminal and not quiet
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not live, transient=True) as progress:
        bars = [
            progress.add_task(name, total=total)
            for name, total in (("groups made", course.groups), ("groups judged", course.judgements))
        ]

        def advance(made: int, judged: int) -> None:
            for bar, news in zip(bars, (made, judged), strict=True):
                progress.advance(bar, news)

        course.told = advance if live or quiet else Lines(course.groups, course.judgements)
        try:
            return trio.run(course.measure)
        except ChildDied as error:
            raise LocalError(f"{error} The calibration ends here; its log is {course.log}.") from error


class Lines:
    """Progress for a log: a line now and then."""

    def __init__(self, groups: int, judgements: int) -> None:
        self._totals, self._counts = (groups, judgements), [0, 0]
        self._last = time.monotonic()

    def __call__(self, made: int, judged: int) -> None:
        self._counts[0] += made
        self._counts[1] += judged
        if time.monotonic() - self._last < TOLD_SECONDS:
            return
        self._last = time.monotonic()
        done = [f"{n:,} of {total:,} groups" for n, total in zip(self._counts, self._totals, strict=True)]
        print(f"made {done[0]}, judged {done[1]}", file=sys.stderr, flush=True)


def _calibration(run: RunFolder, sights: Sights, engines: list[Kernel], groups: int) -> Calibration:
    """The thresholds of a run's base from what was seen of it. Raises LocalError."""
    manifest = run.manifest
    dtype = manifest.model.dtype
    environments = ", ".join(entry.id for entry in manifest.environments)
    said = (
        f"{groups} honest groups of {manifest.group} x {manifest.sampling.max_tokens} tokens in {dtype} "
        f"({environments}), {platform.machine()} with {', '.join(one.name for one in engines)}"
    )
    margins = FLOAT32 if dtype == "float32" else BFLOAT16
    found = thresholds(sights.honest, sights.strange, groups, margins, said[:MAX_SAID])
    weights = weights_hash(base_tensors(run.checkpoint(0)))
    return Calibration("", dtype, msgspec.structs.replace(found, model=weights))


def _name(model: Path | None) -> str:
    """Of the model, for a file: its folder's."""
    if model is None or model.resolve() == DEFAULT_MODEL.resolve():
        return EMBEDDED_NAME
    text = re.sub("[^a-z0-9.]+", "-", (model.name or model.resolve().name).lower()).strip("-.")
    return text or "model"


def _print(made: Calibration, sights: Sights, file: Path, options: CalibrateOptions, seconds: float) -> None:
    limits, groups = made.thresholds, [one.group for one in sights.honest]
    rows = (
        ("log-probs, mean difference", max(one.logprob for one in groups), limits.logprobs.limit),
        ("distances, mean", max(one.distance for one in groups), limits.distances.limit),
        ("distance of one token", max(one.largest for one in groups), limits.distance_max),
    )
    print(f"Measured {limits.calibrated} in {duration(seconds)}.\n")
    print(f"{'':28}{'largest':>10}{'limit':>10}")
    for name, largest, limit in rows:
        print(f"{name:28}{largest:10.1e}{limit:10.1e}")
    print(f"\nAt most {limits.false_refusals:.2%} of honest groups are refused (95 %). Written to {file}.")
    print(f"Make a run with it: nous-node init NAME{_flags(options)}{home_hint(options.home)}")


def _flags(options: CalibrateOptions) -> str:
    """What `init` has to be told for the run that was measured."""
    told = [] if options.config is None else ["--config", str(options.config)]
    told += [] if options.model is None else ["--model", str(options.model)]
    told += [part for env in options.env for part in ("--env", env)]
    told += [] if options.dtype is None else ["--dtype", options.dtype]
    told += [] if options.max_tokens is None else ["--max-tokens", str(options.max_tokens)]
    return "".join(f" {shlex.quote(part)}" for part in told)
