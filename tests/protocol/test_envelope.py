"""Envelopes: what a genuine one is, and every way of not being one."""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.constants import (
    DOMAIN_ENVELOPE,
    MAX_BODY,
    MAX_ENVELOPE,
    MAX_LIFETIME_MS,
    MAX_SKEW_MS,
)
from nous_node.protocol.encoding import decode, encode
from nous_node.protocol.envelope import Envelope, Kind, seal, unseal
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.identity import Identity

IDENTITY = Identity.from_seed(bytes(range(32)))
RUN = bytes([7]) * 32
TS = 1_800_000_000_000
HEAD: dict[str, Any] = {
    "v": 1,
    "kind": "rollout",
    "run": RUN,
    "from": IDENTITY.key,
    "seq": 5,
    "ts": TS,
    "exp": TS + 1000,
    "body": b"\x80",
}


def wrapped(**changes: Any) -> bytes:
    """An envelope with changed keys, signed all the same; `None` drops a key."""
    head = {key: value for key, value in {**HEAD, **changes}.items() if value is not None}
    signed = encode(head)
    return encode({"sig": IDENTITY.sign(DOMAIN_ENVELOPE + signed), "signed": signed})


def opened(data: bytes) -> bytes:
    envelope = unseal(data)
    envelope.verify_signature()
    envelope.check_time(TS)
    return envelope.content()


def refusal(data: bytes) -> Code:
    with pytest.raises(RemoteError) as caught:
        opened(data)
    return caught.value.code


def compressed(frame: bytes, size: int | None) -> Code:
    return refusal(wrapped(enc="zstd", size=size, body=frame))


def test_a_sealed_message_opens() -> None:
    body = b"body " * 200
    envelope = unseal(seal(IDENTITY, Kind.ROLLOUT, RUN, body, seq=9, ts=TS, lifetime=1))
    envelope.verify_signature()
    envelope.check_time(TS)
    head = envelope.head
    assert (head.v, head.kind, head.run, head.sender) == (1, "rollout", RUN, IDENTITY.key)
    assert (head.seq, head.ts, head.exp, head.enc, head.size) == (9, TS, TS + 1, "zstd", 1000)
    assert envelope.content() == body
    assert envelope.id == hashlib.sha256(envelope.signed).digest()


def test_a_body_that_does_not_shrink_travels_as_it_is() -> None:
    body = os.urandom(1000)
    assert unseal(seal(IDENTITY, Kind.HELLO, RUN, body, seq=0, ts=TS)).head.body == body


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"v": 2}, Code.UNSUPPORTED_VERSION),
        ({"v": 2, "from": None, "run": "elsewhere"}, Code.UNSUPPORTED_VERSION),
        ({"v": 0}, Code.UNSUPPORTED_VERSION),
        ({"v": True}, Code.WRONG_TYPE),
        ({"v": "1"}, Code.WRONG_TYPE),
        ({"v": None}, Code.WRONG_TYPE),
        ({"kind": "gift"}, Code.UNKNOWN_KIND),
        ({"kind": 1}, Code.WRONG_TYPE),
        ({"run": RUN[:31]}, Code.WRONG_TYPE),
        ({"run": RUN.hex()}, Code.WRONG_TYPE),
        ({"from": IDENTITY.key + b"\0"}, Code.WRONG_TYPE),
        ({"seq": -1}, Code.WRONG_TYPE),
        ({"seq": 1.0}, Code.WRONG_TYPE),
        ({"ts": -1}, Code.WRONG_TYPE),
        ({"exp": None}, Code.WRONG_TYPE),
        ({"body": None}, Code.WRONG_TYPE),
        ({"body": "text"}, Code.WRONG_TYPE),
        ({"exp": TS}, Code.LIFETIME),
        ({"exp": TS - 1}, Code.LIFETIME),
        ({"exp": TS + MAX_LIFETIME_MS + 1}, Code.LIFETIME),
        ({"ts": TS + MAX_SKEW_MS + 1, "exp": TS + MAX_SKEW_MS + 2}, Code.FUTURE_DATED),
        ({"ts": TS - 10, "exp": TS}, Code.EXPIRED),
        ({"enc": "gzip", "size": 1}, Code.BAD_COMPRESSION),
        ({"enc": "zstd"}, Code.BAD_COMPRESSION),
        ({"size": 1}, Code.BAD_COMPRESSION),
        ({"enc": "", "size": 1}, Code.BAD_COMPRESSION),
    ],
)
def test_a_changed_key_is_refused(changes: dict[str, Any], code: Code) -> None:
    assert refusal(wrapped(**changes)) is code


def test_unknown_signed_keys_are_ignored() -> None:
    envelope = unseal(wrapped(zebra=[1, 2]))
    envelope.verify_signature()
    assert envelope.content() == b"\x80"


def test_unknown_keys_outside_the_signature_are_refused() -> None:
    outer = decode(wrapped(), MAX_ENVELOPE)
    assert isinstance(outer, dict)
    assert refusal(encode({**outer, "note": "added on the way"})) is Code.WRONG_TYPE


@pytest.mark.parametrize("length", [0, 63, 65])
def test_signatures_of_another_length_are_refused(length: int) -> None:
    assert refusal(encode({"sig": bytes(length), "signed": encode(HEAD)})) is Code.WRONG_TYPE


def test_every_flipped_bit_of_the_signed_part_breaks_the_signature() -> None:
    envelope = unseal(wrapped())
    for place in range(len(envelope.signed)):
        changed = bytearray(envelope.signed)
        changed[place] ^= 1
        forged = Envelope(envelope.head, envelope.sig, bytes(changed), envelope.id)
        with pytest.raises(RemoteError) as caught:
            forged.verify_signature()
        assert caught.value.code is Code.BAD_SIGNATURE


def test_a_signature_without_the_domain_is_refused() -> None:
    signed = encode(HEAD)
    assert refusal(encode({"sig": IDENTITY.sign(signed), "signed": signed})) is Code.BAD_SIGNATURE


def test_signed_bytes_that_are_not_canonical_are_refused() -> None:
    signed = encode(HEAD).replace(b"\xa1v\x01", b"\xa1v\xcc\x01")
    data = encode({"sig": IDENTITY.sign(DOMAIN_ENVELOPE + signed), "signed": signed})
    assert refusal(data) is Code.NOT_CANONICAL


def test_the_times_at_the_edges_are_taken() -> None:
    unseal(wrapped(ts=TS + MAX_SKEW_MS, exp=TS + MAX_SKEW_MS + MAX_LIFETIME_MS)).check_time(TS)
    unseal(wrapped(exp=TS + 1)).check_time(TS)


def zstd_block(kind: int, size: int, data: bytes, last: bool) -> bytes:
    return ((size << 3) | (kind << 1) | last).to_bytes(3, "little") + data


def lying_frame(declared: int, blocks: int) -> bytes:
    """A frame whose header says `declared` bytes and whose run-length blocks hold 128 KiB each."""
    head = bytes.fromhex("28b52ffd") + bytes([0x80, 13 << 3]) + struct.pack("<I", declared)
    return head + b"".join(zstd_block(1, 131_072, b"\0", number == blocks - 1) for number in range(blocks))


PLAIN = b"plain " * 100
FRAME = zstandard.compress(PLAIN)
DICTIONARY = zstandard.ZstdCompressionDict(
    b"plain words of a dictionary " * 20, zstandard.DICT_TYPE_RAWCONTENT
)


@pytest.mark.parametrize(
    ("frame", "size", "code"),
    [
        (FRAME, 601, Code.BAD_COMPRESSION),
        (FRAME, 599, Code.BAD_COMPRESSION),
        (FRAME, 0, Code.BAD_COMPRESSION),
        (FRAME, MAX_BODY + 1, Code.OVERSIZE),
        (FRAME[:-1], 600, Code.BAD_COMPRESSION),
        (FRAME + b"\0", 600, Code.BAD_COMPRESSION),
        (FRAME + FRAME, 1200, Code.BAD_COMPRESSION),
        (FRAME + FRAME, 600, Code.BAD_COMPRESSION),
        (FRAME + bytes.fromhex("502a4d1800000000"), 600, Code.BAD_COMPRESSION),
        (bytes.fromhex("502a4d1804000000") + b"skip", 4, Code.BAD_COMPRESSION),
        (bytes.fromhex("502a4d1800000000") + FRAME, 600, Code.BAD_COMPRESSION),
        (zstandard.ZstdCompressor(write_content_size=False).compress(PLAIN), 600, Code.BAD_COMPRESSION),
        (lying_frame(600, 1), 600, Code.BAD_COMPRESSION),
        (lying_frame(MAX_BODY, 8000), MAX_BODY, Code.BAD_COMPRESSION),
        (lying_frame(MAX_BODY, 1), MAX_BODY, Code.BAD_COMPRESSION),
        (zstandard.compress(b""), 0, Code.BAD_COMPRESSION),
        (b"", 0, Code.BAD_COMPRESSION),
        (b"no frame", 8, Code.BAD_COMPRESSION),
        (FRAME[:4], 600, Code.BAD_COMPRESSION),
    ],
)
def test_a_frame_that_is_not_what_it_says_is_refused(frame: bytes, size: int, code: Code) -> None:
    assert compressed(frame, size) is code


def test_frames_that_need_a_dictionary_are_refused() -> None:
    words = b"plain words of a dictionary " * 3
    trained = zstandard.train_dictionary(1024, [b"sample %d of many plain words" % n * 9 for n in range(99)])
    for dictionary in (DICTIONARY, trained):
        frame = zstandard.ZstdCompressor(dict_data=dictionary).compress(words)
        assert compressed(frame, len(words)) is Code.BAD_COMPRESSION


def test_a_frame_with_a_huge_window_is_refused() -> None:
    wide = bytearray(lying_frame(131_072, 1))
    assert len(opened(wrapped(enc="zstd", size=131_072, body=bytes(wide)))) == 131_072
    wide[5] = 21 << 3  # 2^31 bytes
    assert compressed(bytes(wide), 131_072) is Code.BAD_COMPRESSION


def test_an_honest_frame_of_the_largest_body_opens() -> None:
    body = bytes(MAX_BODY)
    envelope = unseal(wrapped(enc="zstd", size=MAX_BODY, body=zstandard.compress(body)))
    assert envelope.content() == body


def test_a_body_larger_than_asked_for_is_refused() -> None:
    with pytest.raises(RemoteError) as caught:
        unseal(wrapped(body=bytes(101))).content(100)
    assert caught.value.code is Code.OVERSIZE


def test_sealing_more_than_a_reader_takes_is_an_error_with_figures() -> None:
    with pytest.raises(LocalError, match="1000000"):
        seal(IDENTITY, Kind.ROLLOUT, RUN, os.urandom(MAX_ENVELOPE), seq=0, ts=TS)
    with pytest.raises(LocalError, match="8000001"):
        seal(IDENTITY, Kind.ROLLOUT, RUN, bytes(MAX_BODY + 1), seq=0, ts=TS)


@given(st.binary(max_size=400), st.integers(0, 1 << 40), st.sampled_from(Kind))
def test_sealing_and_opening_is_the_identity(body: bytes, seq: int, kind: Kind) -> None:
    envelope = unseal(seal(IDENTITY, kind, RUN, body, seq=seq, ts=TS))
    envelope.verify_signature()
    assert (envelope.content(), envelope.head.seq, envelope.head.kind) == (body, seq, kind)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_envelope_or_a_remote_error(data: bytes) -> None:
    with pytest.raises(RemoteError):
        unseal(data)


VALID = seal(IDENTITY, Kind.ROLLOUT, RUN, b"a plain body " * 40, seq=1, ts=TS)


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_mutated_envelope_is_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(VALID)
    for place, change in changes:
        data[place] ^= change
    if bytes(data) != VALID:
        refusal(bytes(data))


@given(st.lists(st.tuples(st.integers(0, len(FRAME) - 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_mutated_frame_is_decompressed_or_refused(changes: list[tuple[int, int]]) -> None:
    frame = bytearray(FRAME)
    for place, change in changes:
        frame[place] ^= change
    envelope = unseal(wrapped(enc="zstd", size=600, body=bytes(frame)))
    try:
        size, code = len(envelope.content()), Code.BAD_COMPRESSION
    except RemoteError as error:
        size, code = 600, error.code
    assert (size, code) == (600, Code.BAD_COMPRESSION)
