"""Ten volunteers in one process: ten connections, one engine. Some of them cheat.

    python hostile_crowd.py RUN_FOLDER ADDRESS SEED HOSTILE

A cheat whose key is in quarantine goes on with a fresh one. Generates until its stdin is closed, then prints
one JSON array: what each key sent, what became of it, and how the trainer said that it stands. Checkpoints
are read from the trainer's folder on this machine.
"""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import trio
from hostile_forgeries import ATTACKS, Made, Order, Style, Workshop

from nous_node.node.following import Following, Head, ask_head, now_ms
from nous_node.node.network import Network, NetworkConfig, Verdict, open_network
from nous_node.node.network_errors import NoSubscribersError
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Hello, Receipt, Standing, open_receipts
from nous_node.protocol.rollouts import Engine
from nous_node.protocol.runs import shard_of

VOLUNTEERS = 10

WINDOW = 8
"""Groups of one volunteer without a receipt: eighty of all are two and a half updates."""

BATCH = 4
"""Groups of one volunteer in a round."""

TRUST = (24, 0)
"""Accepted groups before the first key of a cheat begins, the second, the third, and so on: some are active
by then, which takes 16, and others cheat from the first group on."""

RATES = (0.5, 0.1, 0.02)
"""Shares of forged groups of the cheats: one who does not care, and two who stay under what is punished."""

LOST_SECONDS = 12.0
"""After which a group without a receipt counts as lost."""

COUNTS_AFTER = 2
"""Versions until a fresh key counts: that of the hello, and one that was on its way."""


HELLO = Hello("hostile-crowd", Engine("nous-torch", "1", "float32", "cpu")).to_bytes()


@dataclass
class Volunteer:
    """One key and what became of it."""

    number: int
    generation: int
    """Keys that this volunteer had before."""
    identity: Identity
    network: Network
    topic: str
    rate: float
    """Share of its groups that are forged; 0 for an honest one."""
    draw: random.Random
    counts_from: int = 0
    """Version from which on the key counts."""
    checkpoint: bytes = b""
    counter: int = 0
    seq: int = 0
    renewed: bool = False
    """Whether there is another key for it."""
    retired: bool = False
    """Whether its key is in quarantine: a cheat takes another, an honest one would wait."""
    waiting: dict[bytes, float] = field(default_factory=dict)
    """Envelope id -> when it was sent, of groups without a receipt."""
    known: dict[bytes, Made] = field(default_factory=dict)
    """The same groups, however long ago they were sent."""
    forged_ids: list[bytes] = field(default_factory=list)
    withholds: bool = False
    """Until the next checkpoint it shows only its better luck."""
    sent: Counter[Style] = field(default_factory=Counter)
    forged: Counter[Style] = field(default_factory=Counter)
    verdicts: dict[Style, Counter[str]] = field(default_factory=dict)
    """Of forged groups, by style; "" is accepted."""
    refused: Counter[str] = field(default_factory=Counter)
    """Of groups that were not forged."""
    accepted: int = 0
    forged_accepted: int = 0
    held_back: int = 0
    lost: int = 0
    states: list[str] = field(default_factory=list)
    """As the trainer said, each change once."""
    standing: Standing | None = None

    @property
    def hostile(self) -> bool:
        return self.rate > 0

    def take(self, head: Head) -> list[Order]:
        """What it begins now."""
        if head.hash != self.checkpoint:
            self.checkpoint, self.counter, self.withholds = head.hash, 0, False
        now = time.time()
        for identity, sent in list(self.waiting.items()):
            if now - sent > LOST_SECONDS:
                del self.waiting[identity]
                self.lost += 1
        if self.retired or head.version < self.counts_from:
            return []
        if len(self.waiting) > WINDOW - BATCH:
            return []
        return [self._order(self._style()) for _ in range(BATCH)]

    def _order(self, style: Style) -> Order:
        self.counter += 1
        return Order(self.identity.key, self.counter - 1, style)

    def _style(self) -> Style:
        if self.withholds:
            return Style.WITHHELD
        if self.accepted < TRUST[self.generation % len(TRUST)] or self.draw.random() >= self.rate:
            return Style.HONEST
        style = self.draw.choice(ATTACKS)
        self.withholds = style is Style.WITHHELD
        return style

    def keeps_back(self, made: Made, usual: float) -> bool:
        """Whether it shows only its better luck."""
        return made.order.style is Style.WITHHELD and made.reward < usual

    def sends(self, identity: bytes, made: Made) -> None:
        self.waiting[identity], self.known[identity] = time.time(), made
        self.sent[made.order.style] += 1
        if made.forged:
            self.forged[made.order.style] += 1
            self.forged_ids.append(identity)

    def note(self, receipt: Receipt) -> None:
        self.waiting.pop(receipt.rollout, None)
        made = self.known.pop(receipt.rollout, None)
        if made is None:
            return
        if receipt.verdict == "accepted":
            self.accepted += 1
            self.forged_accepted += made.forged
        if made.forged:
            self.verdicts.setdefault(made.order.style, Counter())[receipt.code] += 1
        elif receipt.code:
            self.refused[receipt.code] += 1
        self.retired = self.retired or receipt.code in ("quarantined", "banned")

    def stands(self, standing: Standing) -> None:
        self.standing = standing
        if not self.states or self.states[-1] != standing.state:
            self.states.append(standing.state)
        self.retired = self.retired or standing.state in ("quarantine", "banned")

    def report(self) -> dict[str, object]:
        return {
            "number": self.number,
            "generation": self.generation,
            "hostile": self.hostile,
            "rate": self.rate,
            "unanswered": len(self.known),
            "sent": sum(self.sent.values()),
            "accepted": self.accepted,
            "refused": dict(self.refused),
            "forged": {style.value: count for style, count in self.forged.items()},
            "forged_verdicts": {style.value: dict(codes) for style, codes in self.verdicts.items()},
            "forged_accepted": self.forged_accepted,
            "forged_ids": [identity.hex() for identity in self.forged_ids],
            "key": self.identity.key.hex(),
            "held_back": self.held_back,
            "lost": self.lost,
            "states": self.states,
            "debit": None if self.standing is None else self.standing.debit,
            "credit": None if self.standing is None else self.standing.credit,
        }


class Crowd:
    """All of them, and one more who listens for them."""

    def __init__(self, folder: RunFolder, address: str, seed: int, hostile: int) -> None:
        self.folder, self.address, self.seed, self.hostile = folder, address, seed, hostile
        self.following = Following.of(folder.run, folder.envelope)
        self.workshop = Workshop(folder)
        self.volunteers: list[Volunteer] = []
        """One a key."""
        self.by_key: dict[bytes, Volunteer] = {}
        self.changed = trio.Event()
        self.usual = 0.5
        """Running mean of rewards."""

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            listener = await stack.enter_async_context(open_network(bytes(32), NetworkConfig(listen=())))
            await self._listen(listener)
            for number in range(VOLUNTEERS):
                seed = self._identity(number, 0).seed
                network = await stack.enter_async_context(open_network(seed, NetworkConfig(listen=())))
                self._add(number, 0, network)
            for volunteer in self.volunteers:
                await volunteer.network.connect(self.address)
                await volunteer.network.wait_subscriber(volunteer.topic)
            await self._greet()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_closed, nursery.cancel_scope)
                await self._work()
        print(json.dumps([volunteer.report() for volunteer in self.volunteers]), flush=True)

    def _identity(self, number: int, generation: int) -> Identity:
        text = f"{self.seed} {number} {generation}"
        return Identity.from_seed(hashlib.sha256(text.encode()).digest())

    def _add(self, number: int, generation: int, network: Network) -> Volunteer:
        identity = self._identity(number, generation)
        place = number - (VOLUNTEERS - self.hostile)
        topic = self.following.topics.rollouts(shard_of(identity.key, self.folder.manifest.shards))
        volunteer = Volunteer(
            number,
            generation,
            identity,
            network,
            topic,
            RATES[place % len(RATES)] if place >= 0 else 0.0,
            random.Random(f"{self.seed} {number} {generation}"),
        )
        self.volunteers.append(volunteer)
        self.by_key[identity.key] = volunteer
        return volunteer

    async def _renew(self) -> None:
        """Cheats in quarantine make themselves new keys."""
        for old in [one for one in self.volunteers if one.retired and one.hostile and not one.renewed]:
            old.renewed = True
            fresh = self._add(old.number, old.generation + 1, old.network)
            fresh.counts_from = self.following.version + COUNTS_AFTER
            await fresh.network.publish(fresh.topic, self._seal(fresh, Kind.HELLO, HELLO))

    async def _listen(self, network: Network) -> None:
        topics = self.following.topics
        network.subscribe(topics.receipts, self._hear_receipts, 1000)
        network.subscribe(topics.checkpoints, self._hear_checkpoint, 1000)
        peer = await network.connect(self.address)
        reply = await ask_head(network, peer, self.folder.run)
        assert reply.checkpoint is not None
        self.following.offer(reply.checkpoint)

    async def _greet(self) -> None:
        """All keys count from the next version on."""
        before = self.following.version
        for volunteer in self.volunteers:
            await volunteer.network.publish(volunteer.topic, self._seal(volunteer, Kind.HELLO, HELLO))
        with trio.fail_after(30):
            await self.following.newer_than(before)
            await trio.sleep(1.5)  # those that came after a renewal's look get the next one
            before = self.following.version
        with trio.move_on_after(8):
            await self.following.newer_than(before)

    def _seal(self, volunteer: Volunteer, kind: Kind, body: bytes) -> bytes:
        volunteer.seq += 1
        seq, now = volunteer.seq, now_ms()
        return seal(volunteer.identity, kind, self.folder.run, body, seq=seq, ts=now)

    async def _until_closed(self, scope: trio.CancelScope) -> None:
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        scope.cancel()

    async def _work(self) -> None:
        loaded = b""
        while True:
            head = self.following.head
            assert head is not None
            if head.hash != loaded:
                await trio.to_thread.run_sync(self.workshop.load, head, self._place(head))
                loaded = head.hash
            await self._renew()
            orders = [order for volunteer in self.volunteers for order in volunteer.take(head)]
            if not orders:
                self.changed = trio.Event()
                with trio.move_on_after(0.1):
                    await self.changed.wait()
                continue
            made = await trio.to_thread.run_sync(self.workshop.make, orders)
            async with trio.open_nursery() as nursery:
                for volunteer in self.volunteers:
                    mine = [one for one in made if one.order.key == volunteer.identity.key]
                    nursery.start_soon(self._publish, volunteer, mine)

    async def _publish(self, volunteer: Volunteer, groups: list[Made]) -> None:
        for made in groups:
            if volunteer.keeps_back(made, self.usual):
                volunteer.held_back += 1
                continue
            self.usual += 0.01 * (made.reward - self.usual)
            data = self._seal(volunteer, Kind.ROLLOUT, made.body)
            volunteer.sends(unseal(data).id, made)
            try:
                await volunteer.network.publish(volunteer.topic, data)
            except NoSubscribersError:
                volunteer.lost += 1

    def _place(self, head: Head) -> Path:
        with closing(sqlite3.connect(self.folder.journal)) as connection:
            query = "SELECT folder FROM checkpoints WHERE version = ?"
            (folder,) = connection.execute(query, (head.version,)).fetchone()
        return self.folder.path / folder

    def _hear_receipts(self, data: bytes, forwarder: str) -> Verdict:
        receipts = open_receipts(unseal(data), self.folder.run, self.folder.manifest)
        for receipt in receipts.items:
            if receipt.peer in self.by_key:
                self.by_key[receipt.peer].note(receipt)
        for standing in receipts.standings:
            if standing.peer in self.by_key:
                self.by_key[standing.peer].stands(standing)
        self.changed.set()
        return Verdict.ACCEPT

    def _hear_checkpoint(self, data: bytes, forwarder: str) -> Verdict:
        self.following.offer(data)
        self.changed.set()
        return Verdict.ACCEPT


def main() -> None:
    place, address, seed, hostile = sys.argv[1:]
    trio.run(Crowd(RunFolder.open(Path(place)), address, int(seed), int(hostile)).run)


if __name__ == "__main__":
    main()
