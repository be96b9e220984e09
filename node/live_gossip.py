"""Live checks of pubsub: topics, signatures, RPCs. Spec: `specs/03-transport.md`."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.pubsub.pb import rpc_pb2

from .gossip import MAX_RPC_BYTES, MAX_TOPIC_CHARS, MAX_TOPICS_PER_PEER
from .gossip_signing import SIGNING_PREFIX
from .live_check import TRAINER, Checks, Failed
from .live_peer import varint
from .live_scene import FORWARD_S, SECONDS, Scene, scene
from .live_target import Target
from .mesh import frame

check: Checks[Target] = Checks()

# Topics and the pubsub signature


@check("subscriptions", "NET-7")
async def subscriptions(target: Target) -> str:
    topics = target.listener.topics
    if not topics:
        raise Failed("It reads no topic: nothing of the run reaches it.")
    own = {one for one in topics if one.startswith(f"/nous/1/{target.run.hex()}/")}
    if not own:
        raise Failed("It reads no topic of the run.")
    if len(topics) > MAX_TOPICS_PER_PEER or any(len(one) > MAX_TOPIC_CHARS for one in topics):
        raise Failed(f"It reads {len(topics)} topics, or one with a long name: some are not heard.")
    wanted = {target.topics.checkpoints, target.topics.receipts}
    if target.role != TRAINER and not wanted <= own:
        raise Failed(f"A {target.role} reads the topics of checkpoints and receipts.")
    return f"{target.role}: {len(own)} topics of the run"


@scene(check, "publish-without-reading", "NET-5", "NET-7", "GOS-2")
async def publish_without_reading(scene: Scene) -> str:
    """Signed protobuf of another implementation, from a peer that reads nothing (fanout)."""
    await scene.passes(scene.member().hello())
    return "forwarded"


def _by(key: Ed25519PrivateKey, message: Any) -> Any:
    """Signed by a key that need not be that of `from`."""
    message.ClearField("signature")
    message.signature = key.sign(SIGNING_PREFIX + message.SerializeToString())
    return message


@scene(check, "pubsub-signature", "NET-5")
async def pubsub_signature(scene: Scene) -> str:
    """Three forgeries: fewer than a peer is banned for."""
    zeros, unsigned, other = (scene.author.signed(scene.topic, scene.passing()) for _ in range(3))
    zeros.signature = bytes(64)
    unsigned.ClearField("signature")
    _by(Ed25519PrivateKey.generate(), other)
    await scene.stops(zeros, unsigned, other, ignored=False)
    return "not forwarded: a signature of zeros, none, another key's"


@scene(check, "pubsub-fields", "NET-5")
async def pubsub_fields(scene: Scene) -> str:
    signer = Ed25519PrivateKey.from_private_bytes(os.urandom(32))
    hashed, short = (scene.author.signed(scene.topic, scene.passing()) for _ in range(2))
    hashed.from_id = b"\x12\x20" + hashlib.sha256(b"whoever").digest()
    hashed.key = b"\xff junk"
    short.from_id = scene.author.origin[:6] + signer.public_key().public_bytes_raw()
    short.seqno = b"\x01"
    await scene.stops(_by(signer, hashed), _by(signer, short), ignored=False)
    return "not forwarded: an origin that is a hash, a sequence number of one byte"


@check("rpc-oversize", "NET-6", seconds=SECONDS)
async def rpc_oversize(target: Target) -> str:
    """More than an RPC may have, by its length."""
    async with target.peer() as author:
        await author.say(varint(MAX_RPC_BYTES + 1) + bytes(1024))
        if not await author.pubsub_ends(FORWARD_S):
            raise Failed(f"An RPC of {MAX_RPC_BYTES + 1} bytes is waited for; {MAX_RPC_BYTES} may be.")
    return "the stream ended"


@check("rpc-garbage", "NET-6")
async def rpc_garbage(target: Target) -> str:
    """Bytes that are no protobuf, and topics that are none of the run's. It has to live, that is all."""
    async with target.peer() as author:
        rpc = rpc_pb2.RPC()
        rpc.control.graft.add().topicID = "/made-up"
        rpc.control.ihave.add(topicID="/made-up", messageIDs=[b"x" * 46, b"\xff\x00"])
        rpc.control.iwant.add(messageIDs=[os.urandom(46), b""])
        rpc.control.prune.add(topicID="/made-up", backoff=2**60)
        await author.say(frame(rpc) + varint(5) + b"\xff" * 5)
    return "it lives"
