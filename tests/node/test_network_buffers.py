"""What lies between a socket and the reader of a stream: messages cut from bytes, bytes that wait."""

from __future__ import annotations

import sys

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.muxer_buffer import KEPT, Unread
from nous_node.node.muxer_socket import READ_SIZE, Incoming, Outgoing


class Raw:
    """libp2p's layer over one end of a memory stream."""

    def __init__(self, stream) -> None:
        self.stream = stream

    async def read(self, n: int) -> bytes:
        return bytes(await self.stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        await self.stream.send_all(data)


@given(
    parts=st.lists(st.sampled_from([1, 2, 700, KEPT - 1, KEPT, 65_000]), max_size=12),
    most=st.sampled_from([1, 3, 1_000, KEPT, 100_000]),
)
def test_bytes_are_read_in_the_order_in_which_they_came(parts: list[int], most: int) -> None:
    unread, sent, got = Unread(), bytearray(), bytearray()
    for number, size in enumerate(parts):
        part = bytes([number]) * size
        unread.put(memoryview(part))
        sent += part
        if number % 3 == 2:
            got += unread.take(most)
        assert unread.size == len(sent) - len(got)
    while unread.size:
        piece = unread.take(most)
        assert 0 < len(piece) <= most
        got += piece
    assert got == sent


def test_small_parts_do_not_hold_the_messages_that_they_came_in() -> None:
    """A peer may send a byte of a stream in a message of 64 KiB that has nothing else for us."""
    message = bytes(65_000)
    unread = Unread()
    before = sys.getrefcount(message)
    for _ in range(1_000):
        unread.put(memoryview(message)[:1])
    assert sys.getrefcount(message) == before
    assert unread.take(5_000) == bytes(1_000)


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 400))
def test_messages_are_cut_wherever_the_socket_cuts_them(messages: list[bytes], step: int) -> None:
    wire = b"".join(len(message).to_bytes(2, "big") + message for message in messages)

    async def scenario() -> list[bytes]:
        ours, theirs = trio.testing.memory_stream_pair()
        incoming, got = Incoming(Raw(theirs)), []
        for start in range(0, len(wire), step):
            await ours.send_all(wire[start : start + step])
            assert await incoming.receive() == len(wire[start : start + step])
            while (message := incoming.message()) is not None:
                got.append(message)
        await ours.aclose()
        assert await incoming.receive() == 0
        return got

    assert trio.run(scenario) == messages


async def test_messages_of_every_size_pass_a_socket() -> None:
    sizes = [0, 1, 65_535, 65_535, 65_535, 65_535, 65_535, 30_000, 0, 17]
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    ours = await trio.testing.open_stream_to_socket_listener(listeners[0])
    theirs = await listeners[0].accept()
    incoming, outgoing = Incoming(Raw(Raw(theirs))), Outgoing(Raw(Raw(ours)))

    async def send() -> None:
        for _ in range(3):
            for number, size in enumerate(sizes):
                outgoing.put(bytes([number]) * size)
            await outgoing.send()

    got: list[bytes] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while len(got) < 3 * len(sizes):
            assert 0 < await incoming.receive() <= READ_SIZE
            while (message := incoming.message()) is not None:
                got.append(message)
    assert got == [bytes([number]) * size for number, size in enumerate(sizes)] * 3
    await ours.aclose()
    assert await incoming.receive() == 0
    await theirs.aclose()
    await listeners[0].aclose()
