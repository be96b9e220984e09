"""What a volunteer sends while nobody listens, and once somebody does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from nous_node.node.config import Settings
from nous_node.node.following import Following, Head
from nous_node.node.home import Home
from nous_node.node.joined import JoinedFolder
from nous_node.node.network_errors import NoSubscribersError
from nous_node.node.outbox import Outbox
from nous_node.node.runfolder import RunFolder
from nous_node.node.volunteer import _Volunteer
from nous_node.node.worker_messages import Group
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.envelope import unseal
from nous_node.protocol.identity import Identity

KEY = Identity.from_seed(b"v" * 32)
FILES = [file_entry("model.safetensors", [b"weights"])]
HEAD = Head(b"h" * 32, CheckpointManifest(0, FULL, FILES, {"w": bytes(32)}, bytes(32), b"p" * 32), b"")


class Net:
    """A topic that `readers` read. The first `refused` messages find them gone all the same."""

    def __init__(self) -> None:
        self.readers: tuple[str, ...] = ()
        self.refused = 0
        self.sent: list[bytes] = []
        self.changed = trio.Event()

    def listen(self, *readers: str) -> None:
        self.readers = readers
        self.changed.set()
        self.changed = trio.Event()

    def subscribers(self, topic: str) -> tuple[str, ...]:
        return self.readers

    async def wait_subscriber(self, topic: str) -> None:
        while not self.readers:
            await self.changed.wait()

    async def wait_lost(self, peer: str) -> None:
        while peer in self.readers:
            await self.changed.wait()

    async def publish(self, topic: str, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.refused -= 1
        if not self.readers or self.refused >= 0:
            raise NoSubscribersError(topic)
        self.sent.append(data)


class Bench:
    def __init__(self, path: Path, run: RunFolder, outbox: Outbox) -> None:
        self.net, self.outbox = Net(), outbox
        network: Any = self.net
        folder = JoinedFolder.of(Home.open(path / "home"), run.run)
        following = Following.of(run.run, run.envelope)
        following.head = HEAD
        settings = Settings(threads=1, memory=1 << 30)
        self.node = _Volunteer(settings, KEY, folder, network, following, outbox, lambda event: None)

    async def makes(self, counter: int) -> bytes:
        """Its id."""
        item = self.node._finished(HEAD, Group(counter, b"body", 4))
        assert item is not None
        await self.node.unsent.send(item)
        return item[0]

    def ids(self) -> list[bytes]:
        return [unseal(data).id for data in self.net.sent]

    def times_sent(self) -> list[int]:
        rows = self.outbox._database.rows("SELECT sent FROM groups ORDER BY made")
        return [int(str(sent)) for (sent,) in rows]


@pytest.fixture
def bench(tmp_path: Path, base_run: RunFolder) -> Iterator[Bench]:
    with Outbox.open(tmp_path / "outbox.sqlite") as outbox:
        yield Bench(tmp_path, base_run, outbox)


async def test_a_group_goes_out_once_as_soon_as_somebody_listens(
    bench: Bench, autojump_clock: object
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node._publish_loop)
        nursery.start_soon(bench.node._resend_loop)
        made = [await bench.makes(counter) for counter in range(3)]
        await trio.sleep(61)  # not when the loop looks up, every 5 s
        assert bench.net.sent == []
        bench.net.listen("trainer")
        await trio.sleep(0.1)
        assert bench.ids() == made
        nursery.cancel_scope.cancel()
    assert bench.times_sent() == [1, 1, 1]


async def test_a_listener_that_is_gone_again_is_waited_for(bench: Bench, autojump_clock: object) -> None:
    bench.net.listen("trainer")
    bench.net.refused = 3
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node._publish_loop)
        made = await bench.makes(0)
        await trio.sleep(3)
        assert bench.ids() == [made]
        nursery.cancel_scope.cancel()


async def test_a_group_that_became_too_old_is_not_sent(bench: Bench, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node._publish_loop)
        await bench.makes(0)
        fresh = await bench.makes(1)
        await trio.sleep(1)
        old, _ = bench.node.versions
        del bench.node.versions[old]
        bench.net.listen("trainer")
        await trio.sleep(1)
        assert bench.ids() == [fresh]
        nursery.cancel_scope.cancel()


async def test_a_repeat_counts_only_if_it_was_sent(bench: Bench, autojump_clock: object) -> None:
    made = await bench.makes(0)
    bench.node.unpublished.discard(made)  # as after a restart
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node._resend_loop)
        await trio.sleep(61)  # not when the loop looks up, every 5 s
        assert bench.times_sent() == [1]
        bench.net.refused = 1
        bench.net.listen("trainer")
        await trio.sleep(0.1)
        assert (bench.net.sent, bench.times_sent()) == ([], [1])
        bench.net.listen()
        await trio.sleep(1)
        bench.net.listen("trainer")
        await trio.sleep(0.1)
        assert len(bench.net.sent) == 1
        assert bench.times_sent() == [2]
        nursery.cancel_scope.cancel()
