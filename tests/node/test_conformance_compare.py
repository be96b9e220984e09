"""Whether an answer fits a vector: the right ones in any spelling, and each kind of wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nous_node.node.conformance import chosen
from nous_node.node.conformance_cases import Case, Op, load_cases
from nous_node.node.conformance_compare import FIGURES, Kind, judge, kind_of, raw, shown
from nous_node.protocol.errors import LocalError

OP = Op("op", "file", (), ("a", "steps.x"), ("run",), ("value", "steps.code"))


def case(**fields: Any) -> Case:
    return Case(OP, 0, {"comment": "a case", "requires": ["ENC-1"], **fields}, {"run": "00", "seeds": {}})


def test_each_case_of_the_vectors_takes_its_own_answer() -> None:
    for one in load_cases():
        figures = {name: one.fields.get(name) for name in FIGURES}
        answer = (
            {"error": one.fields.get("code", "any"), **figures} if one.refused else {"ok": one.expected()}
        )
        assert judge(one, answer) is None, one.name


def test_question_holds_the_fields_of_its_op() -> None:
    asked = case(a=1, b=2, steps=[{"x": 1, "code": "stale"}, {"code": None}]).question()
    assert asked == {"op": "op", "run": "00", "a": 1, "steps": [{"x": 1}, {}]}


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (1, 1.0),
        ("00ff", [["00", 1], ["ff", 1]]),
        ([["00", 3]], "000000"),
        ([["00", 3]], [["0000", 1], ["00", 1]]),
        ({"float": "0.1"}, {"float": "1e-1"}),
        ({"float": "-0.0"}, {"float": "-0"}),
        ([["a", 1]], [["a", 1]]),  # no bytes: no hex
        (None, None),
    ],
)
def test_same_value_in_another_spelling_fits(value: Any, came: Any) -> None:
    assert judge(case(value=value), {"ok": {"value": came, "beyond": 1}}) is None


@pytest.mark.parametrize(
    ("value", "came", "note"),
    [
        (1, 2, "value: expected 1, came 2"),
        (1, True, "value: expected 1, came true"),
        (0, None, "value: expected 0, came null"),
        (1, "1", 'value: expected 1, came "1"'),
        ("a", "b", 'value: expected "a", came "b"'),
        ([1, 2], [1, 3], "value[1]: expected 2, came 3"),
        ([1, 2], [1], "value: expected 2 elements, came 1"),
        ({"a": 1}, {"a": 1, "b": 2}, 'value: expected the keys ["a"], came ["a", "b"]'),
        ({"int": "1"}, {"float": "1"}, 'value: expected the keys ["int"], came ["float"]'),
        ({"float": "0.0"}, {"float": "-0.0"}, 'value: expected the float "0.0", came "-0.0"'),
        ({"float": "0.1"}, {"float": "0.10000000149011612"}, "expected the float"),
        ({"float": "0.1"}, {"float": "one tenth"}, 'came "one tenth"'),
        ({"map": [["a", None], ["b", None]]}, {"map": [["b", None], ["a", None]]}, 'expected "a", came "b"'),
        ([["00", 3]], "0000", "value: expected 3 bytes, came 2 bytes"),
        ([["00", 3]], "000100", "value from byte 1: expected 0000, came 0100"),
        ([["00", 3]], [["00", 1 << 40]], "value[0][1]: expected 3, came 1099511627776"),
        (1, 10**400, "value: expected 1, came 1000"),
    ],
)
def test_another_value_does_not(value: Any, came: Any, note: str) -> None:
    found = judge(case(value=value), {"ok": {"value": came}})
    assert found is not None
    assert note in found
    assert found.isprintable()
    assert len(found) < 600


def test_tolerance_is_that_of_the_case() -> None:
    near = {"ok": {"value": [0.5, 0.100001]}}
    assert judge(case(value=[0.5, 0.1], tolerance=1e-5), near) is None
    assert judge(case(value=[0.5, 0.1], tolerance=1e-7), near) == "value[1]: expected 0.1, came 0.100001"
    assert judge(case(value=0.1), {"ok": {"value": 0.1 + 1e-16}}) is not None


def test_what_is_missing_is_told() -> None:
    assert judge(case(value=1), {"ok": {}}) == "value: expected 1, came nothing"
    assert judge(case(value=None), {"ok": {}}) == "value: expected null, came nothing"


def test_steps_are_compared_one_by_one() -> None:
    one = case(steps=[{"x": 1, "code": "stale"}, {"x": 2}])
    assert judge(one, {"ok": {"steps": [{"code": "stale", "y": 0}, {"code": None}]}}) is None
    note = 'steps[0].code: expected "stale", came "banned"'
    assert judge(one, {"ok": {"steps": [{"code": "banned"}, {}]}}) == note
    assert judge(one, {"ok": {"steps": [{"code": "stale"}]}}) is not None
    assert judge(one, {"ok": {"steps": "stale"}}) is not None
    assert judge(one, {"ok": {"steps": [1, 2]}}) is not None


def test_refusal_has_to_have_its_code_and_figures() -> None:
    one = case(code="stale", measured=3.0, threshold=None, tolerance=0.1)
    assert judge(one, {"error": "stale", "measured": 3.05}) is None
    assert judge(one, {"error": "stale", "measured": 3.2}) == "measured: expected 3.0, came 3.2"
    assert judge(one, {"error": "stale"}) == "measured: expected 3.0, came null"
    note = "threshold: expected null, came 1"
    assert judge(one, {"error": "stale", "measured": 3, "threshold": 1}) == note
    assert judge(one, {"error": "banned"}) == 'expected the code "stale", came "banned"'
    assert "but was taken" in str(judge(one, {"ok": {}}))
    assert judge(case(refused=True), {"error": "whatever"}) is None
    assert "expected to be taken" in str(judge(case(value=1), {"error": "stale"}))


def test_results_before_a_refusal_may_be_missing_but_not_wrong() -> None:
    one = case(code="stale", value=1)
    assert judge(one, {"error": "stale", "ok": {}}) is None
    assert judge(one, {"error": "stale", "ok": {"value": 2}}) == "value: expected 1, came 2"
    assert judge(one, {"error": "stale", "ok": 3}) == "ok: expected an object, came 3"


@pytest.mark.parametrize(
    "answer",
    [
        *(None, 1, [], "ok", {}, {"ok": 1}, {"error": 1}, {"unsupported": False}),
        *({"error": "bad-question"}, {"error": "adapter-failed", "note": "ZeroDivisionError"}),
    ],
)
def test_what_is_no_answer_fits_nothing(answer: Any) -> None:
    assert kind_of(answer) is Kind.BROKEN
    assert judge(case(value=1), answer) is not None
    assert judge(case(refused=True), answer) is not None


def test_long_and_deep_values_are_cut() -> None:
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    assert shown(deep) == "[" * 160 + "..."
    assert shown(deep, 100_000) == "a value nested too deep to show"
    assert len(shown({"a": "x" * 1_000_000})) < 200
    assert len(shown(list(range(1_000_000)))) < 200
    assert shown("\x1b[2J\u202e") == '"\\u001b[2J\\u202e"'


def test_pieces_unfold_to_no_more_than_fits() -> None:
    assert raw([["00", 2], ["ff", 1]]) == b"\0\0\xff"
    for bad in ([["00", 1 << 40]], [["0g", 1]], [[1, 1]], "0", 5, None, []):
        assert raw(bad) is None  # type: ignore[arg-type]


def test_cases_are_chosen_by_file_op_and_requirement() -> None:
    cases = load_cases()
    assert {one.op.file for one in chosen(cases, "chunks, hellos")} == {"chunks", "hellos"}
    assert all("ENC-9" in one.requires for one in chosen(cases, "ENC-9"))
    assert chosen(cases, None) == cases
    with pytest.raises(LocalError, match="no vector of ENC-999"):
        chosen(cases, "ENC-9,ENC-999")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"ops.toml": "= 1"},
        {"ops.toml": "[a]"},
        {"ops.toml": "[a]", "a.json": "{"},
        {"ops.toml": "[a]", "a.json": '{"cases": 1}'},
        {"ops.toml": '[a]\nhas = ["x"]', "a.json": '{"cases": [{}]}'},
    ],
)
def test_folder_without_good_vectors_is_told(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(LocalError, match="vectors cannot be read"):
        load_cases(tmp_path)
