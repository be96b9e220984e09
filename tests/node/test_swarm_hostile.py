"""Peers that change what they say, say nothing or come and go, in virtual time: they end no download, and
hold none up for long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from nous_node.node.blobs import BlobIndex, FetchError
from nous_node.node.network_errors import RequestTimeoutError
from nous_node.node.shares import MAX_NEIGHBOURS
from nous_node.node.swarm_download import STARVED_S
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.streams import BLOB_PROTOCOL, MAX_HAVE_REQUEST, HaveReply, HaveRequest, bitmap

from .shaped import MB, RUN, Fabric, Node, inline
from .swarm import CHECKPOINT

Make = Callable[[int, float], Fabric]


@pytest.fixture
def fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(trio.to_thread, "run_sync", inline)
    return lambda chunks, uplink: Fabric(tmp_path, chunks, uplink)


class Saying(Node):
    """Says what it has as it likes, and delivers nothing."""

    def says(self) -> int:
        return 0

    def install(self) -> None:
        self.fabric.nodes[self.name] = self
        self.swarm.answer = self.answer  # type: ignore[method-assign]
        self.answers = self.stall

    def have(self) -> bytes | None:
        return bitmap(chunks, self.fabric.size >> 20) if (chunks := self.says()) else None

    async def answer(self, peer: str, request: bytes) -> bytes:
        return encode(HaveReply(self.have()))

    async def tell(self, node: Node, http: int | None = None) -> None:
        await node.swarm.answer(self.name, encode(HaveRequest(RUN, CHECKPOINT, self.have(), http)))

    async def stall(self) -> bytes:
        await trio.sleep_forever()
        return b""


class AllButOne(Saying):
    def says(self) -> int:
        return (1 << (self.fabric.size >> 20)) - 2


async def beside(work: Callable[[], Awaitable[Any]], other: Callable[[], Awaitable[None]]) -> None:
    """`work`, while `other` goes on."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await work()
        nursery.cancel_scope.cancel()


# --- sources that come and go --------------------------------------------------------------------


class Url:
    """Plain HTTP of a node."""

    def __init__(self, name: str, index: BlobIndex) -> None:
        self.name, self._index = name, index

    async def fetch(self, digest: bytes, length: int) -> bytes:
        await trio.sleep(0.05)
        data = self._index.read(digest)
        assert data is not None
        return data

    def close(self) -> None: ...


async def slow_disk(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A thread that nothing interrupts."""
    with trio.CancelScope(shield=True):
        await trio.sleep(0.05)
    return function(*args)


@pytest.mark.parametrize("what", ["http", "connection"])
async def test_a_source_that_comes_and_goes_while_its_chunks_are_written_ends_no_download(
    fabric: Make, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", slow_disk)
    net = fabric(96, 5 * MB)
    volunteer, other = net.add("volunteer", MB), net.add("flapping", 20 * MB)
    other.index.add(net.path / "trainer", net.manifest.files)
    other.swarm.hold(CHECKPOINT, net.manifest)
    volunteer.swarm._http = lambda url: Url(url, other.index)
    ports: list[int | None] = [None, 8080]

    async def flap() -> None:
        whole = bitmap((1 << 96) - 1, 96)
        for number in range(10_000):
            await trio.sleep(0.03)
            if what == "connection":
                volunteer.refused[:] = [["flapping"], []][number % 2]
                for download in volunteer.swarm._downloads[CHECKPOINT]:
                    download._looked = -1.0
            elif CHECKPOINT in volunteer.swarm._shares:
                request = HaveRequest(RUN, CHECKPOINT, whole, ports[number % 2])
                await volunteer.swarm.answer("flapping", encode(request))

    start = trio.current_time()
    await beside(lambda: net.fetch(volunteer), flap)
    assert trio.current_time() - start <= 1.2 * net.size / (5 * MB) + 1


async def test_a_peer_is_asked_in_one_way_until_that_fails(fabric: Make, autojump_clock: MockClock) -> None:
    net = fabric(24, 5 * MB)
    volunteer = net.add("volunteer", MB)
    opened: list[str] = []

    def http(url: str) -> Url:
        opened.append(url)
        return Url(url, net.trainer.index)

    volunteer.swarm._http = http
    net.trainer.swarm.http_port = 8080

    async def toggle() -> None:
        whole = bitmap((1 << 24) - 1, 24)
        for number in range(10_000):
            await trio.sleep(0.1)
            request = HaveRequest(RUN, CHECKPOINT, whole, [None, 8081][number % 2])
            await volunteer.swarm.answer("trainer", encode(request))

    await beside(lambda: net.fetch(volunteer), toggle)
    assert len(opened) == 1
    assert net.trainer.sent == 0


# --- slow lines and lines that are held up -------------------------------------------------------


async def test_a_slow_line_of_ours_is_not_asked_for_more_than_comes_in_time(
    fabric: Make, autojump_clock: MockClock
) -> None:
    """Many sources whose chunks share one line of 0.3 MB/s."""
    net = fabric(24, 100 * MB)
    volunteer = net.add("volunteer", MB)
    for number in range(11):
        seed = net.add(f"seed {number}", 100 * MB)
        seed.index.add(net.path / "trainer", net.manifest.files)
        seed.swarm.hold(CHECKPOINT, net.manifest)
    rate, sharing = 0.3 * MB, [0]
    quick = volunteer.request

    async def request(peer: str, protocol: str, payload: bytes, **limits: Any) -> bytes:
        reply = await quick(peer, protocol, payload, **limits)
        if protocol != BLOB_PROTOCOL:
            return reply
        sharing[0] += 1
        try:
            left = float(len(reply))
            while left > 0:
                await trio.sleep(0.25)
                left -= rate * 0.25 / sharing[0]
        finally:
            sharing[0] -= 1
        return reply

    volunteer.request = request  # type: ignore[method-assign]
    assert await net.fetch(volunteer) <= 1.5 * net.size / rate


@pytest.mark.parametrize("number", [1, 6])
async def test_peers_that_say_much_and_deliver_nothing_do_not_keep_us_from_the_publisher(
    fabric: Make, autojump_clock: MockClock, number: int
) -> None:
    net = fabric(48, 5 * MB)
    volunteer = net.add("volunteer", MB)
    for name in range(number):
        AllButOne(net, f"stalling {name}", MB).install()
    assert await net.fetch(volunteer) <= net.size / (5 * MB) + 15


class Toggling(Saying):
    """Has one of the chunks that another lacks, and has it no more, in turn."""

    target: Node
    said = 0

    def says(self) -> int:
        self.said += 1
        digests = self.fabric.manifest.files[0].hashes()
        lacking = [number for number, one in enumerate(digests) if self.target.index.place(one) is None]
        return 1 << lacking[self.said % len(lacking)] if self.said % 2 and lacking else 0


async def test_who_has_and_has_not_a_chunk_in_turn_makes_nobody_wait(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(48, 5 * MB)
    volunteer, toggling = net.add("volunteer", MB), Toggling(net, "toggling", MB)
    toggling.target = volunteer
    toggling.install()

    async def toggle() -> None:
        while True:
            await trio.sleep(0.2)
            await toggling.tell(volunteer)

    start = trio.current_time()
    await beside(lambda: net.fetch(volunteer), toggle)
    assert trio.current_time() - start <= 1.2 * net.size / (5 * MB) + 2


class Mute(Saying):
    async def answer(self, peer: str, request: bytes) -> bytes:
        await trio.sleep(10)
        raise RequestTimeoutError(self.name, 10)


async def test_who_never_says_what_it_has_does_not_keep_a_download_from_ending(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(24, 5 * MB)
    volunteer = net.add("volunteer", MB)
    Mute(net, "mute", MB).install()

    async def die() -> None:
        await trio.sleep(2)
        net.trainer.gone = True
        await trio.sleep_forever()

    async def fail() -> None:
        with pytest.raises(FetchError):
            await net.fetch(volunteer)

    await beside(fail, die)
    assert trio.current_time() <= 2 + STARVED_S + 2


async def test_a_crowd_that_has_nothing_does_not_hide_the_trainer(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(24, 5 * MB)
    volunteer = net.add("volunteer", MB)
    crowd = [Saying(net, f"idle {number}", MB) for number in range(MAX_NEIGHBOURS + 8)]
    for node in crowd:
        node.install()

    async def announce() -> None:
        while True:
            for node in crowd:
                await node.tell(volunteer)
            await trio.sleep(30)

    volunteer.swarm._share(CHECKPOINT, net.manifest)
    await beside(lambda: net.fetch(volunteer), announce)
    assert trio.current_time() <= 1.2 * net.size / (5 * MB) + 1


async def test_nobody_waits_to_be_told_for_one_that_does_not_answer(
    fabric: Make, autojump_clock: MockClock
) -> None:
    """[STR-4]"""
    net = fabric(24, 5 * MB)
    taker, mute = Saying(net, "taker", MB), Mute(net, "mute", MB)
    told: list[tuple[int, bytes | None]] = []

    async def answer(peer: str, request: bytes) -> bytes:
        told.append((round(trio.current_time()), read(request, HaveRequest, MAX_HAVE_REQUEST).have))
        return encode(HaveReply())

    for node in (taker, mute):
        node.install()
        await node.tell(net.trainer)
    taker.swarm.answer = answer  # type: ignore[method-assign]

    async def change() -> None:
        net.trainer.swarm.hold(CHECKPOINT, net.manifest, files=False)
        await trio.sleep(2)
        net.trainer.swarm.hold(CHECKPOINT, net.manifest)
        await trio.sleep(2)

    await beside(change, net.trainer.swarm.run)
    assert told == [(0, None), (2, bitmap((1 << 24) - 1, 24))]


def test_others_are_told_exactly_what_is_held(fabric: Make) -> None:
    net = fabric(3, 5 * MB)
    swarm = net.trainer.swarm
    share = swarm._shares[CHECKPOINT]
    share.heard("taker", None, None, 0, 0.0)
    swarm.hold(CHECKPOINT, net.manifest, files=False)
    assert share.have == 0
    swarm.hold(CHECKPOINT, net.manifest)
    assert share.have == share.files
    assert swarm._shares[CHECKPOINT] is share
    assert "taker" in share.members
    swarm.release(CHECKPOINT)
    assert not swarm._shares


async def test_who_tells_too_much_is_asked_to_come_again_later(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(3, 5 * MB)
    request = encode(HaveRequest(RUN, CHECKPOINT))
    replies = [await net.trainer.swarm.answer("loud", request) for _ in range(9)]
    assert replies[-1] == encode(HaveReply(error="busy"))
    assert replies[-2] != replies[-1]
