"""The committed vectors, asked of this node's own adapter and judged as the kit judges any client's."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from nous_node.node.adapter import BAD_QUESTION, FAILED, OPS, answered
from nous_node.node.conformance_cases import Case, load_cases
from nous_node.node.conformance_compare import judge, raw
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind

CASES = load_cases()
FILES = {
    path.name.removesuffix(".json"): json.loads(path.read_text(encoding="utf-8"))
    for path in files("nous_node.vectors").iterdir()
    if path.name.endswith(".json")
}
FURTHER_OPS = {"client"}
"""Ops of no file."""


def answer(case: Case) -> Any:
    return msgspec.json.decode(msgspec.json.encode(answered(msgspec.json.encode(case.question()))))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:60])
def test_vector(case: Case) -> None:
    found = answer(case)
    assert found.get("error") not in (BAD_QUESTION, FAILED), found
    assert "unsupported" not in found, found
    assert judge(case, found) is None


def test_every_case_of_every_file_is_asked() -> None:
    asked = {(case.op.file, case.number) for case in CASES}
    assert asked == {(name, number) for name, file in FILES.items() for number in range(len(file["cases"]))}


def test_no_question_is_asked_twice() -> None:
    """But for one that shows that questions in between change nothing."""
    seen: dict[bytes, str] = {}
    for case in CASES:
        first = seen.setdefault(msgspec.json.encode(case.question()), case.name)
        assert first == case.name or "once more" in case.name, (first, case.name)


def test_this_node_has_the_ops_of_the_table_and_no_others() -> None:
    assert {case.op.name for case in CASES} | FURTHER_OPS == set(OPS)


def test_chapters_have_at_least_250_vectors_of_which_half_are_negative() -> None:
    """Environments refuse little: what is text is answered."""
    chapters = [content for content in FILES.values() if "chapter" in content["comment"]]
    cases = [case for content in chapters for case in content["cases"]]
    negative = [case for case in cases if is_negative(case)]
    assert len(cases) >= 250
    assert len(negative) * 2 >= len(cases)


def is_negative(case: dict[str, Any]) -> bool:
    steps = any("code" in step for step in case.get("steps", []))
    return "code" in case or case.get("refused") is True or steps


def test_every_kind_of_message_has_a_vector() -> None:
    kinds = {untagged(case["head"])["kind"] for case in FILES["envelopes"]["cases"] if "head" in case}
    kinds |= {"run"} if FILES["runs"]["cases"] else set()
    kinds |= {"checkpoint"} if FILES["checkpoints"]["cases"] else set()
    kinds |= {"receipts"} if FILES["receipts"]["cases"] else set()
    assert kinds == {kind.value for kind in Kind}


WRITTEN = {
    "encoding": ("value", "bytes"),
    "envelopes": ("head", "signed"),
    "streams": ("value", "frame"),
    "runs": ("value", "manifest"),
    "rollouts": ("value", "body"),
    "references": ("value", "body"),
    "checkpoints": ("value", "manifest"),
}
"""File -> a tagged value, and the bytes that it has."""


@pytest.mark.parametrize("name", WRITTEN)
def test_values_are_written_as_the_vectors_have_them(name: str) -> None:
    value, written = WRITTEN[name]
    cases = [case for case in FILES[name]["cases"] if value in case]
    assert cases
    for case in cases:
        data = encode(untagged(case[value]))
        frame = len(data).to_bytes(4, "big") + data if written == "frame" else data
        assert frame == raw(case[written]), case["comment"]


def untagged(value: Any) -> Any:
    match value:
        case None | bool():
            return value
        case {"int": str() as digits}:
            return int(digits)
        case {"float": str() as digits}:
            return float(digits)
        case {"text": str() as text}:
            return text
        case {"bin": str() as digits}:
            return bytes.fromhex(digits)
        case {"array": list() as items}:
            return [untagged(item) for item in items]
        case {"map": list() as pairs}:
            return {key: untagged(item) for key, item in pairs}
    raise ValueError(value)
