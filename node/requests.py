"""Request and response over a stream: `u32 big-endian length, payload` each way, then closed.

A server reads one request, runs a handler, writes one answer. Whatever goes wrong resets that stream,
is counted and never leaves this file; what a peer may hold at once is bounded by count, size and time.
Spec: `specs/03-transport.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import trio
from libp2p.network.exceptions import SwarmException
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError, MuxedStreamReset
from trio.lowlevel import ParkingLot

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

HANDLER = "request-handler"
CALLED_OFF = "called-off"
"""No fault: whoever asked has it from somebody else by now."""

Response = bytes | tuple[bytes, ...]
"""Whole, or in parts of which only the last is long."""

Handler = Callable[[str, bytes], Awaitable[Response]]
"""Given a peer and its request."""

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
# Between two looks at a peer that does not read its answer.
LOOK_S = 1.0


async def write_frame(muxed: Any, *parts: bytes) -> None:
    """Write one frame to a muxed stream; of its parts only the last may be long."""
    *heads, last = parts
    head = b"".join((_size(parts).to_bytes(PREFIX_BYTES, "big"), *heads))
    begin = max(0, MAX_FRAME - len(head))
    await muxed.write(head + last[:begin])
    if len(last) > begin:
        await muxed.write(memoryview(last)[begin:])


def _size(parts: Iterable[bytes]) -> int:
    return sum(map(len, parts))


def _parts(response: Response) -> tuple[bytes, ...]:
    return response if isinstance(response, tuple) else (response,)


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


class Turn(Protocol):
    """One request's."""

    @property
    def answer(self) -> bytes | None:
        """Where it is known already, such as that there is no time; else the handler makes it."""

    def stalls(self, seconds: float) -> None:
        """Told how long the peer has not read on, again and again. Raises TooSlowError to end it."""


class Turns(Protocol):
    """Decides whose request is worked on next."""

    def turn(self, peer: str, request: bytes) -> AbstractAsyncContextManager[Turn]:
        """Waits for the turn of a request. Raises what a handler may raise."""


class _Patience:
    """With a peer that does not read its answer: STALL_BYTES within STALL_S, or the answer ends."""

    def __init__(self, turn: Turn | None) -> None:
        self._turn = turn
        self._since, self._mark = 0.0, -STALL_BYTES

    async def park(self, lot: ParkingLot, sent: int) -> None:
        if sent - self._mark >= STALL_BYTES:
            self._since, self._mark = trio.current_time(), sent
        with trio.move_on_after(LOOK_S):
            await lot.park()
            return
        seconds = trio.current_time() - self._since
        if seconds >= STALL_S:
            raise trio.TooSlowError
        if self._turn is not None:
            self._turn.stalls(seconds)


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
                        return await self._respond(peer, request, muxed, None)
            return await self._in_turn(self._service.turns, peer, request, muxed)
        except trio.TooSlowError:
            return "request-slow"
        except OversizeFrameError:
            return "request-oversize"
        except (MuxedStreamError, MuxedConnUnavailable):
            return "request-broken-off"

    async def _in_turn(self, turns: Turns, peer: str, request: bytes, muxed: Any) -> str | None:
        async with AsyncExitStack() as stack:
            try:
                turn = await stack.enter_async_context(turns.turn(peer, request))
            except Exception:
                return HANDLER
            with trio.fail_after(self._service.deadline):
                return await self._respond(peer, request, muxed, turn)

    async def _respond(self, peer: str, request: bytes, muxed: Any, turn: Turn | None) -> str | None:
        response: Response | None = None if turn is None else turn.answer
        if response is None:
            response = await self._run(peer, request)
        if response is None:
            return HANDLER
        muxed.patience = _Patience(turn)
        try:
            await write_frame(muxed, *_parts(response))
        except MuxedStreamReset:
            return CALLED_OFF
        return None

    async def _run(self, peer: str, request: bytes) -> Response | None:
        try:
            response = await self._service.handler(peer, request)
        except trio.TooSlowError:  # a deadline inside the handler, not ours
            return None
        except Exception:
            return None
        return response if _size(_parts(response)) <= self._service.max_response else None


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
