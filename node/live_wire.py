"""A connection of the kit's own below our muxer: bytes on a socket, a Noise session, Yamux frames one by one.

What an honest node never sends can only be sent from here. Reading has limits: the other end may be anybody.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX

from .hardening import MULTISTREAM, NEGOTIATION_S, BoundedCommunicator, BoundedRawConnection
from .live_check import Failed
from .muxer import ACK, DATA, HEADER, PING, SYN

FLOOD_BYTES = 64 << 20
"""More than a client has any reason to send within a check."""
DIAL_PAUSE_S = 0.25
"""Between two connections: some libraries take five a second of one IP address, and close what is beyond."""
MAX_FRAME_BODY = 1 << 20
"""Of a Yamux frame that is read whole: the largest window that an answer of ours grants."""

MULTISTREAM_LINE = b"\x13" + MULTISTREAM + b"\n"


class Pace:
    """Keeps dials apart, whoever makes them."""

    def __init__(self) -> None:
        self._due = -math.inf

    async def turn(self) -> None:
        now = trio.current_time()
        self._due = max(self._due + DIAL_PAUSE_S, now)
        await trio.sleep(self._due - now)


@dataclass(frozen=True)
class Place:
    """Where a client listens, and who it has to be."""

    host: str
    port: int
    peer: str
    pace: Pace = field(default_factory=Pace)

    @classmethod
    def of(cls, address: str) -> Place:
        """Of a multiaddr that `parse_address` takes."""
        parts = address.split("/")
        return cls(parts[2], int(parts[4]), parts[-1])


def line(text: str) -> bytes:
    """A multistream-select line."""
    data = text.encode() + b"\n"
    size = len(data)
    head = bytes([size]) if size < 0x80 else bytes([size & 0x7F | 0x80, size >> 7])
    return head + data


@asynccontextmanager
async def dialled(place: Place) -> AsyncIterator[trio.SocketStream]:
    """A bare TCP connection."""
    await place.pace.turn()
    try:
        socket = await trio.open_tcp_stream(place.host, place.port)
    except OSError as error:
        raise Failed(f"It takes no TCP connection any more ({error}).") from error
    async with socket:
        yield socket


async def closes(socket: trio.SocketStream) -> None:
    """Returns when the other side has closed a socket; what it sends before is passed over."""
    seen = 0
    try:
        while data := await socket.receive_some(1 << 16):
            seen += len(data)
            if seen > FLOOD_BYTES:
                raise Failed(f"It sent {seen} bytes to somebody who asked for nothing.")
    except trio.BrokenResourceError:
        return


def raw_connection(socket: trio.SocketStream) -> Any:
    """What libp2p's negotiation takes."""
    return BoundedRawConnection(TrioTCPStream(socket), True)


async def agree(connection: Any, protocol: str) -> None:
    """Multistream-select of one protocol. Raises what libp2p does where the other side wants another."""
    await MultiselectClient().select_one_of((protocol,), BoundedCommunicator(connection), NEGOTIATION_S)


async def secured(socket: trio.SocketStream, peer: str) -> Any:
    """A Noise session with a key of its own. Raises what libp2p does where the other end is somebody else."""
    key_pair = create_new_key_pair(os.urandom(32))
    noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
    raw = raw_connection(socket)
    await agree(raw, NOISE)
    return await noise.secure_outbound(raw, ID.from_base58(peer))


class Frame(NamedTuple):
    """One of Yamux."""

    kind: int
    flags: int
    stream: int
    length: int
    body: bytes


class Yamux:
    """A session on which Yamux was agreed: each frame is the check's own. Pings are answered unless it is to
    be `silent`."""

    def __init__(self, session: Any, *, silent: bool = False) -> None:
        self._session, self._silent = session, silent
        self._seen = 0  # bytes of all streams

    async def send(self, kind: int, flags: int, stream: int, length: int, body: bytes = b"") -> None:
        data = HEADER.pack(0, kind, flags, stream, length) + body
        view = memoryview(data)
        while view:  # a Noise message holds less than 64 KiB
            await self._session.write(bytes(view[:60_000]))
            view = view[60_000:]

    async def junk(self, data: bytes) -> None:
        """Bytes that are no frame."""
        await self._session.write(data)

    async def open(self, stream: int, body: bytes) -> None:
        """A stream with its first bytes."""
        await self.send(DATA, SYN, stream, len(body), body)

    async def frame(self) -> Frame | None:
        """The next one; None when the other side has closed."""
        header = await self._exactly(HEADER.size)
        if header is None:
            return None
        _, kind, flags, stream, length = HEADER.unpack(header)
        size = length if kind == DATA else 0
        self._seen += size
        if size > MAX_FRAME_BODY or self._seen > FLOOD_BYTES:
            raise Failed(f"It sent a Yamux frame of {size} bytes, past the window of its stream.")
        body = await self._exactly(size)
        if body is None:
            return None
        if kind == PING and flags & SYN and not self._silent:
            await self.send(PING, ACK, 0, length)
        return Frame(kind, flags, stream, length, body)

    async def _exactly(self, size: int) -> bytes | None:
        """None at the end of the connection."""
        found = b""
        try:
            while len(found) < size:
                found += await self._session.read(size - len(found))
        except Exception:
            return None
        return found

    async def closes(self) -> None:
        """Returns when the other side has closed the connection."""
        while await self.frame() is not None:
            pass


@asynccontextmanager
async def yamux(place: Place, *, silent: bool = False) -> AsyncIterator[Yamux]:
    """A connection of a key that nobody knows, up to Yamux."""
    async with dialled(place) as socket:
        session = await secured(socket, place.peer)
        await agree(session, YAMUX)
        yield Yamux(session, silent=silent)
