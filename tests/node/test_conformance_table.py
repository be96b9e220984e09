"""The sheet of a client: by requirement, for a terminal, as JSON and as JUnit XML."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET

import msgspec
import pytest
from rich.console import Console

from nous_node.node.conformance_table import Outcome, Row, Sheet, render, to_json, to_junit

HOSTILE = "a\x00b\x1b]0;owned\x07\ud800\ufffe<&\"'"
SHEET = Sheet(
    f"client {HOSTILE}",
    "adapter",
    (
        Row("it starts", (), Outcome.PASS),
        Row("encoding-1", ("ENC-10", "ENC-2"), Outcome.PASS),
        Row("encoding-2", ("ENC-10",), Outcome.FAIL, f"expected 1, came {HOSTILE}"),
        Row("encoding-3", ("ENC-10", "GOS-1"), Outcome.FAIL, "second"),
        Row("gossip-1", ("GOS-1", "GOS-2"), Outcome.UNTESTED, "no such part"),
        Row("encoding-4", ("ENC-2",), Outcome.UNTESTED),
    ),
)


def test_rows_of_no_requirement_show_their_notes_where_there_are_no_others() -> None:
    rows = (Row("it starts", (), Outcome.PASS), Row("mutations of\x1b x", (), Outcome.PASS, "9 taken\x1b."))
    for shown, sheet in ((1, Sheet("c", "adapter", rows)), (0, Sheet("c", "adapter", (*rows, *SHEET.rows)))):
        written = io.StringIO()
        render(sheet, Console(file=written, width=200))
        assert written.getvalue().count("9 taken") == shown
        assert "\x1b" not in written.getvalue()


def test_requirement_is_as_its_worst_check_that_was_made() -> None:
    assert list(SHEET.by_requirement().items()) == [
        ("ENC-2", Outcome.PASS),
        ("ENC-10", Outcome.FAIL),
        ("GOS-1", Outcome.FAIL),
        ("GOS-2", Outcome.UNTESTED),
    ]
    assert SHEET.failed
    assert not Sheet("x", "peer", SHEET.rows[:2]).failed


@pytest.mark.parametrize(
    ("rows", "empty"),
    [
        ((), True),
        (SHEET.rows[4:5], True),
        ((SHEET.rows[0], SHEET.rows[4]), True),  # that it starts says nothing of the protocol
        (SHEET.rows[:2], False),
        (SHEET.rows[2:3], False),
        (SHEET.rows[:1], False),  # mutations have no requirements
    ],
)
def test_sheet_without_a_tested_requirement_is_empty(rows: tuple[Row, ...], empty: bool) -> None:
    sheet = Sheet("client", "adapter", rows)
    written = io.StringIO()
    render(sheet, Console(file=written, width=100))
    assert sheet.empty is empty
    assert ("Nothing was tested" in written.getvalue()) is empty
    assert json.loads(to_json(sheet))["tested"] is not empty


def test_json_is_one_line_and_reads_back() -> None:
    text = to_json(Sheet("client", "peer", tuple(row for row in SHEET.rows if "\ud800" not in row.note)))
    assert "\n" not in text
    assert msgspec.json.decode(text, type=Sheet).rows[2].requires == ("ENC-10", "GOS-1")
    assert json.loads(text)["requirements"]["GOS-2"] == "untested"


def test_json_holds_what_a_client_wrote_without_control_characters() -> None:
    text = to_json(SHEET)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text)["rows"][2]["note"] == f"expected 1, came {HOSTILE}"


def test_junit_is_valid_whatever_a_client_wrote() -> None:
    suite = ET.fromstring(to_junit(SHEET))
    counts = {name: suite.get(name) for name in ("tests", "failures", "skipped", "errors")}
    assert counts == {"tests": "6", "failures": "2", "skipped": "2", "errors": "0"}
    failures = [case for case in suite if case.find("failure") is not None]
    assert [case.get("classname") for case in failures] == ["ENC-10", "ENC-10"]
    message = failures[0].find("failure")
    assert message is not None
    assert message.get("message") == "expected 1, came a\ufffdb\ufffd]0;owned\ufffd\ufffd\ufffd<&\"'"


@pytest.mark.parametrize("width", [60, 200])
def test_table_shows_the_first_failing_check_and_no_control_characters(width: int) -> None:
    written = io.StringIO()
    render(SHEET, Console(file=written, width=width))
    told = "".join(line.strip("│ ") for line in written.getvalue().split("\n"))
    assert "encoding-2" in told
    assert "encoding-3" in told  # the first of GOS-1
    assert "second" in told
    assert "\x1b" not in told
    assert "\x07" not in told
    assert "6 checks: 2 pass, 2 fail, 2 untested; 4 requirements: 1 pass, 2 fail, 1 untested" in told
