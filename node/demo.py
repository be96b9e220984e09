"""`nous-node demo`: a trainer and volunteers on this machine, from nothing to a policy that got better.

The processes are those of `train` and `join`, started with the same flags that a person would type, and
watched through their `--json` lines. Base and final checkpoint are evaluated here, on the same held-out
tasks, after everything has stopped.
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec
from msgspec.structs import replace

from nous_node.envs.access import Access
from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import Identity

from .children import Child, Family
from .cli_exit import Exit
from .cli_roles import FINISHING
from .create import create_run
from .demo_clients import KEEP, figures_of, read_command
from .demo_report import DemoReport, make_report, measure, told
from .events import (
    Event,
    Note,
    RunReady,
    Summary,
    TrainerStatus,
    VersionReport,
    VolunteerStatus,
)
from .home import Home
from .plan import RunPlan, read_plan, with_environments
from .plots import check_plots, plot
from .runfolder import RunFolder
from .store import Journal
from .views import View, open_view
from .wording import printable

RUN_NAME = "demo"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
REQUIRED_RISE = 0.2
"""Of held-out accuracy. The base of the demo has about .4; by chance 512 tasks move it by .02, 128 by .05."""
READY_SECONDS = 180.0
"""Until the trainer prints its invite: imports of torch on a cold disk, and a model of some hundred MB."""


LEARNING: dict[str, bool | int | float | str] = {"raise_level_at": 1.0}
"""The demo stays with four digits, so that its accuracy means one thing from beginning to end. A run made
with `init` goes on to five and more."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `nous-node demo` was asked for."""

    volunteers: int = 2
    seconds: float = 150.0
    seed: int = 0
    report: Path | None = None
    target: float | None = None
    """Stop as soon as the trainer measures this held-out greedy accuracy."""
    home: Path | None = None
    """None: a temporary folder, of which only the last checkpoint is kept, or the logs of a demo that
    failed."""
    json: bool = False
    config: Path | None = None
    """A run's settings, as `init --config` takes them; None: the embedded default sorts digits."""
    model: str | None = None
    """Folder or hub id of the base model, over that of the config."""
    plot: Path | None = None
    """PNG to draw."""
    trust_env: tuple[str, ...] = ()
    """Environments that run without the sandbox."""
    threads: int = 1
    """Of the trainer's torch; volunteers have one each."""
    clients: tuple[str, ...] = ()
    """Commands of other volunteers, with {invite} and {home} in them."""

    @property
    def plan(self) -> RunPlan:
        """Raises LocalError."""
        if self.config is None and self.model is None:
            return with_environments(RunPlan(learning=LEARNING), [])
        plan = read_plan(self.config)
        return with_environments(plan if self.model is None else replace(plan, model=self.model), [])


class DemoFailed(LocalError):
    """The demo cannot go on; `code` is what the process that ended answered with."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class Tally:
    """What the children have reported so far."""

    invite: str = ""
    trainer: TrainerStatus = field(default_factory=TrainerStatus)
    volunteers: dict[str, VolunteerStatus] = field(default_factory=dict)
    versions: list[VersionReport] = field(default_factory=list)

    def apply(self, source: str, event: Event) -> None:
        match event.status if isinstance(event, Summary) else event:
            case RunReady(invite=invite):
                self.invite = invite
            case TrainerStatus() as status:
                self.trainer = status
            case VolunteerStatus() as status:
                self.volunteers[source] = status
            case VersionReport() as report:
                self.versions.append(report)
            case _:
                pass

    def reached(self, target: float | None) -> bool:
        greedy = [report.greedy for report in self.versions if report.greedy is not None]
        return target is not None and bool(greedy) and greedy[-1] >= target


def run_demo(options: DemoOptions, family: Family | None = None) -> int:
    """Runs it and prints the outcome; the exit code. Raises LocalError where it cannot even begin."""
    for file in (options.report, options.plot):
        if file is not None:
            _check_writable(file)
    if options.plot is not None:
        check_plots()
    home = options.home or Path(tempfile.mkdtemp(prefix="nous-demo-"))
    for text in options.clients:
        read_command(text, "", home)
    if not options.volunteers and not options.clients:
        raise LocalError("Nobody would generate rollouts: --volunteers 0 needs at least one --client.")
    family = family or Family()
    kept = home / "logs"
    try:
        report = _Demo(options, home, family).run()
        kept = Path(report.checkpoint.path)
    except DemoFailed as error:
        print(error)
        return error.code
    finally:
        family.kill()
        if options.home is None:
            clear(home, kept)
    print(report_line(report) if options.json else told(report, REQUIRED_RISE))
    if options.report is not None:
        write_report(options.report, report)
    if options.plot is not None:
        plot(report, options.plot, f"{report.model}, {report.environments}")
    return Exit.OK if report.rise >= REQUIRED_RISE else Exit.FAILED


def clear(home: Path, kept: Path) -> None:
    """Deletes all of a folder but what is `kept` in it."""
    for path in home.iterdir():
        if path == kept:
            continue
        if path in kept.parents:
            clear(path, kept)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _check_writable(path: Path) -> None:
    """Raises LocalError before the demo has begun; an existing file stays as it is."""
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise LocalError(
            f"The report cannot be written to {path} ({error.strerror}); name another file with --report or "
            "--plot."
        ) from error


def make_demo_run(home: Path, seed: int, plan: RunPlan, access: Access) -> RunFolder:
    """The run of the demo in the trainer's home, with the keys of `seed` in all homes."""
    trainer = Home.open(home / "trainer")
    identity = demo_identity(seed, "trainer")
    trainer.replace_identity(identity)
    return create_run(
        trainer.path / "runs" / RUN_NAME,
        RUN_NAME,
        identity,
        plan,
        time.time_ns() // 1_000_000,
        access,
    )


def last_checkpoint(run: RunFolder) -> Path:
    """The folder of the last published version; versions may share one."""
    if not run.journal.is_file():
        return run.checkpoint(0)
    with Journal.read(run.journal) as journal:
        stored = journal.last_checkpoint()
    return run.checkpoint(0) if stored is None else run.path / stored.folder


def demo_identity(seed: int, name: str) -> Identity:
    """The same key for the same seed and name: tasks differ between seeds by more than the clock."""
    return Identity.from_seed(hashlib.sha256(f"nous/demo/{seed}/{name}".encode()).digest())


def report_line(report: DemoReport) -> str:
    """The last line of `demo --json`."""
    return msgspec.json.encode({"event": "demo", **msgspec.structs.asdict(report)}).decode()


def write_report(path: Path, report: DemoReport) -> None:
    """Raises LocalError where the file cannot be written; the figures were printed by then."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise LocalError(f"The report cannot be written to {path} ({error.strerror}).") from error


def _about_elsewhere(event: Event) -> bool:
    """What a trainer or volunteer says to somebody at its own terminal: how to join a run that ends with the
    demo, and what Ctrl-C does there."""
    return isinstance(event, RunReady) or event == Note(FINISHING)


class _Demo:
    """One run of the demo, from top to bottom."""

    def __init__(self, options: DemoOptions, home: Path, family: Family) -> None:
        self.options, self.home, self.family = options, home, family
        self.plan = options.plan
        self.access = Access.of(home / "trainer", options.trust_env)
        self.tally = Tally()
        self.stopping = False
        self.started = time.monotonic()

    def run(self) -> DemoReport:
        folder = make_demo_run(self.home, self.options.seed, self.plan, self.access)
        with open_view(json=self.options.json) as view, self._signals():
            self.started = time.monotonic()
            trainer = self._start_trainer(view)
            volunteers = [self._start_volunteer(n + 1) for n in range(self.options.volunteers)]
            volunteers += [self._start_client(n + 1, one) for n, one in enumerate(self.options.clients)]
            self._watch(view, trainer, volunteers)
            seconds = time.monotonic() - self.started
            left = sum(child.poll() is None for child in volunteers)
            view.report(Note("stopping the volunteers, then the trainer"))
            self._stop(view, volunteers)
            self._stop(view, [trainer])
            view.report(Note("measuring base and final checkpoint on held-out tasks"))
            return self._report(folder, seconds, left)

    def _report(self, folder: RunFolder, seconds: float, left: int) -> DemoReport:
        final = last_checkpoint(folder)
        return make_report(
            run=folder,
            before=measure(folder.checkpoint(0), folder, self.access),
            after=measure(final, folder, self.access),
            trainer=self.tally.trainer,
            volunteers=list(self.tally.volunteers.values()),
            versions=self.tally.versions,
            seconds=seconds,
            asked=self.options.volunteers + len(self.options.clients),
            left=left,
            seed=self.options.seed,
            judged="greedy" if self.options.config is None and self.options.model is None else "sampled",
            checkpoint=final,
            clients=figures_of(folder, self.access) if self.options.clients else (),
        )

    # --- processes -------------------------------------------------------------------------------

    def _start_trainer(self, view: View) -> Child:
        arguments = ["train", RUN_NAME, "--listen", LOOPBACK, "--json"]
        arguments += [
            "--threads",
            str(self.options.threads),
            "--home",
            str(self.home / "trainer"),
            "--seed",
            str(self.options.seed),
        ]
        if self.options.clients:
            arguments += ["--keep", str(KEEP)]
        arguments += self._shared()
        child = self.family.start("trainer", arguments, self.home / "logs" / "trainer.log")
        deadline = time.monotonic() + READY_SECONDS
        while not self.tally.invite:
            self._take(view, 0.2)
            if child.poll() is not None:
                raise self._died(child)
            if time.monotonic() > deadline or self.stopping:
                raise DemoFailed("The trainer printed no invite in time.", Exit.INTERNAL)
        return child

    def _start_volunteer(self, number: int) -> Child:
        name = f"volunteer-{number}"
        Home.open(self.home / name).replace_identity(demo_identity(self.options.seed, name))
        arguments = ["join", self.tally.invite, "--listen", LOOPBACK, "--threads", "1", "--json"]
        arguments += ["--home", str(self.home / name), "--nice", "0", *self._shared()]
        return self.family.start(name, arguments, self.home / "logs" / f"{name}.log")

    def _start_client(self, number: int, text: str) -> Child:
        """Another implementation's volunteer."""
        name = f"client-{number}"
        home = self.home / name
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        program, *arguments = read_command(text, self.tally.invite, home)
        try:
            return self.family.start(name, arguments, self.home / "logs" / f"{name}.log", [program])
        except OSError as error:
            raise DemoFailed(f"{program} cannot be started ({error.strerror}).", Exit.INPUT) from None

    def _shared(self) -> list[str]:
        """Flags of both roles."""
        return [part for name in self.options.trust_env for part in ("--trust-env", name)]

    def _watch(self, view: View, trainer: Child, volunteers: list[Child]) -> None:
        """Until the time is over, the target is reached, somebody pressed Ctrl-C, or nobody is left."""
        reported: set[str] = set()
        while not self.stopping and time.monotonic() - self.started < self.options.seconds:
            self._take(view, 0.2)
            if trainer.poll() is not None:
                raise self._died(trainer)
            for child in volunteers:
                if child.poll() is not None and child.name not in reported:
                    reported.add(child.name)
                    view.report(Note(str(self._died(child)), "error"))
            if len(reported) == len(volunteers):
                raise DemoFailed("No volunteer is left, so nothing more can be learned.", Exit.INTERNAL)
            if self.tally.reached(self.options.target):
                return

    def _stop(self, view: View, children: list[Child]) -> None:
        for child in self.family.stop(children):
            view.report(Note(f"{child.name} did not finish in time and was killed", "warning"))
        self._take(view, 0.2)

    def _take(self, view: View, wait: float) -> None:
        """Takes in what was reported; waits for the first event only."""
        try:
            source, event = self.family.events.get(timeout=wait)
            while True:
                self.tally.apply(source, event)
                if self.options.json or not _about_elsewhere(event):
                    view.report(event, source)
                source, event = self.family.events.get_nowait()
        except queue.Empty:
            return

    def _died(self, child: Child) -> DemoFailed:
        code = Exit.INTERNAL if child.code is None else child.code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        tail = "\n".join(printable(line) for line in child.tail().splitlines())
        passed_on = code if code in (Exit.INPUT, Exit.NETWORK, Exit.STORAGE) else Exit.INTERNAL
        return DemoFailed(f"The {child.name} {how}; the end of {child.log}:\n{tail}", passed_on)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C ends the demo early with all its figures, the second at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.stopping:
                self.family.kill()
                os._exit(Exit.INTERRUPTED)
            self.stopping = True

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
