"""Vectors of chapter 03 about the swarm: bitmaps, have-messages, and what a chunk's reply means."""

from __future__ import annotations

import hashlib
from typing import Any

import vectors_runs
from vectors_encoding import tagged
from vectors_world import RUN, case

from nous_node.protocol.encoding import encode

CHECKPOINT = bytes(range(32))
ADDRESS = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
CHUNK = bytes(number * 7 % 251 for number in range(200))


def framed(data: bytes) -> str:
    return (len(data).to_bytes(4, "big") + data).hex()


def streams() -> list[dict[str, Any]]:
    asked = {"run": RUN, "checkpoint": CHECKPOINT}
    good: list[tuple[str, str, dict[str, Any]]] = [
        ("a have request of a node that has nothing yet", "have-request", asked),
        ("one with chunks", "have-request", {**asked, "have": b"\x05\x01"}),
        ("one with an HTTP port and an address", "have-request", {**asked, "http": 8080, "addresses": [ADDRESS]}),
        ("the largest bitmap", "have-request", {**asked, "have": bytes(65_536)}),
        ("a have reply of a node that has nothing", "have-reply", {}),
        ("one with chunks", "have-reply", {"have": b"\xff\x03"}),
        ("one with an HTTP port and peers", "have-reply", {"have": b"\x01", "http": 65_535, "peers": [ADDRESS]}),
        ("of another run", "have-reply", {"error": "wrong-run"}),
        ("of a node that does not know the checkpoint", "have-reply", {"error": "unknown-checkpoint"}),
    ]  # fmt: skip
    bad: list[tuple[str, str, dict[str, Any]]] = [
        ("no checkpoint", "have-request", {"run": RUN}),
        ("a checkpoint of 31 bytes", "have-request", {**asked, "checkpoint": CHECKPOINT[:31]}),
        ("a bitmap as an array", "have-request", {**asked, "have": [1, 5]}),
        ("a bitmap that is too large for any checkpoint", "have-request", {**asked, "have": bytes(65_537)}),
        ("port 0", "have-request", {**asked, "http": 0}),
        ("port 65536", "have-reply", {"http": 65_536}),
        ("nine addresses", "have-request", {**asked, "addresses": [ADDRESS] * 9}),
        ("17 peers", "have-reply", {"peers": [ADDRESS] * 17}),
        ("an address that is none", "have-reply", {"peers": ["192.0.2.7:4001"]}),
        ("a bitmap as text", "have-reply", {"have": "ff"}),
        ("an address with a line break behind it", "have-reply", {"peers": [ADDRESS + "\n"]}),
    ]
    nil: list[tuple[str, dict[str, Any]]] = [
        ("have-request", {**asked, "have": None}),
        ("have-request", {**asked, "http": None}),
        ("have-request", {**asked, "addresses": None}),
        ("have-reply", {"have": None}),
        ("have-reply", {"error": None, "have": b"\x01"}),
        ("head-reply", {"checkpoint": None, "run": b"envelope"}),
        ("blob-reply", {"data": b"chunk", "error": None}),
        ("blob-reply", {"data": None, "error": "not-found"}),
    ]
    busy = case(
        "a blob for which there is no time",
        "STR-3 STR-1",
        "valid",
        message="blob-reply",
        frame=framed(encode({"error": "busy"})),
        value=tagged({"error": "busy"}),
    )
    return [
        *vectors_runs.streams(),
        busy,
        *(
            case(comment, "STR-4 STR-1", "valid", message=kind, frame=framed(encode(value)), value=tagged(value))
            for comment, kind, value in good
        ),
        *(
            case(comment, "STR-4", "invalid", message=kind, frame=framed(encode(value)), code="wrong-type")
            for comment, kind, value in bad
        ),
        *(
            case("nil for an optional key", "ENC-12", "invalid", message=kind, frame=framed(encode(value)), code="wrong-type")
            for kind, value in nil
        ),
    ]  # fmt: skip


def bitmaps() -> list[dict[str, Any]]:
    """Bitmaps of checkpoints by their number of chunks, and which chunks they name."""
    rows: list[tuple[str, int, list[int]]] = [
        ("the first chunk", 8, [0]),
        ("the eighth is the highest bit of the first byte", 8, [7]),
        ("the ninth begins the second byte", 9, [8]),
        ("all of nine", 9, list(range(9))),
        ("none of ten", 10, []),
        ("one chunk", 1, [0]),
        ("every third of 50", 50, list(range(0, 50, 3))),
        ("no chunks at all: an empty bitmap", 0, []),
    ]
    bad: list[tuple[str, int, bytes]] = [
        ("a byte too few", 9, b"\xff"),
        ("a byte too many, though it is 0", 8, b"\xff\x00"),
        ("a bit behind the last chunk", 9, b"\x00\x02"),
        ("all bits of the last byte", 9, b"\xff\xff"),
        ("a bitmap where there is nothing to have", 0, b"\x00"),
        ("an empty one where there is", 1, b""),
    ]
    return [
        case(comment, "STR-4", "valid", chunks=count, have=_bitmap(held, count).hex(), held=held)
        for comment, count, held in rows
    ] + [
        case(comment, "STR-4", "invalid", chunks=count, have=have.hex(), code="size-mismatch")
        for comment, count, have in bad
    ]


def _bitmap(held: list[int], count: int) -> bytes:
    have = bytearray(-(-count // 8))
    for chunk in held:
        have[chunk // 8] |= 1 << chunk % 8
    return bytes(have)


def blobs() -> list[dict[str, Any]]:
    """Both frames of a stream of /nous/blob/1 for CHUNK, and what the asking node makes of them."""
    good: list[tuple[str, Any]] = [
        ("the chunk", {"data": CHUNK}),
        ("a key of a later revision beside it", {"data": CHUNK, "served": 7}),
        ("an error beside the chunk", {"data": CHUNK, "error": "busy"}),
    ]
    bad: list[tuple[str, str, Any]] = [
        ("another chunk", "hash-mismatch", {"data": CHUNK[::-1]}),
        ("a bit that has turned", "hash-mismatch", {"data": bytes([CHUNK[0] ^ 1]) + CHUNK[1:]}),
        ("the beginning of the chunk", "hash-mismatch", {"data": CHUNK[:-1]}),
        ("more than the chunk", "hash-mismatch", {"data": CHUNK + b"\0"}),
        ("an empty chunk", "hash-mismatch", {"data": b""}),
        ("not held", "not-found", {"error": "not-found"}),
        ("no time", "busy", {"error": "busy"}),
        ("an error that this revision does not know", "not-found", {"error": "another-day"}),
        ("nothing", "not-found", {}),
        ("data as text", "wrong-type", {"data": CHUNK[:5].hex()}),
    ]
    frames: list[tuple[str, str, str]] = [
        ("no frame at all", "malformed", ""),
        ("bytes that are no message", "malformed", framed(b"\xc1")),
        ("an array", "wrong-type", framed(encode([CHUNK]))),
        ("an integer in more bytes than it needs", "not-canonical", framed(b"\x81\xa4data\xd9\x01a")),
        ("it ends in the middle", "malformed", framed(encode({"data": CHUNK}))[:-20]),
        ("a length above the limit, which is all that is read", "oversize", (4_195_329).to_bytes(4, "big").hex()),
    ]  # fmt: skip
    digest = hashlib.sha256(CHUNK).digest()
    request = framed(encode({"hash": digest}))

    def transcript(comment: str, reply: str, code: str = "") -> dict[str, Any]:
        verdict = {"code": code} if code else {"data": CHUNK.hex()}
        flag = "invalid" if code else "valid"
        return case(
            comment, "STR-3 STR-1 CKP-7", flag, hash=digest.hex(), request=request, reply=reply, **verdict
        )

    return [
        *(transcript(comment, framed(encode(value))) for comment, value in good),
        transcript("bytes behind its frame, which are not read", framed(encode({"data": CHUNK})) + "c1"),
        *(transcript(comment, framed(encode(value)), code) for comment, code, value in bad),
        *(transcript(comment, frame, code) for comment, code, frame in frames),
    ]
