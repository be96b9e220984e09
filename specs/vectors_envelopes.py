"""Vectors of chapter 02: envelopes."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from vectors_encoding import tagged
from vectors_references import reference
from vectors_world import ALICE, NOW, RUN, case, forged, head, raw_frame, run_length_frame, sealed

from nous_node.protocol.constants import DOMAIN_ENVELOPE, MAX_BODY, MAX_LIFETIME_MS, MAX_SKEW_MS
from nous_node.protocol.encoding import encode

PLAIN = b"plain " * 20
REPEATING = bytes.fromhex("28b52ffd801805000000080000614500000862015401000001")
"""A raw block `a`, and one with the literal `b` and a match of three at the offset 1."""
CHECKED = b"\x28\xb5\x2f\xfd\xa4" + raw_frame(PLAIN)[5:] + bytes.fromhex("22be531b")
"""With the XXH64 of the content, of which a frame has the low 4 bytes."""


def envelopes() -> list[dict[str, Any]]:
    return [*_good(), *_bad_heads(), *_bad_frames(), *_bad_outers()]


def _good() -> list[dict[str, Any]]:
    frame = raw_frame(PLAIN)
    heads = [
        ("a message that is not compressed", "ENV-5 ENV-6", head(ALICE, "hello", b"\x80", 7), b"\x80"),
        (
            "a compressed body",
            "ENV-8",
            head(ALICE, "rollout", frame, 8, enc="zstd", size=len(PLAIN)),
            PLAIN,
        ),
        (
            "run-length blocks of 128 KiB",
            "ENV-8",
            head(ALICE, "rollout", run_length_frame(262_144, 2), 9, enc="zstd", size=262_144),
            None,
        ),
        (
            "a frame with a checksum",
            "ENV-8",
            head(ALICE, "rollout", CHECKED, 11, enc="zstd", size=len(PLAIN)),
            PLAIN,
        ),
        (
            "a frame with a dictionary id of 0, which is none",
            "ENV-8",
            head(
                ALICE,
                "rollout",
                b"\x28\xb5\x2f\xfd\xa1\0" + raw_frame(PLAIN)[5:],
                12,
                enc="zstd",
                size=len(PLAIN),
            ),
            PLAIN,
        ),
        (
            "a frame with a sequence that repeats an offset",
            "ENV-8",
            head(ALICE, "rollout", REPEATING, 13, enc="zstd", size=5),
            b"abbbb",
        ),
        (
            "an unknown signed key is ignored",
            "ENC-10 ENV-2",
            head(ALICE, "hello", b"\x80", zebra=[1]),
            b"\x80",
        ),
        (
            "enc and size as nil mean absent",
            "ENC-12",
            {**head(ALICE, "hello", b"\x80"), "enc": None},
            b"\x80",
        ),
        ("a reference", "ENV-4", head(ALICE, "reference", encode(reference()), 10), encode(reference())),
        ("the shortest life", "ENV-7", head(ALICE, "hello", b"\x80", exp=NOW + 1), b"\x80"),
        ("the longest life", "ENV-7", head(ALICE, "hello", b"\x80", exp=NOW + MAX_LIFETIME_MS), b"\x80"),
        (
            "as far ahead as clocks may be",
            "ENV-7",
            head(ALICE, "hello", b"\x80", ts=NOW + MAX_SKEW_MS, exp=NOW + MAX_SKEW_MS + 1),
            b"\x80",
        ),
    ]
    return [_taken(comment, rule, fields, body) for comment, rule, fields, body in heads]


def _taken(comment: str, rule: str, fields: dict[str, Any], body: bytes | None) -> dict[str, Any]:
    signed = encode(fields)
    preimage = DOMAIN_ENVELOPE + signed
    sig = ALICE.sign(preimage)
    content = body if body is not None else bytes(fields["size"])
    return case(
        comment,
        rule,
        "valid",
        head=tagged(fields),
        signed=signed.hex(),
        preimage=preimage.hex(),
        sig=sig.hex(),
        id=hashlib.sha256(signed).hexdigest(),
        envelope=encode({"sig": sig, "signed": signed}).hex(),
        now=NOW,
        content_sha256=hashlib.sha256(content).hexdigest(),
    )


def _refused(comment: str, rule: str, data: bytes, code: str) -> dict[str, Any]:
    return case(comment, rule, "invalid", envelope=data.hex(), now=NOW, code=code)


def _bad_heads() -> list[dict[str, Any]]:
    rows: list[tuple[str, str, dict[str, Any], str]] = [
        ("another protocol", "ENV-3", {"v": 2}, "unsupported-version"),
        (
            "another protocol of another shape",
            "ENV-3",
            {"v": 2, "run": 5, "from": None},
            "unsupported-version",
        ),
        ("protocol 0", "ENV-3", {"v": 0}, "unsupported-version"),
        ("no protocol", "ENV-2", {"v": None}, "wrong-type"),
        ("the protocol as a bool", "ENC-12", {"v": True}, "wrong-type"),
        ("the protocol as a float", "ENC-12", {"v": 1.0}, "wrong-type"),
        ("unknown kind", "ENV-4", {"kind": "gift"}, "unknown-kind"),
        ("no kind", "ENV-2", {"kind": None}, "wrong-type"),
        ("kind as bin", "ENC-12", {"kind": b"hello"}, "wrong-type"),
        ("run id of 31 bytes", "ENV-2", {"run": RUN[:31]}, "wrong-type"),
        ("run id as text", "ENC-12", {"run": RUN.hex()}, "wrong-type"),
        ("key of 33 bytes", "ENV-2", {"from": ALICE.key + b"\0"}, "wrong-type"),
        ("negative seq", "ENV-2", {"seq": -1}, "wrong-type"),
        ("seq as a float", "ENC-12", {"seq": 1.0}, "wrong-type"),
        ("no ts", "ENV-2", {"ts": None}, "wrong-type"),
        ("no body", "ENV-2", {"body": None}, "wrong-type"),
        ("body as text", "ENC-12", {"body": "text"}, "wrong-type"),
        ("exp equals ts", "ENV-7", {"exp": NOW}, "lifetime"),
        ("exp before ts", "ENV-7", {"exp": NOW - 1}, "lifetime"),
        ("a millisecond too long a life", "ENV-7", {"exp": NOW + MAX_LIFETIME_MS + 1}, "lifetime"),
        ("expired this very millisecond", "ENV-7", {"ts": NOW - 9, "exp": NOW}, "expired"),
        (
            "a millisecond too far ahead",
            "ENV-7",
            {"ts": NOW + MAX_SKEW_MS + 1, "exp": NOW + MAX_SKEW_MS + 2},
            "future-dated",
        ),
        (
            "unknown compression, though it is a frame",
            "ENV-8",
            {"body": raw_frame(PLAIN), "enc": "gzip", "size": len(PLAIN)},
            "bad-compression",
        ),
        ("compression without a size", "ENV-8", {"enc": "zstd"}, "bad-compression"),
        ("a size without compression", "ENV-8", {"size": 1}, "bad-compression"),
    ]
    return [
        _refused(comment, rule, sealed(ALICE, "hello", b"\x80", **changes), code)
        for comment, rule, changes, code in rows
    ]


def _bad_frames() -> list[dict[str, Any]]:
    frame, size = raw_frame(PLAIN), len(PLAIN)
    skippable = bytes.fromhex("502a4d1800000000")
    nameless = bytes.fromhex("28b52ffd0058") + ((size << 3) | 1).to_bytes(3, "little") + PLAIN
    dictionary = bytes.fromhex("28b52ffda107") + struct.pack("<I", size) + frame[9:]
    rows: list[tuple[str, bytes, int, str]] = [
        ("the envelope declares a byte more", frame, size + 1, "bad-compression"),
        ("the envelope declares a byte less", frame, size - 1, "bad-compression"),
        ("a checksum that does not hold", CHECKED[:-1] + bytes([CHECKED[-1] ^ 1]), size, "bad-compression"),
        ("a checksum that is cut short", CHECKED[:-1], size, "bad-compression"),
        ("a reserved bit of the header", b"\x28\xb5\x2f\xfd\xa8" + frame[5:], size, "bad-compression"),
        (
            "a block of the reserved type",
            frame[:9] + bytes([frame[9] | 6]) + frame[10:],
            size,
            "bad-compression",
        ),
        (
            "reserved bits in the compression modes of a block",
            bytes.fromhex("28b52ffda4000004005400001000000101fbff39c0020300100040270fa6"),
            262_144,
            "bad-compression",
        ),
        ("the frame is cut short", frame[:-1], size, "bad-compression"),
        ("a byte behind the frame", frame + b"\0", size, "bad-compression"),
        ("two frames", frame + frame, 2 * size, "bad-compression"),
        ("a second frame that is not declared", frame + frame, size, "bad-compression"),
        ("a skippable frame behind", frame + skippable, size, "bad-compression"),
        ("a skippable frame before", skippable + frame, size, "bad-compression"),
        ("only a skippable frame", bytes.fromhex("502a4d1804000000") + b"skip", 4, "bad-compression"),
        ("a frame that does not say its size", nameless, size, "bad-compression"),
        ("a frame that needs a dictionary", dictionary, size, "bad-compression"),
        ("more in the blocks than the header says", run_length_frame(600, 1), 600, "bad-compression"),
        (
            "less in the blocks than the header says",
            run_length_frame(MAX_BODY, 1),
            MAX_BODY,
            "bad-compression",
        ),
        ("a bomb of 128 MiB", run_length_frame(MAX_BODY, 1024), MAX_BODY, "bad-compression"),
        ("a window of 2 GiB", run_length_frame(131_072, 1, 21), 131_072, "bad-compression"),
        ("an empty body", raw_frame(b""), 0, "bad-compression"),
        ("a window of 16 MiB", run_length_frame(131_072, 1, 14), 131_072, "bad-compression"),
        (
            "a sequence whose offset is 0",
            bytes.fromhex("28b52ffd801804000000080000613d000000015400010003"),
            4,
            "bad-compression",
        ),
        (
            "a block that unfolds to more bytes than its window",
            bytes.fromhex("28b52ffd4000d0062d00000d7d000000"),
            2000,
            "bad-compression",
        ),
        (
            "a run-length block of more than 128 KiB",
            bytes.fromhex("28b52ffd8068400d0300036a1800"),
            200_000,
            "bad-compression",
        ),
        (
            "a raw block of more bytes than its window",
            bytes.fromhex("28b52ffd4000d006813e00") + bytes(2000),
            2000,
            "bad-compression",
        ),
        (
            "a block of more bytes than its window",
            bytes.fromhex("28b52ffd20050800006145000008620154010000" + "01"),
            5,
            "bad-compression",
        ),
        ("no frame", b"no frame", 8, "bad-compression"),
        ("more than any body holds", frame, MAX_BODY + 1, "oversize"),
    ]
    return [
        _refused(comment, "ENV-8", sealed(ALICE, "rollout", data, enc="zstd", size=declared), code)
        for comment, data, declared, code in rows
    ] + [_many_blocks()]


def _many_blocks() -> dict[str, Any]:
    """A frame of one byte whose blocks are all empty but the last."""
    empty = bytes(3 * 65_536)
    frame = bytes.fromhex("28b52ffd2001") + empty + bytes.fromhex("09000000")
    before, after = sealed(ALICE, "rollout", frame, enc="zstd", size=1).split(empty)
    pieces = [[before.hex(), 1], ["000000", 65_536], [after.hex(), 1]]
    return case("65,537 blocks", "ENV-8", "invalid", envelope=pieces, now=NOW, code="bad-compression")


def _bad_outers() -> list[dict[str, Any]]:
    fields = head(ALICE, "hello", b"\x80")
    signed = encode(fields)
    sig = ALICE.sign(DOMAIN_ENVELOPE + signed)
    loose = signed.replace(b"\xa1v\x01", b"\xa1v\xcc\x01")
    rows: list[tuple[str, str, bytes, str]] = [
        (
            "a flipped bit in the signature",
            "ENV-5",
            forged(encode({"sig": sig, "signed": signed})),
            "bad-signature",
        ),
        (
            "signed without the domain",
            "ENV-5",
            encode({"sig": ALICE.sign(signed), "signed": signed}),
            "bad-signature",
        ),
        (
            "signed with the domain of tasks",
            "ENV-5",
            encode({"sig": ALICE.sign(b"nous/task/1\0" + signed), "signed": signed}),
            "bad-signature",
        ),
        (
            "the id signed instead of the bytes",
            "ENV-5",
            encode({"sig": ALICE.sign(DOMAIN_ENVELOPE + hashlib.sha256(signed).digest()), "signed": signed}),
            "bad-signature",
        ),
        ("an unsigned key", "ENV-1", encode({"note": 1, "sig": sig, "signed": signed}), "wrong-type"),
        ("no signature", "ENV-1", encode({"signed": signed}), "wrong-type"),
        ("a signature of 63 bytes", "ENV-1", encode({"sig": sig[:63], "signed": signed}), "wrong-type"),
        ("the signed part as a map", "ENV-1", encode({"sig": sig, "signed": fields}), "wrong-type"),
        ("an array instead of a map", "ENV-1", encode([sig, signed]), "wrong-type"),
        ("a signed part that is no map", "ENV-2", encode({"sig": sig, "signed": encode([1])}), "wrong-type"),
        ("an empty signed part", "ENV-2", encode({"sig": sig, "signed": b""}), "malformed"),
        (
            "a signed part that is not canonical, with a right signature",
            "ENV-2",
            encode({"sig": ALICE.sign(DOMAIN_ENVELOPE + loose), "signed": loose}),
            "not-canonical",
        ),
    ]
    return [_refused(comment, rule, data, code) for comment, rule, data, code in rows]
