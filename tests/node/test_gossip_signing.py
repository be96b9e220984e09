"""StrictSign: whose pubsub messages are genuine."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from nous_node.node.gossip_signing import SIGNING_PREFIX, is_signed, sign_message
from nous_node.protocol.identity import PEER_ID_PREFIX, SMALL_ORDER, Identity

ALICE = Identity.from_seed(bytes(32))
ORIGIN = PEER_ID_PREFIX + ALICE.key
NEUTRAL = b"\x01" + bytes(31)
"""The neutral point: with it as key and as R, and S = 0, the equation holds for every message."""


def message() -> Any:
    return sign_message(ALICE.private, ORIGIN, bytes(8), "topic", b"data")


def test_a_message_of_its_origin_is_signed() -> None:
    assert is_signed(message())


@pytest.mark.parametrize("field", ["data", "seqno", "from_id", "signature"])
def test_a_changed_message_is_not_signed(field: str) -> None:
    changed = message()
    value = getattr(changed, field)
    setattr(changed, field, bytes([value[0] ^ 1]) + value[1:])
    assert not is_signed(changed)


def test_the_key_field_is_not_read() -> None:
    with_key = message()
    with_key.key = b"no key"
    assert is_signed(with_key)


@pytest.mark.parametrize("length", [0, 7, 9])
def test_a_sequence_number_has_eight_bytes(length: int) -> None:
    assert not is_signed(sign_message(ALICE.private, ORIGIN, bytes(length), "topic", b"data"))


def test_a_key_of_small_order_signs_nothing() -> None:
    forged = message()
    forged.from_id, forged.signature = PEER_ID_PREFIX + NEUTRAL, NEUTRAL + bytes(32)
    forged_bytes = SIGNING_PREFIX + b"whatever it says"
    Ed25519PublicKey.from_public_bytes(NEUTRAL).verify(forged.signature, forged_bytes)  # the library's answer
    assert NEUTRAL in SMALL_ORDER
    assert not is_signed(forged)


def test_another_key_cannot_sign_for_an_origin() -> None:
    other = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
    assert not is_signed(sign_message(other, ORIGIN, bytes(8), "topic", b"data"))
