"""Live checks of requests: the head, and what is no request at all. Spec: `specs/03-transport.md`."""

from __future__ import annotations

import os

import trio
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamError

from nous_node.protocol.encoding import decode, encode
from nous_node.protocol.errors import Code
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HAVE_PROTOCOL,
    HEAD_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HEAD_REPLY,
    MAX_REQUEST,
    HeadRequest,
)

from .live_check import Checks, Failed, Untested
from .live_peer import KitPeer
from .live_target import Target
from .muxer_stream import MuxerStream
from .requests import READ_REQUEST_S
from .swarm import BLOBS_OF_PEER, HAVES_OF_PEER

check: Checks[Target] = Checks()

ANSWER_S = 20.0
SLACK_S = 5.0
ALLOWED_AT_ONCE = {HEAD_PROTOCOL: 8, BLOB_PROTOCOL: BLOBS_OF_PEER, HAVE_PROTOCOL: HAVES_OF_PEER}
"""Requests of one peer and protocol. [STR-1]"""


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


async def answer_of(stream: MuxerStream, limit: int) -> bytes | None:
    """The frame with which a stream is answered; None where it is reset or ends without one. Raises Failed
    for one that is cut, too long, or not the last."""
    data = bytearray()
    clean = False
    try:
        while len(data) <= limit + 4:
            data += await stream.read(1 << 16)
    except MuxedStreamEOF:
        clean = True
    except (MuxedStreamError, MuxedConnUnavailable):
        pass
    if not data:
        return None
    size = int.from_bytes(data[:4], "big")
    if size > limit:
        raise Failed(f"It announced an answer of {size} bytes; the limit is {limit}.")
    if len(data) < 4 + size:
        raise Failed(f"Its answer broke off after {len(data)} bytes of {4 + size}.")
    if len(data) > 4 + size or not clean:
        raise Failed("Its answer is not one frame and then the end of the stream.")
    return bytes(data[4:])


async def refuses(peer: KitPeer, protocol: str, sent: bytes, limit: int, what: str) -> None:
    """Raises Failed unless such bytes are answered by the end of the stream, and with nothing else."""
    stream = await opened(peer, protocol)
    try:
        await stream.write(sent)
        await stream.close_write()
    except (MuxedStreamError, MuxedConnUnavailable):
        return
    if await answer_of(stream, limit) is not None:
        raise Failed(f"It answered {what}.")


async def opened(peer: KitPeer, protocol: str) -> MuxerStream:
    """Raises Failed where the client does not serve a protocol, Untested where it need not."""
    try:
        return await peer.stream(protocol)
    except MultiselectClientError as error:
        if protocol == HAVE_PROTOCOL:
            raise Untested(
                f"It does not serve {protocol}: then it is asked for chunks as if it had all."
            ) from error
        raise Failed(f"It does not serve {protocol}.") from error


# Head


@check("head", "STR-1", "STR-2", "RUN-1", "RUN-2", "CKP-1", seconds=30)
async def head_told(target: Target) -> str:
    reply = await target.ask_head()
    if reply.run is None or reply.error is not None:
        raise Failed(f"To a request for its run it answers {reply.error or 'nothing'!r}.")
    target.take(reply)
    if target.head is None:
        raise Failed("It tells the run and no checkpoint, though it takes part.")
    return f"version {target.head[1].version}"


@check("head-wrong-run", "STR-2", seconds=ANSWER_S)
async def head_wrong_run(target: Target) -> str:
    frame = await target.listener.ask(HEAD_PROTOCOL, encode(HeadRequest(os.urandom(32))), MAX_HEAD_REPLY)
    expects(frame, {"error": Code.WRONG_RUN.value})
    return "wrong-run"


def expects(frame: bytes, wanted: dict[str, str]) -> None:
    """Further keys are a later revision's; those of this one are exactly these. [ENC-10]"""
    value = decode(frame, MAX_HEAD_REPLY)
    known = {"run", "checkpoint", "data", "have", "http", "peers", "error"}
    found = {key: one for key, one in value.items() if key in known} if isinstance(value, dict) else value
    if found != wanted:
        raise Failed(f"It answers {str(found)[:200]} instead of {wanted}.")


SHAPES = {"no hash": {}, "short hash": {"run": bytes(31), "hash": bytes(31)}, "text": "a request"}


@check("head-malformed", "STR-1", "STR-2", seconds=ANSWER_S)
async def head_malformed(target: Target) -> str:
    await _refuses_shapes(target, HEAD_PROTOCOL, MAX_HEAD_REPLY)
    return f"reset: {', '.join(SHAPES)}, no canonical msgpack"


@check("blob-malformed", "STR-1", "STR-3", seconds=ANSWER_S)
async def blob_malformed(target: Target) -> str:
    await _refuses_shapes(target, BLOB_PROTOCOL, MAX_BLOB_REPLY)
    return f"reset: {', '.join(SHAPES)}, no canonical msgpack"


async def _refuses_shapes(target: Target, protocol: str, limit: int) -> None:
    async with target.peer() as peer:
        for name, value in SHAPES.items():
            await refuses(
                peer, protocol, framed(encode(value)), limit, f"a request of another shape ({name})"
            )
        await refuses(peer, protocol, framed(b"\xc1" * 40), limit, "a request that is no canonical msgpack")


# Frames


@check("request-oversize", "STR-1", seconds=ANSWER_S)
async def request_oversize(target: Target) -> str:
    """By its length alone, before anything follows."""
    async with target.peer() as peer:
        for protocol in (HEAD_PROTOCOL, BLOB_PROTOCOL):
            for size in (MAX_REQUEST + 1, 2**32 - 1):
                stream = await opened(peer, protocol)
                await stream.write(size.to_bytes(4, "big"))
                with trio.move_on_after(SLACK_S):
                    if await answer_of(stream, MAX_BLOB_REPLY) is None:
                        continue
                raise Failed(f"A request of {size} bytes on {protocol} is waited for; {MAX_REQUEST} may be.")
    return f"{MAX_REQUEST + 1} bytes are not waited for"


@check("request-broken-off", "STR-1", seconds=ANSWER_S)
async def request_broken_off(target: Target) -> str:
    request = framed(encode(HeadRequest(target.run)))
    async with target.peer() as peer:
        for sent in (b"", request[:2], request[:-1]):
            await refuses(peer, HEAD_PROTOCOL, sent, MAX_HEAD_REPLY, f"{len(sent)} bytes of a request")
    return "reset"


@check("request-stalled", "STR-1", seconds=READ_REQUEST_S + 3 * SLACK_S, aside=True)
async def request_stalled(target: Target) -> str:
    began = trio.current_time()
    async with target.peer() as peer:
        stream = await opened(peer, HEAD_PROTOCOL)
        await stream.write(framed(encode(HeadRequest(target.run)))[:-1])
        with trio.move_on_after(READ_REQUEST_S + SLACK_S):
            if await answer_of(stream, MAX_HEAD_REPLY) is not None:
                raise Failed("It answered a request that was not complete.")
            return f"reset after {trio.current_time() - began:.1f} s"
    raise Failed(f"A request that stops is waited for longer than {READ_REQUEST_S:g} s.")


@check("request-in-pieces", "STR-1", seconds=ANSWER_S)
async def request_in_pieces(target: Target) -> str:
    async with target.peer() as peer:
        stream = await opened(peer, HEAD_PROTOCOL)
        for byte in framed(encode(HeadRequest(target.run))):
            await stream.write(bytes([byte]))
        await stream.close_write()
        if await answer_of(stream, MAX_HEAD_REPLY) is None:
            raise Failed("A request that comes a byte at a time is not answered.")
    return "answered"


@check("request-second-frame", "STR-1", seconds=ANSWER_S)
async def request_second_frame(target: Target) -> str:
    """Only the first is read: whether what follows matters or not, there is one answer at most."""
    request = framed(encode(HeadRequest(target.run)))
    async with target.peer() as peer:
        stream = await opened(peer, HEAD_PROTOCOL)
        await stream.write(request + request)
        await stream.close_write()
        if await answer_of(stream, MAX_HEAD_REPLY) is None:
            raise Failed("A request is not answered where another frame stands behind it.")
    return "answered once"


@check("requests-at-once", "STR-1", seconds=2 * ANSWER_S)
async def requests_at_once(target: Target) -> str:
    """Requests that never become complete hold as many places as one peer has, and no other peer's."""
    async with target.peer() as peer:
        for protocol in (HEAD_PROTOCOL, BLOB_PROTOCOL):
            most = ALLOWED_AT_ONCE[protocol]
            held = [await opened(peer, protocol) for _ in range(most)]
            for stream in held:
                await stream.write(b"\x00")
            await _one_more(peer, protocol)
            for stream in held:
                await stream.reset()
    return ", ".join(f"{most} of {name}" for name, most in ALLOWED_AT_ONCE.items() if name != HAVE_PROTOCOL)


async def _one_more(peer: KitPeer, protocol: str) -> None:
    try:
        stream = await peer.stream(protocol)
        await stream.write(b"\x00")
    except (MultiselectClientError, MuxedStreamError, MuxedConnUnavailable):
        return  # the reset was faster than the negotiation
    with trio.move_on_after(SLACK_S):
        if await answer_of(stream, MAX_BLOB_REPLY) is None:
            return
    raise Failed(f"More than {ALLOWED_AT_ONCE[protocol]} requests of one peer are at work on {protocol}.")
