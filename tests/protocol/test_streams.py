"""Requests and replies of the stream protocols."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.constants import MAX_CHUNK
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.streams import (
    MAX_BLOB_REPLY,
    MAX_REQUEST,
    BlobReply,
    BlobRequest,
    HeadReply,
    HeadRequest,
    blob_reply,
    blob_reply_parts,
    busy_reply,
    read_blob,
    view_blob,
)


@pytest.mark.parametrize("data", [b"", b"chunk", bytes(MAX_CHUNK)])
def test_a_blob_survives(data: bytes) -> None:
    frame = blob_reply(data)
    assert len(frame) <= MAX_BLOB_REPLY
    assert read_blob(frame) == data


def test_a_blob_that_is_not_held_is_said_to_be_so() -> None:
    with pytest.raises(RemoteError) as caught:
        read_blob(blob_reply(None))
    assert caught.value.code is Code.NOT_FOUND


def test_requests_are_small() -> None:
    for request in (encode(BlobRequest(bytes(32))), encode(HeadRequest(bytes(32)))):
        assert len(request) <= MAX_REQUEST


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_a_reply(data: bytes) -> None:
    for struct in (BlobRequest, HeadRequest, HeadReply, BlobReply):
        try:
            read(data, struct, 1000)
        except RemoteError:
            continue
        assert struct in (HeadReply, BlobReply)  # whose keys are all optional


def test_an_oversize_reply_is_refused_unread() -> None:
    with pytest.raises(RemoteError) as caught:
        read_blob(bytes(MAX_BLOB_REPLY + 1))
    assert caught.value.code is Code.OVERSIZE


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 1 << 20, MAX_CHUNK])
def test_a_chunk_is_viewed_as_it_is_read(size: int) -> None:
    frame = blob_reply(bytes(size))
    assert b"".join(blob_reply_parts(bytes(size))) == frame
    assert view_blob(frame) == read_blob(frame)
    for broken in (frame[:-1], frame + b"\0", b"\xff" + frame[1:], busy_reply()):
        with pytest.raises(RemoteError) as read_error:
            read_blob(broken)
        with pytest.raises(RemoteError) as view_error:
            view_blob(broken)
        assert view_error.value.code == read_error.value.code
