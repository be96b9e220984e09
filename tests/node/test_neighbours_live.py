"""Peers that nobody named: real nodes on 127.0.0.1 that know one address, and find each other."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from nous_node.node import neighbours as module
from nous_node.node.neighbours import Neighbours
from nous_node.node.network import Network, NetworkConfig, Verdict, open_network
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.errors import NousError
from nous_node.protocol.streams import (
    HAVE_PROTOCOL,
    MAX_HAVE_REPLY,
    MAX_HAVE_REQUEST,
    HaveReply,
    HaveRequest,
)

RUN, CHECKPOINT = b"r" * 32, b"c" * 32
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
TOPIC = "/nous/1/run/rollouts/0"


@dataclass
class Node:
    """A node that exchanges have-messages and nothing else."""

    network: Network
    neighbours: Neighbours

    def __post_init__(self) -> None:
        self.network.serve(
            HAVE_PROTOCOL, self.answer, max_request=MAX_HAVE_REQUEST, max_response=MAX_HAVE_REPLY
        )

    async def answer(self, peer: str, request: bytes) -> bytes:
        self.neighbours.note_addresses(peer, read(request, HaveRequest, MAX_HAVE_REQUEST).addresses)
        return encode(HaveReply(peers=self.neighbours.others(peer)))

    async def meet(self, peer: str) -> None:
        """As a swarm does: what fails is tried with another peer."""
        request = encode(HaveRequest(RUN, CHECKPOINT, addresses=self.neighbours.ours(peer)))
        with suppress(NousError):
            frame = await self.network.request(peer, HAVE_PROTOCOL, request, max_response=MAX_HAVE_REPLY)
            self.neighbours.note_introduced(peer, read(frame, HaveReply, MAX_HAVE_REPLY).peers)

    def connected(self) -> set[str]:
        return {peer.peer_id for peer in self.network.peers()}


@asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[Node]]:
    async with AsyncExitStack() as stack:
        opened = []
        for number in range(count):
            config = NetworkConfig(listen=LISTEN)
            network = await stack.enter_async_context(open_network(bytes([number + 1]) * 32, config))
            opened.append(Node(network, Neighbours(network, entropy=random.Random(number))))
        yield opened


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for others at once, and again soon."""
    monkeypatch.setattr(module, "FIRST_LOOK_S", 0.02)
    monkeypatch.setattr(module, "LAST_LOOK_S", 0.1)


async def test_three_that_know_only_the_trainer_find_each_other_and_stay_when_it_is_gone(soon: None) -> None:
    async with nodes(4) as (trainer, *volunteers), trio.open_nursery() as nursery:
        for one in volunteers:
            await one.network.connect(trainer.network.addresses[0])
            nursery.start_soon(one.neighbours.run, one.meet)
        everybody = {one.network.peer_id for one in volunteers}
        with trio.fail_after(30):
            await until(
                lambda: all(everybody <= one.connected() | {one.network.peer_id} for one in volunteers)
            )
            for one in volunteers:
                await trainer.network.disconnect(one.network.peer_id)
            await until(lambda: not any(trainer.network.peer_id in one.connected() for one in volunteers))
        assert all(everybody <= one.connected() | {one.network.peer_id} for one in volunteers)
        nursery.cancel_scope.cancel()


async def test_whoever_is_further_away_is_found_step_by_step(soon: None) -> None:
    async with nodes(4) as (first, second, third, fourth), trio.open_nursery() as nursery:
        for one, other in ((first, second), (second, third), (third, fourth)):
            await one.network.connect(other.network.addresses[0])
        for one in (first, second, third, fourth):
            nursery.start_soon(one.neighbours.run, one.meet)
        with trio.fail_after(30):
            await until(lambda: fourth.network.peer_id in first.connected())
        nursery.cancel_scope.cancel()


async def test_node_that_wants_no_neighbours_tells_nobody_where_it_is(soon: None) -> None:
    async with nodes(3) as (trainer, shy, other), trio.open_nursery() as nursery:
        shy.neighbours = Neighbours(shy.network, 0)
        for one in (shy, other):
            await one.network.connect(trainer.network.addresses[0])
            await one.meet(trainer.network.peer_id)
        assert trainer.neighbours.others(shy.network.peer_id) == [other.network.addresses[0]]
        assert trainer.neighbours.others(other.network.peer_id) == []
        shy.neighbours.note_introduced(trainer.network.peer_id, list(other.network.addresses))
        await shy.neighbours.run(shy.meet)  # looks for nobody, and so ends
        assert shy.connected() == {trainer.network.peer_id}
        nursery.cancel_scope.cancel()


async def test_rollouts_still_reach_the_trainer_once_volunteers_know_each_other(soon: None) -> None:
    def judge(data: bytes, forwarder: str) -> Verdict:
        return Verdict.ACCEPT

    async with nodes(4) as (trainer, *volunteers), trio.open_nursery() as nursery:
        inbox = trainer.network.subscribe(TOPIC, judge, 64)
        for one in volunteers:
            await one.network.connect(trainer.network.addresses[0])
            one.network.subscribe("/nous/1/run/checkpoints", judge, 8)
            nursery.start_soon(one.neighbours.run, one.meet)
        with trio.fail_after(30):
            await until(lambda: all(len(one.connected()) == 3 for one in volunteers))
            for one in volunteers:
                await one.network.wait_subscriber(TOPIC)
                assert one.network.subscribers(TOPIC) == (trainer.network.peer_id,)
                for number in range(4):
                    await one.network.publish(TOPIC, one.network.peer_id.encode() + bytes([number]))
            got = {(await inbox.receive())[0] for _ in range(12)}
        assert len(got) == 12
        assert all(one.network.stats.topic(TOPIC).accepted == 0 for one in volunteers)
        nursery.cancel_scope.cancel()


async def test_refused_peer_is_not_taken_back_by_an_introduction(soon: None) -> None:
    async with nodes(3) as (trainer, one, banned), trio.open_nursery() as nursery:
        await one.network.connect(trainer.network.addresses[0])
        await banned.network.connect(trainer.network.addresses[0])
        await banned.meet(trainer.network.peer_id)
        await one.network.refuse(banned.network.peer_id, "test")
        await one.meet(trainer.network.peer_id)
        nursery.start_soon(one.neighbours.run, one.meet)
        with trio.fail_after(30):
            await until(lambda: one.network.stats.connections_refused > 0)
        assert banned.network.peer_id not in one.connected()
        nursery.cancel_scope.cancel()
