"""Chunks over plain HTTP: `GET /blob/<hash>` of whatever this node holds, for anybody who asks. [STR-6]

    async with chunks_by_http(settings, network, swarm):       # where --http is given

HTTP/1.1 by h11, which judges every byte of a request. A body goes from the page cache to the socket by
`sendfile`: neither Python nor a cipher touches it, since whoever fetches a chunk checks its hash. That is why
no ASGI server does this: with 1 MiB chunks on two connections hypercorn on trio moved 1,030 MB per CPU
second, aiohttp 1,410 (its own file responses 1,170), uvicorn 1,580, this 4,500; a stream of py-libp2p 270.

A node with a bad disk must not get a bad name: a chunk is read and hashed before it first goes out, and
again when its file has changed since.
"""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import h11
import trio

from nous_node.protocol.errors import LocalError

from .config import Settings
from .home import UNDER_WAY
from .http_asked import Asked
from .http_wire import Body, Wire
from .network import Network
from .network_errors import ListenError
from .swarm import Swarm
from .upload_limit import UploadLimit
from .uploads import HTTP_SHARE, slots_at

MAX_CONNECTIONS = 256
"""Of all clients; each costs a task and a few KB."""
MAX_CLIENT_CONNECTIONS = 64
"""Of one IPv4 address or IPv6 /64: some volunteers behind one router."""
MAX_UPLOADS = 32
"""Bodies under way at once, half of them of one address at most; beyond that 503."""
MIN_RATE = 300_000
"""Bytes a second of a limited uplink: with less a body, an upload of libp2p and one of a group by reference,
which are there at the least, would be too slow to be waited for, with chunks of 4 MiB."""
RETRY_S = 1
"""What a client that got 503 is told to wait."""
REQUEST_S = 10.0
"""For the first request of a connection to be complete."""
IDLE_S = 30.0
"""For each later one: a downloader writes and hashes between two."""
PIECE = 262_144
"""Bytes that are handed to the socket in one go while others wait."""
LIMITED_PIECE = 65_536
"""The same where uploads are limited: a reader sees something every second."""
MAX_VERIFIED = 65_536
"""Chunks known to stand on the disk as they should; 64 GB of them."""


class HttpPortError(ListenError):
    """Somebody else has the port."""

    def __init__(self, port: int, reason: str) -> None:
        LocalError.__init__(
            self,
            f"Cannot serve chunks over HTTP at port {port}: {reason}. Choose another port with --http, or "
            "leave the flag out.",
        )
        self.address = str(port)


class Chunks(Protocol):
    """What is served: the part of `BlobIndex` that this needs."""

    def place(self, digest: bytes) -> tuple[Path, int, int] | None:
        """File, offset and length, where the chunk lies on the disk."""

    def read(self, digest: bytes) -> bytes | None:
        """The verified chunk, from wherever it is held."""

    def tell_damage(self) -> None:
        """Reports the files that `read` found to be not what they were."""


@asynccontextmanager
async def chunks_by_http(settings: Settings, network: Network, swarm: Swarm) -> AsyncIterator[None]:
    """Where a port is set, serves there what a node holds, at the IP addresses that libp2p listens on, and
    has others told of it. Raises HttpPortError, and LocalError where the uplink is too slow for that."""
    if settings.http is None:
        yield
        return
    if settings.upload is not None and settings.upload < MIN_RATE:
        raise LocalError(
            f"With an upload limit of {settings.upload // 1000} KB/s chunks would come too late over HTTP. "
            f"Leave --http out, or allow at least {MIN_RATE // 1000} KB/s with --upload."
        )
    hosts = [address.split("/")[2] for address in settings.listen] or ["0.0.0.0"]
    serve = partial(serve_chunks, hosts=hosts, fault=network.stats.fault)
    async with trio.open_nursery() as nursery:
        swarm.http_port = await nursery.start(serve, swarm.index, settings.http, network.upload)
        yield
        nursery.cancel_scope.cancel()


async def serve_chunks(
    index: Chunks,
    port: int,
    limit: UploadLimit,
    *,
    hosts: Sequence[str] = ("0.0.0.0",),
    fault: Callable[[str], None] = lambda name: None,
    task_status: Any = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until cancelled; started with the port, which was any free one if it was 0.

    `hosts`: IP addresses to listen on. `fault` is told what clients did wrong, by a fixed name. Raises
    HttpPortError.
    """
    listeners: list[trio.SocketListener] = []
    try:
        for host in dict.fromkeys(hosts):
            listeners += await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        for listener in listeners:
            await listener.aclose()
        raise HttpPortError(port, (error.strerror or str(error)).lower()) from error
    task_status.started(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(_Server(index, limit, fault).handle, listeners)


class _Server:
    def __init__(self, index: Chunks, limit: UploadLimit, fault: Callable[[str], None]) -> None:
        self._index, self._limit, self._fault = index, limit, fault
        rate = limit.rate
        self._slots = slots_at(None if rate is None else rate * HTTP_SHARE, MAX_UPLOADS)
        self._slots_of_client = max(1, self._slots // 2)
        self._piece = PIECE if rate is None else LIMITED_PIECE
        self._connections: Counter[str] = Counter()
        self._uploads: Counter[str] = Counter()
        self._verified: dict[bytes, tuple[Path, int, int]] = {}

    async def handle(self, stream: trio.SocketStream) -> None:
        """One connection, until it ends. Never raises."""
        try:
            client = _client(stream)
            room = self._connections.total() < MAX_CONNECTIONS
            if not room or self._connections[client] >= MAX_CLIENT_CONNECTIONS:
                self._fault("http-too-many")
                return
            with _counted(self._connections, client):
                await self._converse(Wire(stream), client)
        except trio.TooSlowError:
            self._fault("http-slow")
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            self._fault("http-broken-off")
        except Exception:  # an error of ours ends this connection, not the node
            self._fault("http-failed")
        finally:
            await trio.aclose_forcefully(stream)

    async def _converse(self, wire: Wire, client: str) -> None:
        seconds = REQUEST_S
        while True:
            try:
                with trio.fail_after(seconds):
                    asked = await wire.request()
            except h11.RemoteProtocolError as error:
                self._fault("http-malformed")
                await wire.refuse(431 if error.error_status_hint == 431 else 400, ("Connection", "close"))
                await wire.part()
                return
            except trio.TooSlowError:
                if seconds == IDLE_S and wire.idle:
                    return  # a downloader that has what it wanted
                raise
            if asked is None:
                return
            await self._answer(wire, asked, client)
            if not wire.again():
                await wire.part()
                return
            seconds = IDLE_S

    async def _answer(self, wire: Wire, asked: Asked, client: str) -> None:
        if asked.method not in ("GET", "HEAD"):
            await wire.refuse(405, ("Allow", "GET, HEAD"))
        elif asked.name is None:
            await wire.refuse(400)
        elif self._uploads.total() >= self._slots or self._uploads[client] >= self._slots_of_client:
            await wire.refuse(503, ("Retry-After", str(RETRY_S)))
        else:
            with _counted(self._uploads, client):
                digest = bytes.fromhex(asked.name)
                body = self._standing(digest) or await trio.to_thread.run_sync(self._read, digest)
                if body is None:
                    self._index.tell_damage()
                    await wire.refuse(404)
                    return
                try:
                    await self._blob(wire, asked, body, f'"{asked.name}"')
                finally:
                    if body.file is not None:
                        body.file.close()

    async def _blob(self, wire: Wire, asked: Asked, body: Body, etag: str) -> None:
        about = [("ETag", etag), ("Cache-Control", "public, max-age=31536000, immutable")]
        about.append(("Accept-Ranges", "bytes"))
        if asked.holds(etag):
            await wire.head(304, about)
            await wire.nothing()
            return
        part = asked.part(body.length, etag)
        if part is None:
            await wire.refuse(416, ("Content-Range", f"bytes */{body.length}"))
            return
        about += [("Content-Type", "application/octet-stream"), ("Content-Length", str(len(part)))]
        whole = len(part) == body.length
        if not whole:
            about.append(("Content-Range", f"bytes {part.start}-{part.stop - 1}/{body.length}"))
        await wire.head(200 if whole else 206, about)
        if asked.method == "HEAD":
            await wire.nothing()
        else:
            await wire.body(body, part, self._piece, self._limit)

    def _standing(self, digest: bytes) -> Body | None:
        """What may go out as it lies on the disk: it was right, and nobody has written to its file since."""
        place = self._index.place(digest)
        if place is None or (digest not in self._verified and not _under_way(place[0])):
            return None
        path, offset, length = place
        with suppress(OSError):
            file = path.open("rb", buffering=0)
            if _under_way(path) or self._verified[digest] == _mark(path, file):
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)
                return Body(length, file=file, offset=offset)
            file.close()
        return None

    def _read(self, digest: bytes) -> Body | None:
        """What is held of a hash, verified; runs in a thread."""
        self._verified.pop(digest, None)
        place = self._index.place(digest)
        mark = None
        if place is not None:
            with suppress(OSError), place[0].open("rb") as file:
                mark = _mark(place[0], file)
        data = self._index.read(digest)
        if data is None:
            return None
        if mark is not None:
            if len(self._verified) >= MAX_VERIFIED:
                self._verified.clear()
            self._verified[digest] = mark
        return Body(len(data), data)


@contextmanager
def _counted(counter: Counter[str], client: str) -> Iterator[None]:
    counter[client] += 1
    try:
        yield
    finally:
        counter[client] -= 1
        if not counter[client]:
            del counter[client]


def _client(stream: trio.SocketStream) -> str:
    """Whom limits of a client are counted for: an IPv6 customer has a whole /64."""
    address = ipaddress.ip_address(stream.socket.getpeername()[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)


def _under_way(path: Path) -> bool:
    """Whether this process writes there, what it has verified."""
    return any(folder.name.endswith(UNDER_WAY) for folder in path.parents)


def _mark(path: Path, file: BinaryIO) -> tuple[Path, int, int]:
    state = os.fstat(file.fileno())
    return path, state.st_mtime_ns, state.st_size
