"""Chunks from a web server: a peer that serves by HTTP too, or a mirror that a checkpoint names. [STR-6]

    source = HttpSource("http://192.0.2.7:8080/", "a peer")
    data = await source.fetch(digest, length)        # not verified yet

h11 reads the head of an answer; the body, whose length is known, goes from the socket into its place. With
1 MiB chunks that moved 3,100 MB per CPU second; httpx 470, urllib3 in threads 2,230, http.client in threads
3,780, which can neither be cancelled nor be given a deadline for a whole chunk.

The server is believed nothing: no redirect is followed, no proxy is asked, nothing is unpacked, no cookie is
kept, and no more is read than was asked for. Where requests go is not for a peer to say (`peer_url`).
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11
import trio

from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.introductions import LEAST_PORT

from .network_errors import RequestFailedError, RequestTimeoutError, UnreachableError
from .sources import CHUNK_SECONDS

DIAL_S = 10.0
"""For the connection, and TLS where there is any; libp2p has as long."""
HEAD_S = 15.0
"""For the head of an answer: an object store may have to look for it."""
STALL_S = 10.0
"""For each STALL_BYTES of a body: a source below 6.5 KB/s holds up a place in the queue."""
STALL_BYTES = 65_536
PIECE = 1 << 20
"""Bytes read in one go at most."""
MAX_HEAD = 16_384
"""Bytes of a status line with headers; object stores send 1 KB."""
MAX_PRELUDES = 8
"""Informational answers (1xx) before the one that counts; servers send one at most."""
MAX_REFUSAL = 8_192
"""Bytes of the text beside another status than 200 that are read, to use the connection again."""
MAX_IDLE = 4
"""Connections that are kept for the next chunks."""
IDLE_S = 20.0
"""After that a connection is not used again: servers close theirs about then, ours after 30 s."""

Stream = trio.SocketStream | trio.SSLStream

_PRINTABLE = re.compile(r"[!-~]{1,1024}")
_CODES = {404: Code.NOT_FOUND, 410: Code.NOT_FOUND, 429: Code.BUSY, 503: Code.BUSY}


def peer_url(address: str, port: int) -> str | None:
    """Where a connected peer serves chunks. `address`: the multiaddr at the other end of its connection, so
    that nobody can have requests sent to a third party; `port`: the only thing that it says, and none below
    1,024, where others may have services behind the same router. [STR-6]"""
    if port < LEAST_PORT:
        return None
    parts = address.split("/")
    try:
        ip = ipaddress.ip_address(parts[2])
    except (IndexError, ValueError):
        return None
    return f"http://[{ip}]:{port}/" if ip.version == 6 else f"http://{ip}:{port}/"


class HttpSource:
    """A `Source` of chunks at one base URL."""

    def __init__(self, url: str, name: str = "") -> None:
        """`name`: what failures are remembered by, where that is not the URL. Raises RemoteError where this
        is no URL that can be asked."""
        self.name = name or url
        self._host, self._port, self._path, self._tls = _parsed(url)
        bare = f"[{self._host}]" if ":" in self._host else self._host
        usual = self._port == (443 if self._tls else 80)
        self._authority = bare if usual else f"{bare}:{self._port}"
        self._idle: list[_Kept] = []

    async def fetch(self, digest: bytes, length: int) -> bytes:
        """The `length` bytes that the server gives for a hash; the caller checks that.

        Raises RequestFailedError, with the code `not-found` where the server does not hold the chunk, `busy`
        where it has no time, `malformed` where it does not behave; RequestTimeoutError where it is too slow;
        UnreachableError.
        """
        started = trio.current_time()
        try:
            with trio.fail_after(CHUNK_SECONDS):
                return await self._fetch(digest, length)
        except trio.TooSlowError as error:
            raise RequestTimeoutError(self.name, round(trio.current_time() - started)) from error
        except h11.ProtocolError as error:
            raise RequestFailedError(self.name, f"it does not speak HTTP ({error})") from error
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise RequestFailedError(self.name, _reason(error)) from error

    def close(self) -> None:
        """Closes what is kept open for further chunks."""
        while self._idle:
            stream: Any = self._idle.pop().stream
            plain = stream.transport_stream if self._tls else stream
            plain.socket.close()

    async def _fetch(self, digest: bytes, length: int) -> bytes:
        while self._idle:
            kept = self._idle.pop()
            if trio.current_time() - kept.used > IDLE_S:
                await trio.aclose_forcefully(kept.stream)
                continue
            try:
                return await self._exchange(kept.stream, kept.room, digest, length)
            except _Gone:
                continue  # the server closed it meanwhile
        try:
            return await self._exchange(await self._dial(), bytearray(), digest, length)
        except _Gone as error:
            raise RequestFailedError(self.name, "it closed the connection without an answer") from error

    async def _dial(self) -> Stream:
        try:
            with trio.fail_after(DIAL_S):
                return await self._connected()
        except trio.TooSlowError as error:
            raise UnreachableError(self.name, f"no answer within {DIAL_S:g} s") from error
        except (OSError, ValueError, trio.BrokenResourceError) as error:  # ValueError: no name of a host
            raise UnreachableError(self.name, _reason(error)) from error

    async def _connected(self) -> Stream:
        plain = await trio.open_tcp_stream(self._host, self._port)
        if not self._tls:
            return plain
        stream = trio.SSLStream(plain, _trusted(), server_hostname=self._host, https_compatible=True)
        try:
            await stream.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(plain)
            raise
        return stream

    async def _exchange(self, stream: Stream, room: bytearray, digest: bytes, length: int) -> bytes:
        """One request on a connection, which is kept afterwards if that is possible."""
        exchange = _Exchange(stream, room)
        kept = False
        try:
            await exchange.ask(self._authority, f"{self._path}blob/{digest.hex()}")
            with trio.fail_after(HEAD_S):
                response = await exchange.answer()
            if response.status_code != 200:
                kept = await exchange.drop(response)
                status = response.status_code
                raise RequestFailedError(
                    self.name, f"it answers {status}", _CODES.get(status, Code.MALFORMED)
                )
            if _length(response) != length or _coded(response):
                raise RequestFailedError(self.name, f"it does not send the {length} bytes of the chunk")
            data = await exchange.body(length)
            kept = exchange.whole
            return data
        finally:
            if kept and len(self._idle) < MAX_IDLE:
                self._idle.append(_Kept(trio.current_time(), stream, room))
            else:
                await trio.aclose_forcefully(stream)


class _Kept(NamedTuple):
    """A connection for the next chunk."""

    used: float
    stream: Stream
    room: bytearray
    """Where a body is put together: touching new memory for each costs as much as copying it."""


class _Gone(Exception):
    """A connection ended before anything of an answer came."""


@dataclass(slots=True)
class _Exchange:
    """A request and its answer."""

    stream: Stream
    room: bytearray
    whole: bool = False
    """Whether the answer was read to its end, and another may follow."""
    _http: h11.Connection = field(
        default_factory=lambda: h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    )

    async def ask(self, authority: str, target: str) -> None:
        headers = [("Host", authority), ("Accept-Encoding", "identity"), ("User-Agent", "nous-node")]
        wire = self._http.send(h11.Request(method="GET", target=target, headers=headers)) or b""
        try:
            await self.stream.send_all(wire + (self._http.send(h11.EndOfMessage()) or b""))
        except (OSError, trio.BrokenResourceError) as error:
            raise _Gone from error

    async def answer(self) -> h11.Response:
        anything, preludes = False, 0
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                return event
            if isinstance(event, h11.InformationalResponse):
                preludes += 1
                if preludes > MAX_PRELUDES:
                    raise h11.RemoteProtocolError(f"{preludes} answers that are none")
            if isinstance(event, h11.ConnectionClosed):
                raise _Gone
            if event is h11.NEED_DATA:
                try:
                    data = await self.stream.receive_some(MAX_HEAD)
                except (OSError, trio.BrokenResourceError) as error:
                    if anything:
                        raise
                    raise _Gone from error
                if not data and not anything:
                    raise _Gone
                anything = True
                self._http.receive_data(data)

    async def body(self, length: int) -> bytes:
        """Exactly that many bytes; progress is made or it ends (TooSlowError)."""
        if len(self.room) < length:
            self.room.extend(bytes(length - len(self.room)))
        came = self._http.trailing_data[0]
        filled = min(len(came), length)
        with memoryview(self.room) as space, space[:length] as view:
            view[:filled] = came[:filled]
            while filled < length:
                mark = min(filled + STALL_BYTES, length)
                with trio.fail_after(STALL_S):
                    while filled < mark:
                        with view[filled : filled + PIECE] as rest:
                            filled += await self._into(rest)
            self.whole = len(came) <= length and self._http.our_state is h11.DONE
            return bytes(view)

    async def drop(self, response: h11.Response) -> bool:
        """Reads the text of a refusal; False where it is too long for that."""
        length = _length(response)
        if length is None or length > MAX_REFUSAL:
            return False
        await self.body(length)
        return self.whole

    async def _into(self, view: memoryview) -> int:
        """Reads into `view`; raises BrokenResourceError where there is nothing any more."""
        if isinstance(self.stream, trio.SocketStream):
            count = await self.stream.socket.recv_into(view)
        else:
            data = await self.stream.receive_some(len(view))
            count = len(data)
            view[:count] = data
        if not count:
            raise trio.BrokenResourceError("it ended the answer early")
        return count


def _parsed(url: str) -> tuple[str, int, str, bool]:
    """Host, port, path that ends in a slash, and whether by TLS."""
    try:
        parts = urlsplit(url)
        port = parts.port
        plain = parts.username is None and not parts.query and not parts.fragment
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or port == 0
            or not plain
            or not _PRINTABLE.fullmatch(url)
        ):
            raise ValueError
    except ValueError as error:
        raise RemoteError(
            Code.WRONG_TYPE,
            f"{url[:100]!r} is no URL of a mirror: http://HOST/PATH or https://HOST/PATH, where HOST may be "
            "followed by a :PORT of 1 to 65535.",
        ) from error
    tls = parts.scheme == "https"
    return parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/") + "/", tls


def _length(response: h11.Response) -> int | None:
    """What the server says that it sends; None where it does not, or in another way."""
    headers = dict(response.headers)
    text = headers.get(b"content-length", b"")
    return int(text) if text.isdigit() and b"transfer-encoding" not in headers else None


def _coded(response: h11.Response) -> bool:
    return dict(response.headers).get(b"content-encoding", b"identity").lower() != b"identity"


@cache
def _trusted() -> ssl.SSLContext:
    """The certificates that this machine trusts; 20 ms to load."""
    return ssl.create_default_context()


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.lower().rstrip(".")
