"""The kit around clients that are no clients: a row says what each did, and the kit ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nous_node.node import live, stand_checks_join
from nous_node.node.conformance_table import Outcome, Row, Sheet
from nous_node.node.live_check import ANY
from nous_node.node.stand import CHECKS, stand
from nous_node.protocol.errors import LocalError

CONNECTS, OUTPUT = "joins-noise-yamux", "output"

Meet = Callable[..., Sheet]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Meet:
    """Plays with a Python program that is given as text; one that does not connect is given up soon."""
    monkeypatch.setattr(stand_checks_join, "CONNECT_S", 8.0)

    def play(program: str, *names: str) -> Sheet:
        told: list[Row] = []
        sheet = stand([sys.executable, "-c", program, "{invite}"], frozenset(names), told.append, print)
        assert tuple(told) == sheet.rows
        return sheet

    return play


def row(sheet: Sheet, check: str) -> Row:
    return next(one for one in sheet.rows if one.check == check)


def failed(sheet: Sheet) -> set[str]:
    return {one.check for one in sheet.rows if one.outcome is Outcome.FAIL}


def test_a_client_that_exits_early_is_told_so_with_its_last_words(meet: Meet) -> None:
    sheet = meet("import sys; print('\\x1b[31mno such run:', sys.argv[1][:5]); sys.exit(3)")
    assert failed(sheet) == {CONNECTS}
    assert "exit code 3" in row(sheet, CONNECTS).note
    assert "\\x1b[31mno such run: nous1" in row(sheet, CONNECTS).note
    assert [one.check for one in sheet.rows] == [one.name for one in CHECKS]
    assert {one.outcome for one in sheet.rows if one.check not in (CONNECTS, OUTPUT)} == {Outcome.UNTESTED}


def test_a_client_that_floods_its_output_is_ended(meet: Meet) -> None:
    sheet = meet("while True: print('x' * 65536)")
    assert failed(sheet) == {CONNECTS, OUTPUT}
    assert "flooded its output" in row(sheet, CONNECTS).note


def test_a_client_that_hangs_is_given_up(meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_checks_join, "CONNECT_S", 0.5)
    sheet = meet("import time; time.sleep(600)", "HEL-1")
    wanted = {one.name for one in CHECKS if "HEL-1" in one.requires}
    assert {one.check for one in sheet.rows} == {CONNECTS, *wanted}
    assert failed(sheet) == {CONNECTS}  # though it was not asked for: it says why nothing else was played
    assert {row(sheet, name).outcome for name in wanted} == {Outcome.UNTESTED}


def test_a_command_that_cannot_be_started_is_a_sentence() -> None:
    with pytest.raises(LocalError, match="Cannot start 'no-such-client nous1'"):
        stand(["no-such-client", "nous1"], frozenset(), print, print)


def test_names_of_no_check_are_refused() -> None:
    with pytest.raises(LocalError, match="'HEL-99'"):
        stand(["true"], frozenset({"HEL-99"}), print, print)


def test_names_of_checks_are_unique() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names))


def test_the_table_of_live_checks_is_that_of_the_code() -> None:
    lines = Path(__file__).parents[2].joinpath("specs/live-checks.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if line.startswith("| ")]
    told = {name: (set(requires.split()), towards) for name, requires, towards in cells if name != "check"}
    told.pop("---", None)
    played = [(one.name, one.requires, one.towards) for one in live.CHECKS]
    played += [(one.name, one.requires, one.towards) for one in CHECKS]
    roles = {name: "any" if towards == ANY else ", ".join(towards) for name, _, towards in played}
    assert told == {name: (set(requires), roles[name]) for name, requires, _ in played}
