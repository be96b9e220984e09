"""Groups by reference, peers that have their content or do not, and a trainer's journal that waits."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import trio

from nous_node.node.bodies import Bodies
from nous_node.node.network_errors import NotConnectedError, RequestTimeoutError
from nous_node.node.store import Journal, RunRules, StoredCheckpoint, StoredGroup
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.references import cut, pack
from nous_node.protocol.rollouts import Engine, Reference, Role, RolloutGroup, Segment, Trajectory
from nous_node.protocol.streams import MAX_REQUEST, BlobRequest, blob_reply

RUN, CHECKPOINT = b"r" * 32, b"1" * 32
NOW = 1_800_000_000_000
STALENESS = 2
VERSION = 1
RELAY = "relay"

Answer = Callable[[bytes], Awaitable[bytes]]
"""Digest -> frame."""


def key(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32))


ALICE, BOB = key(1), key(2)


def body_of(counter: int, size: int = 1_000, checkpoint: bytes = CHECKPOINT) -> bytes:
    """A group whose bytes do not compress."""
    noise = random.Random(counter).randbytes(4 * (size // 4))
    one = Trajectory(noise, [Segment(len(noise) // 4, Role.RAW, False)], b"", 0.0, "stop")
    return RolloutGroup(checkpoint, counter, "env", Engine("", "", "", ""), [one]).to_bytes()


@dataclass
class Referred:
    """One group by reference of one key."""

    identity: Identity
    counter: int
    size: int = 1_000
    content: bytes | None = None
    """Another content than the honest one."""
    room: int = 1 << 20

    def __post_init__(self) -> None:
        self.body = body_of(self.counter, self.size) if self.content is None else self.content
        self.reference, self.frame = pack(CHECKPOINT, self.counter, self.body, self.room)
        self.chunks = dict(cut(self.reference, self.frame))

    def stored(self, salt: bytes = b"", reference: Reference | None = None) -> StoredGroup:
        """`salt` makes another envelope of it."""
        said = reference or self.reference
        place = (self.identity.key, CHECKPOINT, VERSION, self.counter, said.hash)
        return StoredGroup(sha256(encode(said) + self.identity.key + salt).digest(), *place, NOW, b"envelope")


async def nothing(digest: bytes) -> bytes:
    return blob_reply(None)


async def other_bytes(digest: bytes) -> bytes:
    return blob_reply(b"not what you asked for")


async def babble(digest: bytes) -> bytes:
    return b"\xc1"


async def stall(digest: bytes) -> bytes:
    """A byte a second: the request does not end by itself."""
    await trio.sleep_forever()
    raise AssertionError


def holder(*groups: Referred) -> Answer:
    """A peer that has all chunks of these."""
    held = {digest: data for group in groups for digest, data in group.chunks.items()}

    async def answer(digest: bytes) -> bytes:
        return blob_reply(held.get(digest))

    return answer


@dataclass
class Net:
    """Connected peers, each of which answers in its own way."""

    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    @dataclass(frozen=True)
    class Peer:
        peer_id: str

    def peers(self) -> list[Peer]:
        return [self.Peer(peer) for peer in self.answers if peer not in self.cut]

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        digest = read(payload, BlobRequest, MAX_REQUEST).hash
        self.asked.append((peer, digest))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await trio.lowlevel.checkpoint()
            if peer in self.cut or peer not in self.answers:
                raise NotConnectedError(peer)
            with trio.fail_after(deadline):
                frame = await self.answers[peer](digest)
        except trio.TooSlowError:
            raise RequestTimeoutError(peer, deadline) from None
        finally:
            self.in_flight -= 1
        assert len(frame) <= max_response
        return frame

    async def refuse(self, peer: str, fault: str) -> None:
        self.cut.append(peer)


class Desk:
    """A trainer's intake of groups by reference: a real journal, and peers."""

    def __init__(self, path: Path) -> None:
        self.net = Net()
        self.journal = Journal.open(path, RunRules(RUN, (1,), STALENESS))
        self.room = trio.Event()
        self.room.set()
        self.failed: list[tuple[list[StoredGroup], RemoteError]] = []
        self.took: list[StoredGroup] = []
        self.errors: list[RemoteError | None] = []
        self.bodies = Bodies(
            self.net, self.journal, self._arrived, self._absent, self._roomy, lambda: NOW, random.Random(0)
        )

    def known(self, *identities: Identity) -> None:
        """Keys that count, and versions up to VERSION."""
        for identity in identities:
            self.journal.hear(identity.key, "test", NOW, 0)

    def publish(self, *versions: int) -> None:
        for version in versions:
            name = CHECKPOINT if version == VERSION else sha256(b"%d" % version).digest()
            self.journal.publish(StoredCheckpoint(version, name, b"", "/c", NOW, {}, {}), [])

    def offer(self, group: Referred, forwarder: str = RELAY, salt: bytes = b"") -> RemoteError | None:
        return self.bodies.offer(group.stored(salt), group.reference, forwarder)

    def code(self, group: Referred, salt: bytes = b"") -> str | None:
        """Of its receipt; empty for an accepted one, None without any."""
        receipt = self.journal.receipt(group.stored(salt).id)
        return None if receipt is None else receipt.code

    def pending(self) -> list[tuple[bytes, int]]:
        return [(one.key, one.counter) for one in self.journal.unused()]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.bodies.run)
            yield
            nursery.cancel_scope.cancel()

    async def settled(self) -> None:
        """Until nothing is awaited any more, by the test's clock."""
        while self.bodies._bodies:  # noqa: ASYNC110
            await trio.sleep(0.1)

    async def _roomy(self) -> None:
        await self.room.wait()

    def _arrived(self, groups: list[StoredGroup]) -> None:
        self.took.append(groups[0])
        self.errors += self.journal.add_many(groups)

    def _absent(self, groups: list[StoredGroup], error: RemoteError) -> None:
        self.failed.append((groups, error))
