"""The content of groups by reference: fetched from whoever has it, refused where nobody has, and bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import zstandard

from nous_node.node import bodies as module
from nous_node.node import body_chunks
from nous_node.node.stored_groups import enclosed
from nous_node.protocol.constants import CHUNK
from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import accepted
from nous_node.protocol.references import cut
from nous_node.protocol.streams import blob_reply, busy_reply

from .bodies import (
    ALICE,
    BOB,
    NOW,
    RELAY,
    VERSION,
    Desk,
    Referred,
    babble,
    body_of,
    holder,
    key,
    nothing,
    other_bytes,
    stall,
)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "journal.sqlite")
    desk.publish(0)
    desk.known(ALICE, BOB)
    desk.publish(VERSION)
    with desk.journal:
        yield desk


async def test_a_group_is_fetched_from_its_forwarder_and_journalled(autojump_clock: Any, desk: Desk) -> None:
    group = Referred(ALICE, 0)
    desk.net.answers = {ALICE.peer_id: holder(group), RELAY: holder(group), "other": holder(group)}
    async with desk.open():
        assert desk.offer(group) is None
        await desk.settled()
    (stored,) = desk.journal.unused()
    assert stored.envelope == enclosed(b"envelope", group.frame)
    assert (stored.digest, stored.counter, stored.state) == (group.reference.hash, 0, "pending")
    assert {peer for peer, _ in desk.net.asked} == {RELAY}


async def test_whoever_made_it_is_asked_where_the_forwarder_has_nothing(
    autojump_clock: Any, desk: Desk
) -> None:
    group = Referred(ALICE, 0)
    desk.net.answers = {ALICE.peer_id: holder(group), RELAY: nothing, "other": nothing}
    async with desk.open():
        desk.offer(group)
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]
    assert [peer for peer, _ in desk.net.asked] == [RELAY, ALICE.peer_id]


async def test_others_are_asked_where_neither_is_connected(autojump_clock: Any, desk: Desk) -> None:
    group = Referred(ALICE, 0)
    desk.net.answers = {"other": holder(group)}
    async with desk.open():
        desk.offer(group)
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]


async def test_every_chunk_is_fetched_once_and_a_source_that_fails_comes_last(
    autojump_clock: Any, desk: Desk
) -> None:
    group = Referred(ALICE, 0, size=3 * CHUNK)
    desk.net.answers = {RELAY: babble, ALICE.peer_id: holder(group)}
    async with desk.open():
        desk.offer(group)
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]
    assert [peer for peer, _ in desk.net.asked] == [RELAY] + [ALICE.peer_id] * 4
    assert [digest for _, digest in desk.net.asked[1:]] == list(group.chunks)


async def test_a_volunteer_that_comes_back_in_time_is_waited_for(autojump_clock: Any, desk: Desk) -> None:
    group = Referred(ALICE, 0)
    async with desk.open():
        desk.offer(group, ALICE.peer_id)
        await trio.sleep(body_chunks.PATIENCE_SECONDS / 2)
        desk.net.answers = {ALICE.peer_id: holder(group)}
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]


async def test_a_busy_sender_is_asked_until_it_has_time(autojump_clock: Any, desk: Desk) -> None:
    """It has far more to upload than a peer without the chunk is waited for."""
    group = Referred(ALICE, 0)
    began = trio.current_time()

    async def busy(digest: bytes) -> bytes:
        if trio.current_time() < began + 3 * body_chunks.PATIENCE_SECONDS:
            return busy_reply()
        return await holder(group)(digest)

    desk.net.answers = {RELAY: nothing, ALICE.peer_id: busy}
    async with desk.open():
        desk.offer(group)
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]


async def test_peers_that_say_busy_for_ever_end_with_the_body(autojump_clock: Any, desk: Desk) -> None:
    group = Referred(ALICE, 0)

    async def busy(digest: bytes) -> bytes:
        return busy_reply()

    desk.net.answers = {RELAY: busy}
    async with desk.open():
        began = trio.current_time()
        desk.offer(group)
        await desk.settled()
        assert trio.current_time() - began <= module.BODY_SECONDS + 1
    assert desk.code(group) == "unavailable"


@pytest.mark.parametrize("miss", [nothing, babble])
async def test_one_missed_answer_and_hostile_others_lose_no_group(
    autojump_clock: Any, desk: Desk, miss: Any
) -> None:
    group = Referred(ALICE, 0)
    missed = []

    async def flaky(digest: bytes) -> bytes:
        missed.append(digest)
        return await (miss if len(missed) == 1 else holder(group))(digest)

    desk.net.answers = {ALICE.peer_id: flaky} | {f"evil {number}": stall for number in range(8)}
    async with desk.open():
        desk.offer(group)
        began = trio.current_time()
        await desk.settled()
        assert trio.current_time() - began < 5
    assert desk.pending() == [(ALICE.key, 0)]


async def test_a_forwarder_that_stalls_does_not_use_up_the_time_of_the_sender(
    autojump_clock: Any, desk: Desk
) -> None:
    group = Referred(ALICE, 0, size=CHUNK)
    missed = []

    async def flaky(digest: bytes) -> bytes:
        missed.append(digest)
        return await (nothing if len(missed) < body_chunks.ROUNDS else holder(group))(digest)

    desk.net.answers = {RELAY: stall, ALICE.peer_id: flaky}
    async with desk.open():
        desk.offer(group)
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]


@pytest.mark.parametrize("answer", [nothing, babble, stall, other_bytes])
async def test_what_does_not_arrive_is_refused_as_unavailable(
    autojump_clock: Any, desk: Desk, answer: Any
) -> None:
    """Bytes of a forwarder that are others cost the forwarder its connection, and the sender nothing."""
    group = Referred(ALICE, 0)
    desk.net.answers = {RELAY: answer}
    async with desk.open():
        began = trio.current_time()
        desk.offer(group)
        await desk.settled()
        assert trio.current_time() - began < 60
    assert desk.code(group) == "unavailable"
    assert (desk.pending(), desk.took) == ([], [])
    assert desk.net.cut == ([RELAY] if answer is other_bytes else [])
    record = desk.journal.key(ALICE.key)
    assert record is not None
    assert (record.refused, record.reputation.score) == (1, 0.0)


async def test_a_byte_a_second_for_every_chunk_ends_with_the_body(autojump_clock: Any, desk: Desk) -> None:
    """Each chunk just in time: the body as a whole is too late."""
    group = Referred(ALICE, 0, size=12 * CHUNK)

    async def slow(digest: bytes) -> bytes:
        await trio.sleep(body_chunks.CHUNK_SECONDS + CHUNK / body_chunks.CHUNK_RATE - 1)
        return blob_reply(group.chunks[digest])

    desk.net.answers = {RELAY: slow}
    async with desk.open():
        began = trio.current_time()
        desk.offer(group)
        await desk.settled()
        assert trio.current_time() - began <= module.BODY_SECONDS + 13 * CHUNK / module.BODY_RATE
    assert desk.code(group) == "unavailable"


async def test_a_sender_that_serves_other_bytes_than_it_signed_is_refused_and_cut_off(
    autojump_clock: Any, desk: Desk
) -> None:
    group = Referred(ALICE, 0)
    desk.net.answers = {ALICE.peer_id: other_bytes, RELAY: nothing}
    async with desk.open():
        desk.offer(group)
        await desk.settled()
    assert desk.code(group) == "hash-mismatch"
    assert desk.net.cut == [ALICE.peer_id]
    record = desk.journal.key(ALICE.key)
    assert record is not None
    assert record.reputation.score == 1.0


def lies() -> dict[str, tuple[Referred, str]]:
    """Whose chunks are those of their references, and whose content is not what was said."""
    honest = Referred(ALICE, 0)

    def changed(**changes: Any) -> Referred:
        group = Referred(ALICE, 0)
        group.reference = msgspec.structs.replace(group.reference, **changes)
        return group

    def framed(frame: bytes) -> Referred:
        group = Referred(ALICE, 0, content=frame)
        group.frame = frame
        group.reference = msgspec.structs.replace(
            honest.reference, packed=len(frame), chunks=sha256(frame).digest()
        )
        group.chunks = dict(cut(group.reference, frame))
        return group

    return {
        "another hash": (changed(hash=bytes(32)), "hash-mismatch"),
        "another counter": (Referred(ALICE, 0, content=body_of(1)), "hash-mismatch"),
        "another checkpoint": (Referred(ALICE, 0, content=body_of(0, checkpoint=bytes(32))), "hash-mismatch"),
        "more than it says": (changed(size=honest.reference.size - 1), "bad-compression"),
        "a bomb": (framed(zstandard.compress(bytes(1 << 26))), "bad-compression"),
        "no frame": (framed(honest.body), "bad-compression"),
        "two frames": (framed(honest.frame * 2), "bad-compression"),
        "no msgpack": (Referred(ALICE, 0, content=b"\xc1"), "malformed"),
        "no group": (Referred(ALICE, 0, content=b"\x80"), "wrong-type"),
    }


@pytest.mark.parametrize("lie", lies())
async def test_content_that_is_not_what_was_signed_is_refused_with_its_code(
    autojump_clock: Any, desk: Desk, lie: str
) -> None:
    group, code = lies()[lie]
    desk.net.answers = {RELAY: holder(group)}
    async with desk.open():
        desk.offer(group)
        await desk.settled()
    assert desk.code(group) == code
    assert (desk.pending(), desk.took) == ([], [])
    assert [error.code for _, error in desk.failed] == [code]
    assert desk.net.cut == []  # whoever passed it on could not know
    record = desk.journal.key(ALICE.key)
    assert record is not None
    assert record.reputation.score == 1.0


async def test_nothing_is_fetched_of_what_would_be_refused_in_any_case(
    autojump_clock: Any, desk: Desk
) -> None:
    stranger = Referred(key(3), 0)
    desk.journal.hear(stranger.identity.key, "test", NOW, VERSION)
    assert desk.offer(stranger).code is Code.KEY_TOO_NEW  # type: ignore[union-attr]
    assert desk.code(stranger) == "key-too-new"
    taken = Referred(ALICE, 0)
    desk.journal.add(taken.stored())
    other = Referred(ALICE, 0, content=b"other")
    assert desk.offer(other).code is Code.COUNTER_REUSED  # type: ignore[union-attr]
    far = Referred(ALICE, 5_000)
    assert desk.offer(far).code is Code.COUNTER_GAP  # type: ignore[union-attr]
    desk.journal.decide([accepted(taken.stored().id, ALICE.key, 4)], NOW)
    assert desk.offer(taken, salt=b"again").code is Code.DUPLICATE  # type: ignore[union-attr]
    assert desk.code(taken, b"again") == ""
    assert desk.net.asked == []


async def test_a_second_reference_for_a_counter_that_is_being_fetched_is_refused(
    autojump_clock: Any, desk: Desk
) -> None:
    group, other = Referred(ALICE, 0), Referred(ALICE, 0, content=body_of(0, 2_000))
    desk.net.answers = {RELAY: holder(group, other)}
    async with desk.open():
        desk.offer(group)
        assert desk.offer(other).code is Code.COUNTER_REUSED  # type: ignore[union-attr]
        await desk.settled()
    assert desk.code(other) == "counter-reused"
    assert [one.digest for one in desk.journal.unused()] == [group.reference.hash]


async def test_repeats_of_what_is_being_fetched_are_one_group_and_each_has_its_receipt(
    autojump_clock: Any, desk: Desk
) -> None:
    group = Referred(ALICE, 0)
    desk.net.answers = {RELAY: nothing}
    async with desk.open():
        desk.offer(group)
        await trio.sleep(1)
        desk.net.answers["second"] = holder(group)
        assert desk.offer(group, "second", b"again") is None
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]
    desk.journal.decide([accepted(group.stored().id, ALICE.key, 4)], NOW)
    assert (desk.code(group), desk.code(group, b"again")) == ("", "")
    record = desk.journal.key(ALICE.key)
    assert record is not None
    assert record.credit == 4


async def test_a_group_that_failed_may_be_published_again(autojump_clock: Any, desk: Desk) -> None:
    group = Referred(ALICE, 0)
    async with desk.open():
        desk.offer(group)
        await desk.settled()
        assert desk.code(group) == "unavailable"
        desk.net.answers = {RELAY: holder(group)}
        assert desk.offer(group, salt=b"again") is None
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]


@pytest.mark.parametrize("size", [1_000, 2 * module.AT_ONCE_BYTES])
async def test_a_large_group_is_checked_and_put_together_beside_the_loop(
    autojump_clock: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    threads = set[bool]()

    def seen(name: str) -> None:
        function = getattr(module, name)

        def call(*values: Any) -> Any:
            threads.add(threading.current_thread() is threading.main_thread())
            return function(*values)

        monkeypatch.setattr(module, name, call)

    for name in ("unpack", "open_group", "enclosed"):
        seen(name)
    group = Referred(ALICE, 0, size=size)
    desk.net.answers = {RELAY: holder(group)}
    async with desk.open():
        desk.offer(group)
        await desk.settled()
    assert desk.pending() == [(ALICE.key, 0)]
    assert threads == {size <= module.AT_ONCE_BYTES}


async def test_what_was_awaited_is_nowhere_after_a_restart(autojump_clock: Any, desk: Desk) -> None:
    group = Referred(ALICE, 0)
    desk.net.answers = {RELAY: stall}
    async with desk.open():
        desk.offer(group)
        await trio.sleep(1)
    assert desk.pending() == []
    assert desk.code(group) is None  # its sender will send it again
