"""The swarm of a run: checkpoints come from every peer that has parts of them, and go on to every other.

One `Swarm` a node. `fetch` brings files; `hold` says what others may be told that this node has, beside the
chunks of downloads under way. Who takes part in a checkpoint is learnt by exchanging have-bitmaps. [STR-4]
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import trio

from nous_node.protocol.checkpoints import CheckpointManifest, FileEntry
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.errors import Code, NousError, RemoteError
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HAVE_PROTOCOL,
    HEAD_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HAVE_REPLY,
    MAX_HAVE_REQUEST,
    MAX_HEAD_REPLY,
    MAX_REQUEST,
    HaveReply,
    HaveRequest,
)

from .blob_turns import BlobTurns
from .blobs import BlobIndex, FetchError
from .following import Following
from .http_source import HttpSource
from .network_errors import RequestFailedError, UnsupportedProtocolError
from .part_folder import PartFolder
from .records import Records
from .requests import Handler, Turns
from .shares import ASK_AGAIN_S, Share
from .small_blobs import fetch_blob
from .sources import CHUNK_SECONDS, Source
from .swarm_download import TICK_S, Download, SwarmNetwork
from .upload_limit import UploadLimit
from .uploads import HTTP_SHARE

HAVE_SECONDS = 10.0
"""Deadline of an exchange of bitmaps."""

HAVES_OF_PEER = 2
"""Bitmaps of one peer that are read at once."""

BLOBS_OF_PEER = 16
"""Requests for chunks of one peer that may be under way or wait: its window, and what it has called off."""

BAD_HAVE = "bad-have-bitmap"
IDLE_SHARES = 8
"""Checkpoints that are remembered though nobody holds or fetches them."""


class Introductions(Protocol):
    """How those who take part learn of each other. [STR-7]"""

    def ours(self, peer: str) -> list[str]:
        """Addresses at which this node can be dialled, for a peer."""

    def note_addresses(self, peer: str, addresses: Sequence[str]) -> None:
        """Where a peer says that it can be dialled."""

    def others(self, peer: str, members: Collection[str]) -> list[str]:
        """Addresses of some of the members of a checkpoint, for a peer that asks."""

    def note_introduced(self, peer: str, addresses: Sequence[str]) -> None:
        """Members of a checkpoint, by what a peer says."""

    def delivered(self, peer: str, size: int) -> None:
        """A peer has brought a chunk."""

    async def run(self, meet: Callable[[str], Awaitable[None]]) -> None:
        """Forever. `meet` exchanges have-messages with a peer."""


class NoIntroductions:
    """Of a node that introduces nobody."""

    def ours(self, peer: str) -> list[str]:
        return []

    def note_addresses(self, peer: str, addresses: Sequence[str]) -> None: ...

    def others(self, peer: str, members: Collection[str]) -> list[str]:
        return []

    def note_introduced(self, peer: str, addresses: Sequence[str]) -> None: ...

    def delivered(self, peer: str, size: int) -> None: ...

    async def run(self, meet: Callable[[str], Awaitable[None]]) -> None: ...


class Swarm:
    """What one node fetches of a run's checkpoints, and what it serves."""

    def __init__(
        self,
        network: SwarmNetwork,
        run: bytes,
        index: BlobIndex,
        *,
        entropy: random.Random | None = None,
        introductions: Introductions | None = None,
        http: Callable[[str], Source] = HttpSource,
    ) -> None:
        """`http` makes a source of a base URL."""
        self.index = index
        self.http_port: int | None = None
        """Where this node serves chunks by plain HTTP, if it does. [STR-6]"""
        self._network, self._run = network, run
        self._entropy = entropy or random.Random()
        self._introductions = introductions or NoIntroductions()
        self._http = http
        self._records, self._blob_records = Records(), Records()
        self._shares: dict[bytes, Share] = {}
        self._held: dict[bytes, int] = {}
        """Checkpoints of which others are told, and the chunks that stand in complete folders."""
        self._downloads: dict[bytes, list[Download]] = {}
        self._wake = trio.Event()

    # What comes

    async def fetch(
        self, checkpoint: bytes, manifest: CheckpointManifest, entries: Sequence[FileEntry], folder: Path
    ) -> int:
        """Puts entries of a checkpoint's files, or of its deltas, into `folder`, which then exists and is
        complete; bytes fetched.

        Raises FetchError where no source delivers a chunk (what was verified stays for the next try), and
        StorageError where the disk refuses.
        """
        share = self._share(checkpoint, manifest)
        download = Download(
            self._network,
            share,
            PartFolder(folder, entries, self.index),
            self._records,
            self._entropy,
            exchange=self._exchange,
            delivered=self._introductions.delivered,
            http=self._http,
            mirrors=manifest.mirrors,
        )
        under_way = self._downloads.setdefault(checkpoint, [])
        under_way.append(download)
        try:
            return await download.run()
        finally:
            under_way.remove(download)
            if not under_way:
                del self._downloads[checkpoint]
            self._wake.set()

    async def blob(self, digest: bytes, limit: int) -> bytes:
        """A blob of at most `limit` bytes, such as a manifest. Raises FetchError where nobody has it."""
        held = await trio.to_thread.run_sync(self.index.read, digest)
        if held is not None:
            return held
        peers = [peer.peer_id for peer in self._network.peers()]
        peers = self._entropy.sample(peers, len(peers))
        found = await fetch_blob(self._network, self._blob_records, peers, digest, limit)
        if found is not None:
            return found
        raise FetchError("No connected peer delivers a part of the checkpoint; it is tried again.")

    # What goes

    def hold(
        self, checkpoint: bytes, manifest: CheckpointManifest, *, files: bool = True, deltas: bool = True
    ) -> None:
        """From now on others are told that this node has all files, all deltas, or both, and no longer what
        it is not said to have any more."""
        share = self._share(checkpoint, manifest)
        self._holds(share, (share.files if files else 0) | (share.deltas if deltas else 0))

    def release(self, checkpoint: bytes) -> None:
        """Others are told of this checkpoint no more, but for what a download brings."""
        share = self._shares.get(checkpoint)
        if share is not None and checkpoint in self._downloads:
            self._holds(share, 0)
        elif share is not None:
            del self._shares[checkpoint]
        self._held.pop(checkpoint, None)

    def _holds(self, share: Share, chunks: int) -> None:
        have = share.have & ~self._held.get(share.checkpoint, 0) | chunks
        self._held[share.checkpoint] = chunks
        if have != share.have:
            share.have = have
            self._wake.set()

    def _share(self, checkpoint: bytes, manifest: CheckpointManifest) -> Share:
        share = self._shares.get(checkpoint)
        if share is None:
            idle = [one for one in self._shares if one not in self._held and one not in self._downloads]
            for old in idle[: max(0, len(idle) - IDLE_SHARES)]:
                del self._shares[old]
            share = self._shares[checkpoint] = Share.of(checkpoint, manifest)
        return share

    async def run(self) -> None:
        """Forever: tells others what is new here, and lets those who take part meet."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._introductions.run, self._meet)
            nursery.start_soon(self._tell_loop, nursery)

    async def _meet(self, peer: str) -> None:
        """An exchange about the newest checkpoint, for the introductions that come with it."""
        if self._shares:
            await self._exchange(next(reversed(self._shares.values())), peer)

    async def _tell_loop(self, nursery: trio.Nursery) -> None:
        """Tells those who still download; downloads of ours do so themselves. Nobody waits for another."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            connected = [peer.peer_id for peer in self._network.peers()]
            for checkpoint, share in self._shares.items():
                if checkpoint not in self._downloads:
                    for peer in share.due(connected, trio.current_time(), curious=False):
                        nursery.start_soon(self._exchange, share, peer)
            await trio.sleep(TICK_S)

    # Have-bitmaps

    async def _exchange(self, share: Share, peer: str) -> None:
        """Tells a peer what is here of a checkpoint, and learns what is there. Never raises NousError."""
        told = share.have
        share.ask_at[peer] = trio.current_time() + HAVE_SECONDS
        request = HaveRequest(
            self._run, share.checkpoint, share.bitmap(), self.http_port, self._introductions.ours(peer)
        )
        try:
            frame = await self._network.request(
                peer,
                HAVE_PROTOCOL,
                encode(request),
                max_response=MAX_HAVE_REPLY,
                deadline=HAVE_SECONDS,
            )
            reply = read(frame, HaveReply, MAX_HAVE_REPLY)
            if reply.error is not None:
                share.ask_at[peer] = trio.current_time() + ASK_AGAIN_S
                return
            share.heard(peer, reply.have, reply.http, told, trio.current_time())
        except UnsupportedProtocolError:
            share.silent(peer, trio.current_time())
        except RequestFailedError:
            share.ask_at[peer] = trio.current_time() + ASK_AGAIN_S
        except RemoteError:
            await self._network.refuse(peer, BAD_HAVE)
        except NousError:  # not connected any more
            share.members.pop(peer, None)
        else:
            share.ask_at.pop(peer, None)
            self._introductions.note_introduced(peer, reply.peers)
            if share.have != told:
                self._wake.set()

    async def answer(self, peer: str, request: bytes) -> bytes:
        """The handler of /nous/have/1. Raises RemoteError where the request is none."""
        try:
            asked = read(request, HaveRequest, MAX_HAVE_REQUEST)
            if asked.run != self._run:
                return encode(HaveReply(error=Code.WRONG_RUN.value))
            share = self._shares.get(asked.checkpoint)
            if share is None or peer in share.liars:
                return encode(HaveReply(error=Code.UNKNOWN_CHECKPOINT.value))
            if not share.takes(peer, trio.current_time()):
                return encode(HaveReply(error=Code.BUSY.value))
            share.heard(peer, asked.have, asked.http, share.have, trio.current_time())
        except RemoteError:
            await self._network.refuse(peer, BAD_HAVE)
            raise
        self._introductions.note_addresses(peer, asked.addresses)
        for download in self._downloads.get(asked.checkpoint, ()):
            download.note_news()
        others = self._introductions.others(peer, share.members.keys())
        return encode(HaveReply(share.bitmap(), self.http_port, others))


class Server(Protocol):
    """The part of the network that answers requests."""

    @property
    def upload(self) -> UploadLimit: ...

    def serve(
        self,
        protocol: str,
        handler: Handler,
        *,
        max_request: int,
        max_response: int,
        per_peer: int = ...,
        deadline: float = ...,
        turns: Turns | None = ...,
    ) -> None: ...


def serve_run(network: Server, following: Following, swarm: Swarm) -> None:
    """Answers what every node of a run answers: its manifest, its newest checkpoint, chunks, and which of
    them are here. Where chunks go by HTTP as well, `swarm` has its port already."""
    rate = network.upload.rate
    if rate is not None and swarm.http_port is not None:
        rate *= 1 - HTTP_SHARE
    network.serve(HEAD_PROTOCOL, following.answer_head, max_request=MAX_REQUEST, max_response=MAX_HEAD_REPLY)
    network.serve(
        HAVE_PROTOCOL,
        swarm.answer,
        max_request=MAX_HAVE_REQUEST,
        max_response=MAX_HAVE_REPLY,
        per_peer=HAVES_OF_PEER,
    )
    network.serve(
        BLOB_PROTOCOL,
        swarm.index.answer,
        max_request=MAX_REQUEST,
        max_response=MAX_BLOB_REPLY,
        per_peer=BLOBS_OF_PEER,
        deadline=CHUNK_SECONDS,
        turns=BlobTurns(swarm.index, rate),
    )
