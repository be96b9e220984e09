"""Chunks of groups by reference and chunks of checkpoints do not hold up each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node import blob_turns as module
from nous_node.node.blob_turns import BlobTurns
from nous_node.node.blobs import BlobIndex
from nous_node.node.uploads import SLOTS, Turn
from nous_node.protocol.encoding import encode
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.streams import BlobRequest, blob_reply, busy_reply

ELSEWHERE = {bytes([number]) * 32: bytes([number]) for number in range(100)}
BUSY, STALLED = b"b" * 32, b"s" * 32


class Node:
    """One that holds a chunk, and knows where others are."""

    def __init__(self, rate: float | None = None) -> None:
        self.index = BlobIndex(lambda file: None)
        self.held = self.index.add_bytes(b"a chunk of a checkpoint")
        self.index.elsewhere = self._elsewhere
        self.turns = BlobTurns(self.index, rate)
        self.asked: list[str] = []

    async def _elsewhere(self, peer: str, digest: bytes) -> bytes | None:
        self.asked.append(peer)
        if digest == BUSY:
            raise RemoteError(Code.BUSY, "Not now.")
        if digest == STALLED:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return ELSEWHERE.get(digest)

    def turn(self, digest: bytes, peer: str = "peer") -> Any:
        return self.turns.turn(peer, encode(BlobRequest(digest)))

    @asynccontextmanager
    async def all_referred(self) -> AsyncIterator[None]:
        """As many uploads of groups by reference as may be."""
        async with AsyncExitStack() as stack:
            for digest in list(ELSEWHERE)[: module.REFERRED_SLOTS]:
                assert await stack.enter_async_context(self.turn(digest))
            yield


async def test_what_is_held_is_left_to_the_handler_and_what_is_elsewhere_is_answered() -> None:
    node = Node()
    async with node.turn(node.held) as turn:
        assert turn.answer is None
    assert node.asked == []
    async with node.turn(bytes(32), "trainer") as turn:
        assert turn.answer == blob_reply(ELSEWHERE[bytes(32)])
    assert node.asked == ["trainer"]


@pytest.mark.parametrize(
    ("digest", "answer"), [(b"\xff" * 32, blob_reply(None)), (BUSY, busy_reply()), (STALLED, busy_reply())]
)
async def test_what_cannot_be_had_is_told_and_takes_no_turn(
    autojump_clock: Any, digest: bytes, answer: bytes
) -> None:
    node = Node()
    async with node.all_referred(), node.turn(digest) as turn:
        assert turn.answer == answer


async def test_what_is_still_to_come_holds_up_no_chunk_that_is_held(autojump_clock: Any) -> None:
    node = Node()
    began: list[Turn] = []

    async def ask() -> None:
        async with node.turn(STALLED):
            pass

    async with trio.open_nursery() as nursery:
        for _ in range(2 * SLOTS):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        async with node.all_referred():
            for _ in range(SLOTS):
                async with node.turn(node.held) as turn:
                    began.append(turn)
        nursery.cancel_scope.cancel()
    assert all(began)


async def test_uploads_of_checkpoints_hold_up_no_group(autojump_clock: Any) -> None:
    node = Node()
    async with AsyncExitStack() as stack:
        for _ in range(SLOTS):
            assert await stack.enter_async_context(node.turn(node.held))
        async with node.all_referred():
            pass


async def test_what_is_no_request_is_refused() -> None:
    node = Node()
    with pytest.raises(RemoteError):
        async with node.turns.turn("peer", b"\xc1"):
            pass
