"""What becomes of sources that fail, are busy, announce what they lack, or go."""

from __future__ import annotations

from nous_node.node.picker import MAX_FAILURES
from nous_node.node.picker_source import FIRST_WINDOW
from nous_node.node.records import Records

from .picking import asks, bits, picker


def test_a_source_that_failed_is_asked_last_also_for_the_next_checkpoint() -> None:
    memory = Records()
    one = picker(2, memory)
    one.offer("bad", 3, 0.0)
    ask = one.next(0.0)
    assert ask is not None
    one.failed("bad", ask.chunk, 0.0)
    later = picker(4, memory)
    later.offer("bad", 15, 0.5)
    later.offer("good", 7, 0.5)
    assert {ask.chunk for ask in asks(later, 0.5) if ask.source == "bad"} == {3}
    much_later = picker(4, memory)
    much_later.offer("bad", 15, 90.0)
    much_later.offer("good", 7, 90.0)
    assert len([ask for ask in asks(much_later, 90.0) if ask.source == "bad"]) == FIRST_WINDOW


def test_a_source_that_fails_again_and_again_is_given_up_for_this_download() -> None:
    one = picker(9)
    one.offer("bad", bits(*range(9)), 0.0)
    for _ in range(MAX_FAILURES):
        ask = one.next(0.0)
        assert ask is not None
        one.failed("bad", ask.chunk, 0.0)
    assert one.given_up("bad")
    one.offer("bad", bits(*range(9)), 1.0)
    assert one.next(99.0) is None
    assert one.stuck(99.0)


def test_one_that_announced_what_it_lacks_loses_the_claim_and_has_failed() -> None:
    memory = Records()
    one = picker(1, memory)
    one.offer("liar", 1, 0.0)
    assert one.next(0.0) is not None
    one.lacks("liar", 0, 0.0)
    one.offer("liar", 1, 0.1)
    assert one.next(99.0) is None
    assert memory.of("liar", 0.0).failures == 1


def test_one_that_announced_nothing_may_lack_it() -> None:
    memory = Records()
    one = picker(2, memory)
    one.offer("other", 3, 0.0, assumed=True)
    ask = one.next(0.0)
    assert ask is not None
    one.lacks("other", ask.chunk, 0.0)
    assert memory.of("other", 0.0).failures == 0
    again = one.next(0.0)
    assert again is not None
    assert again.chunk == 1 - ask.chunk


def test_a_busy_source_is_left_alone_for_a_moment_and_has_not_failed() -> None:
    memory = Records()
    one = picker(1, memory)
    one.offer("busy", 1, 0.0)
    waits = []
    now = 0.0
    for _ in range(6):
        assert one.next(now) is not None
        one.busy("busy", 0, now)
        assert not one.stuck(now)
        start = now
        while one.next(now) is None:
            now += 0.125
        one.called_off("busy", 0)
        waits.append(now - start)
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert memory.of("busy", 0.0).failures == 0


def test_what_was_asked_of_one_that_is_gone_is_asked_of_others() -> None:
    one = picker(1)
    one.offer("gone", 1, 0.0)
    assert one.next(0.0) is not None
    one.offer("other", 1, 0.0)
    assert one.next(0.0) is None
    one.leave("gone", 0.0)
    ask = one.next(0.0)
    assert ask is not None
    assert ask.source == "other"


def test_who_comes_back_is_known() -> None:
    one = picker(9)
    for _ in range(MAX_FAILURES):
        one.offer("bad", bits(*range(9)), 0.0)
        ask = one.next(0.0)
        assert ask is not None
        one.leave("bad", ask.deadline)
    one.offer("bad", bits(*range(9)), 99.0)
    assert one.given_up("bad")
    assert one.next(99.0) is None


def test_of_those_who_say_nothing_the_one_that_delivered_last_time_is_asked_first() -> None:
    memory = Records()
    names = [f"peer {number}" for number in range(9)]
    before = picker(1, memory)
    before.offer("peer 4", 1, 0.0, assumed=True)
    assert before.next(0.0) is not None
    before.arrived("peer 4", 0, 0.5)
    for seed in range(9):
        one = picker(2, memory, seed=seed)
        for name in names:
            one.offer(name, 3, 1.0, assumed=True)
        ask = one.next(1.0)
        assert ask is not None
        assert ask.source == "peer 4"
    one.lacks("peer 4", ask.chunk, 1.0)
    assert not memory.of("peer 4", 1.0).proven
