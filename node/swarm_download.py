"""One download from the swarm: chunks from whoever has them, until all are here.

    have-bitmaps -> picker -> requests to sources -> verified, written -> the folder gets its name

A source that fails is asked less, one that lies is cut off; the download ends only where nobody is left who
has what is missing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import trio

from nous_node.protocol.errors import Code, NousError, RemoteError

from .blobs import FetchError
from .home import StorageError
from .http_source import peer_url
from .network_errors import RequestTimeoutError, UnsupportedProtocolError
from .part_folder import PartFolder
from .picker import Ask, Picker
from .records import Records
from .shares import Member, Share
from .sources import PeerSource, Requester, Source

SMALL = 1 << 20
"""Bytes: where less is missing nobody is asked what it has, since that would take longer than the chunks."""

TICK_S = 0.25
"""Between looks at who is connected, and at least between what one peer is told of our chunks."""

STARVED_S = 10.0
"""Without a chunk, while nothing is under way, after which nobody is waited for any more."""

GIVEN_UP_S = 60.0
"""The same where sources only say that they are busy."""


class Peer(Protocol):
    """A connected peer."""

    @property
    def peer_id(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def inbound(self) -> bool: ...


class SwarmNetwork(Requester, Protocol):
    """The part of the network that a swarm needs."""

    @property
    def peer_id(self) -> str: ...

    def peers(self) -> Sequence[Peer]: ...

    async def refuse(self, peer: str, fault: str) -> None: ...


BAD_CHUNK = "bad-chunk"


def first_of(group: BaseExceptionGroup[NousError]) -> NousError:
    """One of the errors of tasks that ran side by side."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, NousError)
    return error


class Download:
    """Brings the missing chunks of some entries of one checkpoint into a folder."""

    def __init__(
        self,
        network: SwarmNetwork,
        share: Share,
        part: PartFolder,
        records: Records,
        entropy: random.Random,
        *,
        exchange: Callable[[Share, str], Awaitable[None]],
        delivered: Callable[[str, int], None],
        http: Callable[[str], Source],
        mirrors: Sequence[str],
    ) -> None:
        """`exchange` asks a peer what it has of the share, `delivered` is told of each chunk; `http` makes a
        source of a base URL."""
        self._network, self._share, self._part = network, share, part
        self._records, self._entropy = records, entropy
        self._exchange, self._delivered, self._http, self._mirrors = exchange, delivered, http, mirrors
        self._fetched = 0
        self._picker = Picker({}, records, entropy)
        self._sizes: Mapping[int, int] = {}
        self._small = True
        self._sources: dict[str, Source] = {}
        self._owners: dict[str, str] = {}
        """Peers by the names of their sources."""
        self._ways: dict[str, str] = {}
        """By peer: the source by which it is asked. Another is taken only where that one fails."""
        self._under_way: dict[trio.CancelScope, Ask] = {}
        """Requests to sources that were not dropped since."""
        self._met: set[str] = set()
        self._first_exchanges = 0
        """Under way: somebody may turn out to have something."""
        self._progress = 0.0
        self._looked = -math.inf
        self._reasons: list[str] = []
        self._failure: StorageError | None = None
        self._news = trio.Event()

    def note_news(self) -> None:
        """Others have said what they have: it is taken up at the next look, however much they say."""
        self._news.set()

    def _look_soon(self) -> None:
        self._looked = -math.inf
        self._news.set()

    async def run(self) -> int:
        """Bytes fetched. Raises FetchError, or StorageError."""
        missing = await trio.to_thread.run_sync(self._part.prepare)
        for digest in self._part.wanted - missing.keys():
            self._share.add(digest)
        self._sizes = {self._share.positions[digest]: size for digest, size in missing.items()}
        if self._sizes:
            await self._fetch()
        await trio.to_thread.run_sync(self._part.complete)
        return self._fetched

    async def _fetch(self) -> None:
        self._picker = Picker(self._sizes, self._records, self._entropy, self._network.peer_id)
        self._small = sum(self._sizes.values()) <= SMALL
        self._progress = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                if not self._small:
                    self._first_exchanges = 1
                    nursery.start_soon(self._exchange_loop, nursery)
                self._open_mirrors()
                self._look_around()
                await self._ask_loop(nursery)
                nursery.cancel_scope.cancel()
        except* NousError as group:
            raise first_of(group) from None
        finally:
            for source in self._sources.values():
                source.close()

    async def _ask_loop(self, nursery: trio.Nursery) -> None:
        """Until every chunk is here."""
        while self._picker.missing:
            now = trio.current_time()
            if self._failure is not None:
                raise self._failure
            if now - self._looked >= TICK_S or self._picker.stuck(now):
                self._look_around()
            ask = self._picker.next(now)
            if ask is not None:
                scope = trio.CancelScope()
                self._under_way[scope] = ask
                nursery.start_soon(self._request, ask, scope)
                continue
            if self._is_hopeless(now):
                raise FetchError(self._sentence())
            with trio.move_on_after(TICK_S):
                await self._news.wait()
            self._news = trio.Event()

    # Who there is

    def _open_mirrors(self) -> None:
        """Those that can be asked; others are passed over. [CKP-16]"""
        for url in self._mirrors:
            try:
                self._sources[url] = self._http(url)
            except RemoteError as error:
                self._reasons.append(str(error).rstrip("."))

    def _look_around(self) -> None:
        """Tells the picker who is connected, and what they have."""
        now = self._looked = trio.current_time()
        offered: set[str] = set()
        for url in self._mirrors:
            if url in self._sources:
                self._offer(offered, url, self._share.whole, now, assumed=True)
        for peer in self._network.peers():
            self._owners[peer.peer_id] = peer.peer_id
            member = self._share.members.get(peer.peer_id)
            if member is None:
                if self._small:
                    self._offer(offered, peer.peer_id, self._share.whole, now, assumed=True)
                continue
            way = self._way(peer, member)
            self._owners[way] = peer.peer_id
            assumed = member.assumed and way == peer.peer_id
            self._offer(offered, way, member.have, now, peer=peer.peer_id, assumed=assumed)
        for name in self._picker.sources():
            if name not in offered:
                self._drop(name)

    def _way(self, peer: Peer, member: Member) -> str:
        """The first that was known, as long as it does not fail: a peer that says something else each time
        would have its chunks asked for again each time."""
        way = self._ways.get(peer.peer_id)
        if way is None:
            served = None if member.http is None else peer_url(peer.address, member.http)
            way = served or peer.peer_id
        if way in self._share.liars or peer.peer_id in self._share.no_http or self._picker.given_up(way):
            way = peer.peer_id
        self._ways[peer.peer_id] = way
        return way

    def _offer(
        self,
        offered: set[str],
        name: str,
        claims: int,
        now: float,
        *,
        peer: str = "",
        assumed: bool = False,
    ) -> None:
        if name in self._share.liars:
            return
        if name not in self._sources:
            by_http = name.startswith(("http://", "https://"))
            self._sources[name] = self._http(name) if by_http else PeerSource(self._network, name)
        offered.add(name)
        self._picker.offer(name, claims, now, peer=peer, assumed=assumed)

    def _drop(self, name: str) -> None:
        self._picker.leave(name, trio.current_time())
        self._sources[name].close()
        for scope, ask in list(self._under_way.items()):
            if ask.source == name:
                del self._under_way[scope]
                scope.cancel()

    async def _exchange_loop(self, nursery: trio.Nursery) -> None:
        """Learns what others have, and tells them what is new here. [STR-4]"""
        first = True
        while True:
            peers = list(self._network.peers())
            self._entropy.shuffle(peers)
            peers.sort(key=lambda peer: peer.inbound)  # no flood of strangers comes before the invite's peers
            connected = [peer.peer_id for peer in peers]
            for peer in self._share.due(connected, trio.current_time(), curious=True):
                unmet = peer not in self._met  # one that is asked again and again gives no hope
                self._met.add(peer)
                self._first_exchanges += unmet
                nursery.start_soon(self._exchange_with, peer, unmet)
            if first:
                first = False
                self._exchanged(1)
            await trio.sleep(TICK_S)

    async def _exchange_with(self, peer: str, unmet: bool) -> None:
        try:
            await self._exchange(self._share, peer)
        finally:
            self._exchanged(int(unmet))

    def _exchanged(self, first: int) -> None:
        self._first_exchanges -= first
        self._look_soon()

    # One chunk

    async def _request(self, ask: Ask, scope: trio.CancelScope) -> None:
        failure = await self._bring(ask, scope)
        dropped = self._under_way.pop(scope, None) is None
        match failure:
            case None:
                if scope.cancelled_caught and not dropped:
                    self._picker.called_off(ask.source, ask.chunk)
            case StorageError():
                self._failure = failure
            case RemoteError(code=Code.HASH_MISMATCH):
                await self._punish(ask.source)
            case _ if not dropped:
                self._note_failure(ask, failure)
        if failure is not None:
            self._reasons.append(f"{ask.source[-8:]}: {failure}")
            self._look_soon()  # another way to the same peer may be left
        self._news.set()

    async def _bring(self, ask: Ask, scope: trio.CancelScope) -> NousError | None:
        """Fetches, verifies and writes a chunk, unless that is called off; what went wrong."""
        digest = self._share.digests[ask.chunk]
        with scope:
            try:
                with trio.fail_after(ask.deadline):
                    data = await self._sources[ask.source].fetch(digest, self._sizes[ask.chunk])
                if scope in self._under_way:
                    self._picker.came(ask.source, ask.chunk)
                self._news.set()
                await trio.to_thread.run_sync(self._part.put, digest, data)
            except trio.TooSlowError:
                return RequestTimeoutError(ask.source, round(ask.deadline))
            except NousError as error:
                return error
            self._arrived(ask, digest, dropped=scope not in self._under_way)
        return None

    def _arrived(self, ask: Ask, digest: bytes, *, dropped: bool) -> None:
        now = trio.current_time()
        self._fetched += self._sizes[ask.chunk]
        if (peer := self._owners.get(ask.source)) is not None:
            self._delivered(peer, self._sizes[ask.chunk])
            self._share.givers.add(peer)
        self._share.add(digest)
        self._progress = now
        others = self._picker.arrived("" if dropped else ask.source, ask.chunk, now)
        for scope, other in self._under_way.items():
            if other.chunk == ask.chunk and other.source in others:
                scope.cancel()

    def _note_failure(self, ask: Ask, error: NousError) -> None:
        now = trio.current_time()
        by_peer = isinstance(self._sources[ask.source], PeerSource)
        if by_peer and all(peer.peer_id != ask.source for peer in self._network.peers()):
            self._drop(ask.source)  # a connection that ends is no failure for each chunk that was asked
            return
        match error:
            case RequestTimeoutError() | UnsupportedProtocolError():
                self._picker.failed(ask.source, ask.chunk, now)
            case RemoteError(code=Code.NOT_FOUND):
                self._picker.lacks(ask.source, ask.chunk, now)
            case RemoteError(code=Code.BUSY):
                self._picker.busy(ask.source, ask.chunk, now)
            case _:
                self._picker.failed(ask.source, ask.chunk, now)

    async def _punish(self, name: str) -> None:
        """A source that delivered something else is not asked again, and as a peer not spoken to. [STR-3]"""
        if name in self._share.liars:
            return
        self._share.liars.add(name)
        self._share.members.pop(name, None)
        by_peer = isinstance(self._sources[name], PeerSource)
        self._drop(name)
        if by_peer:
            await self._network.refuse(name, BAD_CHUNK)
        elif name in self._owners:
            self._share.no_http.add(self._owners[name])

    # The end

    def _is_hopeless(self, now: float) -> bool:
        waited = now - self._progress
        if not self._picker.stuck(now):
            return waited > GIVEN_UP_S
        if waited > STARVED_S:
            return True
        connected = [peer.peer_id for peer in self._network.peers()]
        return not self._first_exchanges and not any(self._share.takers(connected))

    def _sentence(self) -> str:
        why = "; ".join(list(dict.fromkeys(self._reasons))[-3:])
        if not why:
            why = "none has it" if self._network.peers() else "no peer is connected"
        return f"No connected peer delivers a chunk of the checkpoint ({why}); it is tried again."
