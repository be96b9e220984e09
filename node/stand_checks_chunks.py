"""Checks of how a client comes to new versions, whatever its sources do, and of what it serves itself."""

from __future__ import annotations

import os

import trio

from nous_node.protocol.encoding import encode, read
from nous_node.protocol.errors import Code, NousError
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HAVE_PROTOCOL,
    HEAD_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HAVE_REPLY,
    MAX_HEAD_REPLY,
    MAX_REQUEST,
    BlobReply,
    BlobRequest,
    HaveReply,
    HaveRequest,
    HeadReply,
    HeadRequest,
)

from .live_check import VOLUNTEER, Checks, Failed, Untested
from .network_errors import RequestFailedError, UnsupportedProtocolError
from .stand_desk import LIAR, SHORT, STALLER, Asked, Manner
from .stand_run import Version
from .stand_scene import Scene

CHUNKS: Checks[Scene] = Checks()
TOWARDS = (VOLUNTEER,)

VERSION_S = 30.0
"""From a version that is published to a group of it."""
ASKED_S = 15.0
"""Within which a source that has a chunk, while all others are busy, is asked for it."""
DISCONNECT_S = 5.0
UNDER_WAY_S = 1.0
"""After a wrong answer: requests that were under way by then arrive."""
STALL_S = 40.0
"""Each 16,384 bytes of an answer that has begun get 10 s; then another source is asked, and a group made."""
POLL_S = 45.0
"""Heads are asked for every 15 s; of several peers."""
ASK_S = 10.0


@CHUNKS(
    "version-gossiped",
    "CKP-9",
    "CKP-10",
    "ENC-10",
    "ENV-8",
    towards=TOWARDS,
    seconds=VERSION_S + 5,
)
async def by_gossip(scene: Scene) -> str:
    """Its manifest has a key that no revision knows."""
    version = scene.run.make(extra=True)
    await scene.publish(version)
    await scene.followed(version, VERSION_S)
    return ""


async def _despite(scene: Scene, name: str, manner: Manner, seconds: float) -> tuple[Version, Asked]:
    """Publishes a version for whose chunks one peer answers in this manner, while all others are busy until
    it was asked; waits for a group of it. The first request that was answered so."""
    version, desk = scene.run.make(), scene.desk
    desk.play(version.files, Manner.BUSY, **{name.replace(" ", "_"): manner})
    await scene.publish(version)
    try:
        await scene.until(lambda: desk.served(manner), ASKED_S, "ask")
    except Failed:
        scene.alive()
    first = desk.served(manner)
    if manner in (Manner.WRONG, Manner.SHORT):
        desk.play(version.files, Manner.HONEST, **{name.replace(" ", "_"): manner})
    else:
        desk.be_honest()
    try:
        await scene.followed(version, seconds)
    finally:
        desk.be_honest()
    if first is None:
        raise Untested(f"It never asked the {name}, which was the only one that was not busy.")
    return version, first


async def _shunned(scene: Scene, name: str, version: Version, first: Asked) -> str:
    """A peer whose chunk was wrong is disconnected, and not asked again for this checkpoint. [STR-3]"""
    again = [
        one
        for one in scene.desk.asked_for(version.files)
        if one.peer == name and one.at > first.at + UNDER_WAY_S
    ]
    if again:
        raise Failed(f"It asked the {name} for {len(again)} more chunks after a wrong one.")
    await scene.until(lambda: scene.connected(name) is None, DISCONNECT_S, f"disconnect the {name}")
    return ""


@CHUNKS("chunk-wrong", "CKP-7", "STR-3", towards=TOWARDS, seconds=VERSION_S + 25)
async def wrong_bytes(scene: Scene) -> str:
    version, first = await _despite(scene, LIAR, Manner.WRONG, VERSION_S)
    return await _shunned(scene, LIAR, version, first)


@CHUNKS("chunk-short", "CKP-7", "STR-3", towards=TOWARDS, seconds=VERSION_S + 25)
async def wrong_length(scene: Scene) -> str:
    version, first = await _despite(scene, SHORT, Manner.SHORT, VERSION_S)
    return await _shunned(scene, SHORT, version, first)


@CHUNKS("chunk-oversize", "STR-1", "STR-3", towards=TOWARDS, seconds=STALL_S + 25)
async def boast(scene: Scene) -> str:
    await _despite(scene, STALLER, Manner.BOAST, STALL_S)
    return ""


@CHUNKS("chunk-stalled", "STR-1", "STR-3", towards=TOWARDS, seconds=STALL_S + 25)
async def stall(scene: Scene) -> str:
    _, first = await _despite(scene, STALLER, Manner.STALL, STALL_S)
    return f"It took {trio.current_time() - first.at:.1f} s from the stalled answer to a group."


@CHUNKS("delta", "CKP-13", "CKP-14", "CKP-15", "DLT-8", towards=TOWARDS, seconds=VERSION_S + 5)
async def delta(scene: Scene) -> str:
    version = scene.run.make(delta=True)
    await scene.publish(version)
    await scene.followed(version, VERSION_S)
    if not scene.desk.asked_for(version.deltas):
        raise Untested("It came to the version by its files, and never asked for the delta.")
    return "It asked for the delta." + _beside(scene, version)


@CHUNKS("delta-broken", "CKP-15", "DLT-8", towards=TOWARDS, seconds=VERSION_S + 5)
async def broken_delta(scene: Scene) -> str:
    version = scene.run.make(delta=True, broken=True)
    await scene.publish(version)
    await scene.followed(version, VERSION_S)
    if not scene.desk.asked_for(version.deltas):
        raise Untested("It came to the version by its files, and never asked for the delta.")
    return ""


def _beside(scene: Scene, version: Version) -> str:
    chunks = len(scene.desk.asked_for(version.files))
    return f" It asked for {chunks} chunks of its files, too." if chunks else ""


@CHUNKS("version-polled", "STR-2", towards=TOWARDS, seconds=POLL_S + VERSION_S)
async def by_polling(scene: Scene) -> str:
    """Gossip is withheld."""
    version = scene.run.make()
    since = trio.current_time()
    await scene.publish(version, gossip=False)
    await scene.followed(version, POLL_S)
    return f"It took {trio.current_time() - since:.0f} s."


# --- what it serves ------------------------------------------------------------------------------


async def _ask(scene: Scene, protocol: str, payload: bytes, limit: int) -> bytes:
    if scene.peer is None or scene.connected("trainer") is None:
        raise Untested("It is not connected.")
    try:
        return await scene.trainer.request(scene.peer, protocol, payload, max_response=limit, deadline=ASK_S)
    except UnsupportedProtocolError as error:
        raise Failed(f"It does not serve {protocol}.") from error


@CHUNKS("reseeds", "CKP-11", "STR-3", towards=TOWARDS, seconds=30)
async def seeds(scene: Scene) -> str:
    chunks = sorted(scene.run.newest.files)
    for digest in chunks:
        frame = await _ask(scene, BLOB_PROTOCOL, encode(BlobRequest(digest)), MAX_BLOB_REPLY)
        reply = read(frame, BlobReply, MAX_BLOB_REPLY)
        if reply.data is None:
            raise Failed(f"It makes groups of a version and does not serve a chunk of it ({reply.error}).")
        if reply.data != scene.run.blobs[digest]:
            raise Failed("It serves a chunk with other bytes than its hash says.")
    return f"{len(chunks)} chunks of the newest version."


@CHUNKS("reseeds-not-found", "STR-3", towards=TOWARDS, seconds=15)
async def lacks(scene: Scene) -> str:
    frame = await _ask(scene, BLOB_PROTOCOL, encode(BlobRequest(os.urandom(32))), MAX_BLOB_REPLY)
    reply = read(frame, BlobReply, MAX_BLOB_REPLY)
    if reply.data is not None or reply.error != Code.NOT_FOUND:
        raise Failed(f"A chunk that nobody has is not-found; it answered {reply.error!r}.")
    return ""


@CHUNKS("serves-head", "STR-2", towards=TOWARDS, seconds=15)
async def serves_head(scene: Scene) -> str:
    frame = await _ask(scene, HEAD_PROTOCOL, encode(HeadRequest(scene.run.run)), MAX_HEAD_REPLY)
    reply = read(frame, HeadReply, MAX_HEAD_REPLY)
    if reply.run != scene.run.folder.envelope:
        raise Failed("It does not answer with the run's envelope as it was signed.")
    if reply.checkpoint != scene.run.newest.head.envelope:
        raise Failed("It does not answer with the newest checkpoint as it was signed.")
    frame = await _ask(scene, HEAD_PROTOCOL, encode(HeadRequest(os.urandom(32))), MAX_HEAD_REPLY)
    if read(frame, HeadReply, MAX_HEAD_REPLY).error != Code.WRONG_RUN:
        raise Failed("Asked for a run that it does not follow it did not answer wrong-run.")
    return ""


@CHUNKS("serves-have", "STR-4", towards=TOWARDS, seconds=15)
async def tells_bitmap(scene: Scene) -> str:
    head = scene.run.newest.head
    request = encode(HaveRequest(scene.run.run, head.hash))
    try:
        frame = await _ask(scene, HAVE_PROTOCOL, request, MAX_HAVE_REPLY)
    except Failed as failure:
        raise Untested(f"{failure} A client may leave it out.") from failure
    reply = read(frame, HaveReply, MAX_HAVE_REPLY)
    count = sum(len(entry.hashes()) for entry in head.manifest.files)
    have = int.from_bytes(reply.have or b"", "little")
    if have != (1 << count) - 1 or len(reply.have or b"") != -(-count // 8):
        raise Failed(f"It has all {count} chunks and told the bitmap {(reply.have or b'').hex()!r}.")
    return ""


@CHUNKS("requests-wrong", "STR-1", towards=TOWARDS, seconds=60)
async def wrong_requests(scene: Scene) -> str:
    wrong = (os.urandom(40), b"\x80", bytes(MAX_REQUEST + 1), encode(BlobRequest(bytes(32)))[:-1])
    for protocol in (BLOB_PROTOCOL, HEAD_PROTOCOL):
        for payload in wrong:
            try:
                frame = await _ask(scene, protocol, payload, MAX_BLOB_REPLY)
            except RequestFailedError:
                continue
            raise Failed(f"A request of {len(payload)} wrong bytes was answered with {len(frame)} bytes.")
    await seeds(scene)
    await scene.next_group()
    return ""


@CHUNKS("dials-again", "NET-8", towards=TOWARDS, seconds=60)
async def dials_again(scene: Scene) -> str:
    if scene.peer is None:
        raise Untested("It is not connected.")
    await scene.trainer.disconnect(scene.peer)
    since = trio.current_time()
    await scene.until(lambda: scene.connected("trainer"), 25.0, "dial the trainer again")
    took = trio.current_time() - since
    try:
        await scene.next_group(25.0)
    except NousError as error:
        raise Failed(str(error)) from error
    return f"It took {took:.1f} s."
