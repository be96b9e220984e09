"""Deltas between two safetensors files of one layout. Spec: `specs/09-checkpoints.md`, "Deltas".

A delta is a header and one payload a *segment* of a tensor that changed; segments bound what a reader holds
in memory. All of it is on bit patterns: NaNs, infinities and the sign of zero come out as they went in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import zstandard
from msgspec import Meta
from numpy.typing import NDArray

from .constants import MAX_MANIFEST, MAX_MANIFEST_VALUES, ZSTD_LEVEL
from .encoding import encode, read
from .envelope import ZSTD_MAGIC, Uint, decompressed
from .errors import Code, RemoteError
from .layout import WIDTHS, Place

MAGIC: Final = b"nous/delta/1\x00"
LENGTH_BYTES: Final = 4
"""Behind the magic: the length of the header, big-endian."""

SEGMENT: Final = 1 << 20
"""Elements of every segment but a tensor's last: a reader holds one, its payload and some arrays of that
length, 60 MB in all for the widest types."""

MAX_PAYLOAD: Final = 1 << 24
"""Bytes of one payload; the largest honest one is a full segment of 8-byte elements, half of this."""

EXPONENTS: Final = {"BF16": (7, 0xFF), "F16": (10, 0x1F), "F32": (23, 0xFF)}
"""Types that have gaps -> where the exponent field of their bit patterns is: shift and mask."""

HEAD_BYTES: Final = 5
"""A `gap` payload begins with the number of changes and the limit of the order. [DLT-6]"""

LONG_GAP: Final = 255
"""A byte of gaps that says: as many unchanged elements, and the gap goes on."""

SPARSE: Final = 1 / 8
"""Share of changed elements below which `gap` is by far the smallest: others are not tried."""

SAMPLE: Final = 1 << 16
"""Elements of a segment with more changes that all encodings are tried on; the smallest takes the segment."""

DENSE: Final = 1 / 16
"""Share of changes from which the elements of an exponent stand in front: short gaps there, steps alike."""

BLOCK: Final = 1_024
"""Changes from which a run of exponents gets zstd blocks of its own, and so tables of its own."""

Words = NDArray[np.unsignedinteger[Any]]
Encoding = Literal["gap", "xor", "full"]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What one segment of a tensor becomes."""

    segment: Uint
    """Counts the segments of the tensor from 0."""
    encoding: Encoding
    size: Annotated[int, Meta(ge=1, le=MAX_PAYLOAD)]
    """Bytes of the payload."""


class DeltaHeader(msgspec.Struct, frozen=True):
    """What a delta holds; payloads follow in the same order."""

    tensors: dict[str, list[Record]]
    """Tensor name -> the segments of it that changed, rising."""


def delta_head(records: Mapping[str, Sequence[Record]]) -> bytes:
    """Everything before the first payload. Raises LocalError for more records than a reader takes."""
    header = encode(DeltaHeader({name: list(found) for name, found in records.items()}))
    return MAGIC + len(header).to_bytes(LENGTH_BYTES, "big") + header


def delta_header_length(head: bytes) -> int:
    """Bytes of the header behind the first `len(MAGIC) + LENGTH_BYTES` of a delta. [DLT-2]"""
    if len(head) != len(MAGIC) + LENGTH_BYTES or not head.startswith(MAGIC):
        raise RemoteError(Code.MALFORMED, "This file is no delta.")
    length = int.from_bytes(head[len(MAGIC) :], "big")
    if length > MAX_MANIFEST:
        raise RemoteError(Code.OVERSIZE, f"The header of a delta has {length} bytes.")
    return length


def read_delta_header(
    header: bytes, rest: int, places: Sequence[Place]
) -> dict[tuple[str, int], tuple[Record, int]]:
    """(tensor, segment) -> its record, and where its payload begins behind the header.

    `rest`: bytes of the file behind the header; `places`: the tensors of the parent's file. [DLT-3]
    """
    tensors = read(header, DeltaHeader, MAX_MANIFEST, MAX_MANIFEST_VALUES).tensors
    counts = {place.name: segments(place.elements) for place in places}
    found: dict[tuple[str, int], tuple[Record, int]] = {}
    at = 0
    for name, records in tensors.items():
        if name not in counts:
            raise RemoteError(Code.WRONG_TYPE, f"The parent has no tensor {name[:64]!r}.")
        last = -1
        for record in records:
            if not last < record.segment < counts[name]:
                raise RemoteError(
                    Code.OUT_OF_RANGE, f"A segment of {name[:64]!r} is out of order or beyond it."
                )
            last = record.segment
            found[name, last] = record, at
            at += record.size
    if at != rest:
        raise RemoteError(
            Code.SIZE_MISMATCH, f"The payloads of a delta have {rest} bytes, its header says {at}."
        )
    return found


def segments(elements: int) -> int:
    """How many segments a tensor of so many elements has."""
    return -(-elements // SEGMENT)


def pieces(place: Place) -> Iterator[tuple[int, int, int]]:
    """Number, offset in the file and length in bytes of each segment of a tensor."""
    for number in range(segments(place.elements)):
        start = number * SEGMENT
        length = min(SEGMENT, place.elements - start)
        yield number, place.offset + start * place.width, length * place.width


def make_payload(old: bytes, new: bytes, dtype: str) -> tuple[Encoding, bytes] | None:
    """A small payload that makes `new` of `old`; None where they are equal. [DLT-7]"""
    if old == new:
        return None
    before, after = _words(old, dtype), _words(new, dtype)
    encoding = _smallest(before, after, dtype)
    return encoding, _packed(encoding, before, after, dtype)


def _smallest(before: Words, after: Words, dtype: str) -> Encoding:
    changed = np.count_nonzero(before != after)
    if dtype in EXPONENTS and changed < SPARSE * len(before):
        return "gap"
    start = max(0, len(before) - SAMPLE) // 2
    sample = slice(start, start + SAMPLE)
    tried: list[Encoding] = ["gap", "xor", "full"] if dtype in EXPONENTS else ["xor", "full"]
    return min(tried, key=lambda one: len(_packed(one, before[sample], after[sample], dtype)))


def _packed(encoding: Encoding, before: Words, after: Words, dtype: str) -> bytes:
    match encoding:
        case "gap":
            return _compressed(_gap_parts(before, after, dtype))
        case "xor":
            return _compressed(_planes(before ^ after))
        case "full":
            return _compressed(_planes(after))


def force_payload(encoding: Encoding, old: bytes, new: bytes, dtype: str) -> bytes:
    """The payload of a segment in an encoding of the caller's choice: for benches."""
    return _packed(encoding, _words(old, dtype), _words(new, dtype), dtype)


def apply_payload(old: bytes, encoding: Encoding, payload: bytes, dtype: str) -> bytes:
    """The new bytes of a segment. Raises RemoteError. [DLT-4] [DLT-5] [DLT-6]"""
    before = _words(old, dtype)
    if encoding == "gap":
        return _apply_gap(before, payload, dtype)
    content = np.frombuffer(_unpacked(payload, len(old), len(old)), np.uint8)
    words = np.ascontiguousarray(content.reshape(WIDTHS[dtype], -1).T).reshape(-1).view(before.dtype)
    return (words if encoding == "full" else words ^ before).tobytes()


def _apply_gap(before: Words, payload: bytes, dtype: str) -> bytes:
    if dtype not in EXPONENTS:
        raise RemoteError(Code.WRONG_TYPE, f"A gap payload is not for tensors of the type {dtype}.")
    elements, width = len(before), before.itemsize
    longest = HEAD_BYTES + elements * (width + 1) + elements // LONG_GAP
    data = _unpacked(payload, HEAD_BYTES + width + 1, longest)
    count, limit = int.from_bytes(data[: HEAD_BYTES - 1], "big"), data[HEAD_BYTES - 1]
    if not 0 < count <= elements:
        raise RemoteError(Code.OUT_OF_RANGE, f"A payload names {count} of {elements} elements.")
    split = HEAD_BYTES + count * width
    at = _positions(np.frombuffer(data, np.uint8, offset=min(split, len(data))), count)
    if at[-1] >= elements:
        raise RemoteError(Code.OUT_OF_RANGE, f"A payload names the element {at[-1]} of {elements}.")
    planes = np.frombuffer(data, np.uint8, count * width, HEAD_BYTES).reshape(width, count)
    steps = np.ascontiguousarray(planes.T).reshape(-1).view(before.dtype)
    if not steps.all():
        raise RemoteError(Code.OUT_OF_RANGE, "A payload names an element that does not change.")
    if limit:
        at = _Order(_exponents(before, dtype), limit).indices(at)
    after = before.copy()
    after[at] = _stepped(before[at], steps)
    return after.tobytes()


def _positions(gaps: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Indices of the changed elements, which rise by construction. [DLT-6]"""
    ends = np.flatnonzero(gaps != LONG_GAP)
    if len(ends) != count or len(gaps) != ends[-1] + 1:
        raise RemoteError(Code.SIZE_MISMATCH, f"A payload of {count} elements has {len(ends)} gaps.")
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count)


def _gap_parts(before: Words, after: Words, dtype: str) -> list[bytes]:
    """The content of a `gap` payload, cut where its statistics change."""
    changed = before != after
    exponents = _exponents(before, dtype)
    limit = _limit(exponents, changed)
    at, found = _Order(exponents, limit).ranks(changed)
    gaps = np.diff(at, prepend=-1) - 1
    long = gaps // LONG_GAP
    ends = np.cumsum(long + 1)
    stream = np.full(ends[-1] if len(ends) else 0, LONG_GAP, np.uint8)
    stream[ends - 1] = gaps - long * LONG_GAP
    cuts = _cuts(exponents[found], limit)
    parts = [len(at).to_bytes(HEAD_BYTES - 1, "big") + bytes([limit])]
    for plane in _planes(_steps(before[found], after[found])):
        parts += [plane[start:end] for start, end in pairwise(cuts)]
    edges = [0, *ends[np.array(cuts[1:], np.int64) - 1].tolist()] if len(at) else [0]
    return parts + [stream[start:end].tobytes() for start, end in pairwise(edges)]


def _exponents(words: Words, dtype: str) -> NDArray[np.uint8]:
    shift, mask = EXPONENTS[dtype]
    return (words >> words.dtype.type(shift)).astype(np.uint8) & np.uint8(mask)


def _limit(exponents: NDArray[np.uint8], changed: NDArray[np.bool_]) -> int:
    """Above the highest exponent of whose elements many change: small weights take a step at each update."""
    every = np.bincount(exponents[::16], minlength=256)
    some = np.bincount(exponents[::16][changed[::16]], minlength=256)
    dense = np.flatnonzero(some > DENSE * every)
    return min(int(dense[-1]) + 1, 0xFF) if len(dense) else 0


class _Order:
    """How gaps count: exponents below `limit` first, rising; the other elements as they lie. [DLT-6]"""

    def __init__(self, exponents: NDArray[np.uint8], limit: int) -> None:
        self._small = np.flatnonzero(exponents < limit)
        self.front = self._small[np.argsort(exponents[self._small], kind="stable")]

    def ranks(self, changed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of the changed elements in this order: their places in it, and in the segment."""
        first = np.flatnonzero(changed[self.front])
        behind = changed.copy()
        behind[self.front] = False
        rest = np.flatnonzero(behind)
        places = rest - np.searchsorted(self._small, rest) + len(self.front)
        return np.concatenate((first, places)), np.concatenate((self.front[first], rest))

    def indices(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the segment of what stands at these rising places of the order."""
        split = int(np.searchsorted(ranks, len(self.front)))
        rest = ranks[split:] - len(self.front)
        skipped = np.searchsorted(self._small - np.arange(len(self._small)), rest, side="right")
        return np.concatenate((self.front[ranks[:split]], rest + skipped))


def _cuts(exponents: NDArray[np.uint8], limit: int) -> list[int]:
    """Where the changes of another exponent begin, `BLOCK` apart at least; the beginning and the end too."""
    sizes = np.bincount(np.minimum(exponents, limit), minlength=limit + 1)
    cuts = [0]
    for end in np.cumsum(sizes).tolist():
        if end - cuts[-1] >= BLOCK and len(exponents) - end >= BLOCK:
            cuts.append(end)
    return [*cuts, len(exponents)] if len(exponents) else cuts


def _steps(before: Words, after: Words) -> Words:
    """Zigzag differences of the ordered patterns: 1 is one down, 2 one up, 3 two down ..."""
    signed = (_ordered(after) - _ordered(before)).view(f"<i{before.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * before.itemsize - 1))).view(before.dtype)


def _stepped(before: Words, steps: Words) -> Words:
    one = before.dtype.type(1)
    ordered = _ordered(before) + ((steps >> one) ^ (~(steps & one) + one))
    top = before.dtype.type(1 << (8 * before.itemsize - 1))
    return np.where(ordered & top, ordered ^ top, ~ordered)


def _ordered(words: Words) -> Words:
    """Bit patterns of floats as unsigned integers in the order of their values; -0 lies below 0."""
    top = words.dtype.type(1 << (8 * words.itemsize - 1))
    return np.where(words & top, ~words, words ^ top)


def _words(data: bytes, dtype: str) -> Words:
    return np.frombuffer(data, f"<u{WIDTHS[dtype]}")


def _planes(words: Words) -> list[bytes]:
    """Byte planes, the lowest first. [ROL-10]"""
    octets = words.view(np.uint8).reshape(-1, words.itemsize)
    return [octets[:, number].tobytes() for number in range(words.itemsize)]


def _compressed(parts: Sequence[bytes]) -> bytes:
    """One zstd frame with its content size. Each part begins a block, and so a table of its own."""
    packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj(size=sum(map(len, parts)))
    packed = []
    for part in parts:
        packed += [packer.compress(part), packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*packed, packer.flush()])


def _unpacked(payload: bytes, least: int, most: int) -> bytes:
    """The content of one zstd frame of `least` to `most` bytes that says its size. [DLT-4]"""
    try:
        size = zstandard.get_frame_parameters(payload).content_size
    except zstandard.ZstdError as error:
        raise RemoteError(Code.BAD_COMPRESSION, f"A payload of a delta is no zstd frame: {error}.") from error
    if not payload.startswith(ZSTD_MAGIC):  # the length of a skippable frame is no size of any content
        raise RemoteError(Code.BAD_COMPRESSION, "A payload of a delta is no zstd frame with content.")
    if size == zstandard.CONTENTSIZE_UNKNOWN:
        raise RemoteError(Code.BAD_COMPRESSION, "A payload of a delta does not say its size.")
    if not least <= size <= most:
        raise RemoteError(
            Code.SIZE_MISMATCH,
            f"A payload of a delta unfolds to {size} bytes, where {least} to {most} fit.",
        )
    return decompressed(payload, size)
