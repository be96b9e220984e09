"""Vectors of chapter 07: references to rollout groups, and frames that are fetched for them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from vectors_encoding import tagged
from vectors_world import case, group, raw_frame, run_length_frame, trajectory

from nous_node.protocol.encoding import decode, encode
from nous_node.protocol.rollouts import Reference, RolloutGroup

CHUNK = 16_384
GROUP = group(counter=7)
LIMIT = 262_144
"""Bytes of a group by reference in the run of the vectors. [ROL-14]"""


def reference(one: RolloutGroup = GROUP, frame: bytes | None = None, **changes: Any) -> dict[str, Any]:
    """Of a frame that is made of one raw block, as plain values; a change to `None` drops a key."""
    body = one.to_bytes()
    frame = raw_frame(body) if frame is None else frame
    pieces = [frame[start : start + CHUNK] for start in range(0, len(frame), CHUNK)]
    hashes = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    digest = hashlib.sha256(body).digest()
    made = Reference(one.checkpoint, one.counter, digest, len(body), len(frame), CHUNK, hashes)
    fields = {**msgspec.to_builtins(made, builtin_types=(bytes,)), **changes}
    return {key: value for key, value in fields.items() if value is not None}


def references() -> list[dict[str, Any]]:
    return [*_good(), *_bad_references(), *_bad_frames()]


def _good() -> list[dict[str, Any]]:
    long = group(trajectories=[trajectory(components={f"{'part' * 50} {n}": 0.5 for n in range(60)})] * 8)
    rows = [
        ("a group in one chunk", "ROL-15 ROL-16 ROL-17", GROUP),
        ("a group in several chunks", "ROL-15 ROL-16 ROL-17", long),
    ]
    return [
        case(
            comment,
            rule,
            "valid",
            body=(body := encode(reference(one))).hex(),
            value=tagged(decode(body, 1 << 20)),
            frame=raw_frame(one.to_bytes()).hex(),
            group=one.to_bytes().hex(),
        )
        for comment, rule, one in rows
    ]


def _bad_references() -> list[dict[str, Any]]:
    rows: list[tuple[str, str, dict[str, Any], str]] = [
        ("a chunk too many", "ROL-15", {"chunks": bytes(64)}, "size-mismatch"),
        ("no chunks", "ROL-15", {"chunks": b""}, "size-mismatch"),
        ("half a hash", "ROL-15", {"chunks": bytes(16)}, "size-mismatch"),
        ("a byte more than its chunks", "ROL-15", {"packed": CHUNK + 1}, "size-mismatch"),
        ("larger than any group of the run", "ROL-14", {"size": LIMIT + 1}, "oversize"),
        ("packed larger than any group of the run", "ROL-14", {"packed": LIMIT + 1, "chunks": bytes(32 * 17)}, "oversize"),
        ("too large before its chunks are counted", "ROL-14", {"packed": LIMIT + 1}, "oversize"),
        ("larger than any group", "ROL-15", {"size": (1 << 26) + 1}, "wrong-type"),
        ("an empty group", "ROL-15", {"size": 0}, "wrong-type"),
        ("an empty frame", "ROL-15", {"packed": 0, "chunks": b""}, "wrong-type"),
        ("chunks smaller than any may be", "ROL-15", {"chunk": CHUNK - 1}, "wrong-type"),
        ("chunks larger than any may be", "ROL-15", {"chunk": (1 << 22) + 1}, "wrong-type"),
        ("a hash of 31 bytes", "ROL-15", {"hash": bytes(31)}, "wrong-type"),
        ("no checkpoint", "ROL-15", {"checkpoint": None}, "wrong-type"),
        ("a counter of 2^32", "ROL-15", {"counter": 1 << 32}, "wrong-type"),
        ("a size as text", "ROL-15", {"size": "12"}, "wrong-type"),
    ]  # fmt: skip
    return [
        case(comment, rule, "invalid reference", body=encode(reference(**changes)).hex(), code=code)
        for comment, rule, changes, code in rows
    ]


def _bad_frames() -> list[dict[str, Any]]:
    body, other = GROUP.to_bytes(), group(counter=8).to_bytes()
    frame = raw_frame(body)
    rows: list[tuple[str, dict[str, Any], bytes, str]] = [
        ("another chunk than the reference names", reference(), raw_frame(other), "hash-mismatch"),
        ("a frame of another group", reference(frame=raw_frame(other)), raw_frame(other), "hash-mismatch"),
        ("a group of another counter", reference(counter=8), frame, "hash-mismatch"),
        ("a group of another checkpoint", reference(checkpoint=b"\1" * 32), frame, "hash-mismatch"),
        ("a frame shorter than the reference says", reference(), frame[:-1], "size-mismatch"),
        ("a frame longer than the reference says", reference(), frame + b"\0", "size-mismatch"),
        ("the group as it is", reference(frame=body), body, "bad-compression"),
        ("bytes behind the frame", reference(frame=frame + b"\0"), frame + b"\0", "bad-compression"),
        ("a frame that says another size", reference(size=len(body) - 1), frame, "bad-compression"),
        ("a frame that unfolds to more than it says", reference(frame=(bomb := run_length_frame(len(body), 64))), bomb, "bad-compression"),
    ]  # fmt: skip
    nothing = raw_frame(b"\x80")
    empty = encode(
        {
            **reference(frame=nothing),
            "size": 1,
            "hash": hashlib.sha256(b"\x80").digest(),
        }
    )
    found = [
        case(comment, "ROL-17", "invalid frame", body=encode(said).hex(), frame=data.hex(), code=code)
        for comment, said, data, code in rows
    ]
    return [
        *found,
        case(
            "a group of another shape",
            "ROL-13 ROL-17",
            "invalid frame",
            body=empty.hex(),
            frame=nothing.hex(),
            code="wrong-type",
        ),
    ]
