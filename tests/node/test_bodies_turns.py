"""Groups by reference: in whose turn they are fetched, and what their key owes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from nous_node.node import bodies as module
from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import accepted

from .bodies import ALICE, BOB, CHECKPOINT, NOW, RELAY, VERSION, Desk, Referred, holder, key, stall


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "journal.sqlite")
    desk.publish(0)
    desk.known(ALICE, BOB)
    desk.publish(VERSION)
    with desk.journal:
        yield desk


# --- holes -----------------------------------------------------------------------------------------


async def test_groups_behind_a_large_one_wait_for_it_and_are_judged_in_order(
    autojump_clock: Any, desk: Desk
) -> None:
    large = [Referred(ALICE, counter) for counter in range(4)]
    served = trio.Event()

    async def later(digest: bytes) -> bytes:
        await served.wait()
        return await holder(*large)(digest)

    desk.net.answers = {RELAY: later}
    async with desk.open():
        for group in large:
            desk.offer(group)
        small = [Referred(ALICE, counter).stored() for counter in range(4, 8)]
        assert desk.journal.add_many(small) == [None] * 4
        assert desk.pending() == []
        served.set()
        await desk.settled()
    assert sorted(desk.pending()) == [(ALICE.key, counter) for counter in range(8)]


async def test_what_is_on_its_way_when_its_checkpoint_becomes_stale_is_owed_only_if_it_never_comes(
    autojump_clock: Any,
    desk: Desk,
) -> None:
    desk.journal.add(Referred(ALICE, 0).stored())
    desk.journal.decide([accepted(Referred(ALICE, 0).stored().id, ALICE.key, 10)], NOW)
    comes, never = Referred(ALICE, 1), Referred(ALICE, 2)
    desk.journal.add(Referred(ALICE, 3).stored())
    served = trio.Event()

    async def later(digest: bytes) -> bytes:
        await served.wait()
        return await holder(comes)(digest)

    def debit() -> int:
        record = desk.journal.key(ALICE.key)
        assert record is not None
        return record.debit

    desk.net.answers = {RELAY: later}
    async with desk.open():
        desk.offer(comes)
        desk.offer(never)
        await trio.sleep(1)
        desk.publish(2, 3, 4)
        assert debit() == 0
        served.set()
        await desk.settled()
    assert desk.code(never) == "unavailable"
    assert debit() == 10


@pytest.mark.parametrize("comes", [True, False])
async def test_groups_behind_what_is_on_its_way_are_judged_when_their_checkpoint_becomes_stale(
    autojump_clock: Any, desk: Desk, comes: bool
) -> None:
    """Their sender has done all that it could, whether the rest comes or not."""
    large = [Referred(ALICE, counter) for counter in range(8)]
    served = trio.Event()

    async def later(digest: bytes) -> bytes:
        await served.wait()
        return await holder(*large[: 8 if comes else 2])(digest)

    desk.net.answers = {RELAY: later}
    async with desk.open():
        for group in large:
            desk.offer(group)
        small = [Referred(ALICE, counter) for counter in (8, 9)]
        assert desk.journal.add_many([one.stored() for one in small]) == [None] * 2
        desk.publish(2, 3)
        assert desk.pending() == []
        desk.publish(4)
        assert desk.pending() == [(ALICE.key, 8), (ALICE.key, 9)]
        served.set()
        await desk.settled()
    assert [desk.code(one) for one in small] == [None] * 2
    late = {(ALICE.key, counter) for counter in range(8 if comes else 2)}
    assert late <= set(desk.pending())


async def test_groups_with_more_holes_than_are_on_their_way_are_refused_when_their_checkpoint_is_stale(
    autojump_clock: Any, desk: Desk
) -> None:
    """What is announced above the highest counter fills no hole."""
    desk.net.answers = {RELAY: stall}
    async with desk.open():
        for counter in (1, *range(20, 30)):
            assert desk.offer(Referred(ALICE, counter)) is None
        waits = Referred(ALICE, 9)
        desk.journal.add(waits.stored())
        desk.publish(2, 3, 4)
    receipt = desk.journal.receipt(waits.stored().id)
    assert receipt is not None
    assert (receipt.code, receipt.measured) == ("withheld", 8)


async def test_announcing_what_never_comes_saves_no_key_from_its_holes(
    autojump_clock: Any, desk: Desk
) -> None:
    desk.journal.add(Referred(ALICE, 0).stored())
    desk.journal.decide([accepted(Referred(ALICE, 0).stored().id, ALICE.key, 10)], NOW)
    desk.journal.add(Referred(ALICE, 2).stored())
    async with desk.open():
        desk.offer(Referred(ALICE, 1))
        await desk.settled()
    desk.publish(2, 3, 4)
    record = desk.journal.key(ALICE.key)
    assert record is not None
    assert record.debit == 10


# --- quotas ----------------------------------------------------------------------------------------


def fetching(desk: Desk) -> list[bytes]:
    return sorted(body.group.key for body in desk.bodies._fetching)


async def test_one_key_has_few_fetches_at_once_and_others_have_theirs(
    autojump_clock: Any, desk: Desk
) -> None:
    mine, his = [Referred(ALICE, counter) for counter in range(1, 6)], Referred(BOB, 0)
    slow = {digest for group in mine for digest in group.chunks}

    async def answer(digest: bytes) -> bytes:
        return await (stall if digest in slow else holder(his))(digest)

    desk.net.answers = {RELAY: answer}
    async with desk.open():
        for group in mine:
            desk.offer(group)
        desk.offer(his)
        await trio.sleep(1)
        assert fetching(desk) == [ALICE.key] * module.OWN_BODIES
        assert desk.pending() == [(BOB.key, 0)]


async def test_strangers_have_a_share_of_the_fetches_and_active_keys_the_rest(
    autojump_clock: Any, desk: Desk, tmp_path: Path
) -> None:
    crowd = [Referred(key(number), 0) for number in range(10, 40)]
    desk.journal._database.write("UPDATE keys SET state = 'active' WHERE key = ?", (ALICE.key,))
    desk.net.answers = {RELAY: stall}
    async with desk.open():
        for group in crowd:
            desk.journal.hear(group.identity.key, "test", NOW, 0)
            assert desk.offer(group) is None
        await trio.sleep(1)
        assert len(fetching(desk)) == module.BODIES // module.STRANGERS
        mine = Referred(ALICE, 0)
        desk.net.answers[ALICE.peer_id] = holder(mine)
        desk.offer(mine, ALICE.peer_id)
        await trio.sleep(1)
        assert (ALICE.key, 0) in desk.pending()


async def test_announced_bytes_are_bounded_before_any_has_come(
    autojump_clock: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BODY_BYTES", 20_000)
    monkeypatch.setattr(module, "OWN_BYTES", 6_000)
    crowd = [Referred(key(number), 0, size=4_000) for number in range(10, 20)]
    desk.net.answers = {RELAY: stall}
    async with desk.open():
        for group in crowd:
            desk.journal.hear(group.identity.key, "test", NOW, 0)
            desk.offer(group)
        desk.offer(Referred(ALICE, 0, size=4_000))
        desk.offer(Referred(ALICE, 1, size=4_000))
        await trio.sleep(1)
        assert len(fetching(desk)) == 2  # half of 20,000 bytes for keys that are not active
        await desk.settled()  # each in its turn
    assert {desk.code(group) for group in crowd} == {"unavailable"}


async def test_a_key_that_announces_more_than_may_wait_is_held_off(autojump_clock: Any, desk: Desk) -> None:
    desk.net.answers = {RELAY: stall}
    async with desk.open():
        mine = [Referred(ALICE, counter) for counter in range(module.OWN_BODIES + module.QUEUED + 1)]
        assert [desk.offer(group) for group in mine[: module.OWN_BODIES]] == [None] * module.OWN_BODIES
        await trio.sleep(0.1)
        assert [desk.offer(group) for group in mine[module.OWN_BODIES : -1]] == [None] * module.QUEUED
        error = desk.offer(mine[-1])
        assert error is not None
        assert error.code is Code.BUSY
        assert desk.code(mine[-1]) is None
        assert desk.offer(Referred(BOB, 0)) is None


async def test_a_group_that_has_come_waits_while_the_learner_has_enough(
    autojump_clock: Any, desk: Desk
) -> None:
    group = Referred(ALICE, 0)
    desk.net.answers = {RELAY: holder(group)}
    desk.room = trio.Event()
    async with desk.open():
        desk.offer(group)
        await trio.sleep(10 * module.BODY_SECONDS)
        assert desk.pending() == []
        desk.room.set()
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]


async def test_a_key_that_lost_its_standing_meanwhile_is_not_taken(autojump_clock: Any, desk: Desk) -> None:
    group = Referred(ALICE, 0)
    served = trio.Event()

    async def later(digest: bytes) -> bytes:
        await served.wait()
        return await holder(group)(digest)

    desk.net.answers = {RELAY: later}
    async with desk.open():
        desk.offer(group)
        await trio.sleep(1)
        desk.journal._database.write("UPDATE keys SET state = 'banned' WHERE key = ?", (ALICE.key,))
        served.set()
        await desk.settled()
    assert desk.code(group) == "banned"
    assert CHECKPOINT not in {one.checkpoint for one in desk.journal.unused()}
