"""Sampled tokens that came before: which prefixes count, whose they are, and how long they are remembered."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from nous_node.node.copies import MAX_SURPRISAL, Copies, Owner, lengths
from nous_node.protocol.errors import Code, RemoteError

ALICE: Owner = (b"a" * 32, b"c" * 32, 0)
BOB: Owner = (b"b" * 32, b"c" * 32, 0)
UNLIKELY = 6.0
"""Nats a token: 8 of them are more than MAX_SURPRISAL, 6 are not."""

Sampled = tuple[NDArray[np.int64], NDArray[np.float32]]


def tokens(seed: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 50_000, count)


def sampled(ids: NDArray[np.int64], nats: float = UNLIKELY) -> Sampled:
    return ids, np.full(len(ids), -nats, np.float32)


def code(copies: Copies, owner: Owner, *trajectories: Sampled) -> Code | None:
    try:
        copies.check(owner, trajectories)
    except RemoteError as error:
        return error.code
    return None


def test_prefixes_double_and_end_with_the_whole_trajectory() -> None:
    assert [lengths(count) for count in (0, 1, 8, 9, 40)] == [[], [1], [8], [8, 9], [8, 16, 32, 40]]


def test_a_trajectory_of_another_group_is_copied_and_its_own_group_may_come_again() -> None:
    copies, ids = Copies(), tokens(1, 40)
    copies.add(ALICE, [ids])
    assert code(copies, BOB, sampled(ids)) == Code.COPIED
    assert code(copies, ALICE, sampled(ids)) is None
    assert code(copies, (*ALICE[:2], 1), sampled(ids)) == Code.COPIED
    assert code(copies, BOB, sampled(tokens(2, 40))) is None


def test_a_copy_with_another_end_is_found_by_its_prefix() -> None:
    copies, ids = Copies(), tokens(1, 40)
    copies.add(ALICE, [ids])
    for kept in (8, 20, 39):
        changed = np.concatenate([ids[:kept], tokens(3, 40 - kept)])
        assert code(copies, BOB, sampled(changed)) == Code.COPIED
    assert code(copies, BOB, sampled(np.concatenate([ids[:7], tokens(3, 33)]))) is None


def test_likely_tokens_may_agree() -> None:
    """Short answers and sure policies give the same tokens again and again."""
    copies, ids = Copies(), tokens(1, 40)
    copies.add(ALICE, [ids])
    assert code(copies, BOB, sampled(ids, 0.9)) is None
    with pytest.raises(RemoteError) as error:
        copies.check(BOB, [sampled(ids, 1.1)])
    assert (error.value.measured, error.value.threshold) == (pytest.approx(44, rel=1e-5), MAX_SURPRISAL)


def test_a_group_that_repeats_its_own_trajectory_is_copied() -> None:
    ids = tokens(1, 40)
    assert code(Copies(), ALICE, sampled(ids), sampled(ids)) == Code.COPIED
    assert code(Copies(), ALICE, sampled(ids, 0.5), sampled(ids, 0.5)) is None


def test_in_a_free_run_only_copies_of_ones_own_have_figures() -> None:
    """Whoever came first may have heard the other."""
    copies, ids = Copies(free=True), tokens(1, 40)
    copies.add(ALICE, [ids])
    figures = []
    for owner, trajectories in (
        (BOB, [ids]),
        ((*ALICE[:2], 1), [ids]),
        (BOB, [tokens(2, 40), tokens(2, 40)]),
    ):
        with pytest.raises(RemoteError) as error:
            copies.check(owner, [sampled(one) for one in trajectories])
        assert error.value.code == Code.COPIED
        figures.append((error.value.measured, error.value.threshold))
    assert figures == [(None, None), (48.0, 40.0), (48.0, 40.0)]


def test_what_was_checked_and_not_added_is_not_known() -> None:
    """A group that is refused takes nothing from who comes later with the same tokens."""
    copies, ids = Copies(), tokens(1, 40)
    assert code(copies, ALICE, sampled(ids)) is None
    assert code(copies, BOB, sampled(ids)) is None


def test_the_first_owner_of_a_prefix_stays_its_owner() -> None:
    copies, ids = Copies(), tokens(1, 8)
    copies.add(ALICE, [ids])
    copies.add(BOB, [ids])
    assert code(copies, ALICE, sampled(ids)) is None
    assert code(copies, BOB, sampled(ids)) == Code.COPIED


def test_memory_is_bounded_and_forgets_what_came_first() -> None:
    copies = Copies(prefixes=4)
    groups = [tokens(seed, 8) for seed in range(12)]
    for number, ids in enumerate(groups):
        copies.add((*ALICE[:2], number), [ids])
    known = [code(copies, BOB, sampled(ids)) is not None for ids in groups]
    assert known == sorted(known)
    assert 4 <= sum(known) <= 8


def test_trajectories_without_sampled_tokens_are_no_copies() -> None:
    copies = Copies()
    copies.add(ALICE, [tokens(1, 0)])
    assert code(copies, BOB, sampled(tokens(1, 0)), sampled(tokens(1, 0))) is None
