"""Messages that no correct node sends, against a real trainer: each has its code, and nothing comes of it.

The forwarder of each is a network node of its own: what libp2p does to forwarders is in `test_libp2p_*`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import zstandard

from nous_node.protocol.constants import MAX_ENVELOPE
from nous_node.protocol.encoding import decode, encode
from nous_node.protocol.envelope import Kind, unseal
from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import Receipts, accepted

from .edits import attacks

MINUTE = 60_000
FAR_DEEPER = 50_000
BOMB = 64 << 20
BURST, FLOOD = 240, 60
"""Groups of one key that the arena takes at once (60 s of its rate), and how many more come."""


def now() -> int:
    return time.time_ns() // 1_000_000


def outer(data: bytes) -> dict[str, bytes]:
    value = decode(data, MAX_ENVELOPE)
    assert isinstance(value, dict)
    return value


def body(arena: Any, forger: Any) -> bytes:
    """Of a group that is well: the key's first one."""
    data: bytes = forger.group(arena.head, 0).to_bytes()
    return data


def compressed(arena: Any, forger: Any, size: int, declared: int) -> bytes:
    packed = zstandard.ZstdCompressor().compress(bytes(size))
    data: bytes = forger.seal(packed, enc="zstd", size=declared)
    return data


def unordered(arena: Any, forger: Any) -> bytes:
    """Signed bytes whose map is not in order."""
    value = decode(unseal(forger.seal(body(arena, forger))).signed, MAX_ENVELOPE)
    assert isinstance(value, dict)
    data: bytes = forger.sign(msgpack.packb(dict(reversed(value.items()))))
    return data


def twice(arena: Any, forger: Any) -> bytes:
    """Signed bytes in which a key stands twice: readers that take the last see another run."""
    signed = unseal(forger.seal(body(arena, forger))).signed
    run = b"\xa3run\xc4\x20"
    more = bytes([signed[0] + 1]) + signed[1:]
    data: bytes = forger.sign(more.replace(run, run + bytes(32) + run, 1))
    return data


def altered(arena: Any, forger: Any) -> bytes:
    """Somebody on the way put another body under an honest signature."""
    honest = outer(forger.seal(body(arena, forger)))
    other = outer(forger.seal(body(arena, forger)))
    return encode({"sig": honest["sig"], "signed": other["signed"]})


def impersonated(arena: Any, forger: Any) -> bytes:
    victim = arena.forger("somebody else")
    data: bytes = forger.seal(body(arena, forger), **{"from": victim.identity.key})
    return data


def annotated(arena: Any, forger: Any) -> bytes:
    """Something unsigned beside the signed."""
    return encode(outer(forger.seal(body(arena, forger))) | {"note": "trust me"})


Craft = Callable[[Any, Any], bytes]

ATTACKS: dict[str, tuple[Code, Craft]] = {
    "garbage": (Code.MALFORMED, lambda arena, forger: b"\xc1" + os.urandom(2_000)),
    "cut message": (Code.MALFORMED, lambda arena, forger: b"\x82"),
    "message of another shape": (Code.WRONG_TYPE, lambda arena, forger: encode("a rollout group")),
    "oversize": (Code.OVERSIZE, lambda arena, forger: forger.seal(os.urandom(MAX_ENVELOPE))),
    "trailing bytes": (Code.MALFORMED, lambda arena, forger: forger.seal(body(arena, forger)) + b"\xc0"),
    "unsigned message": (
        Code.WRONG_TYPE,
        lambda arena, forger: encode({"signed": outer(forger.seal(body(arena, forger)))["signed"]}),
    ),
    "signature of zeros": (
        Code.BAD_SIGNATURE,
        lambda arena, forger: encode(outer(forger.seal(body(arena, forger))) | {"sig": bytes(64)}),
    ),
    "altered body": (Code.BAD_SIGNATURE, altered),
    "wrong key": (Code.BAD_SIGNATURE, impersonated),
    "unsigned addition": (Code.WRONG_TYPE, annotated),
    "non-canonical encoding": (Code.NOT_CANONICAL, unordered),
    "key twice in a map": (Code.NOT_CANONICAL, twice),
    "expired": (
        Code.EXPIRED,
        lambda arena, forger: forger.seal(body(arena, forger), ts=now() - 2 * MINUTE, exp=now() - 1),
    ),
    "future-dated": (
        Code.FUTURE_DATED,
        lambda arena, forger: forger.seal(body(arena, forger), ts=now() + MINUTE, exp=now() + 2 * MINUTE),
    ),
    "message that lives too long": (
        Code.LIFETIME,
        lambda arena, forger: forger.seal(body(arena, forger), ts=now(), exp=now() + 11 * MINUTE),
    ),
    "message that ends before it begins": (
        Code.LIFETIME,
        lambda arena, forger: forger.seal(body(arena, forger), ts=now() + 1, exp=now()),
    ),
    "wrong run": (Code.WRONG_RUN, lambda arena, forger: forger.seal(body(arena, forger), run=bytes(32))),
    "other protocol version": (
        Code.UNSUPPORTED_VERSION,
        lambda arena, forger: forger.seal(body(arena, forger), v=2),
    ),
    "unknown kind": (
        Code.UNKNOWN_KIND,
        lambda arena, forger: forger.seal(body(arena, forger), "weights"),
    ),
    "checkpoint of a key that is no trainer's": (
        Code.WRONG_KIND,
        lambda arena, forger: forger.seal(arena.head.manifest.to_bytes(), Kind.CHECKPOINT),
    ),
    "receipts of a key that is no trainer's": (
        Code.WRONG_KIND,
        lambda arena, forger: forger.seal(
            Receipts([accepted(bytes(32), forger.identity.key, 1_000)]).to_bytes(), Kind.RECEIPTS
        ),
    ),
    "negative number": (Code.WRONG_TYPE, lambda arena, forger: forger.seal(body(arena, forger), seq=-1)),
    "decompression bomb": (
        Code.OVERSIZE,
        lambda arena, forger: compressed(arena, forger, BOMB, BOMB),
    ),
    "decompression bomb that lies about its size": (
        Code.BAD_COMPRESSION,
        lambda arena, forger: compressed(arena, forger, BOMB, forger.manifest.rollout_body_limit),
    ),
    "unknown compression": (
        Code.BAD_COMPRESSION,
        lambda arena, forger: forger.seal(body(arena, forger), enc="gzip", size=10),
    ),
    "nesting bomb": (Code.TOO_DEEP, lambda arena, forger: b"\x91" * FAR_DEEPER + b"\xc0"),
    "nesting bomb in a signed body": (
        Code.TOO_DEEP,
        lambda arena, forger: forger.seal(b"\x91" * FAR_DEEPER + b"\xc0"),
    ),
    "array that says it is huge": (
        Code.OUT_OF_RANGE,
        lambda arena, forger: forger.seal(b"\xdd\xff\xff\xff\xff"),
    ),
    "body of another shape": (Code.WRONG_TYPE, lambda arena, forger: forger.seal(encode({"tokens": 1}))),
}


@pytest.mark.parametrize("name", attacks(ATTACKS))
def test_message_is_turned_away(arena, honest, name: str) -> None:
    code, craft = ATTACKS[name]
    data = craft(arena, honest)
    groups = arena.journalled()
    arena.turned_away(data, honest.topic, code)
    assert arena.journalled() == groups


def test_trainer_lives_after_all_of_them(arena, honest) -> None:
    arena.accepts_honest(honest)


@pytest.mark.attack("topic of another shard", "wrong-shard")
def test_rollout_on_the_topic_of_another_shard_is_turned_away(arena, honest) -> None:
    other = arena.folder.manifest.shards - 1 - honest.shard
    topic = honest.topic.removesuffix(str(honest.shard)) + str(other)
    arena.turned_away(honest.seal(body(arena, honest)), topic, Code.WRONG_SHARD)


@pytest.mark.attack("replay", "duplicate")
def test_replayed_message_counts_once(arena, honest, liar) -> None:
    data = liar.seal(body(arena, liar))
    arena.send(data, liar.topic)
    arena.receipt(data)
    groups, credit = arena.journalled(), arena.status.tokens_verified
    arena.send(data, liar.topic)
    arena.accepts_honest(honest)
    assert len(arena.receipts[unseal(data).id]) == 1
    assert arena.journalled() == groups + 1
    assert arena.state(data) == ("accepted", None)
    assert arena.status.tokens_verified >= credit


@pytest.mark.attack("group sealed again", "")
def test_group_that_is_sealed_again_has_its_receipt_again_and_counts_once(arena, liar) -> None:
    group = body(arena, liar)
    first = arena.outcome(liar, group)
    groups = arena.journalled()
    again = arena.outcome(liar, group)
    assert (again.verdict, again.rollout) == ("accepted", again.rollout)
    assert again.rollout != first.rollout
    assert arena.journalled() == groups


@pytest.mark.attack("sequence number used twice", "sequence-reused")
def test_second_message_under_a_sequence_number_is_ignored(arena, honest, liar) -> None:
    first = liar.seal(liar.group(arena.head).to_bytes())
    second = liar.seal(liar.group(arena.head).to_bytes(), seq=unseal(first).head.seq)
    arena.send(first, liar.topic)
    arena.send(second, liar.topic)
    arena.receipt(first)
    arena.accepts_honest(honest)
    assert arena.state(second) is None


@pytest.mark.attack("flood of hellos by one peer", "rate")
def test_key_that_floods_is_held_off_and_others_are_not(arena, honest) -> None:
    flooder = arena.known("flooder")
    arena.flood([flooder.hello() for _ in range(300)], flooder.topic)
    arena.until(lambda: arena.status.refused.get(Code.RATE.value))
    arena.accepts_honest(honest)


@pytest.mark.attack("flood by one peer", "rate")
def test_key_that_floods_groups_is_held_to_its_rate_and_others_are_not(arena, honest) -> None:
    """Its own group, sealed anew again and again, which is allowed at the rate of the run."""
    flooder = arena.known("flooder of groups")
    group = body(arena, flooder)
    groups = arena.journalled()
    before = arena.status.refused.get(Code.RATE.value, 0)
    arena.flood([flooder.seal(group) for _ in range(BURST + FLOOD)], flooder.topic)
    arena.until(lambda: arena.status.refused.get(Code.RATE.value, 0) >= before + FLOOD // 2)
    arena.accepts_honest(honest)
    assert arena.journalled() == groups + 2
