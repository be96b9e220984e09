"""Which groups go into an update: shares of keys, and that nobody can make the others wait for ever."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.selection import (
    FEW_KEYS,
    PRESENT_SECONDS,
    Kept,
    Participants,
    Selection,
    Shares,
    Waiting,
    select,
)

SHARES = Shares(groups=8, peer=0.5, probation=0.25)
KEYS = [bytes([letter]) * 32 for letter in b"abcdefgh"]
A, B, C, D, E, *_ = KEYS
FIVE = KEYS[:FEW_KEYS]


def groups(keys: Iterable[bytes], tokens: int = 10) -> list[Waiting]:
    return [Waiting(key, tokens) for key in keys]


def chosen_keys(held: list[Waiting], selection: Selection) -> Counter[bytes]:
    return Counter(held[place].key for place in selection.chosen)


def left(held: list[Waiting], selection: Selection) -> list[Waiting]:
    return [one for place, one in enumerate(held) if place not in selection.surplus]


# --- one update ----------------------------------------------------------------------------------


def test_an_update_waits_for_enough_groups() -> None:
    assert select(groups([A] * 7), [A], [A], SHARES) == Selection()


@pytest.mark.parametrize("keys", [[A], [A, B], [A, B, C, D]])
@pytest.mark.parametrize("active", [[], KEYS])
def test_with_few_keys_the_oldest_groups_are_taken_whoever_sent_them(keys, active) -> None:
    held = groups([A] * 9 + [B] * 3)
    assert select(held, keys, active, SHARES) == Selection(list(range(8)))


@pytest.mark.parametrize("active", [[], KEYS])
def test_where_five_keys_take_part_none_has_more_than_its_share(active) -> None:
    held = groups([A] * 20 + [B, C, D, E, B, C])
    selection = select(held, FIVE, active, SHARES)
    assert selection == Selection([0, 1, 2, 3, 20, 21, 22, 23])


def test_an_update_that_cannot_be_filled_waits_and_the_oldest_of_who_is_over_its_share_leave() -> None:
    held = groups([B] + [A] * 10)
    selection = select(held, FIVE, KEYS, SHARES)
    assert selection == Selection(surplus=[1, 2, 3])
    assert len(left(held, selection)) == SHARES.groups


def test_beyond_a_share_what_the_others_have_goes_first_and_the_rest_is_the_oldest() -> None:
    held = groups([A] * 6 + [B] + [A] * 4 + [C])
    assert select(held, FIVE, KEYS, SHARES, Kept.STRANGERS) == Selection([0, 1, 2, 3, 4, 5, 6, 11])


def test_the_share_of_strangers_is_kept_where_only_that_of_single_keys_need_not_be() -> None:
    held = groups([*KEYS[5:], *[A] * 6, B])
    selection = select(held, FIVE, FIVE, SHARES, Kept.STRANGERS)
    assert selection == Selection([0, 1, 3, 4, 5, 6, 7, 9])
    assert not select(held[:-2], FIVE, FIVE, SHARES, Kept.STRANGERS).chosen


def test_strangers_fill_an_update_behind_all_others() -> None:
    held = groups([*KEYS[5:], *[A] * 2, *KEYS[5:], B])
    assert select(held, FIVE, FIVE, SHARES, Kept.NONE) == Selection([0, 1, 2, 3, 4, 5, 6, 8])


def test_keys_on_probation_share_a_quarter_where_an_active_key_takes_part() -> None:
    held = groups([B, C, D, E, A, A, A, A, A, A])
    assert select(held, FIVE, [A], SHARES) == Selection([0, 1, 4, 5, 6, 7, 8, 9])
    assert select(held, FIVE, [], SHARES) == Selection(list(range(8)))


def test_an_active_key_that_has_left_is_not_waited_for() -> None:
    held = groups([A] + [B] * 9)
    assert select(held, [A, B], [A], SHARES).surplus
    assert select(held, [B], [A], SHARES) == Selection(list(range(8)))


def test_strangers_do_not_make_the_shares_of_others_smaller() -> None:
    """Five fresh keys cost nothing: they must not make an active volunteer wait for them."""
    held = groups([A] * 8)
    assert select(held, KEYS, [A], SHARES) == Selection(list(range(8)))


def test_settings_that_so_few_keys_cannot_keep_hold_from_more_keys_on() -> None:
    tight = Shares(groups=8, peer=0.13, probation=0.25)  # one group a key
    held = groups([A] * 8)
    assert select(held, KEYS[:7], KEYS, tight) == Selection(list(range(8)))
    assert select(held, KEYS, KEYS, tight) == Selection()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_updates_can_be_made(count) -> None:
    shares = Shares(count, 0.5, 0.25)
    held = [Waiting(key, 10 + place) for place, key in enumerate(FIVE)]
    assert select(held, FIVE, KEYS, shares) == Selection(list(range(count)))


def test_nobody_has_more_than_its_share_of_the_tokens() -> None:
    held = [Waiting(A, 100)] * 4 + groups([B, C, D, E] * 4)
    selection = select(held, FIVE, KEYS, SHARES)
    assert chosen_keys(held, selection)[A] == 1
    assert selection.chosen == [0, 4, 5, 6, 7, 8, 9, 10]


def test_strangers_have_no_more_than_their_share_of_the_tokens_together() -> None:
    held = [Waiting(B, 20), Waiting(C, 20), *groups([A] * 8)]
    assert select(held, [A, B, C], [A], SHARES) == Selection([0, 2, 3, 4, 5, 6, 7, 8])
    assert select([Waiting(B, 31), *groups([A] * 8)], [A, B], [A], SHARES) == Selection(list(range(1, 9)))


waiting = st.lists(st.builds(Waiting, st.sampled_from(KEYS), st.integers(1, 300)), max_size=60)
some_keys = st.sets(st.sampled_from(KEYS))
shares = st.builds(Shares, st.integers(1, 20), st.floats(0.01, 1), st.floats(0.01, 1))


@given(waiting, some_keys, some_keys, shares)
def test_shares_are_kept_or_the_update_waits_with_less_than_it_takes(held, present, active, shares) -> None:
    selection = select(held, present, active, shares)
    assert selection == select(held, present, active, shares)
    if not selection.chosen:
        assert len(left(held, selection)) == min(len(held), shares.groups)
        assert selection.surplus == sorted(set(selection.surplus))
        return
    assert selection.chosen == sorted(set(selection.chosen))
    assert (len(selection.chosen), selection.surplus) == (shares.groups, [])
    counts, tokens = chosen_keys(held, selection), Counter[bytes]()
    for place in selection.chosen:
        tokens[held[place].key] += held[place].tokens
    known = present & active
    if known:
        strange = counts.keys() - active
        assert sum(counts[key] for key in strange) <= shares.probation * shares.groups
        assert sum(tokens[key] for key in strange) <= shares.probation * tokens.total()
    few = max(FEW_KEYS, shares.groups / max(1, int(shares.peer * shares.groups)))
    if len(known or present) >= few:
        for key in counts:
            assert counts[key] == 1 or counts[key] <= shares.peer * shares.groups
            assert counts[key] == 1 or tokens[key] <= shares.peer * tokens.total()


@given(waiting, some_keys, some_keys, shares)
def test_only_who_is_over_its_share_loses_groups(held, present, active, shares) -> None:
    """A key with a single group of its own loses it only as a stranger among others."""
    selection = select(held, present, active, shares)
    counts = Counter(one.key for one in held)
    for place in selection.surplus:
        key = held[place].key
        assert counts[key] > 1 or (present & active and key not in active)


# --- over time -----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Queue:
    """What a learner holds, with a trainer before it that stops reading at two updates' worth."""

    def __init__(self, states: dict[bytes, str], shares: Shares = SHARES) -> None:
        self.clock = Clock()
        self.participants = Participants(self.clock, shares)
        self.shares, self.states = shares, states
        self.held: list[Waiting] = []
        self.updates: list[Counter[bytes]] = []

    def take(self, *arrived: Waiting) -> None:
        for one in arrived:
            self.participants.accepted(one.key, one.tokens, self.states[one.key])  # type: ignore[arg-type]
            self.held.append(one)
        while (selection := self.participants.select(self.held)).chosen:
            self.participants.updated()
            self.updates.append(chosen_keys(self.held, selection))
            self.held = [one for place, one in enumerate(self.held) if place not in selection.chosen]
        self.held = left(self.held, selection)
        assert len(self.held) <= self.shares.groups  # the trainer goes on reading


def test_a_key_that_floods_has_its_share_and_the_others_set_the_pace() -> None:
    queue = Queue(dict.fromkeys(FIVE, "active"))
    queue.take(*groups([B, C, D, E]))
    for second in range(100):
        queue.clock.now += 1
        queue.take(*groups([A] * 2), *groups([FIVE[1 + second % 4]]))
    assert len(queue.updates) >= 104 // 4 - 1  # as many as the others' groups allow
    assert all(update[A] <= 4 for update in queue.updates)


def test_a_flood_of_long_groups_has_no_more() -> None:
    queue = Queue(dict.fromkeys(FIVE, "active"))
    queue.take(*groups([B, C, D, E]))
    for second in range(140):
        queue.clock.now += 1
        queue.take(Waiting(A, 1000), *groups([FIVE[1 + second % 4]]))
    assert len(queue.updates) == 144 // 7
    assert all(update[A] == 1 for update in queue.updates)


def test_an_update_waits_for_as_many_groups_again_as_it_has() -> None:
    queue = Queue(dict.fromkeys(FIVE, "active"))
    queue.take(*groups([A, B, A, C, A, D, A, E]))  # keeps the shares
    queue.take(*groups([A, B, A, C, A, D, A, A]))  # three others come again, as it seems
    assert len(queue.updates) == 1
    queue.take(*groups([A] * 7))
    assert len(queue.updates) == 1
    queue.take(*groups([A]))
    assert [update[A] for update in queue.updates] == [4, 5]


def test_keys_that_bring_nothing_are_not_waited_for() -> None:
    queue = Queue(dict.fromkeys(FIVE, "active"))
    queue.take(*groups(FIVE))
    for _ in range(67):
        queue.clock.now += 0.1
        queue.take(Waiting(A, 10))
    assert [update[A] for update in queue.updates] == [4, *[8] * 8]


def test_two_volunteers_on_probation_are_not_slowed_down() -> None:
    states = {A: "probation", B: "probation"}
    queue = Queue(states)
    for number in range(64):
        if number == 24:
            states[A] = "active"
        if number == 26:
            states[B] = "active"
        queue.take(*groups([A, B]))
    assert len(queue.updates) >= 15


def test_strangers_wait_for_a_slow_active_key_and_no_longer_than_it_takes_part() -> None:
    queue = Queue({A: "active", **dict.fromkeys(KEYS[1:], "probation")})
    queue.take(Waiting(A, 10))
    for _ in range(59):
        queue.clock.now += 1
        queue.take(*groups(KEYS[1:]))
    assert not queue.updates
    queue.clock.now += 2
    queue.take(*groups(KEYS[1:]))
    assert queue.updates


def test_a_key_counts_as_it_stood_last() -> None:
    clock = Clock()
    participants = Participants(clock, SHARES)
    participants.accepted(A, 10, "active")
    held = groups([B] * 9)
    for _ in held:
        participants.accepted(B, 10, "probation")
    assert participants.select(held).surplus
    participants.stands(B, "active")
    assert participants.select(held).chosen


def test_where_updates_take_long_a_key_takes_part_for_longer() -> None:
    clock = Clock()
    participants = Participants(clock, SHARES)
    clock.now += 300
    participants.updated()
    participants.accepted(A, 10, "active")
    participants.accepted(B, 10, "probation")
    held = groups([B] * 9)
    clock.now += 299
    assert participants.select(held).surplus
    clock.now += 2
    assert participants.select(held).chosen
    clock.now += 10_000
    participants.updated()
    participants.accepted(A, 10, "active")
    clock.now += 601
    assert participants.select(held).chosen


# --- at different speeds -------------------------------------------------------------------------

UPDATE = Shares(groups=32, peer=0.5, probation=0.25)
SLOW = 1 / 50


def learnt(rates: dict[bytes, float], strangers: Collection[bytes] = (), seconds: float = 600) -> Queue:
    """After some time in which each key brings so many groups a second, of varied length. Strangers come
    last."""
    queue = Queue({key: "probation" if key in strangers else "active" for key in rates}, UPDATE)
    start, draw = queue.clock.now, random.Random(0)
    due = [
        ((number + (key in strangers)) / rate, key)
        for key, rate in rates.items()
        for number in range(int(seconds * rate) + 1)
    ]
    for when, key in sorted(due):
        if when > seconds:
            break
        queue.clock.now = start + when
        queue.take(Waiting(key, draw.randrange(400, 1000)))
    return queue


def pace(rates: dict[bytes, float], strangers: Collection[bytes] = ()) -> float:
    """Updates of all that could have been made."""
    came = sum(int(600 * rate) for rate in rates.values())
    return len(learnt(rates, strangers).updates) / (came // UPDATE.groups)


@pytest.mark.parametrize("slow", [3, 4, 7])
def test_slow_volunteers_do_not_slow_down_a_fast_one(slow) -> None:
    assert pace({A: 4.0, **dict.fromkeys(KEYS[1 : 1 + slow], SLOW)}) > 0.95


@pytest.mark.parametrize("slow", [2, 3, 6])
def test_slow_volunteers_do_not_slow_down_two_fast_ones(slow) -> None:
    """Equally fast ones: one of them always has more than half of the tokens."""
    assert pace({A: 2.0, B: 2.0, **dict.fromkeys(KEYS[2 : 2 + slow], SLOW)}) > 0.9


@pytest.mark.parametrize("fast", [0.25, 0.5, 1, 2, 3, 4, 8])
def test_the_share_of_a_key_costs_half_of_the_pace_at_most(fast) -> None:
    assert pace({A: fast, **dict.fromkeys(FIVE[1:], 0.25)}) >= 0.5


@pytest.mark.parametrize("fast", [1, 1.5, 2])
def test_a_fast_key_never_has_more_than_its_share_while_the_others_bring_enough(fast) -> None:
    queue = learnt({A: fast, **dict.fromkeys(FIVE[1:], 0.25)})
    assert len(queue.updates) > 30
    assert all(update[A] <= 16 for update in queue.updates)


def test_a_slow_active_key_does_not_keep_a_newcomer_waiting_for_long() -> None:
    """It would take 22 minutes until it had three quarters of an update. Once there is a version more the
    newcomer is active."""
    rates = {A: 1 / 55, B: 4.0}
    assert not learnt(rates, [B], seconds=4 * PRESENT_SECONDS).updates
    first, *_ = learnt(rates, [B], seconds=4 * PRESENT_SECONDS + 10).updates
    assert first[A] == 5  # all that it had


@pytest.mark.parametrize("each", [0.1, 0.5])
def test_fresh_keys_never_have_more_than_their_share_while_active_keys_bring_enough(each) -> None:
    fresh = [bytes([number]) * 32 for number in range(50)]
    queue = learnt({**dict.fromkeys(KEYS[:4], 0.75), **dict.fromkeys(fresh, each)}, fresh, seconds=100)
    assert len(queue.updates) >= 300 // 24 - 1
    assert all(sum(update[key] for key in fresh) <= 8 for update in queue.updates)


def test_what_fresh_keys_may_do_follows_from_the_pace_of_active_ones_and_not_from_theirs() -> None:
    """Active ones that bring a fourth of what they brought keep the share, those that bring less do not."""
    fresh = [bytes([number]) * 32 for number in range(8)]
    for slower, kept in ((0.3, True), (0.02, False)):
        queue = learnt({**dict.fromkeys(KEYS[:4], 0.75)}, seconds=300)
        queue.states.update(dict.fromkeys(fresh, "probation"))
        queue.updates.clear()
        for _ in range(60):
            queue.clock.now += 1 / (3 * slower)
            queue.take(Waiting(A, 700), *(Waiting(key, 700) for key in fresh))
        assert queue.updates
        assert all(sum(update[key] for key in fresh) <= 8 for update in queue.updates) == kept
