"""What every role knows of a run: its manifest, its newest checkpoint, and the gossip view.

A head is learnt by gossip or asked from a peer (`/nous/head/1`); both ways lead through `offer`, which
takes nothing that is not signed by a trainer of the run and newer than what is known. A trainer key that
signed two checkpoints of one version is found there too: nothing is followed from then on. [CKP-9] [CKP-17]
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import trio

from nous_node.protocol.checkpoints import CheckpointManifest, checkpoint_hash, open_checkpoint
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.envelope import unseal
from nous_node.protocol.equivocation import Equivocation, Ledger
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.gossip import GossipView
from nous_node.protocol.runs import RunManifest, Topics, open_manifest
from nous_node.protocol.streams import (
    HEAD_PROTOCOL,
    MAX_HEAD_REPLY,
    MAX_REQUEST,
    HeadReply,
    HeadRequest,
)

HEAD_SECONDS = 20.0
"""Deadline of a head request: 32 MB of manifests over a slow line."""


def now_ms() -> int:
    """Unix time in milliseconds: the clock of envelopes."""
    return time.time_ns() // 1_000_000


RECENT = 4
"""Heads that are remembered with their manifests, of which each may have 16 MB."""

INBOX = 64
"""Accepted messages of a topic whose judge has done all the work already."""


async def drain(inbox: trio.MemoryReceiveChannel[tuple[bytes, str]]) -> None:
    """Empties the channel of a topic that is handled in its judge."""
    async for _ in inbox:
        pass


class HeadSource(Protocol):
    """The part of the network that a head request needs."""

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Head:
    """A checkpoint that a trainer of the run published."""

    hash: bytes
    manifest: CheckpointManifest
    envelope: bytes
    """As it was signed: what is passed on."""

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def sender(self) -> bytes:
        """Key of the trainer that signed it."""
        return unseal(self.envelope, MAX_MANIFEST).head.sender

    @property
    def content(self) -> bytes:
        """Bytes of the manifest, which its hash is of."""
        return unseal(self.envelope, MAX_MANIFEST).content(MAX_MANIFEST)


@dataclass(slots=True)
class Following:
    """A run as one node sees it."""

    run: bytes
    envelope: bytes
    manifest: RunManifest
    view: GossipView
    head: Head | None = None
    heard: bool = False
    """Whether a peer has told its head since this node started."""
    recent: list[Head] = field(default_factory=list)
    """The last RECENT heads that were taken, the newest first."""
    conflict: Equivocation | None = None
    """What proves that a trainer key of this run signed two checkpoints of one version."""
    _changed: trio.Event = field(default_factory=trio.Event)
    _conflicted: trio.Event = field(default_factory=trio.Event)
    _ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self._ledger = Ledger(horizon=4 * (self.manifest.staleness + 1))

    @classmethod
    def of(cls, run: bytes, envelope: bytes) -> Following:
        """Raises RemoteError where the envelope is not the run's manifest."""
        manifest = open_manifest(unseal(envelope, MAX_MANIFEST), run)
        return cls(run, envelope, manifest, GossipView(run, manifest))

    @property
    def topics(self) -> Topics:
        return Topics(self.run)

    @property
    def version(self) -> int:
        return -1 if self.head is None else self.head.version

    def offer(self, data: bytes) -> Head | None:
        """A checkpoint envelope from anywhere: the head that it is, where it is newer than the one known.

        Raises RemoteError where it is none of this run's.
        """
        envelope = unseal(data, MAX_MANIFEST)
        manifest = open_checkpoint(envelope, self.run, self.manifest)
        return self.take(Head(checkpoint_hash(envelope.content(MAX_MANIFEST)), manifest, data))

    def take(self, head: Head) -> Head | None:
        """A head that is known to be genuine."""
        conflict = self._ledger.note(head.sender, head.version, head.hash, head.envelope)
        if conflict is not None and self.conflict is None:
            self.conflict = conflict
            self._conflicted.set()
        if self.conflict is not None:
            return None
        self.view.learn(head.hash, head.version)
        if self.head is not None and head.version <= self.head.version:
            return None
        self.head = head
        self.recent = [head, *self.recent[: RECENT - 1]]
        self._changed.set()
        self._changed = trio.Event()
        return head

    async def newer_than(self, version: int) -> Head:
        """Waits for a head above `version`."""
        while self.head is None or self.head.version <= version:
            await self._changed.wait()
        return self.head

    async def conflicted(self) -> Equivocation:
        """Waits for a `conflict`."""
        while self.conflict is None:
            await self._conflicted.wait()
        return self.conflict

    async def answer_head(self, peer: str, request: bytes) -> bytes:
        """The handler of /nous/head/1."""
        if read(request, HeadRequest, MAX_REQUEST).run != self.run:
            return encode(HeadReply(error=Code.WRONG_RUN.value))
        head = self.head
        return encode(HeadReply(run=self.envelope, checkpoint=None if head is None else head.envelope))


async def ask_head(network: HeadSource, peer: str, run: bytes) -> HeadReply:
    """What a peer knows of a run. Raises RemoteError where it follows another one."""
    frame = await network.request(
        peer,
        HEAD_PROTOCOL,
        encode(HeadRequest(run)),
        max_response=MAX_HEAD_REPLY,
        deadline=HEAD_SECONDS,
    )
    reply = read(frame, HeadReply, MAX_HEAD_REPLY)
    if reply.run is None:
        raise RemoteError(
            Code.WRONG_RUN,
            "The peer does not follow this run; ask for a newer invite.",
        )
    return reply
