"""Checks of one environment or of a whole family, and how they are shown."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec
from rich.console import Console
from rich.text import Text

from nous_node.envs import registry
from nous_node.envs.access import Access
from nous_node.envs.environment import PolicySettings
from nous_node.envs.errors import EnvError
from nous_node.envs.registry import Place
from nous_node.protocol.errors import LocalError
from nous_node.protocol.runs import Setting

from .cli_exit import Exit
from .env_check import ROWS, Check, Checked, Row, seeds
from .env_hosts import Hosts
from .env_views import REFUSED
from .wording import duration, printable

STYLES: Final = {"ok": "green", "warning": "yellow", "FAILED": "bold red", "skipped": "dim"}

MAX_ROW: Final = 600
"""Characters of a row's sentence."""


@dataclass(frozen=True)
class Survey:
    """How environments are checked."""

    access: Access
    config: Mapping[str, Setting]
    settings: PolicySettings
    tasks: int
    deadline: float | None
    """Seconds of one call; None: what nodes allow."""

    def check(self, name: str) -> Checked:
        """In processes of its own. Raises UnknownEnvironment for what is not there; all else is a row."""
        with Hosts(self.deadline) as hosts:
            return self.check_in(hosts, self.place(name))

    def place(self, name: str) -> Place:
        """Raises UnknownEnvironment, BrokenEnvironment. Not for use in threads: what a third party offers is
        asked of a process that all of them share."""
        registry.served(name, self.config, self.access)
        return registry.place(name, self.access)

    def check_in(self, hosts: Hosts, place: Place) -> Checked:
        """In these processes."""
        config = registry.served(place.info.id, self.config, self.access)
        return Check(place, config, self.settings, hosts, seeds(self.tasks)).run()

    def member(self, name: str) -> Place | Checked:
        """Where a member of a family runs; one that cannot be looked at is a failed row at once."""
        try:
            return self.place(name)
        except EnvError as error:
            return Checked(name, "FAILED", False, 0.0, [Row(ROWS[0], "FAILED", str(error))])


class Summary(msgspec.Struct, frozen=True):
    """Of a family, after its members. With `--json` these are the keys."""

    family: str
    known: int
    """Members that are offered or refused."""
    exact: int
    """Members that were found to be exact."""
    ok: int
    warnings: int
    failed: int
    refused: dict[str, str]
    """Members that are not offered, with the reason."""


def survey_family(survey: Survey, family: str, jobs: int, *, json: bool) -> int:
    """Checks all members, prints a line for each as it is done and a summary; the exit code."""
    members = registry.offer(family, survey.access).members or ()
    if not members:
        raise LocalError(f"{family} does not know its members: check one by name, as {family}/NAME.")
    console = Console(highlight=False, markup=False)
    width = max(map(len, members)) + len(family) + 1
    done: list[Checked] = []
    with _progress(len(members)) as advance:
        for checked in _each(survey, [f"{family}/{member}" for member in members], jobs):
            done.append(checked)
            advance()
            if json:
                print(msgspec.json.encode(checked).decode(), flush=True)
            else:
                console.print(_member_line(checked, width), soft_wrap=True)
    summary = _summary(family, done)
    if json:
        print(msgspec.json.encode(summary).decode())
    else:
        for line in summary_lines(summary):
            print(line)
    return Exit.FAILED if summary.failed else Exit.OK


def _each(survey: Survey, names: Sequence[str], jobs: int) -> Iterator[Checked]:
    """As they are done; each job has processes of its own, which all members share."""
    places = [survey.member(name) for name in names]
    with ExitStack() as stack, ThreadPoolExecutor(jobs) as threads:
        free: queue.Queue[Hosts] = queue.Queue()
        for _ in range(jobs):
            free.put(stack.enter_context(Hosts(survey.deadline)))

        def one(found: Place | Checked) -> Checked:
            if isinstance(found, Checked):
                return found
            hosts = free.get()
            try:
                return survey.check_in(hosts, found)
            finally:
                free.put(hosts)

        waiting = [threads.submit(one, found) for found in places]
        try:
            for ended in as_completed(waiting):
                yield ended.result()
        finally:
            threads.shutdown(cancel_futures=True)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where somebody looks at it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("checked"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    live = console.is_terminal and not sys.stdout.isatty()
    with Progress(*columns, console=console, disable=not live, transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield lambda: progress.advance(bar)


def _summary(family: str, done: Sequence[Checked]) -> Summary:
    refused = dict(REFUSED.get(family, {}))
    verdicts = [one.verdict for one in done]
    return Summary(
        family,
        len(done) + len(refused),
        sum(one.exact for one in done),
        verdicts.count("ok"),
        verdicts.count("warning"),
        verdicts.count("FAILED"),
        refused,
    )


def summary_lines(summary: Summary) -> list[str]:
    """For a person."""
    told = [
        "",
        f"{summary.family}: {summary.exact} of {summary.known} are exact; {summary.ok} ok, "
        f"{summary.warnings} with warnings, {summary.failed} failed, {len(summary.refused)} not offered.",
    ]
    return told + [f"  not offered: {name}: {reason}" for name, reason in sorted(summary.refused.items())]


def print_checked(checked: Checked, console: Console) -> None:
    """A table of one environment."""
    console.print(Text(f"{printable(checked.environment)}, checked in {duration(checked.seconds)}", "bold"))
    for row in checked.rows:
        told = Text.assemble(
            f"  {row.name:10}", (f"{row.verdict:8}", STYLES[row.verdict]), printable(row.text, MAX_ROW)
        )
        console.print(told, soft_wrap=True)
    console.print(Text(_verdict(checked), STYLES[checked.verdict]))


def _verdict(checked: Checked) -> str:
    if checked.verdict == "FAILED":
        return "It FAILED: mend what failed first; what comes after may only follow from it."
    if checked.verdict == "warning":
        return "It can be used; look at the warnings."
    return "Nothing was found that speaks against it."


def _member_line(checked: Checked, width: int) -> Text:
    worst = next((row for row in checked.rows if row.verdict == checked.verdict), None)
    said = (
        "" if worst is None or checked.verdict == "ok" else f"{worst.name}: {printable(worst.text, MAX_ROW)}"
    )
    return Text.assemble(
        f"{printable(checked.environment):{width}}  ",
        (f"{checked.verdict:8}", STYLES[checked.verdict]),
        f"{checked.seconds:6.1f} s  {'exact' if checked.exact else '':6} {said}",
    )
