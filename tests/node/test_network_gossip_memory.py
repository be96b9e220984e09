from __future__ import annotations

import pytest
import trio
from libp2p.pubsub.pb import rpc_pb2

from nous_node.node import gossip_memory
from nous_node.node.gossip_memory import (
    PATIENCE_REFILL,
    PATIENCE_S,
    QUEUE_MESSAGES,
    SEEN_GENERATION_S,
    OutboundQueue,
    RecentMessages,
    SeenMessages,
)


async def test_an_id_is_seen_for_one_to_two_generations(autojump_clock) -> None:
    seen = SeenMessages()
    seen.add(b"old")
    await trio.sleep(SEEN_GENERATION_S)
    seen.add(b"young")
    assert seen.has(b"old")
    await trio.sleep(SEEN_GENERATION_S)
    seen.add(b"newest")
    assert not seen.has(b"old")
    assert seen.has(b"young")
    seen.discard(b"young")
    assert not seen.has(b"young")


async def test_a_flood_of_ids_shortens_the_generations(autojump_clock, monkeypatch) -> None:
    monkeypatch.setattr(gossip_memory, "SEEN_GENERATION_SIZE", 100)
    seen = SeenMessages()
    for number in range(1000):
        seen.add(number.to_bytes(4, "big"))
    assert len(seen._young) + len(seen._old) <= 200
    assert seen.has((999).to_bytes(4, "big"))


def message(number: int, size: int = 10):
    return rpc_pb2.Message(from_id=b"me", seqno=number.to_bytes(8, "big"), data=bytes(size), topicIDs=["t"])


def mid(number: int) -> bytes:
    return b"me" + number.to_bytes(8, "big")


def test_recent_messages_leave_after_five_heartbeats() -> None:
    recent = RecentMessages(3, 5)
    recent.put(message(1))
    for _ in range(3):
        assert recent.get(mid(1)) is not None
        recent.shift()
    assert recent.window("t") == []
    recent.shift()
    assert recent.get(mid(1)) is not None
    recent.shift()
    assert recent.get(mid(1)) is None
    assert recent._bytes == 0


def test_recent_messages_are_bounded_by_bytes(monkeypatch) -> None:
    monkeypatch.setattr(gossip_memory, "RECENT_BYTES", 1000)
    recent = RecentMessages(3, 5)
    for number in range(20):
        recent.put(message(number, 100))
        recent.put(message(number, 100))  # twice is once
        if number == 7:
            recent.shift()
    assert sorted(recent.msgs) == [mid(number) for number in range(10, 20)]
    assert recent._bytes == 1000


async def test_control_goes_first_and_frames_are_joined() -> None:
    queue = OutboundQueue()
    assert queue.push_message(b"message")
    assert queue.push_control(b"control")
    assert await queue.pop_batch(1000) == b"controlmessage"


async def test_a_batch_keeps_to_its_limit_but_for_one_large_message() -> None:
    queue = OutboundQueue()
    for frame in (b"a" * 40, b"b" * 40, b"c" * 200):
        queue.push_message(frame)
    assert await queue.pop_batch(100) == b"a" * 40 + b"b" * 40
    assert await queue.pop_batch(100) == b"c" * 200


async def test_a_full_queue_refuses_and_tells_when_there_is_room() -> None:
    queue = OutboundQueue()
    while queue.push_message(b"x"):
        pass
    assert len(queue) == QUEUE_MESSAGES
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.wait_room)
        await trio.testing.wait_all_tasks_blocked()
        await queue.pop_batch(1)
    assert queue.push_message(b"x")


async def test_a_queue_is_bounded_by_bytes_too(monkeypatch) -> None:
    monkeypatch.setattr(gossip_memory, "QUEUE_BYTES", 1000)
    queue = OutboundQueue()
    assert queue.push_message(bytes(1500))  # one message always fits
    assert not queue.push_message(b"x")


async def test_control_is_bounded_by_bytes_until_it_is_written(monkeypatch) -> None:
    monkeypatch.setattr(gossip_memory, "QUEUE_CONTROL_BYTES", 1000)
    queue = OutboundQueue()
    assert queue.push_control(bytes(1500))  # one always fits
    assert not queue.push_control(b"x")
    await queue.pop_batch(10_000)
    assert queue.push_control(bytes(600))
    assert queue.push_control(bytes(400))
    assert not queue.push_control(b"x")


async def test_closing_a_queue_wakes_both_sides() -> None:
    queue = OutboundQueue()
    while queue.push_message(b"x"):
        pass
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.wait_room)
        await trio.testing.wait_all_tasks_blocked()
        queue.close()
    assert await queue.pop_batch(1) == b""
    assert not queue.push_message(b"x")
    assert not queue.push_control(b"x")


async def test_patience_is_spent_and_comes_back_slowly(autojump_clock) -> None:
    queue = OutboundQueue()
    while queue.push_message(b"x"):
        pass
    start = trio.current_time()
    assert not await queue.push_patiently(b"x")
    assert trio.current_time() - start == pytest.approx(PATIENCE_S)
    assert not await queue.push_patiently(b"x")  # refused at once
    assert trio.current_time() - start == pytest.approx(PATIENCE_S, abs=0.01)
    await trio.sleep(10)
    assert queue.patience == pytest.approx(10 * PATIENCE_REFILL, abs=0.01)


async def test_written_means_that_the_next_batch_was_asked_for() -> None:
    queue = OutboundQueue()
    queue.push_message(b"x")
    written = []

    async def wait() -> None:
        await queue.wait_written()
        written.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await queue.pop_batch(10)
        await trio.testing.wait_all_tasks_blocked()
        assert not written
        nursery.start_soon(queue.pop_batch, 10)
        await trio.testing.wait_all_tasks_blocked()
        assert written
        queue.close()


@pytest.mark.parametrize("rate", [0, -1.0])
def test_an_upload_limit_must_be_positive(rate) -> None:
    from nous_node.node.upload_limit import UploadLimit

    with pytest.raises(ValueError, match="above 0 bytes/s"):
        UploadLimit(rate)
