"""The client under test: where it is, which run it follows, what role it plays, and what it told of it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import trio

from nous_node.protocol.checkpoints import CheckpointManifest, checkpoint_hash, open_checkpoint
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.envelope import unseal
from nous_node.protocol.identity import key_of
from nous_node.protocol.runs import RunManifest, Topics, open_manifest, shard_of
from nous_node.protocol.streams import HEAD_PROTOCOL, MAX_HEAD_REPLY, HeadReply, HeadRequest

from .live_check import RELAY, TRAINER, VOLUNTEER, Untested
from .live_forgery import new_identity
from .live_peer import KitPeer, kit_peer
from .live_wire import Pace, Place
from .network import silence_libp2p
from .network_errors import UnreachableError

SUBSCRIBE_S = 5.0
"""Until a client has said which topics it reads: libraries ask for identify first."""
SETTLE_S = 0.3
"""More topics may follow the first."""
HEAD_S = 20.0
HEALTH_S = 10.0
RECENT = 4

_TOPIC = re.compile(r"/nous/1/([0-9a-f]{64})/(rollouts/[0-9]{1,5}|checkpoints|receipts)")


class Target:
    """Made by `reached`."""

    def __init__(self, place: Place, run: bytes | None, listener: KitPeer) -> None:
        self.address, self.place = listener.address, place
        self.listener = listener
        """A peer of the kit that stays connected, and reads every topic that the client reads or writes."""
        self._run = run
        self.envelope: bytes | None = None
        """Of the run, as the client told it, where it is genuine."""
        self._manifest: RunManifest | None = None
        self.head: tuple[bytes, CheckpointManifest] | None = None
        """The newest checkpoint that was told, with its hash, where it is genuine."""
        self.recent: deque[tuple[bytes, CheckpointManifest]] = deque(maxlen=RECENT)
        """The last that were told, the newest first: a client may still fetch the newest."""
        self.head_envelope: bytes | None = None
        self.pupil, self.second = new_identity(), new_identity()
        """Keys of the kit that say hello to a trainer."""
        self.known: int | None = None
        """Version that the trainer answered to that."""
        self.lesson: bytes | None = None
        """A checkpoint that counts for these keys."""

    def peer(self) -> AbstractAsyncContextManager[KitPeer]:
        """A further peer of the kit, with a key of its own."""
        return kit_peer(self.address, self.place.pace)

    @property
    def run(self) -> bytes:
        if self._run is None:
            raise Untested("Nobody said which run it follows, and it reads no topic that names one.")
        return self._run

    @property
    def manifest(self) -> RunManifest:
        if self._manifest is None:
            raise Untested("It told no genuine manifest of its run (see the check `head`).")
        return self._manifest

    @property
    def topics(self) -> Topics:
        return Topics(self.run)

    @property
    def role(self) -> str:
        """By the topics that it reads [NET-7]; empty where it reads none."""
        read = self.listener.topics
        rollouts = any("/rollouts/" in topic for topic in read)
        others = any(topic.endswith(("/checkpoints", "/receipts")) for topic in read)
        if rollouts:
            return RELAY if others else TRAINER
        return VOLUNTEER if others else ""

    async def learn(self) -> None:
        """Role, run and head, as far as the client tells them. Never raises for what it does not."""
        await self.listener.until(lambda: bool(self.role), SUBSCRIBE_S)
        await trio.sleep(SETTLE_S)
        named = [match[1] for topic in self.listener.topics if (match := _TOPIC.fullmatch(topic))]
        if self._run is None and named:
            self._run = bytes.fromhex(max(set(named), key=named.count))
        if self._run is not None:
            await self.refresh()
            await self.listener.subscribe(self._heard_topics())

    def _heard_topics(self) -> list[str]:
        """Those of trainers, and one of rollouts: there the client forwards, or publishes by itself."""
        shard = self.shard
        if shard is None:
            shards = 1 if self._manifest is None else self._manifest.shards
            shard = shard_of(key_of(self.place.peer), shards)
        return [self.topics.checkpoints, self.topics.receipts, self.topics.rollouts(shard)]

    @property
    def shard(self) -> int | None:
        """The first whose rollouts the client reads."""
        own = f"/nous/1/{self.run.hex()}/rollouts/"
        read = [one.removeprefix(own) for one in self.listener.topics if one.startswith(own)]
        return min((int(one) for one in read if one.isascii() and one.isdigit()), default=None)

    async def refresh(self) -> None:
        """Asks for the head; what is not genuine changes nothing."""
        try:
            self.take(await self.ask_head())
        except Exception:  # whatever it is, the check `head` says it
            return

    async def ask_head(self) -> HeadReply:
        request = encode(HeadRequest(self.run))
        return read(
            await self.listener.ask(HEAD_PROTOCOL, request, MAX_HEAD_REPLY, HEAD_S), HeadReply, MAX_HEAD_REPLY
        )

    def take(self, reply: HeadReply) -> None:
        """Raises RemoteError where the run or the checkpoint is not genuine."""
        if reply.run is not None:
            self._manifest = open_manifest(unseal(reply.run, MAX_MANIFEST), self.run)
            self.envelope = reply.run
        if reply.checkpoint is not None:
            envelope = unseal(reply.checkpoint, MAX_MANIFEST)
            manifest = open_checkpoint(envelope, self.run, self.manifest)
            self.head = checkpoint_hash(envelope.content(MAX_MANIFEST)), manifest
            self.head_envelope = reply.checkpoint
            if not self.recent or self.recent[0][0] != self.head[0]:
                self.recent.appendleft(self.head)

    async def newer_than(self, version: int, seconds: float) -> bool:
        """Whether the client tells of a later version within this time."""
        with trio.move_on_after(seconds):
            while self.head is None or self.head[1].version <= version:
                await self.refresh()
                await trio.sleep(0.25)
        return self.head is not None and self.head[1].version > version

    async def answers(self) -> bool:
        """Whether somebody who has done nothing wrong still gets an answer: a newcomer, and who is here."""
        try:
            with trio.fail_after(HEALTH_S):
                async with self.peer() as peer:
                    await _told(peer, self._run)
                await _told(self.listener, self._run)
        except Exception:  # whichever way it goes wrong
            return False
        return True


async def _told(peer: KitPeer, run: bytes | None) -> None:
    if run is None:
        await peer.stream("/ipfs/ping/1.0.0")
    else:
        await peer.ask(HEAD_PROTOCOL, encode(HeadRequest(run)), MAX_HEAD_REPLY, HEALTH_S)


@asynccontextmanager
async def reached(addresses: Sequence[str], run: bytes | None) -> AsyncIterator[Target]:
    """The client at the first address that answers. Raises UnreachableError where none does."""
    silence_libp2p()
    address = await _answering(addresses)
    place = Place.of(address)
    async with kit_peer(address, place.pace) as listener:
        target = Target(place, run, listener)
        await target.learn()
        yield target


async def _answering(addresses: Sequence[str]) -> str:
    *others, last = addresses
    for address in others:
        with suppress(UnreachableError):
            async with kit_peer(address, Pace()):
                return address
    return last
