"""Which chunk is asked of whom: properties over any course of events, and the rules one by one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from nous_node.node.ownership import Ownership, draw, mask
from nous_node.node.picker import (
    FIRST_FLYING,
    FLYING_SECONDS,
    MAX_COPIES,
    MAX_DEADLINE_S,
    MAX_FLYING,
    MIN_DEADLINE_S,
    Ask,
    Picker,
)
from nous_node.node.picker_source import FIRST_WINDOW, MAX_WINDOW
from nous_node.node.records import Records

from .picking import MIB, asks, bits, picker, records

# --- any course of events ------------------------------------------------------------------------


@dataclass
class World:
    """Sources with chunks of their own, that deliver, fail, lie, are busy, come and go."""

    chunks: int
    picker: Picker
    claims: dict[str, int] = field(default_factory=dict)
    flying: list[Ask] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    now: float = 0.0

    def offer(self, name: str, claims: int) -> None:
        self.claims[name] = claims
        self.picker.offer(name, claims, self.now)

    def leave(self, name: str) -> None:
        self.claims.pop(name, None)
        self.picker.leave(name, self.now)
        self.flying = [ask for ask in self.flying if ask.source != name]

    def ask(self) -> None:
        for ask in asks(self.picker, self.now):
            assert ask.chunk not in self.arrived
            assert self.claims[ask.source] >> ask.chunk & 1
            assert MIN_DEADLINE_S <= ask.deadline <= MAX_DEADLINE_S
            assert ask not in self.flying
            self.flying.append(ask)
        assert len(self.flying) * MIB <= MAX_FLYING
        of_source = Counter(ask.source for ask in self.flying)
        assert all(number <= MAX_WINDOW for number in of_source.values())
        late = {name for name, one in self.picker._sources.items() if one.overdue(self.now)}
        copies = Counter(ask.chunk for ask in self.flying if ask.source not in late)
        assert all(number <= MAX_COPIES for number in copies.values())

    def end(self, ask: Ask, how: str) -> None:
        self.flying.remove(ask)
        match how:
            case "arrives":
                others = self.picker.arrived(ask.source, ask.chunk, self.now)
                self.arrived.add(ask.chunk)
                for other in [one for one in self.flying if one.chunk == ask.chunk]:
                    assert other.source in others
                    self.flying.remove(other)
                    self.picker.called_off(other.source, other.chunk)
            case "fails":
                self.picker.failed(ask.source, ask.chunk, self.now)
            case "lacks":
                self.picker.lacks(ask.source, ask.chunk, self.now)
            case "busy":
                self.picker.busy(ask.source, ask.chunk, self.now)


EVENTS = st.one_of(
    st.tuples(st.just("offer"), st.integers(0, 4), st.integers(0, (1 << 12) - 1)),
    st.tuples(st.just("leave"), st.integers(0, 4), st.just(0)),
    st.tuples(st.sampled_from(["arrives", "fails", "lacks", "busy"]), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 30), st.just(0)),
)


@settings(max_examples=300)
@given(events=st.lists(EVENTS, max_size=60), chunks=st.integers(1, 12), seed=st.integers(0, 9))
def test_whatever_happens_nothing_is_asked_in_vain_and_an_honest_source_completes_it(
    events: list[tuple[str, int, int]], chunks: int, seed: int
) -> None:
    world = World(chunks, picker(chunks, seed=seed))
    for kind, number, value in events:
        match kind:
            case "offer":
                world.offer(f"source {number}", value & (1 << chunks) - 1)
            case "leave":
                world.leave(f"source {number}")
            case "wait":
                world.now += number / 10
            case _:
                if world.flying:
                    world.end(world.flying[number % len(world.flying)], kind)
        world.ask()
    world.offer("honest", (1 << chunks) - 1)
    for _ in range(20 * chunks):
        world.now += 0.5
        world.ask()
        if world.flying:
            honest = [ask for ask in world.flying if ask.source == "honest"]
            world.end((honest or world.flying)[0], "arrives")
    assert not world.picker.missing
    assert world.arrived == set(range(chunks))


@given(st.sets(st.integers(0, 500)), st.integers(0, 99))
def test_sets_of_chunks_hold_what_was_put_in(chunks: set[int], seed: int) -> None:
    found = mask(dict.fromkeys(chunks, 1))
    assert found == bits(*chunks)
    entropy = random.Random(seed)
    drawn: set[int] = set()
    while found:
        chunk = draw(found, entropy)
        drawn.add(chunk)
        found ^= 1 << chunk
    assert drawn == chunks


# --- which chunk ---------------------------------------------------------------------------------


def test_the_rarest_chunk_goes_first() -> None:
    one = picker(3)
    one.offer("a", bits(0, 1), 0.0)
    one.offer("b", bits(0, 1), 0.0)
    one.offer("c", bits(0, 2), 0.0)
    assert next(ask.chunk for ask in asks(one) if ask.source == "c") == 2


def test_ties_are_drawn_by_lot() -> None:
    first = set()
    for seed in range(40):
        one = picker(8, seed=seed)
        one.offer("seed", bits(*range(8)), 0.0)
        ask = one.next(0.0)
        assert ask is not None
        first.add(ask.chunk)
    assert len(first) >= 6


def test_those_who_begin_together_ask_a_complete_source_for_different_chunks() -> None:
    names = [f"peer {number}" for number in range(4)]
    asked: list[int] = []
    for us in names:
        one = Picker(dict.fromkeys(range(40), MIB), records(seed=8.0 * MIB), random.Random(us), us)
        one.offer("seed", bits(*range(40)), 0.0)
        for other in names:
            if other != us:
                one.offer(other, 0, 0.0)
        one._shrunk = 0.0
        asked += [ask.chunk for ask in asks(one, 0.1)]
    assert len(asked) == len(set(asked)) >= 20


def test_what_falls_to_another_is_fetched_when_nothing_comes_to_it() -> None:
    one = Picker({0: MIB}, Records(), random.Random(0), "us")
    other = next(name for name in map(str, range(99)) if not _falls_to_us(name))
    one.offer("seed", 1, 0.0)
    one.offer(other, 0, 0.0)
    one._shrunk = 0.0
    assert one.next(1.0) is None
    ask = one.next(3.0)
    assert ask is not None
    assert ask.source == "seed"


def _falls_to_us(other: str) -> bool:
    ownership = Ownership("us")
    ownership.share([other])
    return ownership.draw(1, random.Random(0)) is not None


def test_each_chunk_falls_to_exactly_one_of_those_who_know_each_other() -> None:
    names = [f"peer {number}" for number in range(5)]
    owners: Counter[int] = Counter()
    shares = []
    for us in names:
        ownership = Ownership(us)
        ownership.share(set(names) - {us})
        found = {chunk for chunk in range(200) if ownership.draw(1 << chunk, random.Random(0)) is not None}
        owners.update(found)
        shares.append(len(found))
    assert owners == Counter(range(200))
    assert min(shares) > 20


def test_a_complete_source_is_spared_what_others_can_deliver() -> None:
    one = picker(6, records(seed=50.0 * MIB, peer=50.0 * MIB))
    one.offer("seed", bits(*range(6)), 0.0)
    one.offer("peer", bits(0, 1, 2), 0.0)
    chunks = {ask.chunk: ask.source for ask in asks(one, 10.0)}
    assert {chunk for chunk, source in chunks.items() if source == "peer"} == {0, 1, 2}


def test_it_is_not_spared_where_they_would_take_long() -> None:
    one = picker(40, records(seed=50.0 * MIB, peer=0.5 * MIB))
    one.offer("seed", bits(*range(40)), 0.0)
    one.offer("peer", bits(*range(39)), 0.0)
    sources = Counter(ask.source for ask in asks(one, 10.0))
    assert sources["seed"] == MAX_WINDOW


def test_at_the_end_what_comes_late_is_asked_of_another_source_too() -> None:
    one = picker(2, records(fast=4.0 * MIB, slow=1.0 * MIB))
    one.offer("slow", bits(0), 0.0)
    (ask,) = asks(one)
    one.offer("fast", bits(0, 1), 0.0)
    assert [(again.source, again.chunk) for again in asks(one)] == [("fast", 1)]
    one.arrived("fast", 1, 0.25)
    assert [(again.source, again.chunk) for again in asks(one, 5.0)] == [("fast", 0)]
    assert one.arrived("fast", ask.chunk, 5.2) == ["slow"]
    assert not one.missing


def test_what_is_about_to_arrive_is_not_asked_for_again() -> None:
    one = picker(1, records(first=2.0 * MIB, second=2.0 * MIB))
    one.offer("first", 1, 0.0)
    one.offer("second", 1, 0.0)
    assert len(asks(one)) == 1
    assert asks(one, 0.3) == []


# --- whom ----------------------------------------------------------------------------------------


def test_the_window_follows_the_rate() -> None:
    for rate, window in ((0.0, FIRST_WINDOW), (0.1, 1), (3.2, 4), (500.0, MAX_WINDOW)):
        one = picker(60, records(source=rate * MIB))
        one.offer("source", bits(*range(60)), 0.0)
        assert len(asks(one)) == window, rate


def test_what_is_being_verified_takes_no_place_unless_the_source_is_new() -> None:
    for rate, more in ((1.0, 1), (0.0, 0)):
        one = picker(60, records(source=rate * MIB))
        one.offer("source", bits(*range(60)), 0.0)
        one.came("source", asks(one)[0].chunk)
        assert len(asks(one)) == more


def test_no_more_bytes_are_under_way_than_fit() -> None:
    names = [f"source {number}" for number in range(20)]
    for rate, most in ((9.0, MAX_FLYING), (0.1, FIRST_FLYING), (0.0, FIRST_FLYING)):
        one = picker(200, records(**dict.fromkeys(names, rate * MIB)))
        for name in names:
            one.offer(name, bits(*range(200)), 0.0)
        assert len(asks(one)) == most // MIB, rate


def test_what_should_have_come_long_ago_takes_no_room() -> None:
    one = picker(200)
    for number in range(40):
        one.offer(f"source {number}", bits(*range(200)), 0.0)
    assert len(asks(one)) == FIRST_FLYING // MIB
    assert len(asks(one, FLYING_SECONDS)) == FIRST_FLYING // MIB


def test_a_source_far_slower_than_the_others_is_asked_only_for_what_they_lack() -> None:
    one = picker(30, records(a=8.0 * MIB, b=8.0 * MIB, slow=0.5 * MIB))
    one.offer("a", bits(*range(29)), 0.0)
    one.offer("b", bits(*range(29)), 0.0)
    one.offer("slow", bits(*range(30)), 0.0)
    assert [ask.chunk for ask in asks(one, 10.0) if ask.source == "slow"] == [29]


def test_the_one_that_will_have_it_soonest_is_asked() -> None:
    one = picker(1, records(near=9.0 * MIB, far=2.0 * MIB))
    one.offer("far", 1, 0.0)
    one.offer("near", 1, 0.0)
    ask = one.next(0.0)
    assert ask is not None
    assert ask.source == "near"


def test_deadlines_follow_the_rate() -> None:
    fast, unknown = picker(1, records(source=8.0 * MIB)), picker(1)
    for one in (fast, unknown):
        one.offer("source", 1, 0.0)
    quick, patient = fast.next(0.0), unknown.next(0.0)
    assert quick is not None
    assert MIN_DEADLINE_S < quick.deadline < MIN_DEADLINE_S + 1
    assert patient is not None
    assert patient.deadline == MAX_DEADLINE_S
