"""Requests and answers between two real nodes on 127.0.0.1."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from nous_node.node.network import NetworkConfig, open_network
from nous_node.node.network_errors import (
    AddressError,
    NotConnectedError,
    OversizeResponseError,
    RequestFailedError,
    RequestTimeoutError,
    UnsupportedProtocolError,
)


@asynccontextmanager
async def pair():
    listen = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",))
    async with open_network(b"1" * 32, listen) as server, open_network(b"2" * 32, listen) as client:
        yield server, client


async def test_an_answer_is_what_the_handler_returned() -> None:
    async def reverse(peer: str, request: bytes) -> bytes:
        return peer.encode() + request[::-1]

    async with pair() as (server, client):
        server.serve("/x/1", reverse, max_request=2_000_000, max_response=2_000_000)
        peer = await client.connect(server.addresses[0])
        for size in (0, 1, 1_500_000):
            request = bytes(i % 251 for i in range(size))
            answer = await client.request(peer, "/x/1", request, max_response=2_000_000)
            assert answer == client.peer_id.encode() + request[::-1]
        assert not server.stats.faults


async def test_a_server_may_ask_its_client_back() -> None:
    async with pair() as (server, client):

        async def name(peer: str, request: bytes) -> bytes:
            return b"client"

        async def ask_back(peer: str, request: bytes) -> bytes:
            return await server.request(peer, "/name/1", b"", max_response=100)

        server.serve("/back/1", ask_back, max_request=10, max_response=100)
        client.serve("/name/1", name, max_request=10, max_response=100)
        peer = await client.connect(server.addresses[0])
        assert await client.request(peer, "/back/1", b"", max_response=100) == b"client"


async def test_failed_requests_are_said_in_words() -> None:
    async def slow(peer: str, request: bytes) -> bytes:
        await trio.sleep_forever()

    async def long(peer: str, request: bytes) -> bytes:
        return bytes(50)

    async with pair() as (server, client):
        server.serve("/slow/1", slow, max_request=10, max_response=100)
        server.serve("/long/1", long, max_request=10, max_response=100)
        with pytest.raises(NotConnectedError, match="Connect to one of its addresses"):
            await client.request(server.peer_id, "/slow/1", b"", max_response=10)
        with pytest.raises(AddressError):
            await client.request("nobody", "/slow/1", b"", max_response=10)
        peer = await client.connect(server.addresses[0])
        with pytest.raises(RequestTimeoutError, match=r"within 0\.1 s"):
            await client.request(peer, "/slow/1", b"", max_response=10, deadline=0.1)
        with pytest.raises(UnsupportedProtocolError, match="/none/1"):
            await client.request(peer, "/none/1", b"", max_response=10)
        with pytest.raises(OversizeResponseError, match="50 bytes, the limit is 10"):
            await client.request(peer, "/long/1", b"", max_response=10)


async def test_requests_beyond_the_total_wait_their_turn() -> None:
    running = most = 0

    async def count(peer: str, request: bytes) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.testing.wait_all_tasks_blocked(0.01)
        running -= 1
        return request

    async with pair() as (server, client):
        server.serve("/x/1", count, max_request=10, max_response=10, per_peer=20, total=2)
        peer = await client.connect(server.addresses[0])
        answers = []

        async def ask(number: int) -> None:
            answers.append(await client.request(peer, "/x/1", bytes([number]), max_response=10))

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, number)
        assert sorted(answers) == [bytes([number]) for number in range(10)]
        assert most == 2


async def test_a_protocol_that_the_peer_gave_up_is_noticed() -> None:
    """From the second request on nobody waits for the peer's consent before the request goes out."""

    async def echo(peer: str, request: bytes) -> bytes:
        return request

    async with pair() as (server, client):
        server.serve("/x/1", echo, max_request=10, max_response=10)
        peer = await client.connect(server.addresses[0])
        for number in range(3):
            assert await client.request(peer, "/x/1", bytes([number]), max_response=10) == bytes([number])
        assert not server.stats.faults
        handler = server._host.multiselect.handlers.pop("/x/1")
        with pytest.raises(RequestFailedError):
            await client.request(peer, "/x/1", b"x", max_response=10)
        with pytest.raises(UnsupportedProtocolError, match="/x/1"):
            await client.request(peer, "/x/1", b"x", max_response=10)
        server._host.multiselect.handlers["/x/1"] = handler
        assert await client.request(peer, "/x/1", b"x", max_response=10) == b"x"
