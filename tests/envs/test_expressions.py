"""Which texts are formulas that an algebra system may be given."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nous_node.envs.expressions import is_formula


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "85*52/13 + 13",
        "-34*x**8/15 - 5*x/4 + C",
        "-4*(-2*x - 8)**(3/2)/3 + C",
        "x*log(x) - x + C",
        "exp(-x**2/2)",
        "2**x + x**(-1)",
        "sqrt(1 - x**2)*asin(x)",
        " (x + 1)**64 ",
        "1.5*y",
    ],
)
def test_formulas_are_formulas(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x**9**9**9",
        "9**9**9",
        "(((9**64)**64)**64)**64",
        "9**(9**9)",
        "x**(9*9)",
        "x**65",
        "1e999999",
        "7" * 10_000,
        "exp(9**64*9**64)**64",
        "__import__('os').system('true')",
        "x.__class__",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        "Integral(x, x)",
        "integrate(x, x)",
        "S('x')",
        "log(x, y)",
        "exit()",
        "1 # x",
        "1\n+ 2",
        "x = 3",
        "True",
        "2j",
        "𝑥 + 1",
        "f'{x}'",
        "(" * 1_000 + "x" + ")" * 1_000,
        "5!",
        "x if x else x",
        "x < 3",
        "x % 3",
        "x // 3",
        "~x",
        "x @ x",
        "x; x",
    ],
)
def test_what_is_more_than_a_formula_is_none(text: str) -> None:
    assert not is_formula(text)


@given(text=st.text())
def test_any_text_is_a_formula_or_not(text: str) -> None:
    assert is_formula(text) in (True, False)


@given(text=st.text(alphabet="123 x+-*/().", min_size=1, max_size=16))
@settings(max_examples=200, deadline=None)
def test_a_formula_is_read_by_sympy_in_no_time(text: str) -> None:
    parser: Any = pytest.importorskip("sympy.parsing.sympy_parser")
    if is_formula(text):
        began = time.perf_counter()
        try:
            parser.parse_expr(text.strip())
        except TypeError:  # a number that is called: Python reads that, and then refuses it
            pytest.fail(f"{text!r} is no formula")
        assert time.perf_counter() - began < 5
