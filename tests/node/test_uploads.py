"""Turns at the uplink: nobody starves, nobody waits for ever, nothing is lost when somebody gives up."""

from __future__ import annotations

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from nous_node.node.uploads import SLOTS, WAIT_SECONDS, Uploads

BUSY = b"busy"


class Line:
    """Uploads that end when they are let go, in the order in which they began."""

    def __init__(self, uploads: Uploads) -> None:
        self.uploads = uploads
        self.began: list[str] = []
        self.refused: list[str] = []
        self._ends: list[trio.Event] = []

    async def upload(self, peer: str) -> None:
        async with self.uploads.turn(peer) as granted:
            if not granted:
                self.refused.append(peer)
                return
            self.began.append(peer)
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
                async with uploads.turn(peer) as granted:
                    if granted:
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
        assert uploads._waiting == 0

    trio.run(main)
