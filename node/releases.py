"""New versions go out: what the learner made, and renewed beacons. Each is published and announced.

learner -> journal -> gossip, swarm -> the learner is told -> old versions are deleted
"""

from __future__ import annotations

from contextlib import suppress

import trio

from nous_node.protocol.constants import MAX_ENVELOPE

from .canary import rollback_sentence
from .events import Note, Report
from .following import Following, Head, now_ms
from .learner_messages import Updated
from .lessons import Lessons
from .network import Network
from .network_errors import NoSubscribersError
from .own_heads import OwnHeads
from .pipe import ChildDied
from .publishing import Publisher
from .renewals import Renewals, wanted
from .store import Journal
from .swarm import Swarm
from .training import Training


class Releases:
    """The only one that publishes; nothing is published before `own` has settled."""

    def __init__(
        self,
        publisher: Publisher,
        following: Following,
        network: Network,
        swarm: Swarm,
        own: OwnHeads,
        renewals: Renewals,
        journal: Journal,
        training: Training,
        report: Report,
        *,
        keep: int,
        room: int,
    ) -> None:
        """`keep`: versions that stay beside those needed, while all of them fit `room` bytes."""
        self._publisher, self._following, self._network = publisher, following, network
        self._swarm, self._own, self._renewals, self._journal = swarm, own, renewals, journal
        self._training, self._report = training, report
        self._keep, self._room = keep, room
        self._told: set[bytes] = set()
        """Checkpoints of which others are told."""
        self._crowded = False
        """Whether a person was told that what is needed takes more room than there is to be."""

    async def run(self, lessons: Lessons) -> None:
        """Forever: lessons, whose `updated` is ours, and beacons between them."""
        self.hold()
        if self._own.rolling_back or self._publisher.mending:
            self._training.doing = "asking peers for newer versions"
            await self._own.settled.wait()
            self._publisher.mend()  # the learner begins with this version, or with what it was rolled back to
            await self._announce(self._publisher.head)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beacon_loop, lessons)
            nursery.start_soon(lessons.loop)

    async def updated(self, updated: Updated, lessons: Lessons) -> None:
        """A new version from the learner: journalled with its groups in one transaction, then gossiped."""
        await self._own.settled.wait()
        head = self._publisher.update(updated)
        self._renewals.updated(trio.current_time())
        self._report(self._training.published(head, updated))
        if updated.rolled_back is not None:
            self._report(Note(rollback_sentence(updated), "warning"))
        if updated.note:
            self._report(Note(updated.note, "warning"))
        await self._announce(head)
        await lessons.coach.published(head.version)
        await self._prune(updated.good)

    async def _beacon_loop(self, lessons: Lessons) -> None:
        """Draws a new beacon for keys that have waited for one longer than for an update. [TSK-6]"""
        await self._own.settled.wait()
        while True:
            await trio.sleep(self._renewals.idle)
            if not self._due():
                continue
            async with lessons.turn:  # in turn: a trainer that is never idle still has keys that wait
                if not self._due():  # the turn before made a version
                    continue
                head = self._publisher.renew()
                self._renewals.renewed(trio.current_time())
                with suppress(ChildDied):  # the next learner is opened at this version
                    await lessons.coach.published(head.version)
            await self._announce(head)

    def _due(self) -> bool:
        """Whether somebody waits for a version, and waited long enough."""
        due = self._renewals.due(trio.current_time())
        return due and wanted(self._journal, self._following.version, now_ms())

    async def _announce(self, head: Head) -> None:
        """Gossips the head; whoever misses it, or it is too large for gossip, asks for it within seconds."""
        self.hold()
        if len(head.envelope) > MAX_ENVELOPE:
            return
        with suppress(NoSubscribersError):
            await self._network.publish(self._following.topics.checkpoints, head.envelope)

    def hold(self) -> None:
        """Tells others what is here, and what no longer is."""
        here = {one.head.hash: one for one in self._publisher.holdings() if one.files or one.deltas}
        for digest in self._told - here.keys():
            self._swarm.release(digest)
        for digest, one in here.items():
            self._swarm.hold(digest, one.head.manifest, files=one.files, deltas=one.deltas)
        self._told = set(here)

    async def _prune(self, good: int) -> None:
        prune = self._publisher.prune
        size = await trio.to_thread.run_sync(prune, self._keep, good, self._room)
        if size > self._room and not self._crowded:
            self._crowded = True
            self._report(
                Note(
                    f"The versions that this run needs take {size / 1e9:.1f} GB with deltas and optimizer "
                    f"states, and --disk allows {self._room / 1e9:.1f} GB: none is kept beside them. Allow "
                    "more with --disk if there is room.",
                    "warning",
                )
            )
