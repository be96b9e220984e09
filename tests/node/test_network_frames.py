from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.utils.varint import encode_uvarint

from nous_node.node.frames import FrameError, OversizeFrameError, VarintFrames

payloads = st.lists(st.binary(max_size=300), max_size=20)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(payloads, st.lists(st.integers(min_value=0), max_size=30))
def test_frames_come_out_whatever_the_pieces(frames, cuts) -> None:
    wire = b"".join(encode_uvarint(len(frame)) + frame for frame in frames)
    reader = VarintFrames(300)
    assert [frame for piece in pieces(wire, cuts) for frame in reader.feed(piece)] == frames


def test_byte_by_byte_with_trailing_junk() -> None:
    reader = VarintFrames(1000)
    wire = encode_uvarint(200) + b"x" * 200 + b"\xff"
    assert [frame for byte in wire for frame in reader.feed(bytes([byte]))] == [b"x" * 200]


def test_a_length_above_the_limit_is_refused_before_its_payload() -> None:
    with pytest.raises(OversizeFrameError) as caught:
        list(VarintFrames(1000).feed(encode_uvarint(1001)))
    assert (caught.value.size, caught.value.limit) == (1001, 1000)


def test_frames_before_a_bad_one_are_still_given() -> None:
    frames = VarintFrames(10).feed(b"\x01a" + encode_uvarint(11))
    assert next(frames) == b"a"
    with pytest.raises(OversizeFrameError):
        next(frames)


@given(st.binary(max_size=400))
def test_any_bytes_are_frames_or_a_frame_error(data) -> None:
    try:
        total = sum(len(frame) for frame in VarintFrames(64).feed(data))
    except FrameError:
        return
    assert total <= len(data)
