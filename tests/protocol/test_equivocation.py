"""Two checkpoints of one version by one key: what is remembered, and what a proof has to hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.encoding import encode
from nous_node.protocol.equivocation import Equivocation, Ledger, open_equivocation
from nous_node.protocol.errors import RemoteError

ANNA, BERT = b"a" * 32, b"b" * 32


def note(
    ledger: Ledger, version: int, what: int = 0, key: bytes = ANNA, size: int = 10
) -> Equivocation | None:
    """A checkpoint of a version, another one for each `what`."""
    return ledger.note(key, version, bytes([what]) * 32, bytes([what]) * size)


def test_a_second_one_of_a_version_is_found_with_the_first() -> None:
    ledger = Ledger(horizon=4)
    assert note(ledger, 1) is None
    assert note(ledger, 1) is None
    assert note(ledger, 2, 1) is None
    assert note(ledger, 1, 2) == Equivocation(bytes(10), bytes([2]) * 10)
    assert note(ledger, 1, 3) == Equivocation(bytes(10), bytes([3]) * 10)


def test_each_key_speaks_for_itself() -> None:
    ledger = Ledger(horizon=4)
    assert note(ledger, 1, 1) is None
    assert note(ledger, 1, 2, BERT) is None
    assert note(ledger, 1, 1, BERT) is not None


def test_versions_far_below_the_newest_are_forgotten_and_not_taken_up_again() -> None:
    ledger = Ledger(horizon=4)
    for version in range(10):
        note(ledger, version, 1)
    assert note(ledger, 4, 2) is None
    assert note(ledger, 4, 3) is None
    assert note(ledger, 5, 2) is not None


def test_memory_is_bounded_by_bytes_and_the_newest_stays() -> None:
    ledger = Ledger(horizon=1000, room=100)
    for version in range(50):
        note(ledger, version, 1)
    assert [version for version in range(50) if note(ledger, version, 2) is not None] == list(range(40, 50))
    note(ledger, 50, 1, size=1000)
    assert note(ledger, 49, 3, size=0) is None  # forgotten, and taken up again
    assert note(ledger, 50, 3) is not None


@given(st.binary(max_size=200))
def test_bytes_that_prove_nothing_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteError):
        open_equivocation(data, bytes(32), None)  # type: ignore[arg-type]


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_parts_that_are_no_envelopes_prove_nothing(first: bytes, second: bytes) -> None:
    manifest: Any = None
    with pytest.raises(RemoteError):
        open_equivocation(encode({"first": first, "second": second}), bytes(32), manifest)
