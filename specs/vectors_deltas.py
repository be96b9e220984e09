"""Vectors of chapter 09 about deltas. Contents are made by the text's formulas on whole numbers, frames without a
compressor."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vectors_world import case, raw_frame, run_length_frame

from nous_node.protocol.encoding import encode

SEGMENT = 1_048_576
Tensor = tuple[str, list[int], bytes]
"""Data type, shape, bytes."""
Payload = tuple[int, str, bytes]
"""Segment, encoding, payload."""


def words(width: int, *values: int) -> bytes:
    return b"".join(value.to_bytes(width, "little") for value in values)


def planes(data: bytes, width: int) -> bytes:
    return b"".join(data[number::width] for number in range(width))


def xor(old: bytes, new: bytes, width: int) -> bytes:
    return planes(bytes(a ^ b for a, b in zip(old, new, strict=True)), width)


def ordered(pattern: int, width: int) -> int:
    half = 1 << (8 * width - 1)
    return 2 * half - 1 - pattern if pattern & half else pattern + half


FIELDS = {"BF16": (7, 0xFF), "F16": (10, 0x1F), "F32": (23, 0xFF)}


def gap(old: bytes, new: bytes, dtype: str, limit: int = 0) -> bytes:
    """Chapter 09, word for word."""
    shift, mask = FIELDS[dtype]
    width = 4 if dtype == "F32" else 2
    pairs = [
        tuple(int.from_bytes(side[at : at + width], "little") for side in (old, new))
        for at in range(0, len(old), width)
    ]
    pairs.sort(key=lambda pair: min(pair[0] >> shift & mask, limit))  # stable
    steps, gaps, unchanged = b"", b"", 0
    for before, after in pairs:
        if before == after:
            unchanged += 1
            continue
        size = 1 << (8 * width)
        signed = (ordered(after, width) - ordered(before, width)) % size
        signed -= size if signed >= size // 2 else 0
        steps += words(width, 2 * signed if signed >= 0 else -2 * signed - 1)
        long, short = divmod(unchanged, 255)
        gaps += b"\xff" * long + bytes([short])
        unchanged = 0
    return struct.pack(">IB", len(steps) // width, limit) + planes(steps, width) + gaps


def safetensors(tensors: dict[str, Tensor], **more: Any) -> bytes:
    header: dict[str, Any] = dict(more)
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + body


def with_header(text: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + body


def delta(tensors: dict[str, Sequence[Payload]], behind: bytes = b"", **header: Any) -> bytes:
    records = {name: [[at, kind, len(data)] for at, kind, data in found] for name, found in tensors.items()}
    head = encode({"tensors": records, **header})
    payloads = b"".join(data for name in sorted(tensors) for _, _, data in tensors[name])
    return b"nous/delta/1\0" + struct.pack(">I", len(head)) + head + payloads + behind


def hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in tensors.items()}


def packed(data: bytes) -> Any:
    """Hex, or runs of it where that is shorter: [[hex, count], ...]."""
    if len(data) < 4096:
        return data.hex()
    runs: list[list[Any]] = []
    for byte in data:
        if runs and runs[-1][0] == byte:
            runs[-1][1] += 1
        else:
            runs.append([byte, 1])
    return [[bytes([byte]).hex(), count] for byte, count in runs]


@dataclass
class Change:
    """One tensor `w` before and after."""

    dtype: str
    width: int
    old: bytes
    new: bytes
    limit: int = 0

    def tensors(self, data: bytes) -> dict[str, Tensor]:
        return {"w": (self.dtype, [len(data) // self.width], data)}

    def content(self, encoding: str) -> bytes:
        match encoding:
            case "gap":
                return gap(self.old, self.new, self.dtype, self.limit)
            case "xor":
                return xor(self.old, self.new, self.width)
            case _:
                return planes(self.new, self.width)


MIXED = (
    words(2, 0x3F80, 0x3C00, 0xBF80, 0x0001, 0x3C01, 0x7FC0, 0x8000, 0xBC02, 0x3F00),
    words(2, 0x3F81, 0x3C02, 0xBF80, 0x0003, 0x3C01, 0x7FC1, 0x8001, 0xBC01, 0x3EFF),
)
NUMBERS = Change(
    "BF16", 2, words(2, 0x3F80, 0x3C00, 0xBF80, 0x0001, 0), words(2, 0x3F81, 0x3C00, 0xBF81, 0, 0)
)


def valid(
    comment: str, rule: str, old: dict[str, Tensor], new: dict[str, Tensor], made: bytes, **more: Any
) -> dict[str, Any]:
    parent, result = safetensors(old), safetensors(new)
    return case(
        comment, rule, "valid", parent=packed(parent), delta=packed(made), tensors=hashes(new), result=packed(result), **more
    )  # fmt: skip


def changes() -> list[dict[str, Any]]:
    """One tensor and one payload, with its content."""
    apart = {at: bytes(2 * at) for at in (254, 255, 256, 510, 511)}
    rows: list[tuple[str, str, Change, str]] = [
        ("bf16: one up, one down, to 0", "DLT-6", NUMBERS, "gap"),
        ("bf16: a zero changes its sign", "DLT-6", Change("BF16", 2, words(2, 0, 0x8000), words(2, 0x8000, 0)), "gap"),
        ("bf16: to infinity, from a NaN to another, from a NaN", "DLT-6", Change("BF16", 2, words(2, 0x3F80, 0x7FC1, 0xFFFF), words(2, 0xFF80, 0x7FA0, 0x3F80)), "gap"),
        ("bf16: from the lowest pattern to the highest", "DLT-6", Change("BF16", 2, words(2, 0xFFFF), words(2, 0x7FFF)), "gap"),
        ("bf16: half of all patterns up and down", "DLT-6", Change("BF16", 2, words(2, 0xBF80, 0x3F80), words(2, 0x3F80, 0xBF80)), "gap"),
        *((f"bf16: {at} unchanged elements between two", "DLT-6", Change("BF16", 2, words(2, 1) + zeros + words(2, 1), words(2, 2) + zeros + words(2, 2)), "gap") for at, zeros in apart.items()),
        ("bf16: 300 unchanged before the first, some behind the last", "DLT-6", Change("BF16", 2, bytes(604), bytes(600) + words(2, 1, 0)), "gap"),
        ("f16", "DLT-6", Change("F16", 2, words(2, 0x3C00, 0xBC00, 0x7BFF), words(2, 0x3BFF, 0xBC01, 0x7C00)), "gap"),
        ("f32: small and large steps", "DLT-6", Change("F32", 4, words(4, 0x3F800000, 0xBF800000, 0, 7), words(4, 0x3F800001, 0x3F800000, 0x80000000, 7)), "gap"),
        *((f"bf16: exponents below {limit} first", "DLT-6", Change("BF16", 2, *MIXED, limit), "gap") for limit in (1, 120, 127, 128, 255)),
        ("f16: exponents below 15 first", "DLT-6", Change("F16", 2, words(2, 0x7C00, 0x3C00, 0xB800, 0x3801, 0, 0x3BFF), words(2, 0x7C00, 0x3C01, 0xB800, 0x3802, 1, 0x3BFE), 15), "gap"),
        ("f32: exponents below 127 first", "DLT-6", Change("F32", 4, words(4, 0x3F800000, 0xBF000000, 0, 0x3F000001, 0x80000001), words(4, 0x3F800001, 0xBF000000, 2, 0x3F000000, 0), 127), "gap"),
        ("one element", "DLT-6", Change("F32", 4, words(4, 1), words(4, 2)), "gap"),
        ("bf16: xor", "DLT-5", NUMBERS, "xor"),
        ("bf16: full", "DLT-5", NUMBERS, "full"),
        ("u8 of odd length: xor", "DLT-5", Change("U8", 1, b"\1\2\3", b"\1\0\3"), "xor"),
        ("i64: xor", "DLT-5", Change("I64", 8, words(8, 1, 2, 3), words(8, 1, 1 << 63, 3)), "xor"),
        ("f64: full", "DLT-5", Change("F64", 8, bytes(8), struct.pack("<d", 1.5)), "full"),
        ("a record without a change", "DLT-7", Change("BF16", 2, NUMBERS.old, NUMBERS.old), "xor"),
    ]  # fmt: skip
    found = []
    for comment, rule, change, encoding in rows:
        content = change.content(encoding)
        made = delta({"w": [(0, encoding, raw_frame(content))]})
        old, new = change.tensors(change.old), change.tensors(change.new)
        found.append(valid(comment, f"{rule} DLT-4 DLT-8", old, new, made, contents=[content.hex()]))
    return found


def files() -> list[dict[str, Any]]:
    """More than one tensor or payload."""
    width = {
        1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0",
        2: "U16 I16 F16 BF16",
        4: "U32 I32 F32",
        8: "U64 I64 F64 C64",
    }
    types = {name: size for size, names in width.items() for name in names.split()}
    old: dict[str, Tensor] = {name: (name, [3], bytes(3 * size)) for name, size in types.items()}
    new: dict[str, Tensor] = {name: (name, [3], bytes([1] * 3 * size)) for name, size in types.items()}
    every = delta(
        {name: [(0, "full", raw_frame(planes(new[name][2], size)))] for name, size in types.items()}
    )
    shapes: dict[str, Tensor] = {
        "z": ("BF16", [0, 7], b""),
        "s": ("BF16", [], b"\1\0"),
        "a": ("I8", [2, 2], bytes(4)),
    }
    shaped = shapes | {"s": ("BF16", [], b"\2\0"), "a": ("I8", [2, 2], b"\1\2\3\4")}
    both = delta({"s": [(0, "xor", raw_frame(b"\3\0"))], "a": [(0, "full", raw_frame(b"\1\2\3\4"))]})
    ones: dict[str, Tensor] = {"w": ("U8", [SEGMENT + 1], b"\1" * (SEGMENT + 1))}
    last, first = b"\1" * SEGMENT + b"\2", bytes(SEGMENT) + b"\1"
    zero = run_length_frame(SEGMENT, 8)
    half: dict[str, Tensor] = {"w": ("BF16", [SEGMENT + 2], bytes(2 * SEGMENT + 4))}
    edge = {"w": ("BF16", [SEGMENT + 2], bytes(2 * SEGMENT - 2) + words(2, 1, 0, 1))}
    ends = [
        (0, "gap", raw_frame(gap(bytes(2 * SEGMENT), edge["w"][2][: 2 * SEGMENT], "BF16"))),
        (1, "gap", raw_frame(gap(bytes(4), words(2, 0, 1), "BF16"))),
    ]
    given = NUMBERS.tensors(NUMBERS.old)
    frame = raw_frame(NUMBERS.content("gap"))
    free = encode({"tensors": {"w": [[0, "gap", len(frame), "more"]]}, "zebra": 1})
    extended = b"nous/delta/1\0" + struct.pack(">I", len(free)) + free + frame
    return [
        valid("every type of the table", "DLT-1 DLT-5 DLT-8", old, new, every),
        valid("no elements, one element, tensors that lie in another order than their names", "DLT-1 DLT-3 DLT-8", shapes, shaped, both),
        valid("nothing changes", "DLT-3 DLT-8", shapes, shapes, delta({})),
        valid("a tensor without a record of it", "DLT-3", shapes, shapes, delta({"s": []})),
        valid("the second segment has one element", "DLT-3 DLT-8", ones, {"w": ("U8", [SEGMENT + 1], last)}, delta({"w": [(1, "xor", raw_frame(b"\3"))]})),
        valid("the first segment, by repeated bytes", "DLT-3 DLT-4", ones, {"w": ("U8", [SEGMENT + 1], first)}, delta({"w": [(0, "full", zero)]})),
        valid("both segments, at the end of the first", "DLT-3 DLT-6", half, edge, delta({"w": ends})),
        _spelled("metadata, white space, escapes and -0 in the parent's header", '\n {"__metadata__" : {"format":"p\\u0074"},"\\u0077":{"shape":[5],"dtype":"BF16","data_offsets":[-0,10]}}  '),
        valid("unknown keys and further elements are ignored", "ENC-10 DLT-2", given, NUMBERS.tensors(NUMBERS.new), extended),
    ]  # fmt: skip


def _spelled(comment: str, header: str) -> dict[str, Any]:
    """The change of NUMBERS in a file whose header is spelled otherwise; it comes out as it went in."""
    parent, result = (with_header(header.encode(), data) for data in (NUMBERS.old, NUMBERS.new))
    made = delta({"w": [(0, "gap", raw_frame(NUMBERS.content("gap")))]})
    tensors = hashes(NUMBERS.tensors(NUMBERS.new))
    return case(
        comment, "DLT-1 DLT-8", "valid", parent=parent.hex(), delta=made.hex(), tensors=tensors, result=result.hex()
    )  # fmt: skip


def _writer(comment: str, old: bytes, new: bytes, made: bool = False) -> dict[str, Any]:
    """Whether a delta leads from one file to the other."""
    return case(comment, "DLT-7", "writer", parent=old.hex(), tensors={}, result=new.hex(), made=made)


def writers() -> list[dict[str, Any]]:
    old, new = NUMBERS.tensors(NUMBERS.old), NUMBERS.tensors(NUMBERS.new)
    longer = {"w": ("BF16", [6], NUMBERS.new + b"\0\0")}
    tall = {"w": ("BF16", [5, 1], NUMBERS.new)}
    other = {"w": ("F16", [5], NUMBERS.new)}
    fewer: dict[str, Tensor] = {"w": ("F4", [20], NUMBERS.old)}
    return [
        _writer("other values", safetensors(old), safetensors(new), made=True),
        _writer("the same file", safetensors(old), safetensors(old), made=True),
        _writer("another length", safetensors(old), safetensors(longer)),
        _writer("another shape", safetensors(old), safetensors(tall)),
        _writer("another type", safetensors(old), safetensors(other)),
        _writer("another name", safetensors(old), safetensors({"v": new["w"]})),
        _writer("other metadata", safetensors(old), safetensors(new, __metadata__={"format": "pt"})),
        _writer("elements of half a byte", safetensors(fewer), safetensors({"w": ("F4", [20], NUMBERS.new)})),
    ]


def deltas() -> list[dict[str, Any]]:
    from vectors_deltas_refused import headers, parents, payloads

    return changes() + files() + writers() + parents() + headers() + payloads()
