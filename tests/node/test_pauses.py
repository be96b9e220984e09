"""Environments that fail here are paused, the others go on, and `status` says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nous_node.node.events import Event, Note
from nous_node.node.outbox import Outbox
from nous_node.node.outbox_tables import Failing
from nous_node.node.pauses import FAILURES, MAX_PAUSE_SECONDS, MAX_SENT, PAUSE_SECONDS, Pauses
from nous_node.node.status import FailingEnvironment, JoinedStatus, lines
from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import Receipt

NOW = 1_800_000_000.0


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox.open(tmp_path / "outbox.sqlite") as outbox:
        yield outbox


class Node:
    """Two environments of one run, and what a person hears of them."""

    def __init__(self, outbox: Outbox) -> None:
        self.clock, self.told = Clock(), list[str]()
        self.pauses = Pauses({"bad", "good"}, outbox, self.clock, self.report)

    def report(self, event: Event) -> None:
        assert isinstance(event, Note)
        assert event.level == "warning"
        self.told.append(event.text)

    def fail(self, times: int, why: str = "it raised") -> None:
        for _ in range(times):
            self.pauses.failed("bad", why)


@pytest.fixture
def node(outbox: Outbox) -> Node:
    return Node(outbox)


def test_some_failures_in_a_row_pause_an_environment_and_no_other(node: Node) -> None:
    node.fail(FAILURES - 1)
    assert "bad" in node.pauses
    assert node.told == []
    node.fail(1)
    assert "bad" not in node.pauses
    assert "good" in node.pauses
    assert node.told == [
        "The environment bad keeps failing here and is paused for 10 min 00 s; the others go on. Look at it "
        "with `nous-node env check bad`. The last time: it raised"
    ]


def test_a_group_between_failures_begins_the_count_anew(node: Node) -> None:
    for _ in range(5):
        node.fail(FAILURES - 1)
        node.pauses.made("bad")
    assert "bad" in node.pauses


def test_groups_that_were_in_work_when_it_was_paused_pause_it_no_longer(node: Node) -> None:
    node.fail(FAILURES + 20)
    node.clock.now += PAUSE_SECONDS
    assert "bad" in node.pauses
    assert len(node.told) == 1


def test_each_pause_is_twice_as_long_until_it_works_again(node: Node) -> None:
    node.fail(FAILURES)
    lengths = []
    for _ in range(10):
        node.clock.now += MAX_PAUSE_SECONDS
        assert "bad" in node.pauses
        began = node.clock.now
        node.fail(1)
        while "bad" not in node.pauses:
            node.clock.now += PAUSE_SECONDS
        lengths.append((node.clock.now - began) / PAUSE_SECONDS)
    assert lengths == [2, 4, 8, 16, 32, 64, 128, 144, 144, 144]
    node.pauses.made("bad")
    node.fail(1)
    assert "bad" in node.pauses


def test_the_last_environment_is_paused_as_well(node: Node, outbox: Outbox) -> None:
    alone = Pauses({"bad"}, outbox, node.clock, node.report)
    for _ in range(FAILURES):
        alone.failed("bad", "it raised")
    assert "bad" not in alone
    assert "others" not in node.told[-1]


@pytest.mark.parametrize("why", ["\x1b[2Jcleared", "a\nb", "x" * 10_000, "\u202eevil"])
def test_reasons_of_environments_are_told_escaped_and_short(node: Node, outbox: Outbox, why: str) -> None:
    node.fail(FAILURES, why)
    told = [node.told[-1], *lines(joined(outbox.failing), NOW)]
    assert not any(character in line for line in told for character in "\x1b\n\u202e")
    assert all(len(line) < 1_500 for line in told)


def joined(failing: list[Failing]) -> JoinedStatus:
    told = [FailingEnvironment(*one) for one in failing]
    return JoinedStatus("run", "ab", 1, 0, 3, 5, [], 1, "cd", NOW, "active", "go on", failing=told)


def test_status_says_what_is_paused_until_when_and_why(node: Node, outbox: Outbox) -> None:
    node.fail(FAILURES)
    (line,) = [line for line in lines(joined(outbox.failing), NOW) if line.startswith("  environment")]
    assert line.startswith("  environment bad gave up 3 groups and is paused until ")
    assert line.endswith(": it raised")
    node.clock.now += PAUSE_SECONDS
    node.pauses.failed("bad", "it hung")
    node.clock.now += 2 * PAUSE_SECONDS
    node.pauses.made("bad")
    (line,) = [line for line in lines(joined(outbox.failing), NOW) if line.startswith("  environment")]
    assert line == "  environment bad gave up 4 groups and works again"


def test_a_new_session_begins_with_a_clean_sheet(node: Node, outbox: Outbox) -> None:
    node.fail(FAILURES)
    assert "bad" in Pauses({"bad"}, outbox, node.clock, node.report)
    assert outbox.failing == []


def test_a_name_that_the_run_does_not_have_is_not_played(node: Node) -> None:
    assert "other" not in node.pauses
    assert 7 not in node.pauses


def test_groups_that_are_lost_by_nobodys_fault_pause_nothing(node: Node, outbox: Outbox) -> None:
    for _ in range(2 * FAILURES):
        node.pauses.failed("", "others ended its process")
    assert "good" in node.pauses
    assert node.told == []
    assert outbox.failing == []


def test_one_group_that_a_trainer_plays_otherwise_pauses_its_environment(node: Node, outbox: Outbox) -> None:
    node.pauses.sent(b"g" * 32, "good")
    node.pauses.sent(b"b" * 32, "bad")
    node.pauses.answered(receipt(b"g" * 32, Code.STALE))
    node.pauses.answered(receipt(b"x" * 32, Code.PROMPT_MISMATCH))
    assert "good" in node.pauses
    for _ in range(2):
        node.pauses.answered(receipt(b"b" * 32, Code.REWARD_MISMATCH))
    node.pauses.made("bad")  # in the batch that was in work
    assert "bad" not in node.pauses
    assert len(node.told) == 1
    assert "refused it with reward-mismatch" in node.told[0]
    (failing,) = outbox.failing
    assert failing == Failing("bad", 1, round(1000 * (NOW + PAUSE_SECONDS)), failing.why)
    node.clock.now += PAUSE_SECONDS
    assert "bad" in node.pauses


def test_environments_of_old_groups_are_forgotten(node: Node) -> None:
    for number in range(MAX_SENT + 1):
        node.pauses.sent(number.to_bytes(32), "bad")
    node.pauses.answered(receipt(bytes(32), Code.SEGMENTS))
    assert "bad" in node.pauses


def receipt(rollout: bytes, code: Code) -> Receipt:
    return Receipt(rollout, b"k" * 32, "refused", code.value, None, None, 0)
