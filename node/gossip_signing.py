"""StrictSign of pubsub messages, for Ed25519 origins.

Spec: https://github.com/libp2p/specs/blob/master/pubsub/README.md#message-signing. py-libp2p's own
validator ends the process on a `key` field that is no key; a run admits only keys that a peer id holds,
so that field is never read.
"""

from __future__ import annotations

import functools
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from libp2p.pubsub.pb import rpc_pb2

from nous_node.protocol.identity import KEY_BYTES, PEER_ID_PREFIX, SIGNATURE_BYTES, SMALL_ORDER

SIGNING_PREFIX = b"libp2p-pubsub:"
PEER_ID_BYTES = len(PEER_ID_PREFIX) + KEY_BYTES
SEQNO_BYTES = 8
MESSAGE_ID_BYTES = PEER_ID_BYTES + SEQNO_BYTES


@functools.lru_cache(maxsize=1024)  # parsing a key costs half of a verification
def _public_key(raw: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(raw)


def sign_message(private: Ed25519PrivateKey, origin: bytes, seqno: bytes, topic: str, data: bytes) -> Any:
    """A signed `rpc_pb2.Message`. The key is in the peer id, so the `key` field stays empty."""
    message = rpc_pb2.Message(from_id=origin, data=data, seqno=seqno, topicIDs=[topic])
    message.signature = private.sign(SIGNING_PREFIX + message.SerializeToString())
    return message


def is_signed(message: Any) -> bool:
    """Whether the signature is that of the Ed25519 key in `from_id`. Never raises. [NET-5]"""
    origin = message.from_id
    if len(origin) != PEER_ID_BYTES or not origin.startswith(PEER_ID_PREFIX):
        return False
    if origin[len(PEER_ID_PREFIX) :] in SMALL_ORDER:  # [IDN-3]
        return False
    if len(message.seqno) != SEQNO_BYTES or len(message.signature) != SIGNATURE_BYTES:
        return False
    unsigned = rpc_pb2.Message(
        from_id=origin, data=message.data, seqno=message.seqno, topicIDs=message.topicIDs
    )
    try:
        _public_key(origin[len(PEER_ID_PREFIX) :]).verify(
            message.signature, SIGNING_PREFIX + unsigned.SerializeToString()
        )
    except (InvalidSignature, ValueError):
        return False
    return True
