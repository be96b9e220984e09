"""Tasks that never come back: who publishes only what went well leaves holes, and gains nothing by it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from nous_node.protocol.errors import Code

TASKS = 16
"""Of the key that looks for lucky ones; it publishes a fourth."""

STALENESS = 1


@pytest.fixture(scope="module")
def mint(make_arena: Any) -> Iterator[Any]:
    """A trainer that never comes to an update, and whose versions are soon stale."""
    with make_arena({"groups": 1000}, rules={"staleness": STALENESS}) as arena:
        yield arena


def sealed(forger: Any, head: Any, counters: Any) -> list[bytes]:
    return [forger.seal(forger.group(head, counter).to_bytes()) for counter in counters]


def refused_with_its_holes(mint: Any, groups: list[bytes], holes: int) -> None:
    """Once the version is stale; until then nobody looks at them."""
    mint.until(lambda: {mint.state(data) for data in groups} == {("waiting", None)})
    assert not any(mint.answered(data, 0.0) for data in groups)
    mint.renew(STALENESS + 1)
    for data in groups:
        receipt = mint.receipt(data)
        assert (receipt.verdict, receipt.code, receipt.credit) == ("refused", Code.WITHHELD, 0)
        assert receipt.measured == holes > receipt.threshold
        assert mint.state(data) == ("refused", None)


@pytest.mark.attack("one node publishing only its lucky tasks", "withheld")
def test_groups_of_lucky_tasks_wait_and_are_refused_and_cost_credit(mint: Any) -> None:
    lucky, head = mint.known("lucky"), mint.head
    first = sealed(lucky, head, [0, 1])
    mint.say(first, lucky.topic)
    credit = sum(mint.receipt(data).credit for data in first)

    made = {counter: lucky.group(head, counter) for counter in range(6, TASKS)}

    def reward(counter: int) -> float:
        return sum(one.reward for one in made[counter].trajectories)

    best = sorted(sorted(made, key=reward)[-TASKS // 4 :])
    groups = [lucky.seal(made[counter].to_bytes()) for counter in best]
    mint.say(groups, lucky.topic)
    holes = best[-1] + 1 - len(best) - len(first)
    refused_with_its_holes(mint, groups, holes)
    assert debit(mint, lucky) == holes * credit // len(first)


@pytest.mark.attack("skipped counter", "withheld")
def test_groups_behind_skipped_counters_wait_and_are_refused(mint: Any) -> None:
    skipper, head = mint.known("skipper"), mint.head
    groups = sealed(skipper, head, [4, 5])
    mint.say(groups, skipper.topic)
    refused_with_its_holes(mint, groups, 4)


def test_groups_behind_messages_that_were_lost_are_judged_once_those_are_repeated(mint: Any) -> None:
    forger, head = mint.known("on a bad line"), mint.head
    late, early = sealed(forger, head, [4, 5, 6, 7]), sealed(forger, head, [0, 1, 2, 3])
    mint.say(late, forger.topic)
    mint.until(lambda: {mint.state(data) for data in late} == {("waiting", None)})
    mint.say(early, forger.topic)
    assert {mint.receipt(data).verdict for data in [*late, *early]} == {"accepted"}
    assert debit(mint, forger) == 0


def debit(mint: Any, forger: Any) -> int:
    with closing(sqlite3.connect(mint.folder.journal)) as connection:
        query = "SELECT debit FROM keys WHERE key = ?"
        (tokens,) = connection.execute(query, (forger.identity.key,)).fetchone()
    return int(tokens)
