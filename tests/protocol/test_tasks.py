"""Task assignment: every input counts, weights hold, keys do not repeat."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.constants import MAX_COUNTER
from nous_node.protocol.errors import LocalError
from nous_node.protocol.tasks import assign, task_seed

WORDS = [bytes([number]) * 32 for number in range(4)]


def test_the_seed_is_the_hash_that_the_spec_gives() -> None:
    material = b"nous/task/1\0" + b"".join(WORDS) + (5).to_bytes(8, "little")
    assert task_seed(*WORDS, 5) == hashlib.sha256(material).digest()


def test_every_input_changes_the_seed() -> None:
    seeds = {task_seed(*WORDS, 0), task_seed(*WORDS, 1)}
    for place in range(4):
        seeds.add(task_seed(*[bytes(32) + b"" if i == place else word for i, word in enumerate(WORDS, 0)], 0))
        swapped = [WORDS[(place + i) % 4] for i in range(4)]
        seeds.add(task_seed(*swapped, 0))
    assert len(seeds) == 2 + 3 + 3  # WORDS[0] is zeros already, and one rotation is none


def test_environments_come_by_their_weights() -> None:
    drawn = Counter(
        assign(hashlib.sha256(number.to_bytes(4, "big")).digest(), [1, 2, 5], 1).environment
        for number in range(8000)
    )
    # three standard deviations of a binomial are at most 134
    for environment, expected in enumerate((1000, 2000, 5000)):
        assert abs(drawn[environment] - expected) < 140


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(1, 1_000_000), min_size=1, max_size=50))
def test_an_assignment_has_an_environment_and_distinct_keys(seed: bytes, weights: list[int]) -> None:
    assignment = assign(seed, weights, 8)
    assert 0 <= assignment.environment < len(weights)
    keys = {assignment.sampler_key(number) for number in range(8)}
    assert len(keys) == 8
    assert assignment.task_seed not in keys


def test_the_draw_does_not_depend_on_how_much_of_it_is_asked_for() -> None:
    few, many = assign(bytes(32), [3, 1], 1), assign(bytes(32), [3, 1])
    assert (few.environment, few.task_seed) == (many.environment, many.task_seed)
    assert few.sampler_key(0) == many.sampler_key(0)


@pytest.mark.parametrize("trajectory", [-1, 4, 10_000])
def test_a_trajectory_beyond_the_group_has_no_key(trajectory: int) -> None:
    with pytest.raises(LocalError):
        assign(bytes(32), [1], 4).sampler_key(trajectory)


@pytest.mark.parametrize("counter", [-1, MAX_COUNTER])
def test_a_counter_out_of_range_is_an_error(counter: int) -> None:
    with pytest.raises(LocalError):
        task_seed(*WORDS, counter)


def test_inputs_of_another_length_are_an_error() -> None:
    with pytest.raises(LocalError, match="beacon"):
        task_seed(WORDS[0], WORDS[1], b"short", WORDS[3], 0)


@pytest.mark.parametrize("weights", [[], [0], [1, 0], [-1]])
def test_weights_are_positive(weights: list[int]) -> None:
    with pytest.raises(LocalError):
        assign(bytes(32), weights)
