"""Request and response over a stream: `u32 big-endian length, payload` each way, then closed.

A server reads one request, runs a handler, writes one answer. Whatever goes wrong resets that stream,
is counted and never leaves this file; what a peer may hold at once is bounded by count, size and time.
Spec: `specs/03-transport.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import trio
from libp2p.network.exceptions import SwarmException
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError, MuxedStreamReset

from nous_node.protocol.errors import NousError

from .frames import OversizeFrameError
from .muxer_stream import MAX_FRAME
from .network_errors import (
    NotConnectedError,
    OversizeResponseError,
    RequestFailedError,
    RequestTimeoutError,
    UnsupportedProtocolError,
)
from .network_stats import NetworkStats

CALLED_OFF = "called-off"
"""No fault: whoever asked has it from somebody else by now."""

Handler = Callable[[str, bytes], Awaitable[bytes]]

PREFIX_BYTES = 4
UNSUPPORTED = "protocols not supported"  # how libp2p's error begins when the peer itself said so
# A request is small; one that trickles in for longer than this is an attack or a dead link.
READ_REQUEST_S = 10.0
# Each STALL_BYTES of a payload that has begun come within STALL_S: a peer that sends a byte a second would
# hold up a place in our window for the whole deadline.
STALL_BYTES = 16 * 1024
STALL_S = 10.0
# Between two looks at that: a deadline that moves with every piece would cost more than reading it.
MARK_S = 0.5


async def write_frame(muxed: Any, payload: bytes) -> None:
    """Write one frame to a muxed stream."""
    prefix, begin = len(payload).to_bytes(PREFIX_BYTES, "big"), MAX_FRAME - PREFIX_BYTES
    await muxed.write(prefix + payload[:begin])
    if len(payload) > begin:
        await muxed.write(memoryview(payload)[begin:])


async def read_frame(muxed: Any, limit: int) -> bytes:
    """Read one frame of at most `limit` bytes; memory grows with what arrives, not with what is announced.

    Raises OversizeFrameError before reading a payload, muxer errors when the stream ends early, TooSlowError
    when a payload that has begun does not go on.
    """
    buffer = bytearray()
    while len(buffer) < PREFIX_BYTES:
        buffer += await muxed.read(PREFIX_BYTES - len(buffer))
    size = int.from_bytes(buffer, "big")
    if size > limit:
        raise OversizeFrameError(size, limit)
    pieces: list[bytes | memoryview] = []
    left, mark, marked = size, size, trio.current_time()
    with trio.fail_after(STALL_S) as scope:
        while left:
            pieces.append(await muxed.read_piece(left))
            left -= len(pieces[-1])
            now = trio.current_time()
            if mark - left >= STALL_BYTES and now - marked >= MARK_S:
                mark, marked, scope.deadline = left, now, now + STALL_S
    return b"".join(pieces)


@dataclass(frozen=True)
class Service:
    """One served protocol and its bounds."""

    protocol: str
    handler: Handler
    max_request: int  # bytes
    max_response: int  # bytes
    per_peer: int  # requests of one peer at once; more are reset
    total: int  # handlers at once; more wait their turn within the deadline
    deadline: float  # seconds from the complete request, or its turn, to the last byte of the answer
    turns: Turns | None = None  # instead of `total`: who waits, how long, and what answers those who cannot


class Turns(Protocol):
    """Decides whose request is worked on next."""

    @property
    def busy(self) -> bytes:
        """The answer to a request for which there is no time."""

    def turn(self, peer: str) -> AbstractAsyncContextManager[bool]:
        """Waits for the peer's turn; False where it does not come."""


class Server:
    """Runs one service on streams that the host hands over."""

    def __init__(self, service: Service, stats: NetworkStats) -> None:
        self._service = service
        self._stats = stats
        self._active: Counter[str] = Counter()
        self._limiter = trio.CapacityLimiter(service.total)

    async def handle(self, stream: Any) -> None:
        """Answer one stream. Never raises."""
        peer = str(stream.muxed_conn.peer_id)
        if self._active[peer] >= self._service.per_peer:
            self._stats.fault("request-too-many")
            await stream.reset()
            return
        self._active[peer] += 1
        try:
            fault = await self._answer(peer, stream.muxed_stream)
        finally:
            self._active[peer] -= 1
            if not self._active[peer]:
                del self._active[peer]
        if fault is None:
            await stream.close()
        else:
            if fault != CALLED_OFF:
                self._stats.fault(fault)
            await stream.reset()

    async def _answer(self, peer: str, muxed: Any) -> str | None:
        """None, or the name of the fault that ends the stream."""
        try:
            with trio.fail_after(READ_REQUEST_S):
                request = await read_frame(muxed, self._service.max_request)
            if self._service.turns is None:
                with trio.fail_after(self._service.deadline):
                    async with self._limiter:
                        return await self._respond(peer, request, muxed)
            async with self._service.turns.turn(peer) as granted:
                with trio.fail_after(self._service.deadline):
                    if granted:
                        return await self._respond(peer, request, muxed)
                    await write_frame(muxed, self._service.turns.busy)
        except trio.TooSlowError:
            return "request-slow"
        except OversizeFrameError:
            return "request-oversize"
        except (MuxedStreamError, MuxedConnUnavailable):
            return "request-broken-off"
        return None

    async def _respond(self, peer: str, request: bytes, muxed: Any) -> str | None:
        response = await self._run(peer, request)
        if response is None:
            return "request-handler"
        try:
            await write_frame(muxed, response)
        except MuxedStreamReset:
            return CALLED_OFF
        return None

    async def _run(self, peer: str, request: bytes) -> bytes | None:
        try:
            response = await self._service.handler(peer, request)
        except trio.TooSlowError:  # a deadline inside the handler, not ours
            return None
        except Exception:
            return None
        return response if len(response) <= self._service.max_response else None


async def request(
    host: Any, peer_id: Any, protocol: str, payload: bytes, *, max_response: int, deadline: float
) -> bytes:
    """Ask one peer; see `Network.request`."""
    peer = str(peer_id)
    muxed = None
    try:
        with trio.fail_after(deadline):
            prefix = len(payload).to_bytes(PREFIX_BYTES, "big")
            muxed = await host.ask(peer_id, protocol, prefix + payload)
            response = await read_frame(muxed, max_response)
            muxed = None
            return response
    except (trio.TooSlowError, NousError, OversizeFrameError) as error:
        match error:
            case NousError():
                raise
            case OversizeFrameError():
                raise OversizeResponseError(peer, error.size, error.limit) from error
            case _:
                raise RequestTimeoutError(peer, deadline) from error
    except SwarmException as error:
        raise NotConnectedError(peer) from error
    except (MultiselectClientError, MuxedStreamError, MuxedConnUnavailable) as error:
        if str(error).startswith(UNSUPPORTED):
            raise UnsupportedProtocolError(peer, protocol) from error
        raise RequestFailedError(peer, "it ended the stream before a complete answer") from error
    finally:
        if muxed is not None:
            with trio.CancelScope(shield=True):
                await muxed.reset()
