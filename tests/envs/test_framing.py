"""Frames, cut from a stream in whatever pieces it comes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.envs.framing import Frames, FrameTooLarge, framed

LIMIT = 64


def all_of(frames: Frames) -> list[bytes]:
    return list(iter(frames.take, None))


@given(st.lists(st.binary(max_size=LIMIT), max_size=8), st.lists(st.integers(1, 40), max_size=20))
def test_frames_are_the_same_however_the_stream_is_cut(contents: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, contents))
    frames, taken = Frames(LIMIT), list[bytes]()
    for cut in cuts:
        frames.feed(stream[:cut])
        stream = stream[cut:]
        taken += all_of(frames)
    frames.feed(stream)
    assert taken + all_of(frames) == contents


@given(st.lists(st.binary(max_size=LIMIT), max_size=4), st.integers(LIMIT + 1, 0xFFFFFFFF), st.binary())
def test_a_frame_above_the_limit_is_refused_by_its_length_alone(
    before: list[bytes], length: int, after: bytes
) -> None:
    frames = Frames(LIMIT)
    frames.feed(b"".join(map(framed, before)) + struct.pack(">I", length) + after)
    for content in before:
        assert frames.take() == content
    with pytest.raises(FrameTooLarge, match=f"{length} bytes; at most {LIMIT}"):
        frames.take()


@given(st.binary(max_size=300))
def test_whatever_comes_is_frames_or_refused(data: bytes) -> None:
    frames = Frames(LIMIT)
    frames.feed(data)
    try:
        taken = all_of(frames)
    except FrameTooLarge:
        return
    assert data.startswith(b"".join(map(framed, taken)))
    assert all(len(content) <= LIMIT for content in taken)
