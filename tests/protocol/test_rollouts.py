"""Rollout groups: byte planes, round trips, structure, and bytes that are no group."""

from __future__ import annotations

import os
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.constants import MAX_BODY
from nous_node.protocol.envelope import Kind
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import (
    Role,
    RolloutGroup,
    Segment,
    pack_floats,
    pack_tokens,
    planes,
    trained_tokens,
    unpack_floats,
    unpack_tokens,
    unplanes,
)
from nous_node.protocol.structure import check_structure


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_survive(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=50))
def test_f32_survives(values: list[float]) -> None:
    assert repr(unpack_floats(pack_floats(values))) == repr(values)


@given(st.lists(st.floats(width=16, allow_nan=False), max_size=50))
def test_f16_survives(values: list[float]) -> None:
    assert repr(unpack_floats(pack_floats(values, "f16"), "f16")) == repr(values)


def test_planes_put_all_lowest_bytes_first() -> None:
    assert planes(bytes.fromhex("01020304 11121314"), 4) == bytes.fromhex("0111 0212 0313 0414")


@given(st.binary(max_size=100), st.sampled_from([2, 4]))
def test_planes_are_undone_or_refused(data: bytes, width: int) -> None:
    if len(data) % width:
        with pytest.raises(RemoteError) as caught:
            unplanes(data, width)
        assert caught.value.code is Code.WRONG_TYPE
    else:
        assert planes(unplanes(data, width), width) == data


def test_a_group_survives(group: Any) -> None:
    assert RolloutGroup.from_bytes(group().to_bytes()) == group()


def test_defaults_take_no_bytes(group: Any) -> None:
    data = group().to_bytes()
    for absent in (b"components", b"agent", b"advantage", b"advantages", b"parents"):
        assert absent not in data


def test_a_group_of_8_x_512_stays_below_six_bytes_a_trained_token(
    world: Any, group: Any, trajectory: Any
) -> None:
    digits = os.urandom(512 * 8)
    one = [
        trajectory(
            tokens=pack_tokens([48 + byte % 10 for byte in digits[number * 512 : number * 512 + 512]]),
            segments=[Segment(64, Role.RAW, False), Segment(448, Role.ASSISTANT, True)],
            logprobs=pack_floats(
                [-value / 1e4 for value in struct.unpack("<448H", digits[number * 448 : number * 448 + 896])]
            ),
        )
        for number in range(8)
    ]
    data = world.sealed(Kind.ROLLOUT, group(trajectories=one).to_bytes(), world.volunteer)
    assert len(data) / (8 * 448) < 6


@given(st.binary(max_size=200))
def test_any_bytes_are_a_group_or_a_remote_error(data: bytes) -> None:
    with pytest.raises(RemoteError):
        RolloutGroup.from_bytes(data)


@given(st.data())
def test_a_mutated_group_passes_all_checks_or_is_refused(world: Any, group: Any, data: st.DataObject) -> None:
    wire = bytearray(group().to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        mutant = RolloutGroup.from_bytes(bytes(wire))
        check_structure(mutant, world.manifest)
    except RemoteError:
        return
    assert mutant.env == "sort-digits"


@given(st.data())
def test_structure_never_raises_anything_else(
    world: Any, group: Any, trajectory: Any, data: st.DataObject
) -> None:
    """Any fields that the decoder takes, however little they fit each other."""
    segments = st.builds(Segment, st.integers(1, 12), st.sampled_from(Role), st.booleans())
    one = trajectory(
        tokens=data.draw(st.binary(max_size=60)),
        segments=data.draw(st.lists(segments, min_size=1, max_size=4)),
        logprobs=data.draw(st.binary(max_size=60)),
        finish=data.draw(st.sampled_from(["stop", "length", "cut"])),
        reward=data.draw(st.floats(allow_nan=False, allow_infinity=False)),
        advantages=data.draw(st.none() | st.binary(max_size=60)),
        advantage=data.draw(st.none() | st.floats()),
        parents=data.draw(st.none() | st.lists(st.integers(-3, 5), max_size=4)),
    )
    candidate = group(env=data.draw(st.sampled_from(["sort-digits", "free", "no"])), trajectories=[one, one])
    try:
        check_structure(candidate, world.manifest)
    except RemoteError:
        return
    assert len(one.logprobs) == 4 * trained_tokens(one)


def test_structure_of_the_largest_body_is_checked_in_bounded_time(
    world: Any, group: Any, trajectory: Any
) -> None:
    huge = trajectory(tokens=bytes(MAX_BODY // 8), segments=[Segment(MAX_BODY // 32, Role.RAW, False)])
    started = time.process_time()
    with pytest.raises(RemoteError) as caught:
        check_structure(group(trajectories=[huge] * 8), world.manifest)
    assert caught.value.code is Code.TOO_LONG
    assert time.process_time() - started < 0.1  # no token was unpacked


def test_trained_tokens_are_those_of_sampled_segments(trajectory: Any) -> None:
    segments = [Segment(3, Role.RAW, False), Segment(2, Role.ASSISTANT, True), Segment(4, Role.TOOL, True)]
    assert trained_tokens(trajectory(segments=segments)) == 6


def test_empty_fields_that_no_decoder_lets_through_are_refused_too(
    world: Any, group: Any, trajectory: Any
) -> None:
    empty = trajectory(tokens=b"", segments=[], logprobs=b"")
    with pytest.raises(RemoteError) as caught:
        check_structure(group(trajectories=[empty, empty]), world.manifest)
    assert caught.value.code is Code.SEGMENTS
