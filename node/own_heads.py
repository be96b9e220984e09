"""What peers hold of this trainer's own publications. A run's folder that is an older copy is noticed by it.

A trainer signs each version once, and volunteers leave a run whose trainer did otherwise [CKP-17]. Its
journal knows what it signed; one that was put back from a backup, or copied to another machine, does not. So
peers are asked for their newest checkpoint as they connect, and now and then later. One that this key has
signed and the journal does not know ends the trainer, before anything else is signed where that is possible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from nous_node.protocol.checkpoints import checkpoint_hash, open_checkpoint
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import NousError

from .events import Note, Report
from .following import Following, Head, HeadSource, ask_head
from .home import StorageError

GRACE_SECONDS = 20.0
"""For which a trainer waits for somebody who knows its newest version, or a newer one, before it publishes a
version, which its journal may hold groups enough for: volunteers that lost it dial again within 19.5 s."""

GATHER_SECONDS = 10.0
"""For which heads are gathered before a run is rolled back, once somebody knows as much as the journal:
peers may lag."""

UNTOLD_SECONDS = 60.0
"""From the first answer of anybody on, after which a run is rolled back though nobody knows as much: those
who did may be gone."""

LOOK_SECONDS = 0.25
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 64.0
"""A peer that has just started answers nothing yet, and others never do; one that knows less than the journal
learns of its newest version from this trainer."""

AGAIN_SECONDS = 60.0
"""Between questions to one peer or another later on: a second trainer of this key may have begun."""

AT_ONCE = 4
"""Peers asked at once: an answer may have 32 MB."""


class Peer(Protocol):
    """A connected peer."""

    @property
    def peer_id(self) -> str: ...


class Peers(HeadSource, Protocol):
    """The part of the network that is needed here."""

    def peers(self) -> Sequence[Peer]: ...


class OlderCopyError(StorageError):
    """The run's folder does not know all that its trainer has signed."""


@dataclass(slots=True)
class _Retry:
    at: float
    pause: float = FIRST_RETRY_SECONDS


class OwnHeads:
    """Asks peers as they come. `settled` is set once publishing is safe as far as can be known."""

    def __init__(
        self,
        network: Peers,
        following: Following,
        key: bytes,
        name: str,
        overtake: Callable[[Head], Head] | None,
        report: Report,
        entropy: random.Random | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """`name`: of the run's folder, for people. `overtake`: publishes far above a head, where a person
        said that the run is to be rolled back to this folder. `grace`: seconds in which an answer is waited
        for."""
        self.settled = trio.Event()
        self._network, self._following, self._key, self._name = network, following, key, name
        self._overtake, self._report = overtake, report
        self._entropy = entropy or random.Random()
        self._grace = grace
        self._answered = trio.Event()
        self._told = trio.Event()
        """Set by an answer of somebody who knows our newest version or a newer one of this key: whoever has
        just joined, or fell behind, says nothing about what was signed."""
        self._retries: dict[str, _Retry] = {}
        self._unknown: Head | None = None
        """The newest head of this key that the journal does not know, while heads are gathered."""
        self._limit = trio.CapacityLimiter(AT_ONCE)

    @property
    def rolling_back(self) -> bool:
        """Whether a person said that the run is to be rolled back."""
        return self._overtake is not None

    async def run(self) -> None:
        """Forever. Raises OlderCopyError."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._settle)
            nursery.start_soon(self._ask_again)
            while True:
                for peer in self._due(trio.current_time()):
                    nursery.start_soon(self._ask, peer)
                await trio.sleep(LOOK_SECONDS)

    def _due(self, now: float) -> list[str]:
        """Connected peers that have not answered, or not enough, and are to be asked now."""
        peers = [peer.peer_id for peer in self._network.peers()]
        self._retries = {peer: self._retries.get(peer) or _Retry(now) for peer in peers}
        due = [peer for peer in peers if self._retries[peer].at <= now]
        for peer in due:
            retry = self._retries[peer]
            retry.at, retry.pause = now + retry.pause, min(2 * retry.pause, LONGEST_RETRY_SECONDS)
        return due

    async def _ask_again(self) -> None:
        while True:
            await trio.sleep(AGAIN_SECONDS)
            peers = [peer.peer_id for peer in self._network.peers()]
            if peers:
                await self._ask(self._entropy.choice(peers))

    async def _ask(self, peer: str) -> None:
        async with self._limit:
            try:
                reply = await ask_head(self._network, peer, self._following.run)
                head = None if reply.checkpoint is None else self._own_head(reply.checkpoint)
            except NousError:
                return  # whatever it says, or does not: it is asked again
        mine = self._following.head
        if head is not None and mine is not None and head.version >= mine.version:
            if head.hash != mine.hash:
                self._found(head)
            self._told.set()
        self._answered.set()
        if peer in self._retries and (self._told.is_set() or self.settled.is_set()):
            self._retries[peer].at = float("inf")

    def _own_head(self, data: bytes) -> Head | None:
        """A checkpoint of this key; None for one of another trainer. Raises RemoteError for what is none."""
        mine = self._following.head
        if mine is not None and data == mine.envelope:  # nearly always
            return mine
        envelope = unseal(data, MAX_MANIFEST)
        if envelope.head.sender != self._key:
            return None
        manifest = open_checkpoint(envelope, self._following.run, self._following.manifest)
        return Head(checkpoint_hash(envelope.content(MAX_MANIFEST)), manifest, data)

    def _found(self, head: Head) -> None:
        if self._overtake is None or self.settled.is_set():
            raise OlderCopyError(_sentence(self._name, self._following.version, head.version))
        if self._unknown is None or head.version > self._unknown.version:
            self._unknown = head

    async def _settle(self) -> None:
        if self._overtake is None:
            with trio.move_on_after(self._grace):
                await self._told.wait()
        else:
            await self._answered.wait()
            with trio.move_on_after(UNTOLD_SECONDS):
                await self._told.wait()
                await trio.sleep(GATHER_SECONDS)
            self._roll_back(self._overtake)
        self.settled.set()

    def _roll_back(self, overtake: Callable[[Head], Head]) -> None:
        """Publishes far above all that is known, also where nobody told of more: versions are lost, as the
        person said, and who holds them may only be away."""
        mine = self._following.head
        assert mine is not None  # a trainer has one before it asks anybody
        lost = self._unknown
        head = overtake(lost or mine)
        text = (
            f"The run is rolled back to version {mine.version}, published again as version {head.version}: "
            "no peer that was asked holds a newer one, and those that were lost are below it."
            if lost is None
            else f"The run is rolled back from version {lost.version} to version {mine.version}, "
            f"published again as version {head.version}."
        )
        self._report(Note(text, "warning"))


def _sentence(name: str, mine: int, theirs: int) -> str:
    what = f"another version {theirs}" if theirs == mine else f"version {theirs}"
    return (
        "This folder is an older copy of the run, or another trainer runs with this node's key: the newest "
        f"version here is {mine}, and a peer holds {what} that this key has signed. Volunteers leave a run "
        "in which one version is signed twice, so nothing more is published. Stop the other trainer, or put "
        f"the newer folder back. If it is lost, `nous-node train {name} --rollback` publishes version {mine} "
        "again above all others, and those between are given up."
    )
