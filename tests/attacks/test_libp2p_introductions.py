"""Attacks by introductions: whom a node is made to dial."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import pytest
import trio

from nous_node.node.neighbours import DIALS_AT_ONCE, STRIKES, Neighbours
from nous_node.node.network import Network, NetworkConfig, open_network
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.identity import peer_id
from nous_node.protocol.streams import (
    HAVE_PROTOCOL,
    MAX_HAVE_REPLY,
    MAX_HAVE_REQUEST,
    MAX_INTRODUCED,
    HaveReply,
    HaveRequest,
)

LISTEN = ("/ip4/127.0.0.1/tcp/0",)


@asynccontextmanager
async def networks(count: int) -> AsyncIterator[list[Network]]:
    """The first knows nobody, all others know it."""
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(open_network(bytes([n + 1]) * 32, NetworkConfig(listen=LISTEN)))
            for n in range(count)
        ]
        for one in opened[1:]:
            await one.connect(opened[0].addresses[0])
        yield opened


def answer_with(network: Network, peers: Callable[[str, HaveRequest], list[str]]) -> None:
    async def answer(peer: str, request: bytes) -> bytes:
        return encode(HaveReply(peers=peers(peer, read(request, HaveRequest, MAX_HAVE_REQUEST))))

    network.serve(HAVE_PROTOCOL, answer, max_request=MAX_HAVE_REQUEST, max_response=MAX_HAVE_REPLY)


async def ask(network: Network, peer: str, addresses: list[str]) -> list[str]:
    request = encode(HaveRequest(bytes(32), bytes(32), addresses=addresses))
    reply = await network.request(peer, HAVE_PROTOCOL, request, max_response=MAX_HAVE_REPLY)
    return read(reply, HaveReply, MAX_HAVE_REPLY).peers


@asynccontextmanager
async def trap(host: str) -> AsyncIterator[tuple[int, list[trio.SocketStream]]]:
    """A port of somebody who takes no part, and the connections that it has had."""
    caught: list[trio.SocketStream] = []

    async def catch(stream: trio.SocketStream) -> None:
        caught.append(stream)
        with suppress(trio.BrokenResourceError):
            await stream.receive_some()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, catch, 0, host=host))
        yield listener.socket.getsockname()[1], caught
        nursery.cancel_scope.cancel()


@pytest.mark.attack("sending others to a third party", "")
async def test_a_peer_is_introduced_at_its_own_machine_only() -> None:
    async with networks(3) as (server, liar, honest), trap("127.0.0.2") as (port, caught):
        neighbours = Neighbours(server)

        def introduce(peer: str, asked: HaveRequest) -> list[str]:
            neighbours.note_addresses(peer, asked.addresses)
            return neighbours.others(peer)

        answer_with(server, introduce)
        lie = [
            f"/ip4/127.0.0.2/tcp/{port}/p2p/{liar.peer_id}",
            f"/dns4/localhost/tcp/{port}/p2p/{liar.peer_id}",
        ]
        await ask(liar, server.peer_id, lie)
        told = await ask(honest, server.peer_id, [])
        assert told == [f"/ip4/127.0.0.1/tcp/{port}/p2p/{liar.peer_id}"]
        assert not caught


@pytest.mark.attack("introductions that lead nowhere", "")
async def test_a_lying_introducer_wastes_a_few_dials() -> None:
    async with networks(2) as (liar, honest), trap("127.0.0.1") as (port, caught):
        strangers = [peer_id(bytes([n]) * 32) for n in range(1, 1 + MAX_INTRODUCED)]
        answer_with(liar, lambda peer, asked: [f"/ip4/127.0.0.1/tcp/{port}/p2p/{one}" for one in strangers])
        neighbours = Neighbours(honest, entropy=random.Random(1))

        async def meet(peer: str) -> None:
            neighbours.note_introduced(peer, await ask(honest, peer, []))

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(neighbours.run, meet)
                while not neighbours._introducers.waits(liar.peer_id, trio.current_time(), STRIKES):  # noqa: ASYNC110
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
        assert len(caught) < STRIKES + DIALS_AT_ONCE
        assert {peer.peer_id for peer in honest.peers()} == {liar.peer_id}
        assert not neighbours.chosen


@pytest.mark.attack("somebody else behind an introduction", "")
async def test_who_answers_an_introduction_has_to_be_who_was_introduced() -> None:
    async with networks(3) as (liar, honest, other):
        place = other.addresses[0].partition("/p2p/")[0]
        answer_with(liar, lambda peer, asked: [f"{place}/p2p/{peer_id(bytes(31) + b'x')}"])
        neighbours = Neighbours(honest)
        neighbours.note_introduced(liar.peer_id, await ask(honest, liar.peer_id, []))
        chosen = neighbours._choose()
        assert chosen is not None
        await neighbours._dial(*chosen)
        assert {peer.peer_id for peer in honest.peers()} == {liar.peer_id}
        assert neighbours._waits(*chosen, trio.current_time())
