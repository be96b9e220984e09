"""Uniforms, the choice of a token, and the distance that a verifier measures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.errors import LocalError
from nous_node.protocol.sampling import choose, distance, keystream, uniforms

# RFC 8439 appendix A.1: test vectors 1, 2 (zero key, blocks 0 and 1) and 3 (key ...01, block 1)
ZERO_BLOCKS = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)
ONE_BLOCK = bytes.fromhex(
    "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
    "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"
)

logits_lists = st.lists(st.floats(-60, 60), min_size=1, max_size=60)
temperatures = st.floats(0.05, 5)
draws = st.integers(0, (1 << 53) - 1).map(lambda word: word * 2.0**-53)


def test_the_keystream_is_that_of_rfc_8439() -> None:
    assert keystream(bytes(32), 0, 16) == ZERO_BLOCKS
    assert keystream(bytes(31) + b"\1", 8, 8) == ONE_BLOCK


@given(st.binary(min_size=32, max_size=32), st.integers(0, 200), st.integers(0, 40))
def test_a_part_of_the_keystream_is_a_part_of_the_whole(key: bytes, start: int, count: int) -> None:
    assert keystream(key, start, count) == keystream(key, 0, 240)[8 * start : 8 * (start + count)]


@given(st.binary(min_size=32, max_size=32))
def test_uniforms_lie_in_the_half_open_interval(key: bytes) -> None:
    for uniform in uniforms(key, 0, 50):
        assert 0 <= uniform < 1
        assert uniform * 2**53 == int(uniform * 2**53)


def test_uniforms_are_uniform() -> None:
    drawn = uniforms(bytes(range(32)), 0, 10_000)
    assert abs(sum(drawn) / len(drawn) - 0.5) < 0.01
    assert abs(sum(value * value for value in drawn) / len(drawn) - 1 / 3) < 0.01


@pytest.mark.parametrize(
    ("key", "start", "count"), [(b"", 0, 1), (bytes(32), -1, 1), (bytes(32), 0, -1), (bytes(32), 1 << 20, 1)]
)
def test_a_draw_that_does_not_exist_is_an_error(key: bytes, start: int, count: int) -> None:
    with pytest.raises(LocalError):
        keystream(key, start, count)


@given(logits_lists, temperatures, draws)
def test_the_chosen_token_has_distance_zero(logits: list[float], temperature: float, uniform: float) -> None:
    token = choose(logits, temperature, uniform)
    assert 0 <= token < len(logits)
    assert distance(logits, temperature, token, uniform) == 0


@given(logits_lists, temperatures, draws)
def test_distances_grow_with_the_way_to_the_chosen_token(
    logits: list[float], temperature: float, uniform: float
) -> None:
    chosen = choose(logits, temperature, uniform)
    away = [distance(logits, temperature, token, uniform) for token in range(len(logits))]
    assert all(0 <= value <= 1 for value in away)
    assert away[: chosen + 1] == sorted(away[: chosen + 1], reverse=True)
    assert away[chosen:] == sorted(away[chosen:])


@given(st.lists(st.floats(-60, 60) | st.just(-math.inf), min_size=1, max_size=30), draws)
def test_a_token_of_probability_zero_is_never_chosen(logits: list[float], uniform: float) -> None:
    if all(logit == -math.inf for logit in logits):
        with pytest.raises(LocalError):
            choose(logits, 1.0, uniform)
    else:
        assert logits[choose(logits, 1.0, uniform)] != -math.inf


@given(logits_lists, draws, st.integers(-20, 20))
def test_a_shift_of_all_logits_changes_nothing(logits: list[float], uniform: float, shift: int) -> None:
    token = choose([logit + shift for logit in logits], 1.0, uniform)
    assert distance(logits, 1.0, token, uniform) < 1e-12


def test_tokens_come_with_their_probabilities() -> None:
    logits = [math.log(weight) for weight in (0.1, 0.2, 0.3, 0.4)]
    drawn = [choose(logits, 1.0, uniform) for uniform in uniforms(bytes(32), 0, 5000)]
    for token, share in enumerate((0.1, 0.2, 0.3, 0.4)):
        assert abs(drawn.count(token) / len(drawn) - share) < 0.025


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_is_positive(temperature: float) -> None:
    with pytest.raises(LocalError, match="positive"):
        choose([0.0], temperature, 0.5)


def test_logits_that_are_no_distribution_are_an_error() -> None:
    for logits in ([-math.inf] * 3, [math.nan, 0.0], [math.inf, 0.0]):
        with pytest.raises(LocalError):
            choose(logits, 1.0, 0.5)
