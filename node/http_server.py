"""Chunks over plain HTTP: `GET /blob/<hash>` of whatever this node holds, for anybody who asks. [STR-6]

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_chunks, index, 8080, network.upload)

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import h11
import trio

from nous_node.protocol.errors import LocalError

from .http_asked import Asked
from .network_errors import ListenError
from .upload_limit import UploadLimit

MAX_HEAD = 8_192
"""Bytes of a request line with its headers; ours have 200."""
MAX_CONNECTIONS = 256
"""Of all clients; each costs a task and a few KB."""
MAX_CLIENT_CONNECTIONS = 64
"""Of one IPv4 address or IPv6 /64: some volunteers behind one router."""
MAX_UPLOADS = 32
"""Bodies under way at once, as many as streams of libp2p; beyond that 503."""
MAX_CLIENT_UPLOADS = 16
"""Of one address."""
UPLOAD_RATE = 100_000.0
"""Bytes a second that each body should have of a limited uplink: with more at once all of them would be too
slow to be waited for."""
RETRY_S = 1
"""What a client that got 503 is told to wait."""
REQUEST_S = 10.0
"""For the first request of a connection to be complete."""
IDLE_S = 30.0
"""For each later one: a downloader writes and hashes between two."""
STALL_S = 10.0
"""For each PIECE to be taken."""
PIECE = 262_144
"""Bytes that are handed to the socket in one go while others wait."""
LIMITED_PIECE = 65_536
"""The same where uploads are limited: a reader sees something every second."""
PARTING_S = 1.0
"""For a client that was refused to read why."""
MAX_UNREAD = 131_072
"""Bytes of its that are read for that, and dropped."""
MAX_VERIFIED = 65_536
"""Chunks known to stand on the disk as they should; 64 GB of them."""

_SENTENCES = {
    400: "Ask for /blob/ and the 64 hexadecimal digits of a hash.",
    404: "Not held here.",
    405: "Only GET and HEAD.",
    416: "No such range.",
    431: "The request is too long.",
    503: "Too many uploads; try again.",
}
_UNDER_WAY = ".part"
"""How folders end in which this process writes what it has verified."""


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


class _Body(NamedTuple):
    """A chunk that is about to go out: its bytes, or the open file in which they lie."""

    length: int
    data: bytes = b""
    file: BinaryIO | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Passed:
    """Bytes that h11 counts and does not touch."""

    length: int

    def __len__(self) -> int:
        return self.length


class _Wire:
    """One connection: requests in, answers out."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._method = "GET"

    async def request(self) -> Asked | None:
        """The next one; None where the client has gone.

        Raises h11.RemoteProtocolError, also where a body comes along.
        """
        asked = None
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self.stream.receive_some(MAX_HEAD))
            elif isinstance(event, h11.Request):
                asked = Asked(event)
                self._method = asked.method
            elif isinstance(event, h11.EndOfMessage):
                return asked
            elif isinstance(event, h11.ConnectionClosed):
                return None
            else:
                raise h11.RemoteProtocolError("a request with a body")

    @property
    def idle(self) -> bool:
        """Whether nothing of a next request has come."""
        return not self._http.trailing_data[0]

    def again(self) -> bool:
        """Makes ready for the next request; False where there is none."""
        if self._http.our_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def refuse(self, status: int, *about: tuple[str, str]) -> None:
        text = _SENTENCES[status].encode() + b"\n"
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))]
        await self.head(status, [*headers, ("Cache-Control", "no-store"), *about])
        await self._end(text)

    async def head(self, status: int, headers: list[tuple[str, str]]) -> None:
        always = [("Date", formatdate(usegmt=True)), ("X-Content-Type-Options", "nosniff")]
        await self._out(self._http.send(h11.Response(status_code=status, headers=headers + always)))

    async def nothing(self) -> None:
        """The end of an answer without a body."""
        await self._end(b"")

    async def body(self, body: _Body, part: range, piece: int, limit: UploadLimit) -> None:
        self._http.send_with_data_passthrough(h11.Data(data=_Passed(len(part))))  # type: ignore[arg-type]
        view = memoryview(body.data)
        for start in range(part.start, part.stop, piece):
            size = min(piece, part.stop - start)
            await limit.take(size)
            with trio.fail_after(STALL_S):
                if body.file is None:
                    await self.stream.send_all(view[start : start + size])
                else:
                    await _send_file(self.stream, body.file, body.offset + start, size)
        self._http.send(h11.EndOfMessage())

    async def part(self) -> None:
        """Lets the client read the last answer: closing at once would take it back where it still writes."""
        with trio.move_on_after(PARTING_S):
            await self.stream.send_eof()
            for _ in range(MAX_UNREAD // MAX_HEAD):
                if not await self.stream.receive_some(MAX_HEAD):
                    return

    async def _end(self, text: bytes) -> None:
        data = self._http.send(h11.Data(data=text)) if text and self._method != "HEAD" else None
        await self._out((data or b"") + (self._http.send(h11.EndOfMessage()) or b""))

    async def _out(self, wire: bytes | None) -> None:
        with trio.fail_after(STALL_S):
            await self.stream.send_all(wire or b"")


class _Server:
    def __init__(self, index: Chunks, limit: UploadLimit, fault: Callable[[str], None]) -> None:
        self._index, self._limit, self._fault = index, limit, fault
        rate = limit.rate
        self._slots = MAX_UPLOADS if rate is None else max(1, min(MAX_UPLOADS, int(rate / UPLOAD_RATE)))
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
                await self._converse(_Wire(stream), client)
        except trio.TooSlowError:
            self._fault("http-slow")
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            self._fault("http-broken-off")
        except Exception:  # an error of ours ends this connection, not the node
            self._fault("http-failed")
        finally:
            await trio.aclose_forcefully(stream)

    async def _converse(self, wire: _Wire, client: str) -> None:
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

    async def _answer(self, wire: _Wire, asked: Asked, client: str) -> None:
        if asked.method not in ("GET", "HEAD"):
            await wire.refuse(405, ("Allow", "GET, HEAD"))
        elif asked.name is None:
            await wire.refuse(400)
        elif self._uploads.total() >= self._slots or self._uploads[client] >= MAX_CLIENT_UPLOADS:
            await wire.refuse(503, ("Retry-After", str(RETRY_S)))
        else:
            with _counted(self._uploads, client):
                body = await trio.to_thread.run_sync(self._open, bytes.fromhex(asked.name))
                if body is None:
                    await wire.refuse(404)
                    return
                try:
                    await self._blob(wire, asked, body, f'"{asked.name}"')
                finally:
                    if body.file is not None:
                        body.file.close()

    async def _blob(self, wire: _Wire, asked: Asked, body: _Body, etag: str) -> None:
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

    def _open(self, digest: bytes) -> _Body | None:
        """What is held of a hash; runs in a thread, since a disk may be slow."""
        place = self._index.place(digest)
        if place is not None:
            path, offset, length = place
            with suppress(OSError):
                file = path.open("rb", buffering=0)
                state = os.fstat(file.fileno())
                mark = (path, state.st_mtime_ns, state.st_size)
                if self._verified.get(digest) == mark or _under_way(path):
                    if hasattr(os, "posix_fadvise"):
                        os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)
                    return _Body(length, file=file, offset=offset)
                file.close()
                if len(self._verified) >= MAX_VERIFIED:
                    self._verified.clear()
                self._verified[digest] = mark
        data = self._index.read(digest)
        if data is None:
            self._verified.pop(digest, None)
            return None
        return _Body(len(data), data)


async def _send_file(stream: trio.SocketStream, file: BinaryIO, offset: int, size: int) -> None:
    """Raises OSError, also where the file ends early: the answer cannot be completed any more."""
    end = offset + size
    while offset < end:
        try:
            sent = os.sendfile(stream.socket.fileno(), file.fileno(), offset, end - offset)
        except BlockingIOError:
            await trio.lowlevel.wait_writable(stream.socket.fileno())
            continue
        if sent == 0:
            raise OSError("the file has become shorter")
        offset += sent
    await trio.lowlevel.checkpoint()


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
    return any(folder.name.endswith(_UNDER_WAY) for folder in path.parents)
