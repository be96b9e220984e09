"""Turns at the uplink: nobody starves, nobody waits for ever, nothing is lost when somebody gives up."""

from __future__ import annotations

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from nous_node.node.uploads import (
    FAIR,
    GREEDY_SECONDS,
    MAX_ASIDE,
    SLOTS,
    STALLED_SECONDS,
    WAIT_SECONDS,
    Turn,
    Uploads,
)

BUSY = b"busy"


class Line:
    """Uploads that end when they are let go, in the order in which they began."""

    def __init__(self, uploads: Uploads) -> None:
        self.uploads = uploads
        self.began: list[str] = []
        self.refused: list[str] = []
        self.turns: list[Turn] = []
        self._ends: list[trio.Event] = []

    async def upload(self, peer: str) -> None:
        async with self.uploads.turn(peer) as turn:
            if not turn:
                assert turn.answer == BUSY
                self.refused.append(peer)
                return
            self.began.append(peer)
            self.turns.append(turn)
            end = trio.Event()
            self._ends.append(end)
            await end.wait()

    async def let_go(self, number: int = 1) -> None:
        for _ in range(number):
            self._ends.pop(0).set()
            await wait_all_tasks_blocked()


async def test_a_peer_with_many_requests_does_not_hold_up_one_with_few() -> None:
    line = Line(Uploads(BUSY, slots=1))
    async with trio.open_nursery() as nursery:
        for peer in ("greedy",) * 6 + ("modest", "modest", "other"):
            nursery.start_soon(line.upload, peer)
            await wait_all_tasks_blocked()
        await line.let_go(5)
        assert sorted(line.began[1:4]) == ["greedy", "modest", "other"]
        assert line.began[4:6] == ["greedy", "modest"]
        await line.let_go(4)
    assert len(line.began) == 9
    assert not line.refused


async def test_so_many_are_at_work_at_once_and_no_more() -> None:
    line = Line(Uploads(BUSY, slots=3))
    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(line.upload, f"peer {number}")
        await wait_all_tasks_blocked()
        assert len(line.began) == 3
        await line.let_go(2)
        assert len(line.began) == 5
        await line.let_go(3)


async def test_who_comes_when_too_many_wait_is_answered_at_once() -> None:
    line = Line(Uploads(BUSY, slots=1, waiting=2))
    async with trio.open_nursery() as nursery:
        for peer in ("first", "second", "third", "fourth"):
            nursery.start_soon(line.upload, peer)
            await wait_all_tasks_blocked()
        assert line.refused == ["fourth"]
        await line.let_go(3)
    assert line.began == ["first", "second", "third"]


async def test_who_waits_too_long_is_answered_and_the_slot_stays_whole(autojump_clock: MockClock) -> None:
    line = Line(Uploads(BUSY, slots=1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.upload, "first")
        await wait_all_tasks_blocked()
        nursery.start_soon(line.upload, "second")
        await trio.sleep(WAIT_SECONDS + 1)
        assert line.refused == ["second"]
        await line.let_go()
        nursery.start_soon(line.upload, "third")
        await wait_all_tasks_blocked()
        assert line.began == ["first", "third"]
        await line.let_go()


async def test_an_upload_that_stands_makes_way_for_another_peer_and_goes_on() -> None:
    line = Line(Uploads(BUSY, slots=1))
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(line.upload, "slow")
            await wait_all_tasks_blocked()
        line.turns[0].stalls(STALLED_SECONDS)
        await wait_all_tasks_blocked()
        assert line.began == ["slow"]  # its peer would only stand with the next one
        nursery.start_soon(line.upload, "other")
        await wait_all_tasks_blocked()
        line.turns[0].stalls(STALLED_SECONDS - 0.1)
        await wait_all_tasks_blocked()
        assert line.began == ["slow"]
        line.turns[0].stalls(STALLED_SECONDS)
        await wait_all_tasks_blocked()
        assert len(line.began) == 2
        line.turns[0].stalls(2 * STALLED_SECONDS)
        await line.let_go(3)
    assert sorted(line.began) == ["other", "slow", "slow"]
    assert line.uploads._free == 1


async def test_of_a_peer_that_has_many_uploads_they_make_way_sooner() -> None:
    line = Line(Uploads(BUSY, slots=FAIR + 1))
    async with trio.open_nursery() as nursery:
        for peer in ("greedy",) * (FAIR + 1) + ("other", "other"):
            nursery.start_soon(line.upload, peer)
            await wait_all_tasks_blocked()
        for turn in line.turns[:]:
            turn.stalls(GREEDY_SECONDS)
        await wait_all_tasks_blocked()
        assert line.began == ["greedy"] * (FAIR + 1) + ["other"]
        await line.let_go(len(line.began) + 1)


async def test_peers_that_let_all_uploads_stand_hold_up_no_other() -> None:
    """However many: the oldest of the one with most uploads that stand is ended where too many do."""
    line = Line(Uploads(BUSY, slots=2))
    ended = 0
    async with trio.open_nursery() as nursery:
        for number in range(MAX_ASIDE + 4):
            nursery.start_soon(line.upload, f"hostile {number % 3}")
            nursery.start_soon(line.upload, "modest")
            await wait_all_tasks_blocked()
            for turn in line.turns:
                if turn.peer != "modest":
                    try:
                        turn.stalls(STALLED_SECONDS)
                    except trio.TooSlowError:
                        ended += 1
            await wait_all_tasks_blocked()
        assert "modest" in line.began
        assert len(line.uploads._aside) <= MAX_ASIDE
        nursery.cancel_scope.cancel()
    assert line.uploads._free == 2
    assert not line.uploads._aside
    assert not line.uploads._ended


async def test_one_that_goes_away_while_it_waits_gives_its_turn_to_the_next() -> None:
    line = Line(Uploads(BUSY, slots=1))
    gone = trio.CancelScope()

    async def second() -> None:
        with gone:
            await line.upload("second")

    async with trio.open_nursery() as nursery:
        for upload in (lambda: line.upload("first"), second, lambda: line.upload("third")):
            nursery.start_soon(upload)
            await wait_all_tasks_blocked()
        gone.cancel()
        await wait_all_tasks_blocked()
        await line.let_go()
        assert line.began == ["first", "third"]
        await line.let_go()


def test_a_limited_uplink_has_fewer_slots_and_never_none() -> None:
    assert Uploads.at(None, BUSY)._free == SLOTS
    assert Uploads.at(250_000, BUSY)._free == 2
    assert Uploads.at(1_000, BUSY)._free == 1
    assert Uploads.at(1e9, BUSY)._free == SLOTS


@given(
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 3)), max_size=25),
    slots=st.integers(1, 3),
)
def test_however_they_come_and_go_every_slot_is_free_in_the_end(
    steps: list[tuple[str, bool, int]], slots: int
) -> None:
    async def main() -> None:
        uploads = Uploads(BUSY, slots=slots, waiting=4)
        at_work = most = 0

        async def upload(peer: str, patient: bool, rounds: int) -> None:
            nonlocal at_work, most
            with trio.move_on_after(float("inf") if patient else 0):
                async with uploads.turn(peer) as turn:
                    if turn:
                        at_work += 1
                        most = max(most, at_work)
                        try:
                            for _ in range(rounds):
                                await trio.lowlevel.checkpoint()
                        finally:
                            at_work -= 1

        async with trio.open_nursery() as nursery:
            for step in steps:
                nursery.start_soon(upload, *step)
        assert most <= slots
        assert uploads._free == slots
        assert not uploads._queues
        assert not uploads._held
        assert uploads._waiting == 0

    trio.run(main)
