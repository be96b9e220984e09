"""Peers that nobody named: those who take part introduce each other, and a node dials a few of them.

    have-request  -> announced: this peer takes part, and says where it listens
    have-reply    -> candidates -> a dial -> neighbours, or failures that are remembered

An introduction is a claim. It costs a dial at the most: a few at once, of one introducer only so many, to a
place that failed not again for a while, and Noise proves who answers there. The peers of the invite are
dialled elsewhere, stay, and count for nothing here. [STR-7]
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import trio

from nous_node.protocol.errors import NousError
from nous_node.protocol.introductions import IP, Endpoint, believed, passed_on, told, vouched
from nous_node.protocol.streams import MAX_INTRODUCED

from .config import DEFAULT_NEIGHBOURS, MAX_NEIGHBOURS

WANTED: Final = DEFAULT_NEIGHBOURS
"""Neighbours of one's own choice: with the trainer's few they make a swarm of any size connected."""

MOST_CONNECTED: Final = MAX_NEIGHBOURS
"""Connections, those that others began included, from which on nobody more is looked for."""

DIALS_AT_ONCE: Final = 2
"""Each takes 10 s where nothing answers."""

CANDIDATES: Final = 256
"""Introduced peers that are kept for later."""

OF_ONE_INTRODUCER: Final = 32
"""Of these by the word of one peer: two replies."""

STRIKES: Final = 8
"""Failed dials after an introducer's last good one until it is believed no more, and to one IP address until
it is dialled only by the word of those whose word about it has not failed: so nobody's lies keep an honest
peer's machine out of reach, and a machine that has nothing to do with it is dialled a few times."""

FIRST_BACKOFF_S: Final = 30.0
LAST_BACKOFF_S: Final = 3_600.0
"""After a failed dial: as long, then twice as long each time up to the maximum."""

REMEMBERED: Final = 1_024
"""Places and introducers whose failures are remembered, and peers that announced themselves."""

ANNOUNCED_S: Final = 3_600.0
"""For which an announcement holds while its connection does: longer than between two versions."""

FIRST_LOOK_S: Final = 1.0
LAST_LOOK_S: Final = 60.0
"""Between two questions for introductions: twice as long each time up to the maximum."""

TRIAL_S: Final = 120.0
"""In which a neighbour that brings nothing, while others bring something, is kept all the same."""


Key = TypeVar("Key")


class Connected(Protocol):
    """A live connection; see `network.ConnectedPeer`."""

    @property
    def peer_id(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def inbound(self) -> bool: ...


class NeighbourNetwork(Protocol):
    """The part of the network that neighbours need."""

    @property
    def peer_id(self) -> str: ...

    @property
    def addresses(self) -> tuple[str, ...]: ...

    def peers(self) -> Sequence[Connected]: ...

    async def connect(self, address: str) -> str: ...

    async def disconnect(self, peer: str) -> None: ...


@dataclass(slots=True)
class _Failures:
    """Of dials to one place, or by the word of one introducer, since the last good one."""

    number: int = 0
    until: float = 0.0

    def add(self, now: float) -> None:
        self.until = now + min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self.number, 30))
        self.number += 1


class _Memory(Generic[Key]):
    """Failures by place or peer: those that came last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, _Failures] = OrderedDict()

    def failed(self, key: Key, now: float) -> None:
        self._known.setdefault(key, _Failures()).add(now)
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def worked(self, key: Key) -> None:
        self._known.pop(key, None)

    def waits(self, key: Key, now: float, free: int = 1) -> bool:
        """Whether it is left alone for now; the first `free` - 1 failures are forgiven."""
        failures = self._known.get(key)
        return failures is not None and failures.number >= free and failures.until > now


class Neighbours:
    """Whom this node introduces, and whom it knows by introductions."""

    def __init__(
        self, network: NeighbourNetwork, wanted: int = WANTED, entropy: random.Random | None = None
    ) -> None:
        """`wanted`: neighbours that are looked for; with 0 none, and nobody is told where this node is."""
        self._network, self._wanted = network, wanted
        self._entropy = entropy or random.Random()
        self._announced: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()
        self._candidates: dict[Endpoint, str] = {}
        """With the peer that introduced it."""
        self._places = _Memory[Endpoint]()
        self._machines = _Memory[IP]()
        self._words = _Memory[tuple[IP, str]]()
        """What an introducer said of a machine."""
        self._introducers = _Memory[str]()
        self._chosen: dict[str, tuple[Endpoint, float]] = {}
        """Neighbours that were dialled, and since when."""
        self._dialling = 0
        self._brought: Counter[str] = Counter()
        self._news = trio.Event()

    # Introducing others

    def ours(self, peer: str) -> list[str]:
        """Addresses at which this node can be dialled, for a connected peer."""
        listener = self._connected().get(peer)
        if listener is None or not self._wanted:
            return []
        return told(self._network.addresses, listener.address)

    def note_addresses(self, peer: str, addresses: Sequence[str]) -> None:
        """A peer takes part, and says where it can be dialled."""
        self._announced.pop(peer, None)
        if addresses:
            self._announced[peer] = trio.current_time(), list(addresses)
        while len(self._announced) > REMEMBERED:
            self._announced.popitem(last=False)

    def others(self, peer: str, members: Collection[str] = ()) -> list[str]:
        """Addresses of some who announced themselves and are connected now, drawn at random, `members`
        first."""
        connected, now = self._connected(), trio.current_time()
        asker = connected.get(peer)
        if asker is None:
            return []
        names = [
            name
            for name, (at, _) in self._announced.items()
            if name != peer and name in connected and now - at < ANNOUNCED_S
        ]
        self._entropy.shuffle(names)
        names.sort(key=lambda name: name not in members)
        found: list[str] = []
        for name in names:
            other, (_, said) = connected[name], self._announced[name]
            found += passed_on(vouched(name, other.address, other.inbound, said), asker.address)
            if len(found) >= MAX_INTRODUCED:
                break
        return found[:MAX_INTRODUCED]

    # Being introduced

    def note_introduced(self, peer: str, addresses: Sequence[str]) -> None:
        """A peer says who else takes part."""
        connected, now = self._connected(), trio.current_time()
        introducer = connected.get(peer) if self._wanted else None
        if introducer is None or self._introducers.waits(peer, now, STRIKES):
            return
        room = OF_ONE_INTRODUCER - sum(by == peer for by in self._candidates.values())
        for one in believed(addresses[:MAX_INTRODUCED], introducer.address)[: max(0, room)]:
            if one.peer not in connected and one.peer != self._network.peer_id:
                known = self._candidates.get(one)
                if known is None or self._waits(one, known, now):
                    self._candidates[one] = peer
        while len(self._candidates) > CANDIDATES:
            del self._candidates[next(iter(self._candidates))]
        self._wake()

    def delivered(self, peer: str, size: int) -> None:
        """A connected peer has brought something of use."""
        self._brought[peer] += size

    @property
    def chosen(self) -> frozenset[str]:
        """The neighbours of one's own choice that are connected."""
        return frozenset(self._chosen) & frozenset(self._connected())

    async def run(self, meet: Callable[[str], Awaitable[None]]) -> None:
        """Looks for neighbours and keeps the better ones, forever where any are wanted. `meet` exchanges
        have-messages with a connected peer, which brings introductions, and raises nothing."""
        if not self._wanted:
            return
        async with trio.open_nursery() as nursery:
            for _ in range(DIALS_AT_ONCE):
                nursery.start_soon(self._dial_loop)
            nursery.start_soon(self._look_loop, meet)
            nursery.start_soon(self._trial_loop)

    async def _look_loop(self, meet: Callable[[str], Awaitable[None]]) -> None:
        wait = FIRST_LOOK_S
        while True:
            await trio.sleep(wait * self._entropy.uniform(0.7, 1.3))
            wait = min(LAST_LOOK_S, 2 * wait)
            peers = list(self._connected())
            if peers and len(self.chosen) < self._wanted:
                await meet(self._entropy.choice(peers))

    async def _dial_loop(self) -> None:
        while True:
            chosen = self._choose()
            if chosen is None:
                with trio.move_on_after(FIRST_BACKOFF_S):
                    await self._news.wait()
            else:
                await self._dial(*chosen)

    def _choose(self) -> tuple[Endpoint, str] | None:
        """The next to dial, and who introduced it: each introducer has its turn, however many it names."""
        connected, now = self._connected(), trio.current_time()
        self._chosen = {peer: known for peer, known in self._chosen.items() if peer in connected}
        self._candidates = {one: by for one, by in self._candidates.items() if one.peer not in connected}
        if len(self._chosen) + self._dialling >= self._wanted or len(connected) >= MOST_CONNECTED:
            return None
        fit = [one for one, by in self._candidates.items() if not self._waits(one, by, now)]
        if not fit:
            return None
        by = self._entropy.choice(sorted({self._candidates[one] for one in fit}))
        one = self._entropy.choice([one for one in fit if self._candidates[one] == by])
        del self._candidates[one]
        return one, by

    def _waits(self, one: Endpoint, by: str, now: float) -> bool:
        """Whether it is not dialled for now by the word of `by`."""
        word = one.ip, by
        if self._machines.waits(one.ip, now, STRIKES) and self._words.waits(word, now):
            return True
        return self._words.waits(word, now, STRIKES) or self._places.waits(one, now)

    async def _dial(self, one: Endpoint, by: str) -> None:
        self._dialling += 1
        try:
            await self._network.connect(one.address)
        except NousError:
            now = trio.current_time()
            self._places.failed(one, now)
            self._machines.failed(one.ip, now)
            self._words.failed((one.ip, by), now)
            self._introducers.failed(by, now)
        else:
            self._places.worked(one)
            self._machines.worked(one.ip)
            self._words.worked((one.ip, by))
            self._introducers.worked(by)
            self._chosen[one.peer] = one, trio.current_time()
        finally:
            self._dialling -= 1

    async def _trial_loop(self) -> None:
        while True:
            await trio.sleep(TRIAL_S)
            useless = self._useless(trio.current_time())
            self._brought.clear()
            if useless is not None:
                one, _ = self._chosen.pop(useless)
                self._places.failed(one, trio.current_time())
                await self._network.disconnect(useless)
                self._wake()

    def _useless(self, now: float) -> str | None:
        """A neighbour to give up for another one: where all places are taken, others wait, and somebody
        brought something in this time but it did not."""
        chosen = self.chosen
        waiting = any(not self._waits(one, by, now) for one, by in self._candidates.items())
        if len(chosen) < self._wanted or not waiting or not self._brought:
            return None
        idle = [peer for peer in chosen if not self._brought[peer] and now - self._chosen[peer][1] >= TRIAL_S]
        return self._entropy.choice(sorted(idle)) if idle else None

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _connected(self) -> dict[str, Connected]:
        return {peer.peer_id: peer for peer in self._network.peers()}
