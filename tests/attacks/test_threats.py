"""Chapter 11 and the attacks of this folder are one list: names, codes, tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from nous_node.protocol.errors import Code

from .tally import FILES, KNOWN

HERE = Path(__file__).parent
TESTS = HERE.parent
CHAPTER = TESTS.parent / "specs" / "11-threats.md"
HEAD = "| attack | what it would gain | defence | code | test |"


class Row(NamedTuple):
    codes: set[str]
    tests: list[tuple[str, str]]
    """Path below `tests/`, function."""


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def place(text: str) -> tuple[str, str]:
    file, function = text.split("::")
    return (file if "/" in file else f"attacks/{file}"), function


def read_rows() -> dict[str, Row]:
    """By attack."""
    found: dict[str, Row] = {}
    for table in CHAPTER.read_text().split(HEAD)[1:]:
        for line in table.strip().splitlines()[1:]:
            if not line.startswith("|"):
                break
            attack, gain, defence, code, test = (cell.strip() for cell in line.strip("|").split("|"))
            assert attack not in found, f"{attack} has two rows"
            assert gain, attack
            assert defence, attack
            assert quoted(test), f"{attack} names no test"
            found[attack] = Row(set(quoted(code)), [place(one) for one in quoted(test)])
    return found


ROWS = read_rows()


def test_rows_name_codes_and_tests_that_exist() -> None:
    for attack, row in ROWS.items():
        assert row.codes <= {code.value for code in Code}, attack
        for file, function in row.tests:
            assert f"def {function}(" in (TESTS / file).read_text(), f"{attack}: {file}::{function}"


def test_every_attack_has_a_row_with_its_code(request: pytest.FixtureRequest) -> None:
    """Of those that were collected."""
    for (attack, code), files in request.config.stash[KNOWN].items() if KNOWN in request.config.stash else ():
        assert attack in ROWS, f"{attack} of {sorted(files)} is in no row"
        assert {code} - {""} <= ROWS[attack].codes, f"{attack} is answered with {code}"


def test_every_row_is_an_attack_that_is_tried(request: pytest.FixtureRequest) -> None:
    collected = request.config.stash.get(FILES, set())
    if not {path.name for path in HERE.glob("test_*.py")} <= collected:
        pytest.skip("only part of the attacks was collected")
    known = request.config.stash[KNOWN]
    for attack, row in ROWS.items():
        if all(file.startswith("attacks/") for file, _ in row.tests):
            assert {code for name, code in known if name == attack} - {""} == row.codes, attack
            files = {file for (name, _), found in known.items() if name == attack for file in found}
            assert {file.removeprefix("attacks/") for file, _ in row.tests} <= files, attack
