"""Keys that cheat and go on: what they have done stays with them, and nothing of it is trained on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pytest

from nous_node.protocol.errors import Code

from .cheats import cheating, with_int4
from .edits import edited

FAULTS = 4
"""Of full weight: they lead into quarantine."""

PATIENCE = 80
"""Groups of a trusted key that cheats, of which half are audited."""


@pytest.fixture(scope="module")
def convict(court: Any) -> Any:
    """A key that has just been put into quarantine; its first group had been accepted."""
    forger = court.known("convict")
    forger.first = honest(forger, court.head)
    court.say([forger.first], forger.topic)
    assert court.receipt(forger.first).verdict == "accepted"
    for _ in range(FAULTS):
        group = forger.group(court.head)
        false = edited(group, reward=group.trajectories[0].reward + 0.25)
        court.refuses(forger, false.to_bytes(), Code.REWARD_MISMATCH)
    assert court.standing(forger) == "quarantine"
    return forger


def honest(forger: Any, head: Any) -> bytes:
    data: bytes = forger.seal(forger.group(head).to_bytes())
    return data


@pytest.mark.attack("key in quarantine that goes on", "quarantined")
def test_key_in_quarantine_is_told_its_end_and_not_taken(court: Any, convict: Any) -> None:
    receipt = turned_away(court, convict, Code.QUARANTINED)
    assert receipt.threshold > receipt.measured
    assert court.state(convict.first) == ("dropped", None)


@pytest.mark.attack("key that comes back to wash its score", "quarantined")
@pytest.mark.attack("banned key that goes on", "banned")
def test_neither_reconnecting_nor_greeting_nor_a_restart_washes_a_score(court: Any, convict: Any) -> None:
    """Each message comes from a node that nobody has seen before. The other key was banned meanwhile."""
    exile = court.known("exile")
    court.send(convict.hello(), convict.topic)
    turned_away(court, convict, Code.QUARANTINED)
    court.stop()
    with closing(sqlite3.connect(court.folder.journal)) as connection, connection:
        query = "UPDATE keys SET state = 'banned' WHERE key = ?"
        connection.execute(query, (exile.identity.key,))
    court.start()
    turned_away(court, convict, Code.QUARANTINED)
    assert court.standing(convict) == "quarantine"
    turned_away(court, exile, Code.BANNED)


def turned_away(court: Any, convict: Any, code: Code) -> Any:
    """An honest group of it, which is answered and does not come into the journal. Answers are rare: it
    asks until it has one."""
    rows = court.journalled()
    while True:
        data = honest(convict, court.head)
        before = court.status.refused.get(code.value, 0)
        court.send(data, convict.topic)
        court.until(lambda before=before: court.status.refused.get(code.value, 0) > before)
        if court.answered(data):
            break
    assert court.journalled() == rows
    receipt = court.receipt(data)
    assert (receipt.verdict, receipt.code) == ("refused", code.value)
    return receipt


@pytest.mark.attack("cheating once trusted", "logprob-mismatch")
def test_trusted_key_that_cheats_loses_all_that_was_not_looked_at(court: Any) -> None:
    """Half of its groups are audited. The first that fails takes those with it that were not."""
    forger = court.trusted("sleeper")
    accepted: list[bytes] = []
    for _ in range(PATIENCE):
        group = cheating(court.head, forger, with_int4)
        assert group is not None
        data = forger.seal(group.to_bytes())
        court.say([data], forger.topic)
        receipt = court.receipt(data)
        if receipt.verdict == "accepted":
            accepted.append(data)
        else:
            assert receipt.code == Code.LOGPROB_MISMATCH
            court.until(lambda: {court.state(one) for one in accepted} <= {("dropped", None)})
        if court.standing(forger) == "quarantine":
            break
    assert court.standing(forger) == "quarantine"
    assert {court.state(one) for one in accepted} <= {("dropped", None)}
