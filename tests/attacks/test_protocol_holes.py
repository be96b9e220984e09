"""Tasks that never come back: who publishes only what went well leaves holes, and gains nothing by it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pytest

from nous_node.protocol.errors import Code

TASKS = 16
"""Of the key that looks for lucky ones; it publishes a fourth."""


def sealed(forger: Any, head: Any, counters: Any) -> list[bytes]:
    return [forger.seal(forger.group(head, counter).to_bytes()) for counter in counters]


def refused_with_its_holes(court: Any, groups: list[bytes], holes: int) -> None:
    """Once the version is stale; until then nobody looks at them."""
    court.until(lambda: {court.state(data) for data in groups} == {("waiting", None)})
    assert not any(court.answered(data, 0.0) for data in groups)
    court.renew(court.folder.manifest.staleness + 1)
    for data in groups:
        receipt = court.receipt(data)
        assert (receipt.verdict, receipt.code, receipt.credit) == ("refused", Code.WITHHELD, 0)
        assert receipt.measured == holes > receipt.threshold
        assert court.state(data) == ("refused", None)


@pytest.mark.attack("one node publishing only its lucky tasks", "withheld")
def test_groups_of_lucky_tasks_wait_and_are_refused_and_cost_credit(court: Any) -> None:
    lucky, head = court.known("lucky"), court.head
    first = sealed(lucky, head, [0, 1])
    court.say(first, lucky.topic)
    credit = sum(court.receipt(data).credit for data in first)

    made = {counter: lucky.group(head, counter) for counter in range(6, TASKS)}

    def reward(counter: int) -> float:
        return sum(one.reward for one in made[counter].trajectories)

    best = sorted(sorted(made, key=reward)[-TASKS // 4 :])
    groups = [lucky.seal(made[counter].to_bytes()) for counter in best]
    court.say(groups, lucky.topic)
    holes = best[-1] + 1 - len(best) - len(first)
    refused_with_its_holes(court, groups, holes)
    assert debit(court, lucky) == holes * credit // len(first)


@pytest.mark.attack("skipped counter", "withheld")
def test_groups_behind_skipped_counters_wait_and_are_refused(court: Any) -> None:
    skipper, head = court.known("skipper"), court.head
    groups = sealed(skipper, head, [4, 5])
    court.say(groups, skipper.topic)
    refused_with_its_holes(court, groups, 4)


def test_groups_behind_messages_that_were_lost_are_judged_once_those_are_repeated(court: Any) -> None:
    forger, head = court.known("on a bad line"), court.head
    late, early = sealed(forger, head, [4, 5, 6, 7]), sealed(forger, head, [0, 1, 2, 3])
    court.say(late, forger.topic)
    court.until(lambda: {court.state(data) for data in late} == {("waiting", None)})
    court.say(early, forger.topic)
    assert {court.receipt(data).verdict for data in [*late, *early]} == {"accepted"}
    assert debit(court, forger) == 0


def debit(court: Any, forger: Any) -> int:
    with closing(sqlite3.connect(court.folder.journal)) as connection:
        query = "SELECT debit FROM keys WHERE key = ?"
        (tokens,) = connection.execute(query, (forger.identity.key,)).fetchone()
    return int(tokens)
