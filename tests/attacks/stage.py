"""A volunteer under attack: the role in a thread, with a real worker, and a trainer that is played."""

from __future__ import annotations

import hashlib
import itertools
import random
import sqlite3
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import trio

from nous_node.node.blobs import BlobIndex
from nous_node.node.config import Settings
from nous_node.node.create import create_run
from nous_node.node.events import Event, VolunteerStatus
from nous_node.node.following import Following, Head, ask_head, now_ms
from nous_node.node.home import Home
from nous_node.node.network import Network, NetworkConfig, Verdict, open_network
from nous_node.node.plan import EnvironmentPlan, RunPlan
from nous_node.node.publishing import Publisher
from nous_node.node.store import Journal
from nous_node.node.volunteer import volunteer
from nous_node.protocol.checkpoints import CheckpointManifest
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.encoding import read
from nous_node.protocol.envelope import Envelope, Kind, seal, unseal
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Known, Receipt, Receipts, accepted
from nous_node.protocol.runs import Invite, Topics
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HEAD_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HEAD_REPLY,
    MAX_REQUEST,
)

from .arena import CREATED, LOCAL, STRANGERS


class Stage:
    """`trainer` is the key of the run. Its node answers, greets with a version, and gives no receipt unless
    a test does."""

    def __init__(self, path: Path, port: int) -> None:
        self.trainer = Identity.from_seed(hashlib.sha256(b"stage").digest())
        self.home = Home.open(path / "volunteer")
        self.home.replace_identity(Identity.from_seed(hashlib.sha256(b"volunteer").digest()))
        self.key = self.home.identity().key
        plan = RunPlan(environments={"sort-digits": EnvironmentPlan()}, group=2)
        self.folder = create_run(path / "run", "stage", self.trainer, plan, CREATED)
        self.topics = Topics(self.folder.run)
        self.status = VolunteerStatus()
        self.rollouts: list[Envelope] = []
        self._port = port
        self._seq = itertools.count(1_000_000)
        self._numbers = itertools.count(1)
        self._strangers: deque[trio.CancelScope] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        self.until(lambda: self.rollouts)

    # --- what tests do ---------------------------------------------------------------------------

    def receipts(self, *groups: Envelope, credit: int = 10) -> bytes:
        items = [accepted(group.id, self.key, credit) for group in groups]
        return Receipts(items).to_bytes()

    def refusals(self, *groups: Envelope) -> bytes:
        return Receipts(
            [Receipt(group.id, self.key, "refused", "stale", 9.0, 4.0, 0) for group in groups]
        ).to_bytes()

    def sealed(self, kind: Kind, body: bytes, by: Identity | None = None, **changes: Any) -> bytes:
        """By the trainer unless by somebody else."""
        facts: dict[str, Any] = {"run": self.folder.run, "seq": next(self._seq), "ts": now_ms(), **changes}
        run = facts.pop("run")
        return seal(by or self.trainer, kind, run, body, **facts)

    def whisper(self, topic: str, *messages: bytes) -> None:
        """A stranger dials the volunteer and publishes these, in this order."""
        trio.from_thread.run(self._whisper, topic, messages, trio_token=self._token)

    def followed(self, head: Head) -> int:
        """Waits until the volunteer follows this version or a later one; which one it is."""
        return trio.from_thread.run(self._followed, head.version, trio_token=self._token)

    def renew(self) -> Head:
        """The trainer publishes a version, to itself so far."""
        return trio.from_thread.run_sync(self._publisher.renew, trio_token=self._token)

    def waiting(self) -> set[bytes]:
        """Groups in the volunteer's outbox that have no receipt."""
        (path,) = self.home.path.glob("joined/*/outbox.sqlite")
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute("SELECT id FROM groups WHERE state = 'waiting'").fetchall()
        return {rollout for (rollout,) in rows}

    def known_from(self) -> int:
        """Newest version that does not count for the volunteer's key, as it knows it."""
        (path,) = self.home.path.glob("joined/*/outbox.sqlite")
        with closing(sqlite3.connect(path)) as connection:
            (version,) = connection.execute("SELECT value FROM numbers WHERE name = 'known-from'").fetchone()
        return int(version)

    def until(self, condition: Callable[[], Any], seconds: float = 40.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._error or condition(), seconds), self.status
        assert self._error is None, self._error

    def ended(self) -> BaseException:
        """Waits for the volunteer's own end; why it ended."""
        self._thread.join(20)
        assert self._error is not None, self.status
        return self._error

    def close(self) -> None:
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join(20)
        assert self._error is None, self._error

    # --- in the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            trio.run(self._run)
        except BaseException as error:
            self._error = error
            self._tell()

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        self.following = Following.of(self.folder.run, self.folder.envelope)
        index = BlobIndex(lambda file: None)
        with Journal.open(self.folder.journal) as journal:
            entropy = random.Random(0).randbytes
            self._publisher = Publisher(self.trainer, self.folder, journal, self.following, index, entropy)
            self._publisher.resume()
            async with open_network(self.trainer.seed, NetworkConfig(listen=(LOCAL,))) as network:
                network.serve(
                    HEAD_PROTOCOL,
                    self.following.answer_head,
                    max_request=MAX_REQUEST,
                    max_response=MAX_HEAD_REPLY,
                )
                network.serve(
                    BLOB_PROTOCOL, index.answer, max_request=MAX_REQUEST, max_response=MAX_BLOB_REPLY
                )
                await self._play(network)

    async def _play(self, network: Network) -> None:
        settings = Settings(threads=1, memory=1 << 32, nice=0, listen=(f"/ip4/127.0.0.1/tcp/{self._port}",))
        invite = Invite(self.folder.run, list(network.addresses))
        inbox = network.subscribe(self.topics.rollouts(0), lambda data, peer: Verdict.ACCEPT, 1000)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._hear, network, inbox)
            await volunteer(settings, self.home, invite, self._report, self._stop)
            nursery.cancel_scope.cancel()

    async def _hear(self, network: Network, inbox: trio.MemoryReceiveChannel[tuple[bytes, str]]) -> None:
        async for data, _ in inbox:
            envelope = unseal(data)
            if envelope.head.kind == Kind.HELLO:
                await self._greet(network, envelope.head.sender)
            else:
                self.rollouts.append(envelope)
                self._tell()

    async def _greet(self, network: Network, key: bytes) -> None:
        """A version that the hello crosses, which does not count for the key; then the answer, and one that
        does."""
        await network.publish(self.topics.checkpoints, self._publisher.renew().envelope)
        answer = Receipts([], known=[Known(key, self.following.version)])
        await network.publish(self.topics.receipts, self.sealed(Kind.RECEIPTS, answer.to_bytes()))
        await network.publish(self.topics.checkpoints, self._publisher.renew().envelope)

    async def _followed(self, version: int) -> int:
        """Asks as anybody may: /nous/head/1."""
        async with self._stranger() as (network, peer):
            with trio.fail_after(15):
                while True:
                    reply = await ask_head(network, peer, self.folder.run)
                    assert reply.checkpoint is not None
                    content = unseal(reply.checkpoint, MAX_MANIFEST).content(MAX_MANIFEST)
                    found = read(content, CheckpointManifest, MAX_MANIFEST).version
                    if found >= version:
                        return found
                    await trio.sleep(0.05)

    @asynccontextmanager
    async def _stranger(self) -> AsyncIterator[tuple[Network, str]]:
        """A node that nobody has seen before, and the volunteer's peer id, which it is connected to."""
        seed = next(self._numbers).to_bytes(32)
        async with open_network(seed, NetworkConfig(listen=())) as network:
            address = f"/ip4/127.0.0.1/tcp/{self._port}/p2p/{self.home.identity().peer_id}"
            yield network, await network.connect(address)

    async def _whisper(self, topic: str, messages: tuple[bytes, ...]) -> None:
        async def stay(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
            with trio.CancelScope() as scope:
                async with self._stranger() as (network, _):
                    await network.wait_subscriber(topic)
                    for data in messages:
                        await network.publish(topic, data)
                    task_status.started(scope)
                    await trio.sleep_forever()

        if len(self._strangers) == STRANGERS:
            self._strangers.popleft().cancel()
        with trio.fail_after(15):
            self._strangers.append(await self._nursery.start(stay))

    def _report(self, event: Event) -> None:
        if isinstance(event, VolunteerStatus):
            self.status = event
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
