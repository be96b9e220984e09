"""The blocks of a zstd frame, looked at before it is unfolded. Spec: `specs/02-identity-and-envelopes.md`.

Decoders differ in what they take beyond RFC 8878, and nodes that judge a frame differently blame each other
for forwarding it: a walk over the headers of its blocks settles what it can. [ENV-8]
"""

from __future__ import annotations

from typing import Final

import zstandard

from .errors import Code, RemoteError

MAX_BLOCK: Final = 1 << 17
"""Bytes that a block may hold, or say that it unfolds to; no more than the window in any case."""

MAX_BLOCKS: Final = 1 << 16
"""Of a frame. Compressors fill theirs; a frame of empty ones would only cost time."""

_HEADER: Final = 3
_RUN: Final = 1
"""Type of a block that is one byte, repeated."""


def check_blocks(data: bytes) -> None:
    """Raises RemoteError(BAD_COMPRESSION), and ZstdError where there is no header of a frame. What is cut off
    or follows is the decoder's to find."""
    most = min(MAX_BLOCK, zstandard.get_frame_parameters(data).window_size)
    at = zstandard.frame_header_size(data)
    for _ in range(MAX_BLOCKS):
        head = int.from_bytes(data[at : at + _HEADER], "little")
        size = head >> 3
        if size > most:
            raise RemoteError(
                Code.BAD_COMPRESSION, f"A block of a zstd frame has {size} bytes; at most {most} are allowed."
            )
        if head & 1 or at >= len(data):
            return
        at += _HEADER + (1 if head >> 1 & 3 == _RUN else size)
    raise RemoteError(Code.BAD_COMPRESSION, f"A zstd frame has more than {MAX_BLOCKS} blocks.")
