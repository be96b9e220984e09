"""What a client was tested for and how it went: a row a check, told by requirement, as JSON and as JUnit XML.

Names and notes may hold a stranger's text: they are escaped for terminals, and defused for XML.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .wording import plural, printable

MAX_NOTE = 2_000
"""Characters of a note that are kept: a question and an answer, both cut, with a sentence around them."""
MAX_NAME = 200
"""Characters of a check's or a client's name that are shown."""

_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has no way to write, not even as a reference."""


class Outcome(StrEnum):
    """How a check went, and so a requirement."""

    PASS = "pass"
    FAIL = "fail"
    UNTESTED = "untested"
    """The client says that it has no such part, or the check could not be made."""


@dataclass(frozen=True, slots=True)
class Row:
    """One check."""

    check: str
    requires: tuple[str, ...]
    """Requirement ids, such as `ENC-7`; none where the check is of the kit itself."""
    outcome: Outcome
    note: str = ""
    """A sentence: what was expected and what came, or why nothing could be told."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """All checks of one client."""

    client: str
    """What it calls itself."""
    kind: str
    """`adapter` or `peer`: how it was asked."""
    rows: tuple[Row, ...]

    @property
    def failed(self) -> bool:
        return any(row.outcome is Outcome.FAIL for row in self.rows)

    @property
    def empty(self) -> bool:
        """Whether nothing is known of the client: none of its requirements was tested."""
        rows = [row for row in self.rows if row.requires] or self.rows
        return all(row.outcome is Outcome.UNTESTED for row in rows)

    def by_requirement(self) -> dict[str, Outcome]:
        """The worst outcome of a requirement's checks that were made, ids in order."""
        grouped = _grouped(self.rows)
        return {name: _together(rows) for name, rows in grouped.items() if name}

    def count(self, outcome: Outcome) -> int:
        """Checks that went so."""
        return sum(row.outcome is outcome for row in self.rows)


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by requirement; those without one under the empty name, first."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        for name in row.requires or ("",):
            grouped.setdefault(name, []).append(row)
    return dict(sorted(grouped.items(), key=lambda item: in_order(item[0])))


def _together(rows: Sequence[Row]) -> Outcome:
    outcomes = {row.outcome for row in rows}
    if Outcome.FAIL in outcomes:
        return Outcome.FAIL
    return Outcome.PASS if Outcome.PASS in outcomes else Outcome.UNTESTED


def in_order(requirement: str) -> tuple[str, int, str]:
    """Sorts `ENC-2` before `ENC-10`."""
    area, _, number = requirement.partition("-")
    return area, int(number) if number.isascii() and number.isdigit() else 0, number


_STYLES = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.UNTESTED: "yellow"}


def render(sheet: Sheet, console: Console) -> None:
    """The table by requirement; below each one that failed, its first failing check."""
    table = Table(title=Text(f"{sheet.kind}: {printable(sheet.client, MAX_NAME)}"), title_justify="left")
    for title in ("requirement", "outcome", "checks", "first that failed"):
        table.add_column(title, overflow="fold")
    for name, rows in _grouped(sheet.rows).items():
        table.add_row(*_cells(name, rows))
    console.print(table)
    if not sheet.by_requirement():  # mutations are of no requirement: what they came to stands in their notes
        for row in filter(lambda one: one.note, sheet.rows):
            text = f"{printable(row.check, MAX_NAME)}: {printable(row.note, MAX_NOTE)}"
            console.print(Text(text), soft_wrap=True)
    console.print(Text(summary(sheet)), soft_wrap=True)
    if sheet.empty:
        console.print(Text(_nothing(sheet)), soft_wrap=True)


def _nothing(sheet: Sheet) -> str:
    """Why a sheet is empty, as far as its first row that was to be tested tells."""
    notes = [row.note for row in sheet.rows if row.outcome is Outcome.UNTESTED]
    why = printable(notes[0], MAX_NOTE) if notes else "No check was chosen that can be made of this client."
    return f"Nothing was tested, so the client has shown nothing. {why} Choose other checks with --only."


def _cells(name: str, rows: Sequence[Row]) -> tuple[Text, Text, Text, Text]:
    outcome = _together(rows)
    made = [row for row in rows if row.outcome is not Outcome.UNTESTED]
    passed = sum(row.outcome is Outcome.PASS for row in made)
    first = next((row for row in rows if row.outcome is Outcome.FAIL), None)
    told = "" if first is None else f"{printable(first.check, MAX_NAME)}: {printable(first.note, MAX_NOTE)}"
    count = f"{passed}/{len(rows)}" if made else str(len(rows))
    return Text(name or "-"), Text(outcome.value, _STYLES[outcome]), Text(count), Text(told)


def summary(sheet: Sheet) -> str:
    """One line: checks and requirements by outcome."""
    outcomes = list(sheet.by_requirement().values())
    checks = ", ".join(f"{sheet.count(one):,} {one.value}" for one in Outcome)
    requirements = ", ".join(f"{outcomes.count(one):,} {one.value}" for one in Outcome)
    return (
        f"{plural(len(sheet.rows), 'check')}: {checks}; "
        f"{plural(len(outcomes), 'requirement')}: {requirements}"
    )


def to_json(sheet: Sheet) -> str:
    """The whole sheet for a program, on one line."""
    return json.dumps(
        {
            "client": sheet.client,
            "kind": sheet.kind,
            "failed": sheet.failed,
            "tested": not sheet.empty,
            "requirements": sheet.by_requirement(),
            "rows": [row_fields(row) for row in sheet.rows],
        }
    )


def row_fields(row: Row) -> dict[str, str | list[str]]:
    """A row as `to_json` writes it."""
    return {
        "check": row.check,
        "requires": list(row.requires),
        "outcome": row.outcome.value,
        "note": row.note,
    }


def to_junit(sheet: Sheet) -> str:
    """JUnit XML: a test case a check, its class the first requirement that it serves."""
    suite = ET.Element(
        "testsuite",
        name=_xml(f"nous-node conformance {sheet.kind}: {sheet.client}"),
        tests=str(len(sheet.rows)),
        failures=str(sheet.count(Outcome.FAIL)),
        errors="0",
        skipped=str(sheet.count(Outcome.UNTESTED)),
    )
    for row in sheet.rows:
        _add_case(suite, row)
    return ET.tostring(suite, encoding="unicode", xml_declaration=False) + "\n"


def _add_case(suite: ET.Element, row: Row) -> None:
    name = f"{row.check} [{' '.join(row.requires)}]" if row.requires else row.check
    group = row.requires[0] if row.requires else "kit"
    case = ET.SubElement(suite, "testcase", classname=_xml(group), name=_xml(name))
    if row.outcome is Outcome.FAIL:
        ET.SubElement(case, "failure", message=_xml(row.note))
    elif row.outcome is Outcome.UNTESTED:
        ET.SubElement(case, "skipped", message=_xml(row.note))


def _xml(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)
