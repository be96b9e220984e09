"""What a volunteer sends while nobody listens, and once somebody does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node import sending
from nous_node.node.config import Settings
from nous_node.node.engine import UnfitEngineError, WorkerError
from nous_node.node.following import Following, Head, now_ms
from nous_node.node.home import Home
from nous_node.node.joined import JoinedFolder
from nous_node.node.network_errors import NoSubscribersError
from nous_node.node.outbox import Outbox
from nous_node.node.runfolder import RunFolder
from nous_node.node.volunteer import _Volunteer
from nous_node.node.worker_messages import Group
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipts, Standing

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
        await self.node.sending.send(item)
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


async def test_after_an_hour_without_a_trainer_all_groups_go_out_sealed_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """Its checkpoint is still the newest, and each group that never came would be a hole."""
    start = now_ms()
    monkeypatch.setattr(sending, "now_ms", lambda: start + int(trio.current_time() * 1000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node.sending.publish_loop)
        nursery.start_soon(bench.node.sending.resend_loop)
        made = [await bench.makes(counter) for counter in range(3)]
        await trio.sleep(3600)
        bench.net.listen("trainer")
        await trio.sleep(31)
        fresh = {unseal(data).head.exp > start + 3_600_000 for data in bench.net.sent}
        nursery.cancel_scope.cancel()
    assert fresh == {True}
    assert min(bench.times_sent()) > 1
    assert bench.outbox.waiting() == len(made)


async def test_a_group_goes_out_once_as_soon_as_somebody_listens(
    bench: Bench, autojump_clock: object
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node.sending.publish_loop)
        nursery.start_soon(bench.node.sending.resend_loop)
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
        nursery.start_soon(bench.node.sending.publish_loop)
        made = await bench.makes(0)
        await trio.sleep(3)
        assert bench.ids() == [made]
        nursery.cancel_scope.cancel()


async def test_a_group_that_became_too_old_is_not_sent(bench: Bench, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node.sending.publish_loop)
        await bench.makes(0)
        fresh = await bench.makes(1)
        await trio.sleep(1)
        old, _ = bench.node.sending._versions
        del bench.node.sending._versions[old]
        bench.net.listen("trainer")
        await trio.sleep(1)
        assert bench.ids() == [fresh]
        nursery.cancel_scope.cancel()


async def test_a_repeat_counts_only_if_it_was_sent(bench: Bench, autojump_clock: object) -> None:
    made = await bench.makes(0)
    bench.node.sending._unpublished.discard(made)  # as after a restart
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node.sending.resend_loop)
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


class Scripted:
    """An engine that does to each batch what it is told."""

    def __init__(self, *script: Exception | None) -> None:
        self.script = list(script)
        self.asked: list[list[int]] = []

    async def generate(self, orders: Any, progress: Any, checked: Any, spent: Any) -> list[Group]:
        await trio.lowlevel.checkpoint()
        self.asked.append([order.counter for order in orders])
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        return [Group(order.counter, b"body", 4) for order in orders]


async def test_nothing_is_stored_of_groups_that_would_be_refused(bench: Bench) -> None:
    bench.node.engine = engine = Scripted(UnfitEngineError("logprob-mismatch"))  # type: ignore[assignment]
    with pytest.raises(UnfitEngineError):
        await bench.node._batch(HEAD, 3)
    assert engine.asked == [[0, 1, 2]]
    assert bench.outbox.history() == []
    assert bench.net.sent == []
    assert bench.outbox.unfinished(HEAD.hash)[:3] == [0, 1, 2]


async def test_what_a_dying_worker_took_with_it_is_made_before_anything_new(bench: Bench) -> None:
    died = WorkerError("out of memory")
    bench.node.engine = engine = Scripted(died, None, died)  # type: ignore[assignment]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node._finish_loop)
        for _ in range(5):
            with suppress(WorkerError):
                await bench.node._batch(HEAD, 3)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert engine.asked == [[0, 1, 2], [0], [1], [2], [3, 4, 5]]
    assert [group.counter for group in reversed(bench.outbox.history())] == [0, 2, 3, 4, 5]
    assert 1 not in bench.outbox.unfinished(HEAD.hash)


def said(bench: Bench, root: Identity, standings: list[Standing], later: int = 0) -> None:
    """A receipts message of the run's trainer comes in, `later` milliseconds from now."""
    now = time.time_ns() // 1_000_000 + later
    body = Receipts([], standings).to_bytes()
    run = bench.node.following.run
    bench.node._judge_receipts(seal(root, Kind.RECEIPTS, run, body, seq=now, ts=now), "peer")


async def test_nothing_goes_out_while_the_key_is_in_quarantine(
    bench: Bench, root: Identity, autojump_clock: object
) -> None:
    bench.net.listen("trainer")
    waits = await bench.makes(0)
    bench.node.sending._unpublished.discard(waits)  # as after a restart
    until = time.time_ns() // 1_000_000 + 3_600_000
    standing = Standing(KEY.key, "quarantine", 5, 4, 100, 0, 2, 2, until)
    said(bench, root, standings=[standing])
    assert bench.node.contribution.status(0).state == "quarantine"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.node.sending.publish_loop)
        nursery.start_soon(bench.node.sending.resend_loop)
        await bench.makes(1)
        await trio.sleep(100)
        assert bench.net.sent == []
        released = Standing(KEY.key, "probation", 5, 4, 100, 0, 2, 2, 0)
        said(bench, root, standings=[released], later=1)
        await trio.sleep(100)
        assert len(bench.net.sent) >= 2
        nursery.cancel_scope.cancel()


async def test_standings_of_other_keys_are_not_ours(bench: Bench, root: Identity) -> None:
    said(bench, root, standings=[Standing(b"o" * 32, "banned", 0, 9, 0, 0, 0, 2, 0)])
    assert bench.outbox.word is None
    assert not bench.node.restraint.holds
