"""A relay passes on the chunks of references that it forwarded, and holds no more than it may."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node import passing as module
from nous_node.node.passing import Passing, Shares
from nous_node.protocol.constants import CHUNK, MAX_REFERENCED, MIN_CHUNK
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import Reference
from nous_node.protocol.streams import blob_reply

from .bodies import ALICE, BOB, CHECKPOINT, RELAY, Net, Referred, holder, key, nothing, other_bytes, stall

TRUSTED = key(77)
TRAINER = TRUSTED.peer_id


class Bench:
    def __init__(self) -> None:
        self.net = Net()
        self.passing = Passing(self.net, [TRUSTED.key])

    def note(self, group: Referred, forwarder: str = RELAY) -> None:
        self.passing.note(group.identity.key, group.reference, forwarder)

    async def all_of(self, group: Referred) -> list[bytes | None]:
        return [await self.passing.chunk(TRAINER, digest) for digest in group.chunks]

    async def no_time(self, group: Referred, asker: str = TRAINER) -> None:
        for digest in group.chunks:
            with pytest.raises(RemoteError) as refused:
                await self.passing.chunk(asker, digest)
            assert refused.value.code == Code.BUSY

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.passing.run)
            yield
            nursery.cancel_scope.cancel()


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_chunks_are_fetched_from_the_forwarder_when_asked_for_and_once(bench: Bench) -> None:
    group = Referred(ALICE, 0, size=2 * CHUNK)
    bench.net.answers = {RELAY: holder(group)}
    bench.note(group)
    async with bench.open():
        assert bench.net.asked == []
        assert await bench.all_of(group) == list(group.chunks.values())
        assert await bench.all_of(group) == list(group.chunks.values())
    assert bench.net.asked == [(RELAY, digest) for digest in group.chunks]


async def test_the_sender_is_asked_where_the_forwarder_is_gone(bench: Bench) -> None:
    group = Referred(ALICE, 0)
    bench.net.answers = {ALICE.peer_id: holder(group)}
    bench.note(group)
    async with bench.open():
        assert await bench.all_of(group) == list(group.chunks.values())


async def test_nothing_is_fetched_that_no_reference_names(bench: Bench) -> None:
    group = Referred(ALICE, 0)
    bench.net.answers = {RELAY: holder(group)}
    async with bench.open():
        assert await bench.all_of(group) == [None]
    assert bench.net.asked == []


async def test_another_chunk_is_not_passed_on_and_costs_its_source_the_connection(bench: Bench) -> None:
    group = Referred(ALICE, 0)
    bench.net.answers = {RELAY: other_bytes, ALICE.peer_id: nothing}
    bench.note(group)
    async with bench.open():
        assert await bench.all_of(group) == [None]
    assert bench.net.cut == [RELAY]


async def test_those_who_ask_at_the_same_time_share_one_fetch(autojump_clock: Any, bench: Bench) -> None:
    group = Referred(ALICE, 0)
    (digest,) = group.chunks
    found: list[bytes | None] = []
    askers = [TRAINER, "other trainer", "relay"]

    async def later(digest: bytes) -> bytes:
        await trio.sleep(5)
        return blob_reply(group.chunks[digest])

    async def ask(asker: str) -> None:
        found.append(await bench.passing.chunk(asker, digest))

    bench.net.answers = {RELAY: later}
    bench.note(group)
    async with bench.open(), trio.open_nursery() as nursery:
        for asker in askers:
            nursery.start_soon(ask, asker)
    assert found == [group.chunks[digest]] * 3
    assert len(bench.net.asked) == 1


async def test_a_fetch_goes_on_when_whoever_asked_has_given_up(autojump_clock: Any, bench: Bench) -> None:
    group = Referred(ALICE, 0)
    (digest,) = group.chunks

    async def later(digest: bytes) -> bytes:
        await trio.sleep(5)
        return blob_reply(group.chunks[digest])

    bench.net.answers = {RELAY: later}
    bench.note(group)
    async with bench.open():
        with trio.move_on_after(1):
            await bench.passing.chunk(TRAINER, digest)
        await trio.sleep(10)
        bench.net.answers = {}
        assert await bench.passing.chunk(TRAINER, digest) == group.chunks[digest]


async def test_a_key_whose_chunks_stall_holds_up_no_other_key(autojump_clock: Any, bench: Bench) -> None:
    stalled = [Referred(ALICE, counter) for counter in range(module.OWN_PULLS + 1)]
    other = Referred(BOB, 9)
    bench.net.answers = {RELAY: stall, "bob": holder(other)}
    for group in stalled:
        bench.note(group)
    bench.note(other, "bob")
    async with bench.open(), trio.open_nursery() as nursery:
        for group in stalled[:-1]:
            nursery.start_soon(bench.all_of, group)
        await trio.sleep(0.1)
        await bench.no_time(stalled[-1])  # as many as one key may have are on their way
        assert await bench.all_of(other) == list(other.chunks.values())
        nursery.cancel_scope.cancel()


async def test_one_forwarder_leaves_places_for_what_others_forwarded(
    autojump_clock: Any, bench: Bench
) -> None:
    """Keys cost nothing: each has as many fetches as a key may have, and none ever ends."""
    crowd = [Referred(key(100 + number), 100 + number) for number in range(2 * module.FORWARDER_PULLS)]
    honest = Referred(BOB, 9)
    bench.net.answers = {"evil": stall, RELAY: holder(honest)}
    for group in crowd:
        bench.note(group, "evil")
    bench.note(honest)
    async with bench.open(), trio.open_nursery() as nursery:
        for group in crowd[: module.FORWARDER_PULLS]:
            nursery.start_soon(bench.all_of, group)
        await trio.sleep(0.1)
        await bench.no_time(crowd[-1])
        assert await bench.all_of(honest) == list(honest.chunks.values())
        nursery.cancel_scope.cancel()


async def test_peers_that_are_no_trainers_have_few_fetches_and_trainers_the_others(
    autojump_clock: Any, bench: Bench
) -> None:
    crowd = [Referred(key(100 + number), 100 + number) for number in range(module.OTHERS_PULLS + 1)]
    wanted = Referred(BOB, 9)
    bench.net.answers = {RELAY: stall, "bob": holder(wanted)}
    for group in crowd:
        bench.note(group)
    bench.note(wanted, "bob")
    async with bench.open(), trio.open_nursery() as nursery:
        for number, group in enumerate(crowd[:-1]):
            nursery.start_soon(bench.passing.chunk, f"peer {number // module.ASKER_PULLS}", *group.chunks)
        await trio.sleep(0.1)
        await bench.no_time(crowd[-1], "one more")
        await bench.no_time(wanted, "peer 0")
        assert await bench.all_of(wanted) == list(wanted.chunks.values())
        nursery.cancel_scope.cancel()


async def test_a_peer_waits_once_for_a_chunk(autojump_clock: Any, bench: Bench) -> None:
    group = Referred(ALICE, 0)
    (digest,) = group.chunks
    bench.net.answers = {RELAY: stall}
    bench.note(group)
    async with bench.open(), trio.open_nursery() as nursery:
        nursery.start_soon(bench.passing.chunk, TRAINER, digest)
        await trio.sleep(0.1)
        await bench.no_time(group)
        nursery.cancel_scope.cancel()


async def test_a_fetch_that_nobody_answers_ends(autojump_clock: Any, bench: Bench) -> None:
    group = Referred(ALICE, 0)
    bench.net.answers = {RELAY: stall, ALICE.peer_id: stall}
    for number in range(module.ORIGINS):
        thief = Referred(key(50 + number), 0)
        thief.reference = group.reference
        bench.net.answers[f"thief {number}"] = stall
        bench.note(thief, f"thief {number}")
    bench.note(group)
    async with bench.open():
        began = trio.current_time()
        assert await bench.all_of(group) == [None]
        assert trio.current_time() - began <= module.PULL_SECONDS
        assert not bench.passing._pulls


def test_one_reference_enters_no_more_chunks_than_may_be(bench: Bench) -> None:
    """As it comes from a sender that cuts the largest frame into the smallest chunks."""
    count = MAX_REFERENCED // MIN_CHUNK
    hashes = b"".join(number.to_bytes(32) for number in range(count))
    said = Reference(CHECKPOINT, 0, bytes(32), MAX_REFERENCED, MAX_REFERENCED, MIN_CHUNK, hashes)
    bench.passing.note(ALICE.key, said, RELAY)
    assert len(bench.passing._origins._entries) == module.NAMED


async def test_whoever_names_the_chunks_of_another_key_does_not_take_its_place(bench: Bench) -> None:
    honest = Referred(ALICE, 0)
    thief = Referred(BOB, 0)
    thief.reference = honest.reference
    for first, second in ((honest, thief), (thief, honest)):
        bench.passing = Passing(bench.net, [TRUSTED.key])
        bench.net.answers = {RELAY: holder(honest), "thief": nothing}
        bench.note(first, "thief" if first is thief else RELAY)
        bench.note(second, "thief" if second is thief else RELAY)
        async with bench.open():
            assert await bench.all_of(honest) == list(honest.chunks.values())


async def test_what_was_passed_on_is_kept_within_a_bound(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PASSED_BYTES", 5_000)
    bench.passing = Passing(bench.net, [TRUSTED.key])
    groups = [Referred(key(number), number) for number in range(10, 20)]
    bench.net.answers = {RELAY: holder(*groups)}
    for group in groups:
        bench.note(group)
    async with bench.open():
        for group in groups:
            await bench.all_of(group)
        bench.net.answers = {RELAY: nothing}
        kept = [await bench.all_of(group) != [None] for group in groups]
    assert sum(kept) == 4  # each has a little more than 1,000 bytes


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(1, 9))))
def test_a_table_of_shares_never_exceeds_its_bound(puts: list[tuple[int, int, int]]) -> None:
    table = Shares[int](20)
    for name, owner, weight in puts:
        table.put(bytes([name]), bytes([owner]), weight, name)
        held = {name: table.get(bytes([name])) for name in range(31)}
        assert all(value in (None, name) for name, value in held.items())
        assert sum(weight for _, weight, _ in table._entries.values()) == table._sum <= 20
        assert sum(table._weights.values()) == table._sum
        assert len(table._heaviest) <= 2 * len(table._weights) + 2


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(1, 9))))
def test_what_goes_is_the_oldest_of_an_owner_that_has_most(puts: list[tuple[int, int, int]]) -> None:
    table = Shares[int](20)
    for name, owner, weight in puts:
        entries = {one: (whose, size) for one, (whose, size, _) in table._entries.items()}
        entries.pop(bytes([name]), None)
        entries[bytes([name])] = bytes([owner]), weight
        table.put(bytes([name]), bytes([owner]), weight, name)
        while sum(size for _, size in entries.values()) > 20:
            owned = Counter[bytes]()
            for whose, size in entries.values():
                owned[whose] += size
            most = min(owned, key=lambda whose: (-owned[whose], whose))
            del entries[next(one for one, (whose, _) in entries.items() if whose == most)]
        assert set(entries) == set(table._entries)


def test_whoever_fills_a_table_of_shares_loses_its_own_entries() -> None:
    table = Shares[int](10)
    for number in range(3):
        table.put(bytes([number]), b"honest", 1, number)
    for number in range(100, 200):
        table.put(bytes([number]), b"flood", 1, number)
    assert [table.get(bytes([number])) for number in range(3)] == [0, 1, 2]
    assert [number for number in range(100, 200) if table.get(bytes([number])) is not None] == [
        *range(193, 200)
    ]
