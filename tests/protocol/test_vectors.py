"""The committed vectors, driven through the installed package. No generator takes part."""

from __future__ import annotations

import pytest

from nous_node.protocol.envelope import Kind
from nous_node.protocol.errors import RemoteError

from .drivers import DRIVERS, FILES, Case, untagged

ALL = [
    pytest.param(name, case, id=f"{name}-{number}-{case['comment'][:40]}")
    for name, content in FILES.items()
    for number, case in enumerate(content["cases"])
]


@pytest.mark.parametrize(("name", "case"), ALL)
def test_vector(name: str, case: Case) -> None:
    code = case.get("code")
    if code is None:
        DRIVERS[name](case)
        return
    with pytest.raises(RemoteError) as caught:
        DRIVERS[name](case)
    assert caught.value.code.value == code


def test_every_file_has_a_driver() -> None:
    assert set(FILES) == set(DRIVERS)


def test_chapters_have_at_least_250_vectors_of_which_half_are_negative() -> None:
    """Environments refuse little: what is text is answered."""
    chapters = [content for content in FILES.values() if "chapter" in content["comment"]]
    cases = [case for content in chapters for case in content["cases"]]
    negative = [
        case for case in cases if "code" in case or any("code" in step for step in case.get("steps", []))
    ]
    assert len(cases) >= 250
    assert len(negative) * 2 >= len(cases)


def test_every_kind_of_message_has_a_vector() -> None:
    kinds = {untagged(case["head"])["kind"] for case in FILES["envelopes"]["cases"] if "head" in case}
    kinds |= {"run"} if FILES["runs"]["cases"] else set()
    kinds |= {"checkpoint"} if FILES["checkpoints"]["cases"] else set()
    kinds |= {"receipts"} if FILES["receipts"]["cases"] else set()
    assert kinds == {kind.value for kind in Kind}
