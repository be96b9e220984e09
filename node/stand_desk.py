"""The kit's peers in a run of its own, and what they answer to the client under test.

All of them stand in the invite. The trainer and a neighbour are honest; others wait to be dishonest: a chunk
with wrong bytes, a short one, an answer that stalls, wrong gossip. `Desk` holds what each is to answer now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import trio
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError

from nous_node.protocol.checkpoints import FileEntry
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HAVE_PROTOCOL,
    HEAD_PROTOCOL,
    MAX_HAVE_REQUEST,
    MAX_REQUEST,
    BlobRequest,
    HaveReply,
    HaveRequest,
    HeadReply,
    HeadRequest,
    bitmap,
    blob_reply,
    busy_reply,
    read_bitmap,
)

from .frames import OversizeFrameError
from .network import Network, NetworkConfig, open_network
from .requests import READ_REQUEST_S, read_frame, write_frame
from .stand_run import StandRun

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
STALLED_S = 120.0
"""How long a stalled answer stays open: longer than any client may wait for a chunk."""
MAX_ASKED = 100_000
"""Requests that are kept: a client that asks more floods."""

TRAINER, NEIGHBOUR, LIAR, SHORT, STALLER, GOSSIPER = (
    "trainer",
    "neighbour",
    "liar",
    "curt peer",
    "staller",
    "gossiper",
)
NAMES = (TRAINER, NEIGHBOUR, LIAR, SHORT, STALLER, GOSSIPER)


class Manner(StrEnum):
    """How a peer answers for chunks that are at stake."""

    HONEST = "honest"
    BUSY = "busy"
    WRONG = "wrong bytes"
    SHORT = "a short chunk"
    STALL = "a stalled answer"
    BOAST = "an answer that claims 4 GiB"


class Asked(NamedTuple):
    """A request for a chunk."""

    at: float
    peer: str
    digest: bytes
    manner: Manner


class FalseHead(NamedTuple):
    """A reply to a head request that has to be refused."""

    name: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """One of the kit's."""

    name: str
    network: Network


class Desk:
    """`changed` is called with each request."""

    def __init__(self, run: StandRun, changed: Callable[[], None]) -> None:
        self.run, self._changed = run, changed
        self.head: bytes | None = run.newest.head.envelope
        """The checkpoint envelope that heads tell."""
        self.false_heads: deque[FalseHead] = deque()
        """The next replies to head requests, whoever is asked."""
        self.told: dict[str, float] = {}
        """False heads that were told, by name, and when."""
        self.heads: list[tuple[float, str]] = []
        self.asked: list[Asked] = []
        self.haves = 0
        self.faults: list[str] = []
        """What was wrong with requests."""
        self._stake: frozenset[bytes] = frozenset()
        self._manners: dict[str, Manner] = {}

    def play(self, stake: frozenset[bytes], others: Manner, **manners: Manner) -> None:
        """From now on those at `stake` are answered so: by name (a space as `_`), `others` by the rest."""
        self._stake = stake
        named = {name.replace("_", " "): manner for name, manner in manners.items()}
        self._manners = dict.fromkeys(NAMES, others) | named

    def be_honest(self) -> None:
        self._stake = frozenset()

    def served(self, manner: Manner) -> Asked | None:
        """The first request that was answered so."""
        return next((one for one in self.asked if one.manner is manner), None)

    def asked_for(self, digests: frozenset[bytes]) -> list[Asked]:
        return [one for one in self.asked if one.digest in digests]

    def serve(self, name: str, network: Network) -> None:
        network.take_streams(HEAD_PROTOCOL, partial(self._answer, self._head, name, MAX_REQUEST))
        network.take_streams(BLOB_PROTOCOL, partial(self._answer, self._blob, name, MAX_REQUEST))
        if name == TRAINER:
            network.take_streams(HAVE_PROTOCOL, partial(self._answer, self._have, name, MAX_HAVE_REQUEST))

    async def _answer(self, answer: Any, name: str, limit: int, stream: Any) -> None:
        """One request and its answer; whatever is wrong with it is noted and ends the stream."""
        try:
            with trio.fail_after(READ_REQUEST_S):
                request = await read_frame(stream.muxed_stream, limit)
            await answer(name, request, stream.muxed_stream)
            await stream.close()
            return
        except (RemoteError, OversizeFrameError, trio.TooSlowError) as error:
            self._fault(f"a request to the {name} was refused: {error or 'it did not come in time'}")
        except (MuxedStreamError, MuxedConnUnavailable):
            pass  # called off
        with suppress(MuxedStreamError, MuxedConnUnavailable):
            await stream.reset()

    def _fault(self, what: str) -> None:
        if len(self.faults) < MAX_ASKED:
            self.faults.append(what)

    async def _head(self, name: str, request: bytes, muxed: Any) -> None:
        wanted = read(request, HeadRequest, MAX_REQUEST)
        if len(self.heads) < MAX_ASKED:
            self.heads.append((trio.current_time(), name))
        if wanted.run != self.run.run:
            await write_frame(muxed, encode(HeadReply(error=Code.WRONG_RUN.value)))
            return
        if self.false_heads:
            false = self.false_heads.popleft()
            self.told[false.name] = trio.current_time()
            await write_frame(muxed, false.frame)
        else:
            await write_frame(muxed, encode(HeadReply(run=self.run.folder.envelope, checkpoint=self.head)))
        self._changed()

    async def _have(self, name: str, request: bytes, muxed: Any) -> None:
        """The trainer has all of every version."""
        asked = read(request, HaveRequest, MAX_HAVE_REQUEST)
        version = self.run.version_of(asked.checkpoint)
        if version is None or asked.run != self.run.run:
            await write_frame(muxed, encode(HaveReply(error=Code.UNKNOWN_CHECKPOINT.value)))
            return
        manifest = version.head.manifest
        count = _chunks(manifest.files) + _chunks(manifest.deltas)
        if asked.have is not None:
            read_bitmap(asked.have, count)
        self.haves += 1
        await write_frame(muxed, encode(HaveReply(bitmap((1 << count) - 1, count))))

    async def _blob(self, name: str, request: bytes, muxed: Any) -> None:
        digest = read(request, BlobRequest, MAX_REQUEST).hash
        data = self.run.blobs.get(digest)
        at_stake = data is not None and digest in self._stake
        manner = self._manners.get(name, Manner.HONEST) if at_stake else Manner.HONEST
        if len(self.asked) >= MAX_ASKED:
            self._fault(f"more than {MAX_ASKED} chunks were asked for")
            await muxed.reset()
            return
        self.asked.append(Asked(trio.current_time(), name, digest, manner))
        self._changed()
        await _deliver(muxed, data, manner)


async def _deliver(muxed: Any, data: bytes | None, manner: Manner) -> None:
    match manner:
        case Manner.BUSY:
            await write_frame(muxed, busy_reply())
        case Manner.WRONG if data:
            await write_frame(muxed, blob_reply(bytes([data[0] ^ 1]) + data[1:]))
        case Manner.SHORT if data:
            await write_frame(muxed, blob_reply(data[:-1]))
        case Manner.STALL:
            frame = blob_reply(data)
            await muxed.write(len(frame).to_bytes(4, "big") + frame[: len(frame) // 2])
            await trio.sleep(STALLED_S)
        case Manner.BOAST:
            await muxed.write(b"\xff\xff\xff\xff" + bytes(1000))
            await trio.sleep(1.0)
        case _:
            await write_frame(muxed, blob_reply(data))


def _chunks(entries: list[FileEntry]) -> int:
    return sum(len(entry.hashes()) for entry in entries)


@asynccontextmanager
async def open_peers(run: StandRun, desk: Desk) -> AsyncIterator[dict[str, Peer]]:
    """All of the kit's peers, listening on this machine, until the block ends."""
    async with AsyncExitStack() as stack:
        peers: dict[str, Peer] = {}
        for number, name in enumerate(NAMES):
            seed = run.trainer.seed if name == TRAINER else _seed(run, number)
            opened = open_network(seed, NetworkConfig(listen=(LOOPBACK,)))
            network = await stack.enter_async_context(opened)
            desk.serve(name, network)
            peers[name] = Peer(name, network)
        yield peers


def _seed(run: StandRun, number: int) -> bytes:
    """Of the keys of the kit's other peers, fresh for each run."""
    return Identity.from_seed(run.trainer.sign(b"kit" + bytes([number]))[:32]).seed
