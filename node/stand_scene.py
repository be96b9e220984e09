"""The play around a client under test: the kit's peers, the trainer's part, and what checks may do and see.

    client <-> trainer, neighbour, ...        gossip -> witness -> (verified) -> receipts, when it is time

Checks set how receipts flow, publish versions, say what is wrong, and wait for what the client does then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any

import trio

from nous_node.protocol.constants import MAX_ADDRESSES
from nous_node.protocol.envelope import Kind
from nous_node.protocol.identity import Identity, key_of
from nous_node.protocol.receipts import Known, Receipt, Receipts, accepted, refused
from nous_node.protocol.rollouts import RolloutGroup, trained_tokens
from nous_node.protocol.runs import Invite, Topics

from .following import now_ms
from .live_check import Failed
from .network import ConnectedPeer, Network, Verdict
from .network_errors import NoSubscribersError
from .stand_client import Client
from .stand_desk import GOSSIPER, TRAINER, Desk, Peer
from .stand_run import StandRun, Trap, Version
from .stand_witness import Group, Witness

INBOX = 1_000
"""Messages of a topic that wait: more than a client within its rate sends at once."""
LOOK_S = 0.1
"""Between looks at what may have changed, and between batches of receipts."""
LATE_S = 7.0
"""In which those groups get their receipts that wait for one, the oldest first and one after the other: a
client with a window of some dozens of groups then makes a few each second, none is old enough to be repeated,
and two processors do."""
GROUP_S = 20.0
"""For the next honest group, when the client has been disturbed."""


class Flow(Enum):
    """When groups get their receipts."""

    NONE = "none"
    LATE = "late"
    PROMPT = "prompt"


class Scene:
    """Of one client. `run_loops` in a nursery; then checks may be made."""

    def __init__(self, run: StandRun, desk: Desk, peers: dict[str, Peer], witness: Witness) -> None:
        self.run, self.desk, self.peers, self.witness = run, desk, peers, witness
        self.topics = Topics(run.run)
        self.client: Client | None = None
        """None where it was started by hand."""
        self.nursery: trio.Nursery | None = None
        """In which the client's process is looked after."""
        self.peer: str | None = None
        """Peer id of the client."""
        self.flow = Flow.NONE
        self.answers = False
        """Whether hellos are answered."""
        self.restarted: float | None = None
        """When the client was started again, if it was."""
        self.may_end = False
        """Whether the client's end is no fault."""
        self.traps: dict[str, Trap] = {}
        """What it was told and had to refuse, by check."""
        self.head_traps: dict[str, Trap] = {}
        """Those among the false heads, told or not."""
        self.lost = False
        """Whether there is no use in going on."""
        self._hellos_answered = 0
        self._room = 0.0
        """Receipts that may be given now."""
        self._told: set[bytes] = set()
        """Envelopes that have a receipt."""
        self._to_verify: deque[Group] = deque()
        self._verified: set[bytes] = set()
        """Contents."""
        self._changed = trio.Event()

    @property
    def trainer(self) -> Network:
        return self.peers[TRAINER].network

    @property
    def invite(self) -> str:
        addresses = [one.network.addresses[0] for one in self.peers.values()][:MAX_ADDRESSES]
        return Invite(self.run.run, addresses).to_text()

    def change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- what checks do --------------------------------------------------------------------------

    async def publish(self, version: Version, *, gossip: bool = True) -> None:
        """The trainer publishes a version: heads tell it, and gossip unless it is withheld."""
        self.witness.published(version)
        self.desk.head = version.head.envelope
        if gossip:
            await self.say(self.topics.checkpoints, version.head.envelope)

    async def say(self, topic: str, data: bytes, name: str = TRAINER) -> None:
        """Gossip of one of the kit's peers."""
        network = self.peers[name].network
        with trio.move_on_after(GROUP_S):
            await network.wait_subscriber(topic)
        try:
            await network.publish(topic, data)
        except NoSubscribersError as error:
            raise Failed(f"The {name} of the run has nobody who reads {topic.rsplit('/')[-1]}.") from error

    async def whisper(self, topic: str, data: bytes) -> None:
        """Gossip that has to be refused."""
        await self.say(topic, data, GOSSIPER)

    def receipts(self, groups: list[Group], by: Identity | None = None, **changes: object) -> bytes:
        """An envelope that accepts groups; with `changes` of its signed part."""
        items = [accepted(group.ids[0], self.witness.key or b"", 10) for group in groups]
        return self.run.seal(Kind.RECEIPTS, Receipts(items).to_bytes(), by, **changes)

    # --- what checks wait for --------------------------------------------------------------------

    async def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Raises Failed where it does not come in time, or the client ends before. `what`: "publish ..."."""
        with trio.move_on_after(seconds):
            while not condition():
                self.alive()
                with trio.move_on_after(LOOK_S):
                    await self._changed.wait()
            return
        raise Failed(f"Within {seconds:g} s it did not {what}.")

    async def pause(self, seconds: float) -> None:
        """Lets time pass in which the client goes on. Raises Failed where it ends."""
        end = trio.current_time() + seconds
        while trio.current_time() < end:
            self.alive()
            await trio.sleep(LOOK_S)

    def alive(self) -> None:
        """Raises Failed where the client's process has ended."""
        client = self.client
        if client is None or client.exit_code is None or self.may_end:
            return
        self.lost = True
        why = "was ended, since it flooded its output" if client.output.flooded else "ended by itself"
        raise Failed(f"The client {why} (exit code {client.exit_code}).{client.output.words()}")

    async def next_group(self, seconds: float = GROUP_S) -> Group:
        """A right group that comes from now on."""
        since = trio.current_time()
        found: list[Group] = []

        def came() -> bool:
            found[:] = [one for one in self.witness.groups.values() if one.heard > since and one.figures]
            return bool(found)

        await self.until(came, seconds, "publish another honest group")
        return found[0]

    async def followed(self, version: Version, seconds: float) -> Group:
        """The first right group of a version."""
        found: list[Group] = []

        def came() -> bool:
            found[:] = [
                one
                for one in self.witness.groups.values()
                if one.checkpoint == version.head.hash and one.figures
            ]
            return bool(found)

        await self.until(came, seconds, f"publish a right group of version {version.number}")
        return found[0]

    def sprung(self, trap: Trap) -> str:
        """What the client did with a manifest that it had to refuse; empty: nothing."""
        if self.desk.asked_for(trap.chunks):
            return "it asked for the chunks of a manifest that it had to refuse"
        if any(checkpoint == trap.checkpoint for checkpoint, _ in self.witness.groups):
            return "it made a group of a checkpoint that it had to refuse"
        return ""

    def connected(self, name: str) -> ConnectedPeer | None:
        """The client's connection to one of the kit's peers."""
        return next((one for one in self.peers[name].network.peers() if one.peer_id == self.peer), None)

    # --- the trainer's part ----------------------------------------------------------------------

    async def run_loops(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Forever."""
        async with trio.open_nursery() as nursery:
            for shard in range(self.run.manifest.shards):
                inbox = self.trainer.subscribe(
                    self.topics.rollouts(shard), lambda data, peer: Verdict.ACCEPT, INBOX
                )
                nursery.start_soon(self._hear, shard, inbox)
            for loop in (self._meet, self._verify, self._answer):
                nursery.start_soon(loop)
            task_status.started()

    async def _meet(self) -> None:
        """The first that connects to the trainer is the client."""
        kit = {one.network.peer_id for one in self.peers.values()}
        while self.peer is None:
            for one in self.trainer.peers():
                if one.peer_id not in kit and self.peer is None:
                    self.peer, self.witness.key = one.peer_id, key_of(one.peer_id)
                    self.change()
            await trio.sleep(LOOK_S)

    async def _hear(self, shard: int, inbox: trio.MemoryReceiveChannel[tuple[bytes, str]]) -> None:
        async for data, forwarder in inbox:
            if forwarder != self.peer:
                continue
            group = self.witness.hear(shard, data, trio.current_time(), now_ms())
            if group is not None:
                self._to_verify.append(group)
            self.change()

    async def _verify(self) -> None:
        while True:
            while self._to_verify:
                group = self._to_verify.popleft()
                await trio.to_thread.run_sync(self.witness.verify, group)
                self._verified.add(group.digest)
                self.change()
            with trio.move_on_after(LOOK_S):
                await self._changed.wait()

    async def _answer(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            items, known = self._due(), self._known()
            if not items and not known:
                continue
            data = self.run.seal(Kind.RECEIPTS, Receipts(items, [], known).to_bytes())
            with suppress(NoSubscribersError):
                await self.trainer.publish(self.topics.receipts, data)
                self._note_told(items, known)

    def _known(self) -> list[Known]:
        """The answer to hellos that were heard since the last one. [HEL-2]"""
        fresh = len(self.witness.hellos) > self._hellos_answered
        if not self.answers or not fresh or self.witness.key is None:
            return []
        return [Known(self.witness.key, self.witness.counts_from)]

    def _due(self) -> list[Receipt]:
        """For all envelopes of groups whose time has come, or that have one and were repeated."""
        if self.flow is Flow.NONE:
            return []
        now = self._turn(self.witness.unsettled())
        settled = [group for group in self.witness.groups.values() if group.receipted]
        return [
            self._receipt(group, envelope)
            for group in (*settled, *now)
            for envelope in group.ids
            if envelope not in self._told
        ]

    def _turn(self, waiting: list[Group]) -> list[Group]:
        """Those of the groups without a receipt that get theirs now."""
        if self.flow is Flow.PROMPT:
            return waiting
        self._room = min(self._room + len(waiting) * LOOK_S / LATE_S, len(waiting))
        ready = [group for group in waiting if group.digest in self._verified][: int(self._room)]
        self._room -= len(ready)
        return ready

    def _receipt(self, group: Group, envelope: bytes) -> Receipt:
        key = self.witness.key or b""
        if group.error is not None:
            return refused(envelope, key, group.error)
        trajectories = RolloutGroup.from_bytes(group.body).trajectories
        return accepted(envelope, key, sum(map(trained_tokens, trajectories)))

    def _note_told(self, items: list[Receipt], known: list[Known]) -> None:
        told = {item.rollout for item in items}
        self._told |= told
        if known:
            self._hellos_answered, self.witness.answered = len(self.witness.hellos), True
        now = now_ms()
        for group in self.witness.unsettled():
            if not told.isdisjoint(group.ids):
                self.witness.settle(group, now)
        self.change()
