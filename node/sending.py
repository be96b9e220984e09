"""What a volunteer publishes: each group once as soon as somebody listens, and again while it has no receipt.

    put -> outbox -> publish_loop -> gossip
              \\-> resend_loop ------/            every RESEND_SECONDS, then after twice as long, and so on

A group is in the outbox before it is published, so cancelling a loop loses nothing. While the trainer takes
nothing of our key, nothing goes out. [RCP-7]
"""

from __future__ import annotations

import trio

from nous_node.protocol.buckets import THROTTLE
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.errors import TooLargeError
from nous_node.protocol.identity import Identity
from nous_node.protocol.references import cut, pack
from nous_node.protocol.runs import shard_of

from .contribution import Contribution
from .following import Following, Head, now_ms
from .network import Network
from .network_errors import NoSubscribersError
from .outbox import Outbox
from .pacing import OwnRate
from .restraint import Restraint

RESEND_SECONDS = 10.0
"""A group without a receipt for this long is sent again, sealed anew; then after twice as long, and so on: a
trainer that is slow gets few repeats, a message that was lost is missed for seconds."""

UNSENT = 16
"""Finished groups that may wait for the network before generation waits too: a trainer that stops reading
has enough, and more would be stale when it reads again."""

NOBODY_SECONDS = 0.5
"""After a message that nobody could be given."""


class Sending:
    """Of one key in one run."""

    def __init__(
        self,
        identity: Identity,
        network: Network,
        following: Following,
        outbox: Outbox,
        contribution: Contribution,
        restraint: Restraint,
    ) -> None:
        self._identity, self._network, self._following = identity, network, following
        self._outbox, self._contribution, self._restraint = outbox, contribution, restraint
        manifest = following.manifest
        self.topic = following.topics.rollouts(shard_of(identity.key, manifest.shards))
        self._rate = OwnRate(manifest.limits.groups_per_second, now_ms(), fresh=outbox.unused())
        self._versions: dict[bytes, int] = {}
        """Id in the outbox -> version, of groups without a receipt."""
        self._unpublished: set[bytes] = set()
        """Ids of groups that wait to be published for the first time."""
        self._to_send, self._unsent = trio.open_memory_channel[tuple[bytes, bytes]](UNSENT)

    def store(self, head: Head, counter: int, body: bytes) -> tuple[bytes, bytes]:
        """Id and envelope of the sealed group, or of the reference to one that is too large for gossip. From
        here on it survives whatever happens to this process.

        Raises TooLargeError where it is larger than the run has room for.
        """
        chunks: list[tuple[bytes, bytes]] = []
        try:
            data = self.sealed(Kind.ROLLOUT, body)
        except TooLargeError:
            data, chunks = self._referred(head, counter, body)
        place = {"version": head.version, "counter": counter}
        rollout = self._outbox.put(data, checkpoint=head.hash, chunks=chunks, **place)
        self._versions[rollout] = head.version
        self._unpublished.add(rollout)
        return rollout, data

    def _referred(self, head: Head, counter: int, body: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """The envelope of a reference, and the chunks behind it. [ROL-16]"""
        manifest = self._following.manifest
        reference, packed = pack(head.hash, counter, body, manifest.rollout_envelope_limit)
        largest = max(reference.size, reference.packed)
        if largest > manifest.referenced_limit:
            raise TooLargeError(
                f"The group has {largest} bytes; at most {manifest.referenced_limit} can be sent in this run."
            )
        return self.sealed(Kind.REFERENCE, reference.to_bytes()), cut(reference, packed)

    async def chunk(self, asker: str, digest: bytes) -> bytes | None:
        """A chunk of a group by reference that has no receipt yet."""
        return await trio.to_thread.run_sync(self._outbox.chunk, digest)

    async def send(self, item: tuple[bytes, bytes]) -> None:
        """Hands on what `store` gave; waits while UNSENT groups wait already."""
        await self._to_send.send(item)

    def settled(self, rollout: bytes) -> int:
        """A receipt has come: how many versions the group is behind by now."""
        return self._following.version - self._versions.pop(rollout, self._following.version)

    def sealed(self, kind: Kind, body: bytes) -> bytes:
        """An envelope of ours. Raises TooLargeError."""
        manifest = self._following.manifest
        return seal(
            self._identity,
            kind,
            self._following.run,
            body,
            seq=self._outbox.next_seq(),
            ts=now_ms(),
            limit=manifest.rollout_envelope_limit,
            body_limit=manifest.rollout_body_limit,
        )

    async def publish_loop(self) -> None:
        """Each group for the first time, in the order in which they were made."""
        async for rollout, data in self._unsent:
            await self._network.wait_subscriber(self.topic)
            await self._restraint.lifted()
            while rollout in self._versions:  # otherwise it became too old while nobody listened
                if self._outbox.expired(rollout, now_ms()):
                    break  # `resend_loop` seals it anew
                try:
                    await self._publish(data)
                    break
                except NoSubscribersError:
                    await trio.sleep(NOBODY_SECONDS)
                    await self._network.wait_subscriber(self.topic)
            self._unpublished.discard(rollout)

    async def resend_loop(self) -> None:
        """Each group without a receipt again, until it has one or is too old."""
        while True:
            silence = RESEND_SECONDS
            with trio.move_on_after(RESEND_SECONDS / 2):
                await self._heard_again()
                silence = 0.0  # what was on its way when the line broke may be lost
            self._drop_stale()
            if self._restraint.holds:
                continue
            for rollout in self._outbox.due(now_ms(), int(silence * 1000)):
                content = self._outbox.content(rollout)
                if content is None or rollout in self._unpublished:
                    continue  # a receipt came meanwhile, or its turn comes
                data = self.sealed(*content)
                self._outbox.repeat(rollout, data)
                try:
                    await self._publish(data)
                except NoSubscribersError:
                    break
                self._outbox.was_repeated(rollout, now_ms())

    def _drop_stale(self) -> None:
        horizon = self._following.version - self._following.manifest.staleness
        self._contribution.give_up(self._outbox.drop_stale(horizon))
        self._versions = {
            rollout: version for rollout, version in self._versions.items() if version >= horizon
        }

    async def _publish(self, data: bytes) -> None:
        """Raises NoSubscribersError; nothing was sent then."""
        standing = self._restraint.standing
        throttled = standing is not None and standing.state == "throttled"
        await trio.sleep(self._rate.delay(now_ms(), THROTTLE if throttled else 1.0))  # [GOS-6]
        await self._network.publish(self.topic, data)

    async def _heard_again(self) -> None:
        """Until somebody reads our topic, after nobody did."""
        for peer in self._network.subscribers(self.topic):
            await self._network.wait_lost(peer)
        await self._network.wait_subscriber(self.topic)
