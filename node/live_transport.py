"""Live checks of connections: negotiation, Noise, Yamux, ping, identify. Spec: `specs/03-transport.md`."""

from __future__ import annotations

import os

import trio
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError

from .hardening import HANDSHAKE_S, MAX_NEGOTIATION_LINE, PING_BYTES, PING_PROTOCOL
from .live_check import Checks, Failed, Untested
from .live_target import Target
from .live_wire import MULTISTREAM_LINE, Yamux, agree, closes, dialled, line, raw_connection, secured, yamux
from .muxer import ACK, MAX_INBOUND_STREAMS, PING, RST, SYN, WINDOW_UPDATE
from .muxer_stream import INITIAL_WINDOW
from .network import PING_DEADLINE_S, PING_INTERVAL_S

check: Checks[Target] = Checks()

OTHER_SECURITY = ("/plaintext/2.0.0", "/tls/1.0.0", "/secio/1.0.0")
OTHER_MUXER = "/mplex/6.7.0"
SLACK_S = 5.0
"""Beside a deadline of the specification: a loaded machine, and the way there and back."""
SOON_S = 5.0
"""For what happens at once."""
MAX_IDENTIFY = 1 << 16
PINGS = 3
TOO_MANY = 16
"""Streams beyond the limit that are opened."""


@check("security-other", "NET-2", seconds=20)
async def security_other(target: Target) -> str:
    for protocol in OTHER_SECURITY:
        async with dialled(target.place) as socket:
            try:
                await agree(raw_connection(socket), protocol)
            except Exception:  # refused in words, or closed
                continue
            raise Failed(f"It agreed to {protocol} for security.")
    return f"refused: {', '.join(OTHER_SECURITY)}"


@check("security-noise", "NET-1", "NET-2")
async def security_noise(target: Target) -> str:
    async with dialled(target.place) as socket:
        try:
            session = await secured(socket, target.place.peer)
        except Exception as error:
            raise Failed(
                f"No Noise session as {target.place.peer}: {error or type(error).__name__}"
            ) from error
        try:
            await agree(session, OTHER_MUXER)
        except Exception:
            return "Noise proves the peer id of the address; another muxer than Yamux is refused"
        raise Failed(f"It agreed to the muxer {OTHER_MUXER}.")


@check("handshake-slow", "NET-1", seconds=HANDSHAKE_S + 3 * SLACK_S, aside=True)
async def handshake_slow(target: Target) -> str:
    """Each socket stops at another place."""
    beginnings = (b"", MULTISTREAM_LINE[:5], MULTISTREAM_LINE + line("/noise"))
    longest = 0.0

    async def stall(beginning: bytes) -> None:
        nonlocal longest
        began = trio.current_time()
        with trio.move_on_after(HANDSHAKE_S + SLACK_S):
            async with dialled(target.place) as socket:
                await socket.send_all(beginning)
                await closes(socket)
                longest = max(longest, trio.current_time() - began)
                return
        raise Failed(f"A handshake that stops after {len(beginning)} bytes keeps its connection.")

    async with trio.open_nursery() as nursery:
        for beginning in beginnings:
            nursery.start_soon(stall, beginning)
    return f"closed within {longest:.1f} s"


@check("negotiation-line-long", "NET-1", seconds=3 * SOON_S + SLACK_S)
async def negotiation_line_long(target: Target) -> str:
    """One byte more than a line may have, by the length in front of it; then a length without an end."""
    size = MAX_NEGOTIATION_LINE + 1
    long = bytes([size & 0x7F | 0x80, size >> 7]) + b"/" * (size - 1) + b"\n"
    for sent in (MULTISTREAM_LINE + long, b"\xff" * 20):
        async with dialled(target.place) as socket:
            await _write(socket, sent)
            await _closed_soon(socket, f"A negotiation line of {size} bytes keeps its connection.")
    return "closed"


@check("garbage", "NET-1", seconds=4 * SOON_S + SLACK_S)
async def garbage(target: Target) -> str:
    noise = MULTISTREAM_LINE + line("/noise")
    for sent in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), noise + b"\x00\x20" + os.urandom(32)):
        async with dialled(target.place) as socket:
            await _write(socket, sent)
            await _closed_soon(socket, "Bytes that are no handshake keep their connection.")
    return "closed"


async def _write(socket: trio.SocketStream, data: bytes) -> None:
    try:
        await socket.send_all(data)
    except trio.BrokenResourceError:
        return  # it had enough already


async def _closed_soon(socket: trio.SocketStream, otherwise: str) -> None:
    """At once, or when the handshake has taken too long: both end it."""
    with trio.move_on_after(HANDSHAKE_S + SLACK_S):
        await closes(socket)
        return
    raise Failed(otherwise)


@check("yamux-window", "NET-3")
async def yamux_window(target: Target) -> str:
    """One byte past the window in one frame: whatever the other side reads, it cannot have granted it yet."""
    async with yamux(target.place) as peer:
        body = MULTISTREAM_LINE + bytes(INITIAL_WINDOW + 1 - len(MULTISTREAM_LINE))
        with trio.move_on_after(SOON_S + SLACK_S):
            try:
                await peer.open(1, body)
                await peer.closes()
            except Exception:  # a reset ends it, too
                return "the connection broke off"
            return "the connection ended"
    raise Failed(f"{INITIAL_WINDOW + 1} bytes on a stream whose window has {INITIAL_WINDOW} are no offence.")


@check("yamux-streams", "NET-3", seconds=20)
async def yamux_streams(target: Target) -> str:
    async with yamux(target.place) as peer:
        ids = range(1, 2 * (MAX_INBOUND_STREAMS + TOO_MANY), 2)
        for stream in ids:
            await peer.send(WINDOW_UPDATE, SYN, stream, 0)
        reset: set[int] = set()
        beyond = set(ids[MAX_INBOUND_STREAMS:])
        with trio.move_on_after(SOON_S / 2):  # the others end when their negotiation takes too long
            while (frame := await peer.frame()) is not None:
                if frame.flags & RST:
                    reset.add(frame.stream)
                if reset >= beyond:
                    break
        if not reset >= beyond:
            raise Failed(f"Of {len(ids)} open streams {len(reset & beyond)} of {TOO_MANY} were reset.")
        if reset & set(ids[:MAX_INBOUND_STREAMS]):
            raise Failed("It reset streams below the limit.")
        await _pong(peer)
    return f"of {len(ids)} open streams the newest {len(reset)} were reset"


@check("yamux-ping", "NET-3")
async def yamux_ping(target: Target) -> str:
    """While streams wait for the rest of what they were sent."""
    async with yamux(target.place) as peer:
        for stream in range(1, 11, 2):
            await peer.open(stream, MULTISTREAM_LINE[:3])
        await _pong(peer)
    return "answered"


async def _pong(peer: Yamux) -> None:
    number = int.from_bytes(os.urandom(4), "big")
    await peer.send(PING, SYN, 0, number)
    with trio.move_on_after(SOON_S):
        while (frame := await peer.frame()) is not None:
            if (frame.kind, frame.flags & ACK, frame.length) == (PING, ACK, number):
                return
    raise Failed("A Yamux ping has no answer.")


@check("yamux-garbage", "NET-3")
async def yamux_garbage(target: Target) -> str:
    """Another version of Yamux ends that connection and no other."""
    async with yamux(target.place) as peer:
        await peer.junk(b"\xff" * 12)
        with trio.move_on_after(SOON_S):
            await peer.closes()
            return "the connection ended"
    raise Failed("A frame of another version of Yamux keeps its connection.")


@check("ping", "NET-4")
async def ping(target: Target) -> str:
    stream = await target.listener.stream(PING_PROTOCOL)
    for _ in range(PINGS):
        sent, found = os.urandom(PING_BYTES), b""
        await stream.write(sent[:7])  # in pieces, as a slow line brings it
        await stream.write(sent[7:])
        while len(found) < PING_BYTES:
            found += await stream.read(PING_BYTES - len(found))
        if found != sent:
            raise Failed("It answered a ping with other bytes.")
    await stream.reset()
    return f"{PINGS} on one stream"


@check("identify", "NET-4")
async def identify(target: Target) -> str:
    try:
        stream = await target.listener.stream(IDENTIFY)
    except MultiselectClientError as error:
        raise Untested(
            "It serves no identify, which is a SHOULD: some libraries gossip with nobody then."
        ) from (error)
    data = b""
    try:
        while len(data) <= MAX_IDENTIFY:
            data += await stream.read(4096)
    except (MuxedStreamError, MuxedConnUnavailable):
        pass
    told = _identify(data)
    missing = {PING_PROTOCOL} - set(told.protocols)
    if missing:
        raise Failed(f"Its identify does not name {', '.join(missing)}.")
    return f"{len(told.protocols)} protocols"


def _identify(data: bytes) -> Identify:
    """With its length in front, as identify is specified, or, from some libraries, without."""
    size, start = data[:1], 1
    if data[:1] and data[0] & 0x80:
        start = 2
    for part in (data[start:], data):
        try:
            told = Identify.FromString(part)
        except Exception:
            continue
        if told.protocols:
            return told
    raise Failed(f"Its identify is no message ({len(data)} bytes, the first {size.hex()}).")


@check("silent", "NET-8", seconds=PING_INTERVAL_S + PING_DEADLINE_S + 3 * SLACK_S, aside=True)
async def silent_closed(target: Target) -> str:
    """A connection that says nothing more, and answers nothing."""
    began, pinged = trio.current_time(), ""
    async with yamux(target.place, silent=True) as peer:
        with trio.move_on_after(PING_INTERVAL_S + PING_DEADLINE_S + 2 * SLACK_S):
            while (frame := await peer.frame()) is not None:
                if frame.kind == PING and not pinged:
                    pinged = f"pinged after {trio.current_time() - began:.0f} s, "
            return f"{pinged}closed after {trio.current_time() - began:.0f} s"
    raise Untested(f"{pinged or 'not pinged, '}not closed: a SHOULD.")
