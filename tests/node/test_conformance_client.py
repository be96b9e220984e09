"""Adapters that hang, flood, die or talk nonsense: each a row that says so, and the next case is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from nous_node.node import conformance_client, conformance_process
from nous_node.node.conformance import END, IN_STEP, START, rows_of
from nous_node.node.conformance_cases import load_cases
from nous_node.node.conformance_client import Client, GivenUp
from nous_node.node.conformance_process import Fault, Process
from nous_node.node.conformance_table import Outcome, Row

SCRIPT = Path(__file__).parent / "hostile_adapter.py"
CASES = [case for case in load_cases() if case.op.name == "chunks"][:2]
PATIENT_S = 30.0
HASTY_S = 0.4


def hostile(*arguments: str) -> Client:
    return Client([sys.executable, "-I", "-S", str(SCRIPT), *arguments])


def rows_by_check(*arguments: str, seconds: float = PATIENT_S) -> dict[str, Row]:
    """Rows by check."""
    with hostile(*arguments) as client:
        return {row.check: row for row in rows_of(client, CASES, seconds)}


@pytest.mark.parametrize(
    ("fault", "seconds", "note"),
    [
        ("hang", HASTY_S, "gave no answer within 0.4 s"),
        ("trickle", HASTY_S, "gave no answer within 0.4 s"),
        ("exit", PATIENT_S, "ended early with exit code 3; the end of its stderr: first \\x1b[2J words"),
        ("kill", PATIENT_S, "ended early with signal 9"),
        ("held", PATIENT_S, "ended early with exit code 4"),
        ("flood", PATIENT_S, "wrote a line of more than 1,048,576 bytes"),
        ("garbage", PATIENT_S, "answered with a line that is no JSON: \\x1b]0;owned"),
        ("deep", PATIENT_S, "answered with a line that is no JSON: [[["),
        ("nested", PATIENT_S, 'came {"ok": [[['),
        ("other", PATIENT_S, 'expected {"ok": ...} or {"error": ...}, came {"ok": [1]}'),
    ],
)
def test_fault_fails_each_case_and_the_next_is_asked(
    fault: str, seconds: float, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance_process, "MAX_LINE", 1 << 20)
    rows = rows_by_check(fault, seconds=seconds)
    for case in CASES:
        assert rows[case.name].outcome is Outcome.FAIL
        assert note in rows[case.name].note
    assert [rows[name].outcome for name in (START, IN_STEP)] == [Outcome.PASS] * 2


def test_client_that_closes_its_output_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_process, "GRACE_S", 0.05)
    rows = rows_by_check("mute", seconds=HASTY_S)
    assert all("closed its output" in rows[case.name].note for case in CASES)


def test_what_is_written_to_stderr_stops_nothing() -> None:
    rows = rows_by_check("stderr")
    assert {rows[case.name].outcome for case in CASES} == {Outcome.UNTESTED}
    assert not any(row.outcome is Outcome.FAIL for row in rows.values())


@pytest.mark.parametrize("fault", ["lines", "twice"])
def test_more_than_one_answer_fails_that_rule_alone(fault: str) -> None:
    """Whose answer is whose cannot be told, so no requirement passes or fails."""
    rows = rows_by_check(fault)
    assert {rows[case.name].outcome for case in CASES} == {Outcome.UNTESTED}
    assert rows[IN_STEP].outcome is Outcome.FAIL
    assert "wrote more than 1 answer" in rows[IN_STEP].note


def test_same_answer_to_everything_fails_everything() -> None:
    rows = rows_by_check("same")
    assert {rows[case.name].outcome for case in CASES} == {Outcome.FAIL}


def test_late_answer_is_not_taken_for_one_to_the_next_question() -> None:
    rows = rows_by_check("late")
    assert {rows[case.name].outcome for case in CASES} == {Outcome.UNTESTED}
    assert rows[IN_STEP].outcome is Outcome.FAIL


def test_greeting_leaves_all_untested() -> None:
    rows = rows_by_check("banner")
    assert rows[START].outcome is Outcome.FAIL
    notes = ("no JSON: Server is ready.", "wrote more than 1 answer")  # by how fast the answer follows
    assert any(note in rows[START].note for note in notes)
    assert {rows[case.name].outcome for case in CASES} == {Outcome.UNTESTED}


@pytest.mark.parametrize("first", ["echo", "nobody", "unversioned", "blank", "unsupported", "refusing"])
def test_client_that_does_not_say_who_it_is_is_not_asked(first: str) -> None:
    rows = rows_by_check(first)
    assert rows[START].outcome is Outcome.FAIL
    assert "did not say who it is" in rows[START].note
    assert {rows[case.name].outcome for case in CASES} == {Outcome.UNTESTED}


def test_program_that_is_not_there_is_a_row() -> None:
    with Client(["/no/such/program"]) as client:
        rows = list(rows_of(client, CASES, PATIENT_S))
    assert "cannot be started" in rows[0].note
    assert [row.outcome for row in rows] == [Outcome.FAIL, *[Outcome.UNTESTED] * len(CASES)]


@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ("code", "ended its work with exit code 7"),
        ("stay", "did not end within 0.3 s of the end of its input"),
        ("last", "without being asked: Good bye."),
    ],
)
def test_end_of_input_ends_a_client(fault: str, note: str) -> None:
    with hostile(fault) as client:
        client.start()
        with pytest.raises(Fault, match=note):
            client.finish(0.3 if fault == "stay" else PATIENT_S)


def test_client_that_hangs_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_client, "MAX_HANGS", 1)
    rows = rows_by_check("hang", seconds=HASTY_S)
    assert [rows[case.name].outcome for case in CASES] == [Outcome.FAIL, Outcome.UNTESTED]
    assert rows[END].outcome is Outcome.UNTESTED


def test_fault_in_a_batch_is_told_of_its_question() -> None:
    with hostile("exit") as client:
        answers = client.ask_all([b'{"op":"client"}\n', b'{"op":"x"}\n', b'{"op":"client"}\n'], PATIENT_S)
    assert [isinstance(answer, Fault) for answer in answers] == [False, True, False]


def test_batch_is_answered_in_order() -> None:
    with hostile("stay") as client:
        first = client.start()
        answers = client.ask_all([b'{"op":"x"}\n', b'{"op":"client"}\n'] * 500, PATIENT_S)
    assert answers == [{"unsupported": True}, first] * 500


def test_all_that_a_client_started_is_gone(tmp_path: Path) -> None:
    with hostile("child", str(tmp_path / "pid")) as client:
        client.ask(b'{"op":"x"}\n', PATIENT_S)
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        assert child.is_running()
    gone, _ = psutil.wait_procs([child], timeout=5)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_nothing_is_asked_of_a_client_that_was_given_up() -> None:
    with hostile("exit") as client:
        client.given_up = True
        with pytest.raises(GivenUp):
            client.ask(b'{"op":"x"}\n', PATIENT_S)


def test_large_question_and_flood_of_stderr_do_not_block_each_other() -> None:
    """All three pipes are full at once."""
    process = Process.start([sys.executable, "-I", "-S", str(SCRIPT), "stderr"])
    try:
        assert process.exchange([b" " * (1 << 22) + b"\n"], PATIENT_S) == [b'{"unsupported": true}']
    finally:
        process.close()
