"""Where a conformance test is told while it runs and when it has ended: terminal, log, JSON lines, files.

On a terminal a bar, in a log a line at a failure and now and then; `--json -` writes a line a row and the
sheet as the last line. What a client wrote is escaped.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from nous_node.protocol.errors import LocalError

from .cli_exit import Exit
from .conformance_table import (
    MAX_NAME,
    MAX_NOTE,
    Outcome,
    Row,
    Sheet,
    render,
    row_fields,
    to_json,
    to_junit,
)
from .home import disk_errors
from .wording import printable

STDOUT = "-"
"""The file of `--json` that stands for standard output."""
PLAIN_S = 5.0
"""A log is read later: one line in five seconds says that it goes on."""

Tell = Callable[[Row], None]
"""Takes each row as soon as it is known."""


class Output:
    """Entered before the first row and left after the last."""

    def __init__(self, json_file: str | None, junit: Path | None) -> None:
        self._json, self._junit = json_file, junit
        self._lines = json_file == STDOUT
        self._console = Console(file=sys.stdout)
        self._live = not self._lines and self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress = _bar(self._console, disabled=not self._live)
        self._task = self._progress.add_task("", total=None)
        self._told = self._failures = 0
        self._total: int | None = None
        self._due = time.monotonic() + PLAIN_S
        for path in (None if self._lines or json_file is None else Path(json_file), junit):
            if path is not None:
                _check_writable(path)
        if junit is not None and json_file is not None and junit.resolve() == Path(json_file).resolve():
            raise LocalError(f"--json and --junit both name {junit}. Give each a file of its own.")

    def __enter__(self) -> Output:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def expect(self, rows: int) -> None:
        """How many rows there will be, where that is known."""
        self._total = rows
        self._progress.update(self._task, total=rows)

    def tell(self, row: Row) -> None:
        """A check was made."""
        if self._lines:
            print(json.dumps(row_fields(row)), flush=True)
        elif row.outcome is Outcome.FAIL:
            check, note = printable(row.check, MAX_NAME), printable(row.note, MAX_NOTE)
            self._console.print(Text(f"fail: {check}: {note}"), soft_wrap=True)
        self._failures += row.outcome is Outcome.FAIL
        self.step(1)

    def step(self, number: int) -> None:
        """So many more are done."""
        self._told += number
        failed = f"{self._failures:,} failed" if self._failures else ""
        self._progress.update(self._task, advance=number, description=failed)
        if not self._live and not self._lines and time.monotonic() >= self._due:
            self._due = time.monotonic() + PLAIN_S
            of = "" if self._total is None else f" of {self._total:,}"
            print(f"{self._told:,}{of} checks, {self._failures:,} failed", flush=True)

    def say(self, text: str) -> None:
        """A sentence for the person, such as an invite to copy; it goes to stderr where rows are lines."""
        if self._lines:
            print(text, file=sys.stderr, flush=True)
        else:
            self._console.print(Text(text), soft_wrap=True)

    def finish(self, sheet: Sheet) -> Exit:
        """Prints the table, writes the files; the exit code."""
        self._progress.stop()
        if self._lines:
            print(to_json(sheet), flush=True)
        else:
            render(sheet, self._console)
            if self._json is not None:
                _write(Path(self._json), to_json(sheet) + "\n")
        if self._junit is not None:
            _write(self._junit, to_junit(sheet))
        return Exit.FAILED if sheet.failed or sheet.empty else Exit.OK


def _bar(console: Console, *, disabled: bool) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("[red]{task.description}"))
    return Progress(*columns, console=console, disable=disabled, transient=True)


def _check_writable(path: Path) -> None:
    """Raises LocalError now rather than after minutes of tests."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise LocalError(f"{path} cannot be written: there is no folder {folder}.")
    if path.is_dir():
        raise LocalError(f"{path} cannot be written: it is a folder. Name a file in it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise LocalError(f"{path} cannot be written by this user. Name a file in another folder.")


def _write(path: Path, text: str) -> None:
    with disk_errors(path):
        path.write_text(text, encoding="utf-8")
