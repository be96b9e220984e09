"""Live checks of chunks and bitmaps: what a client says to have, it serves. Spec: `specs/03-transport.md`."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from typing import Final

import trio
from libp2p.protocol_muxer.exceptions import MultiselectClientError

from nous_node.protocol.checkpoints import CheckpointManifest
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.errors import Code
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HAVE_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HAVE_REPLY,
    MAX_HAVE_REQUEST,
    BlobReply,
    BlobRequest,
    HaveReply,
    HaveRequest,
    bitmap,
    read_bitmap,
)

from .live_check import Checks, Failed, Untested
from .live_peer import KitPeer
from .live_streams import ALLOWED_AT_ONCE, answer_of, expects, framed, opened
from .live_target import Target
from .live_wire import MULTISTREAM_LINE, line, yamux
from .muxer_stream import INITIAL_WINDOW
from .network_errors import NotConnectedError, RequestFailedError

check: Checks[Target] = Checks()

ANSWER_S = 20.0
SLACK_S = 5.0
SAMPLES = 4
"""Chunks that a client has to prove that it holds: the first, the last, and some between."""
UNREAD_S = 60.0
"""An upload of which nothing can be sent ends after 10 s; a client may have some turns of them."""
BUSY_S = 0.5
SHARED_S = 10.0
"""For a client that begins to fetch what it heard of."""
SHARED_AGAIN_S = 1.0
"""Each checkpoint may be asked about four times a second. [STR-4]"""
HAVES_AT_ONCE = 8
HAVES_ASKED = 12
"""One behind the other: 8 are taken at once, and others may be answered with `busy`."""
TOO_FAST: Final = "Play it while the run makes fewer versions."
IN_TIME_S = 0.5
"""For all of them to be at once."""

# Chunks


async def blob(peer: KitPeer, digest: bytes) -> BlobReply:
    frame = await peer.ask(BLOB_PROTOCOL, encode(BlobRequest(digest)), MAX_BLOB_REPLY, 60.0)
    reply = read(frame, BlobReply, MAX_BLOB_REPLY)
    if (reply.data is None) == (reply.error is None):
        raise Failed("An answer of /nous/blob/1 has exactly one of `data` and `error`.")
    return reply


@check("blob-not-found", "STR-3", seconds=ANSWER_S)
async def blob_not_found(target: Target) -> str:
    reply = await blob(target.listener, os.urandom(32))
    if reply.error != Code.NOT_FOUND.value:
        told = "a chunk" if reply.data is not None else repr(reply.error)
        raise Failed(f"Asked for a chunk that nobody has, it answers with {told} instead of 'not-found'.")
    return "not-found"


@check("blob-held", "STR-3", "CKP-7", "CKP-11", seconds=120)
async def blob_held(target: Target) -> str:
    """Chunks of the newest checkpoint that it says, or does not deny, to have."""
    sizes, places = await held(target)
    chosen = sample(places)
    found = 0
    for digest in chosen:
        reply = await blob(target.listener, digest)
        if reply.data is None:
            if reply.error == Code.BUSY.value or await _without_have(target):
                continue
            raise Failed(f"It says that it has the chunk {digest.hex()[:16]} and answers {reply.error!r}.")
        if hashlib.sha256(reply.data).digest() != digest:
            raise Failed(f"For the chunk {digest.hex()[:16]} it sends {len(reply.data)} other bytes.")
        if len(reply.data) != sizes[digest]:
            raise Failed("A chunk has another length than the manifest says.")
        found += 1
    if not found:
        raise Untested("It serves none of the chunks that it was asked for.")
    return f"{found} of {len(places)} chunks, each with its hash"


@check("blob-several", "STR-3", seconds=120)
async def blob_several(target: Target) -> str:
    """One stream after the other, then as many at once as one peer may have."""
    _, places = await held(target)
    first = places[0]
    async with target.peer() as peer:
        for _ in range(SAMPLES):
            await _right(peer, first)
        async with trio.open_nursery() as nursery:
            for _ in range(ALLOWED_AT_ONCE[BLOB_PROTOCOL]):
                nursery.start_soon(_right, peer, first)
    return f"{SAMPLES} one after the other, {ALLOWED_AT_ONCE[BLOB_PROTOCOL]} at once"


async def _right(peer: KitPeer, digest: bytes) -> None:
    reply = await blob(peer, digest)
    if reply.error == Code.BUSY.value:
        return
    if reply.data is None:
        raise Untested(f"It has not the chunk {digest.hex()[:16]}.")
    if hashlib.sha256(reply.data).digest() != digest:
        raise Failed("Asked several times, it sends other bytes than those of the hash.")


@check("blob-unread", "STR-5", seconds=120)
async def blob_unread(target: Target) -> str:
    """Two peers ask for as much as they may and read nothing; a third one asks for the same chunk."""
    sizes, places = await held(target)
    largest = max(places, key=lambda one: sizes[one])
    if sizes[largest] <= INITIAL_WINDOW:
        raise Untested("All chunks fit the first window of a stream: none waits for its reader.")
    request = MULTISTREAM_LINE + line(BLOB_PROTOCOL) + framed(encode(BlobRequest(largest)))
    async with yamux(target.place) as one, yamux(target.place) as two, target.peer() as honest:
        for peer in (one, two):
            for stream in range(1, 2 * ALLOWED_AT_ONCE[BLOB_PROTOCOL], 2):
                await peer.open(stream, request)
        began = trio.current_time()
        with trio.move_on_after(UNREAD_S):
            while (reply := await blob(honest, largest)).data is None:  # busy, by its own word
                if reply.error == Code.NOT_FOUND:
                    raise Untested(f"Its checkpoint was followed by others meanwhile. {TOO_FAST}")
                await trio.sleep(BUSY_S)
            return f"an honest peer had it after {trio.current_time() - began:.1f} s"
    raise Failed(f"Peers that read nothing hold up another one for more than {UNREAD_S:g} s.")


def chunks_of(manifest: CheckpointManifest) -> list[tuple[bytes, int]]:
    """Hash and length of each chunk, in the order of bitmaps. [STR-4]"""
    found = []
    for entry in [*manifest.files, *manifest.deltas]:
        hashes = entry.hashes()
        for number, digest in enumerate(hashes):
            last = number == len(hashes) - 1
            found.append((digest, entry.size - number * entry.chunk if last else entry.chunk))
    return found


async def held(target: Target) -> tuple[dict[bytes, int], list[bytes]]:
    """Lengths of the chunks of a checkpoint, and those that the client says to have; all of them where it has
    no bitmaps. Raises Untested where it has none."""
    if await _without_have(target):
        await target.refresh()
        if target.head is None:
            raise Untested("It told no checkpoint.")
        chunks = chunks_of(target.head[1])
        return dict(chunks), [one for one, _ in chunks]
    async with target.peer() as peer:
        digest, manifest = await shared(target, peer, lambda reply: any(reply.have or b""))
        chunks = chunks_of(manifest)
        bits = read_bitmap((await have(peer, HaveRequest(target.run, digest))).have or b"", len(chunks))
    places = [one for number, (one, _) in enumerate(chunks) if bits >> number & 1]
    return dict(chunks), places


async def shared(
    target: Target, peer: KitPeer, wanted: Callable[[HaveReply], bool] = lambda reply: True
) -> tuple[bytes, CheckpointManifest]:
    """A checkpoint that the client holds or fetches, by its own word: mostly the newest. It may have heard of
    that a moment ago. Raises Untested where there is none."""
    with trio.move_on_after(SHARED_S):
        while True:
            await target.refresh()
            for digest, manifest in list(target.recent):
                reply = await have(peer, HaveRequest(target.run, digest))
                if reply.error is None and wanted(reply):
                    return digest, manifest
            await trio.sleep(SHARED_AGAIN_S)
    raise Untested("It neither holds nor fetches any of the checkpoints that it told of.")


def sample(places: Sequence[bytes]) -> list[bytes]:
    between = random.Random(0).sample(places, min(len(places), SAMPLES))
    return list(dict.fromkeys((places[0], places[-1], *between)))


# Bitmaps


async def have(peer: KitPeer, request: HaveRequest) -> HaveReply:
    frame = await peer.ask(HAVE_PROTOCOL, encode(request), MAX_HAVE_REPLY)
    return read(frame, HaveReply, MAX_HAVE_REPLY)


async def _without_have(target: Target) -> bool:
    try:
        stream = await target.listener.stream(HAVE_PROTOCOL)
    except MultiselectClientError:
        return True
    await stream.reset()
    return False


async def _needs_have(target: Target) -> None:
    if await _without_have(target):
        raise Untested(f"It does not serve {HAVE_PROTOCOL}: then it is asked for chunks as if it had all.")


@check("have", "STR-4", seconds=ANSWER_S)
async def have_answered(target: Target) -> str:
    await _needs_have(target)
    async with target.peer() as peer:
        digest, manifest = await shared(target, peer)
        count = len(chunks_of(manifest))
        for told in (None, bitmap(0, count)):
            reply = await have(peer, HaveRequest(target.run, digest, told))
            if reply.have is not None:
                read_bitmap(reply.have, count)
    return f"{count} chunks"


@check("have-refusals", "STR-4", seconds=ANSWER_S)
async def have_refusals(target: Target) -> str:
    await _needs_have(target)
    async with target.peer() as peer:
        known = target.head[0] if target.head else os.urandom(32)
        for request, code in (
            (HaveRequest(os.urandom(32), known), Code.WRONG_RUN),
            (HaveRequest(target.run, os.urandom(32)), Code.UNKNOWN_CHECKPOINT),
        ):
            frame = await peer.ask(HAVE_PROTOCOL, encode(request), MAX_HAVE_REPLY)
            expects(frame, {"error": code.value})
    return "wrong-run, unknown-checkpoint"


WRONG_BITMAPS: Final[dict[str, Callable[[int], bytes]]] = {
    "a byte too long": lambda count: bitmap(0, count) + b"\x00",
    "a bit behind the last": lambda count: bitmap(1 << count, count + 1),
}
"""By the number of chunks."""
TRIES: Final = 4
"""A client that follows a fast run may forget a checkpoint between two questions."""


@check("have-bitmap-wrong", "STR-4", seconds=3 * ANSWER_S)
async def have_bitmap_wrong(target: Target) -> str:
    """Each of a peer of its own, which is refused from then on."""
    await _needs_have(target)
    for what, wrong in WRONG_BITMAPS.items():
        await _refuses_bitmap(target, what, wrong)
    return f"disconnected: {', '.join(WRONG_BITMAPS)}"


async def _refuses_bitmap(target: Target, what: str, wrong: Callable[[int], bytes]) -> None:
    for _ in range(TRIES):
        async with target.peer() as peer:
            digest, manifest = await shared(target, peer)
            told = wrong(len(chunks_of(manifest)))
            try:
                reply = await have(peer, HaveRequest(target.run, digest, told))
            except (RequestFailedError, NotConnectedError):
                if await peer.lost(SLACK_S):
                    return
                raise Failed(f"A peer whose bitmap is {what} keeps its connection.") from None
        if reply.error != Code.UNKNOWN_CHECKPOINT:
            raise Failed(f"A bitmap that is {what} is answered.")
    raise Untested(f"Its checkpoint was followed by others each time. {TOO_FAST}")


@check("have-too-often", "STR-4", seconds=2 * ANSWER_S)
async def have_too_often(target: Target) -> str:
    await _needs_have(target)
    async with target.peer() as other:
        digest, _ = await shared(target, other)
    request = HaveRequest(target.run, digest)
    async with target.peer() as peer:
        began = trio.current_time()
        errors = [(await have(peer, request)).error for _ in range(HAVES_ASKED)]
        seconds = trio.current_time() - began
    if seconds > IN_TIME_S:
        raise Untested(f"{HAVES_ASKED} requests took {seconds:.1f} s: too slow a line for this.")
    if any(errors[:HAVES_AT_ONCE]):
        raise Failed(f"Of the first {HAVES_AT_ONCE} requests of a peer some are refused ({errors}).")
    busy = errors.count(Code.BUSY.value)
    if busy + errors.count(None) < HAVES_ASKED:
        raise Failed(f"Requests beyond those that it takes are answered with something else ({errors}).")
    return f"{busy} of {HAVES_ASKED} were answered with busy"


@check("have-oversize", "STR-4", seconds=ANSWER_S)
async def have_oversize(target: Target) -> str:
    await _needs_have(target)
    async with target.peer() as peer:
        stream = await opened(peer, HAVE_PROTOCOL)
        await stream.write((MAX_HAVE_REQUEST + 1).to_bytes(4, "big"))
        with trio.move_on_after(SLACK_S):
            if await answer_of(stream, MAX_HAVE_REPLY) is None:
                return "not waited for"
    raise Failed(f"A request of {MAX_HAVE_REQUEST + 1} bytes is waited for.")


@check("introductions", "STR-7", seconds=2 * ANSWER_S)
async def introductions(target: Target) -> str:
    """A peer that says to be somewhere else is introduced there to nobody."""
    await _needs_have(target)
    elsewhere = "/ip4/203.0.113.7/tcp/4001/p2p/"
    async with target.peer() as liar, target.peer() as asker:
        lie = elsewhere + liar.peer_id
        digest, _ = await shared(target, asker)
        await have(liar, HaveRequest(target.run, digest, addresses=[lie]))
        told = (await have(asker, HaveRequest(target.run, digest))).peers
        if any(one.startswith("/ip4/203.0.113.7/") for one in told):
            raise Failed(
                "It passes on what a peer says of its IP address, so that others dial a third party."
            )
        if any(one.endswith(asker.peer_id) for one in told):
            raise Failed("It introduces a peer to itself.")
    return f"{len(told)} introduced"
