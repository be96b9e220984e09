"""What an audit prints: a line a group and a sentence at the end, for people or as JSON."""

from __future__ import annotations

import sys
import time
from collections import Counter
from enum import StrEnum
from typing import Literal

import msgspec
import typer

from .cli_exit import Exit
from .events import Note, to_line
from .wording import plural, printable

PROGRESS_SECONDS = 10.0
"""Between two words on how far it is, where the lines go to a file."""

_COLUMNS = "{:<16}  {:<26}  {:<26}  {:>10}  {:>10}  {}"
_HEADINGS = ("rollout", "recorded", "now", "measured", "threshold", "")


class Outcome(StrEnum):
    """How a recorded verdict stands."""

    CONFIRMED = "confirmed"
    DIFFERS = "differs"
    UNJUDGED = "unjudged"
    """Nothing was recorded that could be compared."""
    UNVERIFIABLE = "unverifiable"
    """What it takes is gone, or was known to the trainer alone."""


class Finding(msgspec.Struct, frozen=True, tag="group", tag_field="event"):
    """One group. With `--json` these are the keys."""

    rollout: str
    """Envelope id, hex."""
    peer: str
    """Key of its sender, hex; empty where it cannot be told."""
    version: int | None
    """Of its checkpoint."""
    counter: int | None
    recorded: Literal["accepted", "refused", "none"]
    recorded_code: str
    verdict: Literal["accepted", "refused", "unverifiable"]
    """What it is now."""
    code: str
    measured: float | None
    """Where the rule is a comparison; of an accepted group the mean difference of its log-probs."""
    threshold: float | None
    tokens: float | None
    """Sum of the weights of its trained tokens [VER-10]; None where no model was run, like the next two."""
    distance: float | None
    """Mean distance of its uniforms from the tokens' intervals. [VER-10]"""
    largest: float | None
    """Largest distance of one token."""
    outcome: Outcome
    text: str
    """What there is to say for people."""


class Audited(msgspec.Struct, frozen=True, tag="audit", tag_field="event"):
    """The last line under `--json`."""

    groups: int
    confirmed: int
    differ: int
    unjudged: int
    unverifiable: int
    codes: dict[str, int]
    """Groups that are refused now, by code."""
    text: str


class Reporter:
    """Prints findings as they come, and counts them."""

    def __init__(self, groups: int, *, json: bool) -> None:
        """`groups`: how many there will be."""
        self._groups, self._json = groups, json
        self._outcomes: Counter[Outcome] = Counter()
        self._codes: Counter[str] = Counter()
        self._told = time.monotonic()
        if not json and groups:
            typer.echo(_COLUMNS.format(*_HEADINGS).rstrip())

    def found(self, finding: Finding) -> None:
        self._outcomes[finding.outcome] += 1
        if finding.verdict == "refused":
            self._codes[finding.code] += 1
        typer.echo(msgspec.json.encode(finding).decode() if self._json else line(finding))
        self._progress()

    def _progress(self) -> None:
        """Where the lines themselves are not on the screen."""
        if sys.stdout.isatty() or time.monotonic() - self._told < PROGRESS_SECONDS:
            return
        self._told = time.monotonic()
        typer.echo(f"{self._outcomes.total():,} of {plural(self._groups, 'group')} verified", err=True)

    def finish(self) -> Exit:
        """Prints the end; what the command ends with."""
        outcomes = self._outcomes
        exit_code, text = self._sentence()
        audited = Audited(
            outcomes.total(),
            outcomes[Outcome.CONFIRMED],
            outcomes[Outcome.DIFFERS],
            outcomes[Outcome.UNJUDGED],
            outcomes[Outcome.UNVERIFIABLE],
            dict(self._codes),
            text,
        )
        typer.echo(msgspec.json.encode(audited).decode() if self._json else text)
        return exit_code

    def _sentence(self) -> tuple[Exit, str]:
        outcomes = self._outcomes
        total, gone = outcomes.total(), outcomes[Outcome.UNVERIFIABLE]
        if not total:
            return Exit.OK, "There is no recorded group to verify."
        if gone == total:
            return Exit.INPUT, (
                f"None of {plural(total, 'group')} could be verified; each line says why. A trainer keeps "
                "the newest checkpoints only: give one that was kept with --checkpoint DIR."
            )
        parts = [
            f"{plural(outcomes[Outcome.CONFIRMED], 'verdict')} confirmed",
            f"{outcomes[Outcome.DIFFERS]:,} differ",
        ]
        if outcomes[Outcome.UNJUDGED]:
            parts.append(f"{outcomes[Outcome.UNJUDGED]:,} had none")
        if gone:
            parts.append(f"{gone:,} could not be verified")
        code = Exit.FAILED if outcomes[Outcome.DIFFERS] else Exit.OK
        return code, f"{plural(total, 'group')}: {', '.join(parts)}."


def line(finding: Finding) -> str:
    """For people."""
    recorded = "no verdict" if finding.recorded == "none" else _said(finding.recorded, finding.recorded_code)
    match finding.outcome:
        case Outcome.CONFIRMED:
            remark = ""
        case Outcome.DIFFERS:
            remark = f"DIFFERS: {finding.text}"
        case _:
            remark = finding.text
    columns = (recorded, _said(finding.verdict, finding.code))
    figures = (_figure(finding.measured), _figure(finding.threshold))
    return _COLUMNS.format(finding.rollout[:16] or "-", *columns, *figures, printable(remark)).rstrip()


def _said(verdict: str, code: str) -> str:
    return f"{verdict} {printable(code, 32)}".rstrip()


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def tell(text: str, *, json: bool) -> None:
    """A sentence beside the lines."""
    if json:
        typer.echo(to_line(Note(printable(text), "warning")))
    else:
        typer.echo(printable(text), err=True)
