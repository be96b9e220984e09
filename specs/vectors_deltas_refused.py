"""Vectors of chapter 09: parents, headers and payloads of deltas that are refused."""

from __future__ import annotations

import struct
from typing import Any

from vectors_deltas import (
    NUMBERS,
    SEGMENT,
    delta,
    gap,
    hashes,
    packed,
    planes,
    safetensors,
    with_header,
    words,
)
from vectors_world import case, raw_frame, run_length_frame

from nous_node.protocol.encoding import encode

OLD, NEW = NUMBERS.tensors(NUMBERS.old), NUMBERS.tensors(NUMBERS.new)
PARENT = safetensors(OLD)
GAP = NUMBERS.content("gap")
GOOD = raw_frame(GAP)
FULL = raw_frame(planes(NUMBERS.new, 2))
DELTA = delta({"w": [(0, "gap", GOOD)]})


def bad(
    comment: str,
    rule: str,
    made: bytes,
    code: str,
    parent: bytes = PARENT,
    tensors: dict[str, str] | None = None,
) -> dict[str, Any]:
    known = hashes(NEW) if tensors is None else tensors
    return case(comment, rule, "invalid", parent=packed(parent), delta=packed(made), tensors=known, code=code)


def _header(entry: str) -> bytes:
    return with_header(('{"w":' + entry + "}").encode(), NUMBERS.old)


def parents() -> list[dict[str, Any]]:
    entry = '{"dtype":"BF16","shape":[5],"data_offsets":[0,10]}'
    two = f'{entry},"v":' + '{"dtype":"U8","shape":[4],"data_offsets":[%d,%d]}'
    metadata = '"__metadata__":{"x":"' + "[" * 196_608 + '"}'
    rows: list[tuple[str, bytes, str]] = [
        ("no byte", b"", "size-mismatch"),
        ("7 bytes", bytes(7), "size-mismatch"),
        ("a header of 16,000,001 bytes", struct.pack("<Q", 16_000_001) + b"{}", "oversize"),
        ("a header of 2^64 - 1 bytes", b"\xff" * 8 + b"{}", "oversize"),
        ("a header that is cut short", PARENT[:40], "size-mismatch"),
        ("a header that is no JSON", with_header(b"{", NUMBERS.old), "malformed"),
        ("a header that is no UTF-8", with_header(b'{"w":%b,"__metadata__":{"x":"\xff"}}' % entry.encode(), NUMBERS.old), "malformed"),
        ("a header that is an array", with_header(b"[]", NUMBERS.old), "malformed"),
        ("a tensor twice", _header(f'{entry},"w":{entry}'), "malformed"),
        ("a key of a tensor twice", _header(entry.replace('"shape"', '"dtype":"BF16","shape"')), "malformed"),
        ("no shape", _header('{"dtype":"BF16","data_offsets":[0,10]}'), "malformed"),
        ("a type that is a number", _header(entry.replace('"BF16"', "16")), "malformed"),
        ("a shape that is a number", _header(entry.replace("[5]", "5")), "malformed"),
        ("a negative length", _header(entry.replace("[5]", "[-5]")), "malformed"),
        ("a length that is not whole", _header(entry.replace("[5]", "[5.0]")), "malformed"),
        ("a length of 2^63", _header(entry.replace("[5]", "[9223372036854775808]")), "malformed"),
        ("a length that is a bool", _header(entry.replace("[5]", "[5,true]")), "malformed"),
        ("a length with an exponent", _header(entry.replace("[5]", "[5e0]")), "malformed"),
        ("a further key of a tensor", _header(entry.replace('"shape"', '"note":"","shape"')), "malformed"),
        ("metadata that are no texts", _header(f'{entry},"__metadata__":{{"x":1}}'), "malformed"),
        ("metadata that are no object", _header(f'{entry},"__metadata__":"x"'), "malformed"),
        ("a name twice in the metadata", _header(f'{entry},"__metadata__":{{"x":"","x":""}}'), "malformed"),
        ("metadata nested 1,000 deep", _header(f'{entry},"__metadata__":' + '{"x":' * 1000 + '""' + "}" * 1000), "malformed"),
        ("a byte order mark", with_header(b"\xef\xbb\xbf{}"), "malformed"),
        ("a comma too many", _header(entry + ","), "malformed"),
        ("NaN for a length", _header(entry.replace("[5]", "[NaN]")), "malformed"),
        ("half of a surrogate pair in a name", _header(entry + ',"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[10,10]}'), "malformed"),
        ("half of a surrogate pair in the metadata", _header(f'{entry},"__metadata__":{{"x":"\\udc00"}}'), "malformed"),
        ("a shape whose product does not fit 64 bits", _header(entry.replace("[5]", "[4294967296,4294967296,5]")), "size-mismatch"),
        ("three offsets", _header(entry.replace("[0,10]", "[0,10,10]")), "malformed"),
        ("4,000 brackets", with_header(b"[" * 4000), "malformed"),
        ("196,611 brackets", with_header(('{"w":' + entry + "," + metadata + "}").encode(), NUMBERS.old), "out-of-range"),
        ("an unknown type", _header(entry.replace("BF16", "BF8")), "unknown-dtype"),
        ("a type in lower case", _header(entry.replace("BF16", "bf16")), "unknown-dtype"),
        ("elements of half a byte", _header(entry.replace("BF16", "F4").replace("5", "20")), "unknown-dtype"),
        ("a shape of fewer bytes", _header(entry.replace("[5]", "[4]")), "size-mismatch"),
        ("a shape of more bytes", _header(entry.replace("[5]", "[1073741824,1073741824]")), "size-mismatch"),
        ("a hole before the first tensor", with_header(('{"w":' + entry.replace("[0,10]", "[1,11]") + "}").encode(), NUMBERS.old + b"\0"), "size-mismatch"),
        ("a hole between two", with_header(('{"w":' + two % (11, 15) + "}").encode(), NUMBERS.old + bytes(5)), "size-mismatch"),
        ("two that overlap", with_header(('{"w":' + two % (9, 13) + "}").encode(), NUMBERS.old + bytes(3)), "size-mismatch"),
        ("bytes behind the last tensor", PARENT + b"\0", "size-mismatch"),
        ("tensors beyond the end", PARENT[:-1], "size-mismatch"),
        ("an end before its begin", _header(entry.replace("[0,10]", "[10,0]")), "size-mismatch"),
    ]  # fmt: skip
    return [bad(f"parent: {comment}", "DLT-1", DELTA, code, parent) for comment, parent, code in rows]


def _raw(header: object, rest: bytes = b"") -> bytes:
    head = encode(header)
    return b"nous/delta/1\0" + struct.pack(">I", len(head)) + head + rest


def _record(*record: object) -> bytes:
    return _raw({"tensors": {"w": [list(record)]}}, GOOD)


def headers() -> list[dict[str, Any]]:
    size = len(GOOD)
    twice = _raw({"tensors": {"w": [[0, "gap", size], [0, "gap", size]]}}, GOOD * 2)
    ones = safetensors({"w": ("U8", [SEGMENT + 1], bytes(SEGMENT + 1))})
    one = raw_frame(b"\1")
    back = _raw(
        {"tensors": {"w": [[1, "xor", len(one)], [0, "full", 35]]}}, one + run_length_frame(SEGMENT, 8)
    )
    head = DELTA[17:-size]
    doubled = head.replace(b"\x81\xa7tensors\x81", b"\x81\xa7tensors\x82") + head[head.index(b"\xa1w") :]
    rows: list[tuple[str, str, bytes, str]] = [
        ("no byte", "DLT-2", b"", "malformed"),
        ("a later format", "DLT-2", DELTA.replace(b"delta/1", b"delta/2"), "malformed"),
        ("safetensors", "DLT-2", PARENT, "malformed"),
        ("cut within the magic", "DLT-2", DELTA[:12], "malformed"),
        ("cut within the length", "DLT-2", DELTA[:16], "malformed"),
        ("cut within the header", "DLT-2", DELTA[:20], "size-mismatch"),
        ("a header of 16,000,001 bytes", "DLT-2", DELTA[:13] + struct.pack(">I", 16_000_001) + head, "oversize"),
        ("a header that is no msgpack", "DLT-2", b"nous/delta/1\0\0\0\0\1\xc1", "malformed"),
        ("an empty header", "DLT-2", b"nous/delta/1\0\0\0\0\0", "malformed"),
        ("a tensor twice", "DLT-2 ENC-5", b"nous/delta/1\0" + struct.pack(">I", len(doubled)) + doubled + GOOD * 2, "not-canonical"),
        ("no tensors", "DLT-2", _raw({}), "wrong-type"),
        ("tensors as an array", "DLT-2", _raw({"tensors": []}), "wrong-type"),
        ("a record that is no array", "DLT-2", _raw({"tensors": {"w": [0]}}), "wrong-type"),
        ("a record of two elements", "DLT-2", _record(0, "gap"), "wrong-type"),
        ("a negative segment", "DLT-2", _record(-1, "gap", size), "wrong-type"),
        ("a payload of 0 bytes", "DLT-2", _record(0, "gap", 0), "wrong-type"),
        ("a payload of 16,777,217 bytes", "DLT-2", _record(0, "gap", 16_777_217), "wrong-type"),
        ("an unknown encoding", "DLT-3", _record(0, "sum", size), "wrong-type"),
        ("an encoding that is a number", "DLT-3", _record(0, 1, size), "wrong-type"),
        ("a tensor that the parent does not have", "DLT-3", _raw({"tensors": {"v": [[0, "gap", size]]}}, GOOD), "wrong-type"),
        ("the same for one without a record", "DLT-3", _raw({"tensors": {"v": []}}), "wrong-type"),
        ("a segment beyond the tensor", "DLT-3", _record(1, "gap", size), "out-of-range"),
        ("a segment far beyond", "DLT-3", _record((1 << 63) - 1, "gap", size), "out-of-range"),
        ("a segment twice", "DLT-3", twice, "out-of-range"),
        ("a payload that is cut short", "DLT-3", DELTA[:-1], "size-mismatch"),
        ("no payload", "DLT-3", DELTA[:-size], "size-mismatch"),
        ("a byte behind the last payload", "DLT-3", DELTA + b"\0", "size-mismatch"),
        ("a payload without a record", "DLT-3", delta({}, GOOD), "size-mismatch"),
        ("a size that is too small", "DLT-3", _record(0, "gap", size - 1), "size-mismatch"),
        ("sizes that add up to more than any file", "DLT-3", _record(0, "gap", 16_777_216), "size-mismatch"),
    ]  # fmt: skip
    empty = safetensors({"w": ("U8", [0], b"")})
    return [bad(comment, rule, made, code) for comment, rule, made, code in rows] + [
        bad("segments that fall", "DLT-3", back, "out-of-range", ones),
        bad(
            "a segment of a tensor without elements", "DLT-3", _record(0, "full", size), "out-of-range", empty
        ),
    ]


def _gap(count: int, steps: bytes, gaps: bytes, limit: int = 0) -> bytes:
    return raw_frame(struct.pack(">IB", count, limit) + steps + gaps)


def payloads() -> list[dict[str, Any]]:
    small = run_length_frame(4, 1)
    unsized = bytes.fromhex("28b52ffd0058") + (len(GAP) << 3 | 1).to_bytes(3, "little") + GAP
    skipped = b"\x50\x2a\x4d\x18" + struct.pack("<I", 10) + bytes(10)
    short = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + bytes(4)
    wide = run_length_frame(10, 1, window=14)
    reserved = GOOD[:9] + bytes([GOOD[9] | 6]) + GOOD[10:]
    tail = words(2, 1)
    rows: list[tuple[str, str, str, bytes, str]] = [
        ("no zstd", "DLT-4", "full", NUMBERS.new, "bad-compression"),
        ("a frame that is cut short", "DLT-4", "gap", GOOD[:-1], "bad-compression"),
        ("a reserved block type", "DLT-4", "gap", reserved, "bad-compression"),
        ("a frame that does not say its size", "DLT-4", "gap", unsized, "bad-compression"),
        ("a skippable frame", "DLT-4", "full", skipped, "bad-compression"),
        ("a skippable frame of another length", "DLT-4", "full", short, "bad-compression"),
        ("the same for gaps", "DLT-4", "gap", short, "bad-compression"),
        ("two frames", "DLT-4", "full", FULL + FULL, "bad-compression"),
        ("a byte behind the frame", "DLT-4", "full", FULL + b"\0", "bad-compression"),
        ("a skippable frame behind it", "DLT-4", "full", FULL + skipped, "bad-compression"),
        ("a window of 16 MiB", "DLT-4", "full", wide, "bad-compression"),
        ("a bomb that says it is small", "DLT-4", "full", run_length_frame(10, 8), "bad-compression"),
        ("a bomb that says what it is", "DLT-4", "full", run_length_frame(1 << 26, 512), "size-mismatch"),
        ("such a bomb for gaps", "DLT-4", "gap", run_length_frame(1 << 26, 512), "size-mismatch"),
        ("fewer elements: full", "DLT-4", "full", raw_frame(bytes(8)), "size-mismatch"),
        ("more elements: xor", "DLT-4", "xor", raw_frame(bytes(12)), "size-mismatch"),
        ("one byte less: xor", "DLT-4", "xor", raw_frame(bytes(9)), "size-mismatch"),
        ("no element: full", "DLT-4", "full", raw_frame(b""), "size-mismatch"),
        ("gaps of 7 bytes", "DLT-4", "gap", raw_frame(struct.pack(">IB", 1, 0) + b"\1\0"), "size-mismatch"),
        ("gaps of only a count", "DLT-4", "gap", small, "size-mismatch"),
        ("gaps of one byte too many", "DLT-4", "gap", raw_frame(GAP + bytes(21 - len(GAP))), "size-mismatch"),
        ("no element changes", "DLT-6", "gap", _gap(0, b"", b"\0\0\0"), "out-of-range"),
        ("more elements than there are", "DLT-6", "gap", _gap(6, tail, b"\0"), "out-of-range"),
        ("2^32 - 1 elements", "DLT-6", "gap", _gap((1 << 32) - 1, tail, b"\0"), "out-of-range"),
        ("a gap too few", "DLT-6", "gap", _gap(2, tail * 2, b"\0"), "size-mismatch"),
        ("a gap too many", "DLT-6", "gap", _gap(1, tail, b"\0\0"), "size-mismatch"),
        ("steps beyond the content", "DLT-6", "gap", _gap(5, tail, b"\0"), "size-mismatch"),
        ("a last gap that does not end", "DLT-6", "gap", _gap(1, tail, b"\0\xff"), "size-mismatch"),
        ("only a gap that does not end", "DLT-6", "gap", _gap(1, tail, b"\xff"), "size-mismatch"),
        ("a place beyond the segment", "DLT-6", "gap", _gap(1, tail, b"\5"), "out-of-range"),
        ("a place beyond it in another order", "DLT-6", "gap", _gap(1, tail, b"\5", 128), "out-of-range"),
        ("the second place beyond it", "DLT-6", "gap", _gap(2, b"\1\1\0\0", b"\4\0"), "out-of-range"),
        ("a place far beyond", "DLT-6", "gap", _gap(1, tail, b"\xff\0"), "out-of-range"),
        ("a step of 0", "DLT-6", "gap", _gap(1, b"\0\0", b"\0"), "out-of-range"),
        ("a second step of 0", "DLT-6", "gap", _gap(2, b"\1\0\0\0", b"\0\0"), "out-of-range"),
    ]  # fmt: skip
    found = [
        bad(comment, rule, delta({"w": [(0, kind, data)]}), code) for comment, rule, kind, data, code in rows
    ]
    return found + _results()


def _results() -> list[dict[str, Any]]:
    whole = safetensors({"w": ("I16", [5], NUMBERS.old)})
    changed = gap(NUMBERS.old, words(2, 0x3F82, 0x3C00, 0xBF81, 0, 0), "BF16")
    other = delta({"w": [(0, "gap", raw_frame(changed))]})
    reordered = delta({"w": [(0, "gap", raw_frame(GAP[:4] + b"\x80" + GAP[5:]))]})
    more = safetensors({**OLD, "v": ("U8", [1], b"\1")})
    return [
        bad("gaps for whole numbers", "DLT-5", DELTA, "wrong-type", whole),
        bad("one element is another", "DLT-8 CKP-15", other, "hash-mismatch"),
        bad("the same changes in another order", "DLT-8", reordered, "hash-mismatch"),
        bad("a change is missing", "DLT-8", delta({}), "hash-mismatch"),
        bad("another parent", "DLT-8", DELTA, "hash-mismatch", safetensors(NEW)),
        bad("a tensor without a hash", "DLT-8", DELTA, "hash-mismatch", tensors={}),
        bad(
            "an unchanged tensor is another",
            "DLT-8",
            DELTA,
            "hash-mismatch",
            more,
            {**hashes(NEW), "v": "00" * 32},
        ),
    ]
