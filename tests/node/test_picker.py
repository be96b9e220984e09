"""Which chunk is asked of whom: properties over any course of events, and the rules one by one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from nous_node.node.ownership import Ownership, draw, mask
from nous_node.node.picker import (
    FIRST_WINDOW,
    MAX_COPIES,
    MAX_DEADLINE_S,
    MAX_FAILURES,
    MAX_FLYING,
    MAX_WINDOW,
    MIN_DEADLINE_S,
    Ask,
    Picker,
)
from nous_node.node.records import Records

MIB = 1 << 20


def picker(chunks: int, records: Records | None = None, size: int = MIB, seed: int = 0) -> Picker:
    return Picker(dict.fromkeys(range(chunks), size), records or Records(), random.Random(seed), "us")


def bits(*chunks: int) -> int:
    return sum(1 << chunk for chunk in chunks)


def asks(picker: Picker, now: float = 0.0) -> list[Ask]:
    found: list[Ask] = []
    while (ask := picker.next(now)) is not None:
        found.append(ask)
    return found


def records(**rates: float) -> Records:
    found = Records()
    for name, rate in rates.items():
        found.of(name, 0.0).rate = rate
    return found


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
        self.picker.leave(name)
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
        copies = Counter(ask.chunk for ask in self.flying)
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
    one = picker(200, size=4 * MIB)
    for number in range(20):
        one.offer(f"source {number}", bits(*range(200)), 0.0)
    assert len(asks(one)) == MAX_FLYING // (4 * MIB)


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


# --- failures ------------------------------------------------------------------------------------


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
    one.leave("gone")
    ask = one.next(0.0)
    assert ask is not None
    assert ask.source == "other"
