"""A trainer under attack, and a line to it."""

from __future__ import annotations

import hashlib
import itertools
import random
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import trio

from nous_node.node.config import Settings
from nous_node.node.create import create_run
from nous_node.node.events import Event, RunReady, TrainerStatus
from nous_node.node.following import Following, Head, ask_head
from nous_node.node.home import Home
from nous_node.node.network import NetworkConfig, Verdict, open_network
from nous_node.node.plan import EnvironmentPlan, LimitsPlan, RunPlan
from nous_node.node.renewals import Renewals
from nous_node.node.reputation import PASSED
from nous_node.node.trainer import trainer
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import Code
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipt, open_receipts
from nous_node.protocol.runs import Topics
from nous_node.trainer.policy import Policy

from .forger import Forger

LOCAL = "/ip4/127.0.0.1/tcp/0"
RATE = 4.0
"""Groups a second of one key: a burst of 240, more than any test sends in honesty."""

CREATED = 1_750_000_000_000
"""Unix milliseconds: with it and seeded beacons, every run of the tests has the same tasks."""

LOOK_SECONDS = 0.05
"""Between looks for keys that wait for a beacon: no test waits for the usual second."""

STRANGERS = 4
"""Connected at once: what the last ones have sent is on its way."""

WAVE = 100
"""Keys that are made known at once."""


class Arena:
    """A trainer in a thread of its own, with a real learner process, and a line to it.

    Messages of a `Forger` come from a network node that the trainer has never seen before, so that what
    it does to the forwarder of one attack does not hide the next.
    """

    def __init__(
        self, path: Path, learning: dict[str, Any], pause: float, rules: dict[str, Any] | None = None
    ) -> None:
        """`pause`: between renewed beacons; `rules`: fields of the run's plan that are not the defaults."""
        self._pause = pause
        self.home = Home.open(path)
        self.identity = Identity.from_seed(hashlib.sha256(b"arena").digest())
        self.home.replace_identity(self.identity)
        plan = RunPlan(
            environments={"sort-digits": EnvironmentPlan()},
            shards=2,
            limits=LimitsPlan(groups_per_second=RATE),
            learning={"evaluate_tasks": 1, "evaluate_every": 0, **learning},
        )
        plan = msgspec.structs.replace(plan, **(rules or {}))
        self.folder = create_run(self.home.runs / "arena", "arena", self.identity, plan, CREATED)
        self._entropy = random.Random(0).randbytes
        self.status = TrainerStatus()
        self.receipts: dict[bytes, list[Receipt]] = {}
        self._numbers = itertools.count(1)
        self._keys = itertools.count()
        self._policies: dict[str, Policy] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.start()

    def forger(self, name: str) -> Forger:
        identity = Identity.from_seed(hashlib.sha256(name.encode()).digest())
        return Forger(identity, self.folder, self.policy(self.head))

    def policy(self, head: Head) -> Policy:
        """With the weights of a version."""
        with closing(sqlite3.connect(self.folder.journal)) as connection:
            query = "SELECT folder FROM checkpoints WHERE version = ?"
            (folder,) = connection.execute(query, (head.version,)).fetchone()
        if folder not in self._policies:
            self._policies[folder] = Policy.load(self.folder.path / folder, self.folder.manifest.model.dtype)
        return self._policies[folder]

    def known(self, name: str) -> Forger:
        """One whose key counts."""
        forger = self.forger(name)
        self._greet([forger])
        return forger

    def crowd(self, count: int) -> list[Forger]:
        """Keys of one shard that nobody has heard of before, and that count from now on. A key that cheats
        is soon in quarantine, so each attack has one of its own."""
        crowd: list[Forger] = []
        while len(crowd) < count:
            forger = self.forger(f"key {next(self._keys)}")
            if forger.shard == 0:
                crowd.append(forger)
        for start in range(0, count, WAVE):
            self._greet(crowd[start : start + WAVE])
        return crowd

    def _greet(self, forgers: Sequence[Forger]) -> None:
        self.say([forger.hello() for forger in forgers], forgers[0].topic)
        self.until(lambda: all(self.counts(forger) for forger in forgers))

    def trusted(self, name: str) -> Forger:
        """One that is past its probation, by accepted groups of two versions."""
        forger = self.known(name)
        for _ in range(2):
            head = self.head
            forger.policy = self.policy(head)
            groups = [forger.seal(forger.group(head).to_bytes()) for _ in range(PASSED // 2)]
            self.say(groups, forger.topic)
            assert {self.receipt(data).verdict for data in groups} == {"accepted"}
            self.renew()
        forger.policy = self.policy(self.head)
        assert self.standing(forger) == "active"
        return forger

    def renew(self, versions: int = 1) -> None:
        """So many newcomers, one after the other: each leads to a version."""
        for _ in range(versions):
            self.crowd(1)

    def standing(self, forger: Forger) -> str:
        """The state of its key."""
        with closing(sqlite3.connect(self.folder.journal)) as connection:
            query = "SELECT state FROM keys WHERE key = ?"
            (state,) = connection.execute(query, (forger.identity.key,)).fetchone()
        return str(state)

    def counts(self, forger: Forger) -> bool:
        """Whether there is a version that this key counts for."""
        with closing(sqlite3.connect(self.folder.journal)) as connection:
            query = "SELECT heard_version FROM keys WHERE key = ?"
            row = connection.execute(query, (forger.identity.key,)).fetchone()
        return row is not None and self.head.version > row[0]

    def send(self, data: bytes, topic: str) -> None:
        """Publishes from a stranger, who stays connected until STRANGERS others have come."""
        self.flood([data], topic)

    def say(self, messages: Sequence[bytes], topic: str) -> None:
        """Publishes from a neighbour that stays: for what the gossip path takes."""
        trio.from_thread.run(self._say, messages, topic, trio_token=self._token)

    def flood(self, messages: Sequence[bytes], topic: str) -> None:
        """All of them from one stranger."""
        trio.from_thread.run(self._send, messages, topic, trio_token=self._token)

    def receipt(self, data: bytes, count: int = 1) -> Receipt:
        """Waits for the trainer's word on an envelope: the `count`-th."""
        wanted = unseal(data).id
        self.until(lambda: len(self.receipts.get(wanted, ())) >= count)
        return self.receipts[wanted][-1]

    def answered(self, data: bytes, seconds: float = 0.5) -> bool:
        """Whether the trainer answers an envelope soon."""
        wanted = unseal(data).id
        with self._changed:
            return self._changed.wait_for(lambda: wanted in self.receipts, seconds)

    def outcome(self, forger: Forger, body: bytes) -> Receipt:
        """Seals, sends, waits."""
        data = forger.seal(body)
        self.say([data], forger.topic)
        return self.receipt(data)

    def refuses(self, forger: Forger, body: bytes, code: Code) -> Receipt:
        """The receipt of a group that is refused with this code, and lies in the journal as such or not at
        all."""
        data = forger.seal(body)
        self.say([data], forger.topic)
        receipt = self.receipt(data)
        assert (receipt.verdict, receipt.code, receipt.credit) == ("refused", code.value, 0), receipt
        assert self.state(data) in (("refused", None), None)
        return receipt

    def turned_away(self, data: bytes, topic: str, code: Code) -> None:
        """Sends what the gossip path refuses with this code, and nothing of it is journalled."""
        before = self.status.refused.get(code.value, 0)
        self.send(data, topic)
        self.until(lambda: self.status.refused.get(code.value, 0) > before)

    def accepts_honest(self, forger: Forger) -> None:
        """The trainer lives, and a group of this key is taken."""
        receipt = self.outcome(forger, forger.group(self.head).to_bytes())
        assert (receipt.verdict, receipt.code) == ("accepted", ""), receipt

    def state(self, data: bytes) -> tuple[str, int | None] | None:
        """State and version of a group in the journal; None where it never came into it."""
        with closing(sqlite3.connect(self.folder.journal)) as connection:
            query = "SELECT state, used_version FROM groups WHERE id = ?"
            found: tuple[str, int | None] | None = connection.execute(query, (unseal(data).id,)).fetchone()
        return found

    def journalled(self) -> int:
        """Groups in the journal."""
        with closing(sqlite3.connect(self.folder.journal)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM groups").fetchone()
        return int(count)

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self._error or condition(), seconds)
            assert self._error is None, self._error
            assert found, f"in vain; last: {self.status}"

    def start(self) -> None:
        self._ready = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        self.until(lambda: self._ready)

    def stop(self) -> None:
        assert self._thread is not None
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join(20)
        assert not self._thread.is_alive()
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
        self._stop, self._listening = trio.Event(), trio.Event()
        self._strangers: deque[trio.CancelScope] = deque()
        settings = Settings(threads=1, memory=1 << 32, listen=(LOCAL,))
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._listen)
            try:
                await trainer(
                    settings,
                    self.home,
                    self.folder,
                    self._report,
                    self._stop,
                    entropy=self._entropy,
                    renewals=Renewals(self._pause, self._pause, LOOK_SECONDS),
                    grace=0.0,  # nobody here knows more than the folder does
                )
            finally:
                nursery.cancel_scope.cancel()

    def _report(self, event: Event) -> None:
        match event:
            case RunReady(addresses=addresses):
                self.address = addresses[0]
                self._listening.set()
            case TrainerStatus():
                self.status = event
        self._tell()

    async def _listen(self) -> None:
        """An honest neighbour: hears receipts and checkpoints."""
        await self._listening.wait()
        self.following = Following.of(self.folder.run, self.folder.envelope)
        async with open_network(b"l" * 32, NetworkConfig(listen=())) as network:
            topics = Topics(self.folder.run)
            network.subscribe(topics.receipts, self._hear_receipts, 1000)
            network.subscribe(topics.checkpoints, self._hear_checkpoint, 1000)
            self._neighbour = network
            peer = await network.connect(self.address)
            reply = await ask_head(network, peer, self.folder.run)
            assert reply.checkpoint is not None
            self.following.offer(reply.checkpoint)
            self._ready = True
            self._tell()
            await trio.sleep_forever()

    def _hear_receipts(self, data: bytes, forwarder: str) -> Verdict:
        for item in open_receipts(unseal(data), self.folder.run, self.folder.manifest).items:
            self.receipts.setdefault(item.rollout, []).append(item)
        self._tell()
        return Verdict.ACCEPT

    def _hear_checkpoint(self, data: bytes, forwarder: str) -> Verdict:
        self.following.offer(data)
        self._tell()
        return Verdict.ACCEPT

    async def _say(self, messages: Sequence[bytes], topic: str) -> None:
        with trio.fail_after(60):
            await self._neighbour.wait_subscriber(topic)
            for data in messages:
                await self._neighbour.publish(topic, data)

    async def _send(self, messages: Sequence[bytes], topic: str) -> None:
        async def stay(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
            seed = next(self._numbers).to_bytes(32)
            with trio.CancelScope() as scope:
                async with open_network(seed, NetworkConfig(listen=())) as network:
                    await network.connect(self.address)
                    await network.wait_subscriber(topic)
                    for data in messages:
                        await network.publish(topic, data)
                    task_status.started(scope)
                    await trio.sleep_forever()

        if len(self._strangers) == STRANGERS:
            self._strangers.popleft().cancel()
        with trio.fail_after(15):
            self._strangers.append(await self._nursery.start(stay))

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def head(self) -> Head:
        assert self.following.head is not None
        return self.following.head
