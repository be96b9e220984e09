"""Whether an answer of an adapter is the one that a vector gives, and if not, what differs, in a sentence.

Bytes are hex or pieces of hex, whichever the client likes; numbers are equal as numbers, within the case's
tolerance where it has one; a tagged float keeps the sign of its zero. What `ok` holds beyond what was asked
is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from .conformance_cases import Case, Json
from .wording import printable

MAX_SHOWN = 160
"""Characters of a value in a sentence: enough for a hash and its name."""
MAX_BYTES = 1 << 26
"""Bytes that pieces of an answer may unfold to: sixteen times the largest checkpoint of the vectors."""
FIGURES = ("measured", "threshold")
NO_REFUSALS = frozenset({"bad-question", "adapter-failed"})
"""Errors of the adapter itself, and not of what it was asked (chapter 14)."""


class Kind(StrEnum):
    """What an answer is."""

    OK = "ok"
    ERROR = "error"
    UNSUPPORTED = "unsupported"
    BROKEN = "broken"
    """Nothing that chapter 14 knows."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two values differ; shown as `path: expected A, came B`."""

    path: str
    expected: str
    came: str

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}expected {self.expected}, came {self.came}"


def kind_of(answer: Json) -> Kind:
    """What an adapter says. An error goes before results."""
    match answer:
        case {"unsupported": True}:
            return Kind.UNSUPPORTED
        case {"error": str() as code} if code in NO_REFUSALS:
            return Kind.BROKEN
        case {"error": str()}:
            return Kind.ERROR
        case {"ok": dict()}:
            return Kind.OK
    return Kind.BROKEN


def judge(case: Case, answer: Json) -> str | None:
    """None if the answer fits, else what differs. An `unsupported` answer is not for here."""
    kind = kind_of(answer)
    if kind in (Kind.BROKEN, Kind.UNSUPPORTED):
        return f'expected {{"ok": ...}} or {{"error": ...}}, came {shown(answer)}'
    told = cast(dict[str, Json], answer)
    if not case.refused:
        return _judge_taken(case, told, kind)
    if kind is Kind.OK:
        return f"expected to be refused{_with_code(case)}, but was taken with {shown(told['ok'])}"
    return _judge_refused(case, told)


def _with_code(case: Case) -> str:
    return f" with {case.fields['code']}" if "code" in case.fields else ""


def _judge_taken(case: Case, told: Mapping[str, Json], kind: Kind) -> str | None:
    if kind is Kind.ERROR:
        return f"expected to be taken, but was refused with {shown(told['error'])}"
    return _sentence(_results(case, told["ok"], strict=True))


def _judge_refused(case: Case, told: Mapping[str, Json]) -> str | None:
    code = case.fields.get("code")
    if code is not None and told["error"] != code:
        return f"expected the code {shown(code)}, came {shown(told['error'])}"
    tolerance = _tolerance(case)
    for name in FIGURES:
        if name in case.fields:
            found = difference(case.fields[name], told.get(name), tolerance, name)
            if found is not None:
                return _sentence(found)
    return _sentence(_results(case, told["ok"], strict=False)) if "ok" in told else None


def _results(case: Case, ok: Json, *, strict: bool) -> Difference | None:
    """Results before a refusal may be missing, wrong they may not be."""
    if not isinstance(ok, dict):
        return Difference("ok", "an object", shown(ok))
    for name, value in case.expected().items():
        if name not in ok and not strict:
            continue
        found = _field(value, ok, name, _tolerance(case), nested=_is_nested(case, name))
        if found is not None:
            return found
    return None


def _tolerance(case: Case) -> float:
    return float(cast(float, case.fields.get("tolerance", 0.0)))


def _is_nested(case: Case, name: str) -> bool:
    return any(path.startswith(f"{name}.") for path in case.op.outputs)


def _field(
    value: Json, ok: Mapping[str, Json], name: str, tolerance: float, *, nested: bool
) -> Difference | None:
    if name not in ok:
        return Difference(name, shown(value), "nothing")
    if nested:
        return _elements(cast(list[dict[str, Json]], value), ok[name], name, tolerance)
    return difference(value, ok[name], tolerance, name)


def _elements(
    expected: Sequence[Mapping[str, Json]], came: Json, path: str, tolerance: float
) -> Difference | None:
    """One object an element; what else an object holds is ignored."""
    if not isinstance(came, list) or len(came) != len(expected):
        return Difference(path, f"a list of {len(expected)}", shown(came))
    for index, (fields, one) in enumerate(zip(expected, came, strict=True)):
        place = f"{path}[{index}]"
        if not isinstance(one, dict):
            return Difference(place, "an object", shown(one))
        for name, value in fields.items():
            found = difference(value, one.get(name), tolerance, f"{place}.{name}")
            if found is not None:
                return found
    return None


def difference(expected: Json, came: Json, tolerance: float = 0.0, path: str = "") -> Difference | None:
    """The first place where two values differ."""
    if _pieces(expected) is not None or _pieces(came) is not None:
        one, other = raw(expected), raw(came)
        if one is not None and other is not None:
            return _bytes_difference(one, other, path)
    if _is_number(expected) and _is_number(came):
        near = _near(cast(float, expected), cast(float, came), tolerance)
        return None if near else Difference(path, shown(expected), shown(came))
    if isinstance(expected, list) and isinstance(came, list):
        return _list_difference(expected, came, tolerance, path)
    if isinstance(expected, dict) and isinstance(came, dict):
        return _map_difference(expected, came, tolerance, path)
    same = type(expected) is type(came) and expected == came
    return None if same else Difference(path, shown(expected), shown(came))


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _near(expected: float, came: float, tolerance: float) -> bool:
    try:
        return expected == came or abs(expected - came) <= tolerance
    except OverflowError:  # an integer beyond all floats
        return False


def _list_difference(
    expected: Sequence[Json], came: Sequence[Json], tolerance: float, path: str
) -> Difference | None:
    for index, (one, other) in enumerate(zip(expected, came, strict=False)):
        found = difference(one, other, tolerance, f"{path}[{index}]")
        if found is not None:
            return found
    if len(expected) != len(came):
        return Difference(path, f"{len(expected)} elements", str(len(came)))
    return None


def _map_difference(
    expected: Mapping[str, Json], came: Mapping[str, Json], tolerance: float, path: str
) -> Difference | None:
    match expected, came:
        case {"float": str() as one}, {"float": str() as other} if len(expected) == len(came) == 1:
            same = _same_float(one, other)
            return None if same else Difference(path, f"the float {shown(one)}", shown(other))
    if expected.keys() != came.keys():
        return Difference(path, f"the keys {shown([*expected])}", shown([*came]))
    for name, value in expected.items():
        found = difference(value, came[name], tolerance, f"{path}.{name}")
        if found is not None:
            return found
    return None


def _same_float(one: str, other: str) -> bool:
    """As numbers, zeros with their signs. Spellings differ from language to language."""
    try:
        a, b = float(one), float(other)
    except ValueError:
        return False
    return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))


def _bytes_difference(expected: bytes, came: bytes, path: str) -> Difference | None:
    if len(expected) != len(came):
        return Difference(path, f"{len(expected)} bytes", f"{len(came)} bytes")
    if expected == came:
        return None
    at = next(i for i, (one, other) in enumerate(zip(expected, came, strict=True)) if one != other)
    return Difference(f"{path} from byte {at}", expected[at : at + 16].hex(), came[at : at + 16].hex())


def raw(value: Json) -> bytes | None:
    """Hex or pieces of hex as bytes; None if it is neither, or far too much."""
    pieces = [(value, 1)] if isinstance(value, str) else _pieces(value)
    if pieces is None or sum(len(hexed) * max(0, count) for hexed, count in pieces) > 2 * MAX_BYTES:
        return None
    try:
        return b"".join(bytes.fromhex(hexed) * count for hexed, count in pieces)
    except ValueError:
        return None


def _pieces(value: Json) -> list[tuple[str, int]] | None:
    """`[[hex, count], ...]`."""
    if not isinstance(value, list) or not value:
        return None
    pieces: list[tuple[str, int]] = []
    for one in value:
        match one:
            case [str() as hexed, int() as count]:
                pieces.append((hexed, count))
            case _:
                return None
    return pieces


def _sentence(found: Difference | None) -> str | None:
    return None if found is None else str(found)


def shown(value: Json, limit: int = MAX_SHOWN) -> str:
    """A value as short JSON for a terminal; a long one is cut before it is written out."""
    try:
        return printable("".join(_parts(value, limit + 1)), limit)
    except RecursionError:
        return "a value nested too deep to show"


def _parts(value: Json, limit: int) -> Iterator[str]:
    written = 0
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(_shortened(value, limit)):
        yield part
        written += len(part)
        if written > limit:
            return


def _shortened(value: Json, limit: int) -> Json:
    return value[:limit] if isinstance(value, str) else value
