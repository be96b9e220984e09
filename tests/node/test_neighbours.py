"""Whom a node dials and introduces: a network in memory, a clock that jumps, lies of every kind."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from nous_node.node import neighbours as module
from nous_node.node.neighbours import Neighbours
from nous_node.node.network_errors import UnreachableError
from nous_node.protocol.identity import peer_id
from nous_node.protocol.streams import MAX_INTRODUCED


@dataclass
class Peer:
    peer_id: str
    address: str
    inbound: bool = True


@dataclass
class Dials:
    """A network in which a dial is noted, and works where `answers` says so."""

    connected: dict[str, Peer] = field(default_factory=dict)
    dialled: list[str] = field(default_factory=list)
    answers: Callable[[str], bool] = lambda address: False
    peer_id: str = peer_id(b"o" * 32)
    addresses: tuple[str, ...] = ()
    takes: float = 1.0
    at_once: int = 0
    most_at_once: int = 0

    def peers(self) -> Sequence[Peer]:
        return list(self.connected.values())

    async def connect(self, address: str) -> str:
        self.dialled.append(address)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await trio.sleep(self.takes)
        self.at_once -= 1
        if not self.answers(address):
            raise UnreachableError(address, "no answer")
        place, _, peer = address.partition("/p2p/")
        self.connected[peer] = Peer(peer, place, inbound=False)
        return peer

    async def disconnect(self, peer: str) -> None:
        del self.connected[peer]


def stranger(number: int) -> str:
    return peer_id(number.to_bytes(32, "big"))


def far(number: int, port: int = 5000) -> str:
    return f"/ip4/93.184.{number // 200}.{1 + number % 200}/tcp/{port}/p2p/{stranger(number)}"


async def never(peer: str) -> None:
    """Brings no introductions."""


LIAR, HONEST = stranger(900), stranger(901)


@pytest.fixture
def dials() -> Dials:
    return Dials({one: Peer(one, f"/ip4/203.0.114.{i}/tcp/4000") for i, one in enumerate((LIAR, HONEST), 1)})


@pytest.fixture
def neighbours(dials: Dials) -> Neighbours:
    return Neighbours(dials, entropy=random.Random(0))


@asynccontextmanager
async def running(neighbours: Neighbours) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(neighbours.run, never)
        yield
        nursery.cancel_scope.cancel()


async def test_liar_wastes_a_bounded_number_of_dials(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(neighbours):
        for burst in range(100):
            neighbours.note_introduced(LIAR, [far(16 * burst + i) for i in range(16)])
            await trio.sleep(60)
    assert 8 <= len(dials.dialled) <= 100  # of 1,600 claims in 100 minutes
    assert dials.most_at_once == module.DIALS_AT_ONCE


async def test_liar_does_not_keep_honest_introductions_from_being_dialled(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    dials.answers = lambda address: address == far(700)
    neighbours.note_introduced(LIAR, [far(i) for i in range(16)])
    neighbours.note_introduced(LIAR, [far(i) for i in range(16, 32)])
    neighbours.note_introduced(LIAR, [far(i) for i in range(32, 48)])
    neighbours.note_introduced(HONEST, [far(700)])
    async with running(neighbours):
        await trio.sleep(10)
        assert stranger(700) in neighbours.chosen
    assert not any(address in dials.dialled for address in map(far, range(32, 48)))


async def test_one_machine_is_not_dialled_at_all_its_ports(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(neighbours):
        for port in range(2000, 2064):
            neighbours.note_introduced(stranger(800 + port % 8), [])
            for introducer in (LIAR, HONEST):
                neighbours.note_introduced(introducer, [far(1, port)])
            await trio.sleep(5)
    assert len(dials.dialled) <= 2 * module.STRIKES  # of 64 claims of each of two


def lies(about: str) -> list[str]:
    """Of an honest peer's machine: ports at which nobody is, and its port with other peers."""
    place, _, _ = about.partition("/tcp/")
    ports = [f"{place}/tcp/{port}/p2p/{stranger(port)}" for port in range(2000, 2016)]
    return ports + [f"{place}/tcp/5000/p2p/{stranger(number)}" for number in range(3000, 3016)]


async def test_lies_about_an_honest_machine_do_not_keep_it_from_being_dialled(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    """Neither wrong ports, nor other peers at its port, nor that the liar told of it first."""
    dials.answers = lambda address: address == far(700)
    async with running(neighbours):
        for _ in range(20):
            told = [*lies(far(700)), far(700)] if len(dials.dialled) > 8 else lies(far(700))
            for start in range(0, len(told), 16):
                neighbours.note_introduced(LIAR, told[start : start + 16])
            await trio.sleep(60)
        before = len(dials.dialled)
        assert module.STRIKES <= before <= 100
        assert far(700) not in dials.dialled
        neighbours.note_introduced(HONEST, [far(700)])
        await trio.sleep(5)
        assert dials.dialled[before:] == [far(700)]
        assert stranger(700) in neighbours.chosen


async def test_place_that_failed_is_left_alone_for_longer_each_time(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    at = []
    dials.takes = 0

    async with running(neighbours):
        for _ in range(1_000):
            before = len(dials.dialled)
            neighbours.note_introduced(HONEST, [far(1)])
            await trio.sleep(5)
            if len(dials.dialled) > before:
                at.append(trio.current_time())
    waits = [later - sooner for sooner, later in itertools.pairwise(at)]
    assert waits == sorted(waits)
    assert waits[0] >= module.FIRST_BACKOFF_S
    assert len(at) <= 8


@pytest.mark.parametrize(
    "address",
    [
        f"/ip4/127.0.0.1/tcp/5000/p2p/{stranger(1)}",
        f"/ip4/10.0.0.1/tcp/5000/p2p/{stranger(1)}",
        f"/ip4/169.254.169.254/tcp/8080/p2p/{stranger(1)}",
        f"/dns4/victim.example/tcp/5000/p2p/{stranger(1)}",
        f"/ip4/93.184.216.34/tcp/25/p2p/{stranger(1)}",
        f"/ip4/93.184.216.34/tcp/5000/p2p/{peer_id(b'o' * 32)}",
        f"/ip4/93.184.216.34/tcp/5000/p2p/{HONEST}",
        "/ip4/93.184.216.34/tcp/5000/p2p/x",
    ],
)
async def test_lie_about_a_place_that_is_none_of_its_business_is_not_dialled(
    address: str, dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    neighbours.note_introduced(LIAR, [address])
    async with running(neighbours):
        await trio.sleep(100)
    assert dials.dialled == []


async def test_whoever_is_not_connected_introduces_nobody(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    neighbours.note_introduced(stranger(5), [far(1)])
    async with running(neighbours):
        await trio.sleep(100)
    assert dials.dialled == []


async def test_no_more_are_dialled_than_wanted(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    dials.answers = lambda address: True
    async with running(neighbours):
        neighbours.note_introduced(HONEST, [far(i) for i in range(16)])
        await trio.sleep(100)
        assert len(neighbours.chosen) == len(dials.dialled) == module.WANTED
        lost = sorted(neighbours.chosen)[0]
        del dials.connected[lost]
        await trio.sleep(100)
        assert len(neighbours.chosen) == module.WANTED


async def test_node_with_many_connections_looks_for_nobody(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    dials.connected |= {stranger(i): Peer(stranger(i), f"/ip4/203.0.115.{i}/tcp/1") for i in range(1, 40)}
    neighbours.note_introduced(HONEST, [far(700)])
    async with running(neighbours):
        await trio.sleep(100)
    assert dials.dialled == []


async def test_neighbour_that_brings_nothing_makes_room_for_another_one(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    dials.answers = lambda address: True
    async with running(neighbours):
        neighbours.note_introduced(HONEST, [far(i) for i in range(8)])
        await trio.sleep(2 * module.TRIAL_S)
        first = neighbours.chosen
        neighbours.note_introduced(HONEST, [far(i) for i in range(8, 12)])
        await trio.sleep(5)
        assert neighbours.chosen == first  # all places are taken
        idle = stranger(3)
        for _ in range(4):
            for peer in neighbours.chosen - {idle}:
                neighbours.delivered(peer, 1 << 20)
            await trio.sleep(module.TRIAL_S)
        assert idle not in neighbours.chosen
        assert len(neighbours.chosen) == module.WANTED


async def test_nobody_is_given_up_while_nothing_is_fetched(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    dials.answers = lambda address: True
    async with running(neighbours):
        neighbours.note_introduced(HONEST, [far(i) for i in range(12)])
        await trio.sleep(5)
        first = neighbours.chosen
        await trio.sleep(10 * module.TRIAL_S)
        assert neighbours.chosen == first


async def test_only_who_is_connected_is_introduced_and_at_the_ip_of_its_connection(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    for number in range(40):
        dials.connected[stranger(number)] = Peer(stranger(number), f"/ip4/93.184.1.{number}/tcp/40000")
        neighbours.note_addresses(stranger(number), [f"/ip4/8.8.8.8/tcp/5000/p2p/{stranger(number)}"])
    for number in range(0, 40, 2):
        del dials.connected[stranger(number)]
    neighbours.note_addresses(stranger(39), [])  # it would rather not be dialled
    told = neighbours.others(HONEST)
    assert len(told) == MAX_INTRODUCED
    possible = {f"/ip4/93.184.1.{n}/tcp/5000/p2p/{stranger(n)}" for n in range(1, 39, 2)}
    assert set(told) <= possible
    assert neighbours.others(HONEST) != told  # drawn anew
    assert not any(stranger(1) in address for address in neighbours.others(stranger(1)))
    members = {stranger(n) for n in (1, 3, 5)}
    assert {address[-52:] for address in neighbours.others(HONEST, members)[:3]} == {m[-52:] for m in members}
    assert neighbours.others(stranger(2)) == []
    await trio.sleep(module.ANNOUNCED_S + 1)
    assert neighbours.others(HONEST) == []


async def test_announcements_without_end_take_bounded_room(
    dials: Dials, neighbours: Neighbours, autojump_clock: trio.testing.MockClock
) -> None:
    dials.answers = lambda address: False
    dials.takes = 0
    for number in range(3_000):
        neighbours.note_addresses(stranger(number), [far(number)])
    assert len(neighbours._announced) == module.REMEMBERED
    introducers = [stranger(i) for i in range(1_000, 1_100)]
    dials.connected |= {peer: Peer(peer, "/ip4/203.0.115.1/tcp/1") for peer in introducers}
    for number, peer in enumerate(introducers):
        neighbours.note_introduced(peer, [far(2_000 + 16 * number + i) for i in range(16)])
    assert len(neighbours._candidates) == module.CANDIDATES
