"""Which texts are formulas that an algebra system may be given.

sympy's parser hands its text to Python's `eval`: whatever stands in it is run, and a tower of powers is
computed until the memory is full. So a text is read here first, without running anything, and what is more
than numbers, symbols of one letter, + - * / ** and a few functions is no formula.
"""

from __future__ import annotations

import ast
import re
from typing import Final

FUNCTIONS: Final = frozenset(
    {
        "Abs",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "cos",
        "cosh",
        "cot",
        "csc",
        "exp",
        "ln",
        "log",
        "sec",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    }
)
"""Elementary functions. No unevaluated integrals: they would answer a question with itself."""

MAX_CHARACTERS: Final = 2_000
"""Longer formulas are none that anyone asks for, and simplifying one takes minutes."""

MAX_BITS: Final = 4_096
"""Size of the largest number that computing a formula may give."""

MAX_POWER: Final = 64
"""Largest exponent: expanding (x + 1)**64 is quick, (x + y + 1)**1000 is not."""

_CHARACTERS: Final = re.compile(r"[0-9A-Za-z+\-*/(). ]+")
"""No quotes, comments, line ends, underscores, and no letters that Python reads as others."""


def is_formula(text: str) -> bool:
    """Whether a text is a formula of bounded size. Nothing in it is run."""
    if len(text) > MAX_CHARACTERS or not _CHARACTERS.fullmatch(text):
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _bits(tree.body) <= MAX_BITS
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _bits(node: ast.expr) -> float:
    """Bound of a formula's magnitude, in bits. Raises ValueError for what is no formula."""
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("a truth value")
        case ast.Constant(value=int() as value):
            return max(1, value.bit_length())
        case ast.Constant(value=float() as value) if abs(value) < 1e300:
            return 1_024
        case ast.Name(id=name) if len(name) == 1:
            return 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _bits(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return max(_bits(left), _bits(right)) + 1
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return _bits(left) + _bits(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bits(left) * _exponent(right)
        case ast.Call(func=ast.Name(id=name), args=[only], keywords=[]) if name in FUNCTIONS:
            return max(_bits(only), 64)
        case _:
            raise ValueError("no formula")


def _exponent(node: ast.expr) -> float:
    """Bound of an exponent. Raises ValueError where it is too large to be computed."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            bound = float(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            bound = _exponent(operand)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Add() | ast.Sub(), right=right):
            pair = _exponent(left), _exponent(right)
            bound = pair[0] * pair[1] if isinstance(node.op, ast.Mult) else pair[0] + pair[1]
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int())):
            bound = _exponent(left)
        case _ if _symbolic(node):  # stays as it is
            _bits(node)
            bound = MAX_POWER
        case _:
            raise ValueError("an exponent that is computed first")
    if not bound <= MAX_POWER:
        raise ValueError("a power too large to be computed")
    return max(bound, 1.0)


def _symbolic(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id not in FUNCTIONS for part in ast.walk(node))
