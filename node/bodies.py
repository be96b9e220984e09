"""Groups by reference at a trainer: their content is fetched, checked, and handed on as any group. [ROL-17]

    reference -> examined -> waits for its turn -> chunks -> unpacked -> handed on
                   \\-> refused                        \\-> absent: `unavailable`, or what is wrong with it

A fetch is one task, so that a slow sender holds up nobody else. How many there are and how much they may hold
is bounded, for all and for each key; keys have their turns one after the other. What is on its way when the
trainer stops is nowhere: its sender has no receipt and sends it again.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import peer_id
from nous_node.protocol.references import chunks, open_group, unpack
from nous_node.protocol.rollouts import Reference

from .body_chunks import FURTHER, BodyNetwork, ChunkSearch
from .store import Journal, StoredGroup
from .stored_groups import enclosed

BODIES: Final = 16
"""Fetched at once. Each is a task that mostly waits."""

BODY_BYTES: Final = 256 << 20
"""Of their frames, as announced: what they hold in memory when all are complete."""

STRANGERS: Final = 2
"""Keys that are not active have one part in so many of both: keys cost nothing."""

OWN_BODIES: Final = 2
OWN_BYTES: Final = 64 << 20
"""Of one key, at once: one body of the largest size, or one that arrives while the next one is asked for."""

QUEUED: Final = 16
"""Of one key, beside those that are fetched. A sender that has more is told nothing, and sends them again."""

ALL_QUEUED: Final = 1_024
QUEUED_BYTES: Final = 32 << 20
"""Of all keys, and what their envelopes may have together."""

REPEATS: Final = 16
"""Envelopes of one group that each get a receipt."""

BODY_SECONDS: Final = 120.0
BODY_RATE: Final = 512 << 10
"""A body has to be here within so many seconds, and one more for so many bytes."""

AT_ONCE_BYTES: Final = 1 << 20
"""Unpacked without a thread: it takes some milliseconds."""

Place = tuple[bytes, bytes, int]
"""Key, checkpoint and counter."""


@dataclass(slots=True, eq=False)
class _Body:
    """A group whose content is to come."""

    group: StoredGroup
    reference: Reference
    sources: list[str]
    """Peers that should have it: the last forwarder first, at the end who failed last."""
    active: bool
    """Whether its key was when it came. [REP-1]"""
    repeats: list[StoredGroup] = field(default_factory=list)
    """The same group in other envelopes."""


class Bodies:
    """What one trainer fetches. `arrived` is given groups that are complete, as they are to be journalled;
    `failed` hears why one was refused, which the
    journal knows, and its repeats, which nothing knows. `room` is awaited before a group is handed on."""

    def __init__(
        self,
        network: BodyNetwork,
        journal: Journal,
        arrived: Callable[[list[StoredGroup]], None],
        failed: Callable[[list[StoredGroup], RemoteError], None],
        room: Callable[[], Awaitable[None]],
        now: Callable[[], int],
        entropy: random.Random | None = None,
    ) -> None:
        self._network, self._journal, self._now = network, journal, now
        self._arrived, self._failed, self._room = arrived, failed, room
        self._entropy = entropy or random.Random()
        self._bodies: dict[Place, _Body] = {}
        """All that are awaited."""
        self._queues: OrderedDict[bytes, deque[_Body]] = OrderedDict()
        """By key, those that wait for their turn; the key whose turn is next first."""
        self._waiting = self._waiting_bytes = 0
        """Of all queues, and the bytes of their envelopes."""
        self._fetching: list[_Body] = []
        self._awaited: dict[tuple[bytes, bytes], set[int]] = {}
        self._work = trio.Event()
        self._unpacking = trio.CapacityLimiter(1)  # one after the other: each holds its group twice
        journal.awaited = self.awaited

    def awaited(self, key: bytes, checkpoint: bytes) -> Collection[int]:
        """Counters of a key and checkpoint whose groups' content is on its way: no holes. [TSK-7]"""
        return self._awaited.get((key, checkpoint), ())

    def offer(self, group: StoredGroup, reference: Reference, forwarder: str) -> RemoteError | None:
        """Takes a reference that gossip has accepted. None where its content is awaited from now on, else why
        not: BUSY, which is not answered, or what the journal has answered."""
        if self.repeated(group, forwarder):
            return None
        body = self._bodies.get(_place(group))
        error = self._journal.examine(group)
        if error is not None:
            return error
        if body is not None:
            error = RemoteError(Code.COUNTER_REUSED, "Another group with this counter is being fetched.")
            self._journal.absent(group, error, self._now())
            return error
        error = self._check_room(group)
        if error is None:
            sources = list(dict.fromkeys((forwarder, peer_id(group.key))))
            record = self._journal.key(group.key)
            active = record is not None and record.reputation.state == "active"
            self._enqueue(_Body(group, reference, sources, active))
        return error

    def repeated(self, group: StoredGroup, forwarder: str) -> bool:
        """Whether the content of this very group is awaited already. Its sender has no receipt yet, and there
        may be another way to it by now."""
        body = self._bodies.get(_place(group))
        if body is None or body.group.digest != group.digest:
            return False
        if forwarder in body.sources:
            body.sources.remove(forwarder)
        body.sources.insert(0, forwarder)
        del body.sources[FURTHER:]
        if len(body.repeats) < REPEATS:
            body.repeats.append(group)
        return True

    def _check_room(self, group: StoredGroup) -> RemoteError | None:
        own = len(self._queues.get(group.key, ()))
        size = self._waiting_bytes + len(group.envelope)
        if own >= QUEUED or self._waiting >= ALL_QUEUED or size > QUEUED_BYTES:
            return RemoteError(Code.BUSY, "As many groups by reference wait as may.")
        return None

    def _enqueue(self, body: _Body) -> None:
        self._bodies[_place(body.group)] = body
        self._queues.setdefault(body.group.key, deque()).append(body)
        self._waiting += 1
        self._waiting_bytes += len(body.group.envelope)
        self._awaited.setdefault((body.group.key, body.group.checkpoint), set()).add(body.group.counter)
        self._work.set()

    # --- turns -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Forever."""
        async with trio.open_nursery() as nursery:
            while True:
                while (body := self._next()) is not None:
                    self._fetching.append(body)
                    nursery.start_soon(self._fetch, body)
                self._work = trio.Event()
                await self._work.wait()

    def _next(self) -> _Body | None:
        """Whose turn it is, of those for which there is room; it waits no more."""
        for key, queue in self._queues.items():
            if self._fits(queue[0]):
                body = queue.popleft()
                self._queues.move_to_end(key)
                if not queue:
                    del self._queues[key]
                self._waiting -= 1
                self._waiting_bytes -= len(body.group.envelope)
                return body
        return None

    def _fits(self, body: _Body) -> bool:
        fetched = self._fetching
        own = [one for one in fetched if one.group.key == body.group.key]
        if not _room(own, body, OWN_BODIES, OWN_BYTES) or not _room(fetched, body, BODIES, BODY_BYTES):
            return False
        strangers = [one for one in fetched if not one.active]
        return body.active or _room(strangers, body, BODIES // STRANGERS, BODY_BYTES // STRANGERS)

    # --- one body --------------------------------------------------------------------------------

    async def _fetch(self, body: _Body) -> None:
        try:
            frame = await self._frame(body)
            whole = body.group.envelope, body.reference, frame
            if max(body.reference.size, len(frame)) > AT_ONCE_BYTES:
                stored = await trio.to_thread.run_sync(_checked, *whole, limiter=self._unpacking)
            else:
                stored = _checked(*whole)
            self._check_standing(body)
        except RemoteError as error:
            self._done(body)
            self._journal.absent(body.group, error, self._now())
            self._failed([body.group, *body.repeats], error)
            return
        del frame, whole
        await self._room()
        self._done(body)
        self._arrived([msgspec.structs.replace(body.group, envelope=stored), *body.repeats])

    def _check_standing(self, body: _Body) -> None:
        """What waited of a key that lost its standing was refused when it did. [REP-2]"""
        record = self._journal.key(body.group.key)
        if record is not None and not record.reputation.trusted:
            code = Code.BANNED if record.reputation.state == "banned" else Code.QUARANTINED
            raise RemoteError(code, "The key lost its standing while its group was fetched.")

    def _done(self, body: _Body) -> None:
        del self._bodies[_place(body.group)]
        self._fetching.remove(body)
        place = body.group.key, body.group.checkpoint
        self._awaited[place].remove(body.group.counter)
        if not self._awaited[place]:
            del self._awaited[place]
        self._work.set()

    async def _frame(self, body: _Body) -> bytes:
        """All chunks. Raises RemoteError: UNAVAILABLE, or HASH_MISMATCH where the sender sent others."""
        pieces: list[bytes] = []
        seconds = BODY_SECONDS + body.reference.packed / BODY_RATE
        with trio.move_on_after(seconds):
            for digest, length in chunks(body.reference):
                search = ChunkSearch(
                    self._network, self._entropy, body.sources, peer_id(body.group.key), digest, length
                )
                pieces.append(await search.run())
            return b"".join(pieces)
        raise RemoteError(
            Code.UNAVAILABLE,
            f"The group did not arrive within {seconds:.0f} s.",
            measured=seconds,
            threshold=seconds,
        )


def _place(group: StoredGroup) -> Place:
    return group.key, group.checkpoint, group.counter


def _room(others: Sequence[_Body], body: _Body, count: int, size: int) -> bool:
    held = sum(one.reference.packed for one in others)
    return len(others) < count and held + body.reference.packed <= size


def _checked(envelope: bytes, reference: Reference, frame: bytes) -> bytes:
    """The group as it is stored, where its content is what its reference says."""
    open_group(reference, unpack(reference, frame))
    return enclosed(envelope, frame)
