"""Many keys of one hand: what strangers together put into an update stays a quarter of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

UPDATE = 8
"""Groups of one update: of strangers two."""

SYBILS = 6
"""Groups that they have ready at once."""


@pytest.fixture(scope="module")
def market(make_arena: Any) -> Iterator[Any]:
    with make_arena({"groups": UPDATE}) as arena:
        yield arena


@pytest.mark.slow
@pytest.mark.attack("fresh keys beyond their share of an update", "")
def test_updates_hold_a_quarter_of_strangers_at_most(market: Any) -> None:
    """All of theirs are honest and accepted: they only wait."""
    native, sybils = market.trusted("native"), market.crowd(SYBILS)
    head = market.head
    for forger in (native, *sybils):
        forger.policy = market.policy(head)
    own = [native.seal(native.group(head).to_bytes()) for _ in range(UPDATE - UPDATE // 4)]
    market.say(own, native.topic)
    assert {market.receipt(data).verdict for data in own} == {"accepted"}
    strange = [sybil.seal(sybil.group(head).to_bytes()) for sybil in sybils]
    market.say(strange, sybils[0].topic)
    assert {market.receipt(data).verdict for data in strange} == {"accepted"}
    market.until(lambda: market.head.version > head.version)
    assert used(market, market.head.version, native) == (len(own), UPDATE // 4)
    assert [market.state(data) for data in strange].count(("accepted", None)) == SYBILS - UPDATE // 4


def used(market: Any, version: int, native: Any) -> tuple[int, int]:
    """Groups of the native and of strangers that a version was made of."""
    with closing(sqlite3.connect(market.folder.journal)) as connection:
        query = "SELECT key = ?, count(*) FROM groups WHERE state = 'used' AND used_version = ? GROUP BY 1"
        counts = dict(connection.execute(query, (native.identity.key, version)).fetchall())
    return counts.get(1, 0), counts.get(0, 0)
