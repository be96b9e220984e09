"""Adapters that are ours but for one fault fail exactly the requirements that it breaks."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from nous_node.node.cli_exit import Exit
from nous_node.node.conformance import Choice, rows_of, run_adapter
from nous_node.node.conformance_cases import load_cases
from nous_node.node.conformance_client import Client
from nous_node.node.conformance_table import Outcome, Sheet
from nous_node.protocol.errors import LocalError

SCRIPT = Path(__file__).parent / "broken_adapter.py"
MESSAGES = {"encoding", "signatures", "envelopes", "runs", "rollouts", "receipts", "checkpoints", "deltas"}
"""Files whose cases the faults might touch; some of the others take seconds."""
CASES = [case for case in load_cases() if case.op.file in MESSAGES]
PATIENT_S = 60.0


def broken(fault: str) -> list[str]:
    return [sys.executable, "-P", str(SCRIPT), fault]


@pytest.mark.parametrize(
    ("fault", "requirements"),
    [
        ("duplicates", {"ENC-5", "DLT-2"}),  # of a delta's header, too
        ("high-s", {"IDN-2"}),
        ("code", {"ENC-9"}),
        pytest.param("utf-16", {"ENC-4", "ENC-13"}, marks=pytest.mark.slow),  # both orders go wrong
        pytest.param("float32", {"ENC-13"}, marks=pytest.mark.slow),
    ],
)
def test_fault_fails_its_requirements_and_no_others(fault: str, requirements: set[str]) -> None:
    with Client(broken(fault)) as client:
        sheet = Sheet(client.name, "adapter", tuple(rows_of(client, CASES, PATIENT_S)))
    outcomes = sheet.by_requirement()
    assert {name for name, outcome in outcomes.items() if outcome is Outcome.FAIL} == requirements
    assert {name for name, outcome in outcomes.items() if outcome is Outcome.UNTESTED} == set()
    assert [row.outcome for row in sheet.rows if not row.requires] == [Outcome.PASS] * 3


def test_own_adapter_passes_and_sheets_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [sys.executable, "-P", "-m", "nous_node.node.cli", "conformance", "own"]
    choice = Choice(own, only="HEL-1", seconds=PATIENT_S)
    assert run_adapter(choice, str(tmp_path / "sheet.json"), tmp_path / "sheet.xml") == Exit.OK
    assert "HEL-1" in capsys.readouterr().out
    sheet = json.loads((tmp_path / "sheet.json").read_text())
    assert not sheet["failed"]
    assert sheet["requirements"]["HEL-1"] == "pass"
    assert sheet["client"].startswith("nous-node ")
    suite = ET.fromstring((tmp_path / "sheet.xml").read_text())
    assert suite.get("tests") == str(len(sheet["rows"]))


def test_rows_are_lines_where_json_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    choice = Choice(["/no/such/program"], only="hellos")
    assert run_adapter(choice, "-", None) == Exit.FAILED
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["outcome"] for line in lines[:-1]] == ["fail", *["untested"] * (len(lines) - 2)]
    assert lines[-1]["rows"] == lines[:-1]


@pytest.mark.parametrize(
    ("json_file", "junit", "sentence"),
    [
        (None, "none/sheet.xml", "there is no folder"),
        ("none/sheet.json", None, "there is no folder"),
        ("", None, "it is a folder"),
        (None, ".", "it is a folder"),
        ("sheet", "./sheet", "both name"),
    ],
)
def test_file_that_cannot_be_written_is_told_before_anything_is_asked(
    json_file: str | None, junit: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LocalError, match=sentence):
        run_adapter(Choice(["/no/such/program"]), json_file, None if junit is None else Path(junit))


@pytest.mark.parametrize("against", ["", "  ", "a 'b"])
def test_command_to_compare_with_has_to_be_one(against: str) -> None:
    with pytest.raises(LocalError, match="--against is"):
        run_adapter(Choice(["/no/such/program"], fuzz=1, against=against), None, None)


def test_client_that_has_no_part_at_all_has_shown_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = [sys.executable, "-I", "-S", str(SCRIPT.with_name("hostile_adapter.py")), "lacking"]
    assert run_adapter(Choice(lacking, only="hellos", seconds=PATIENT_S), None, None) == Exit.FAILED
    assert "Nothing was tested" in capsys.readouterr().out
