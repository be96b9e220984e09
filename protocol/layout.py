"""Where the tensors of a safetensors file lie. Spec: `specs/09-checkpoints.md`, "Deltas".

Stricter than the format's own text: the tensors fill the file without a hole, which is what its loaders ask,
and nothing stands in a header but what they read: so no reader has to follow JSON deeper than three levels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from .constants import MAX_INT, MAX_MANIFEST, MAX_MAP
from .errors import Code, RemoteError

LENGTH_BYTES: Final = 8
"""A file begins with the length of its header: u64 little-endian."""

MAX_BRACKETS: Final = 3 * MAX_MAP + 2
"""`[` and `{` of a header: three a tensor, its own and that of the metadata. A header of nothing but brackets
would cost a reader a gigabyte."""

WIDTHS: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Data type -> bytes of one element. Types of less than a byte have no deltas."""


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of a file."""

    name: str
    dtype: str
    offset: int
    """Of its first byte, in the file."""
    elements: int

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.dtype]


def header_length(head: bytes) -> int:
    """Bytes of the header that follows the first 8 bytes of a file. [DLT-1]"""
    if len(head) != LENGTH_BYTES:
        raise RemoteError(Code.SIZE_MISMATCH, "A safetensors file ends within its first 8 bytes.")
    length = int.from_bytes(head, "little")
    if length > MAX_MANIFEST:
        raise RemoteError(Code.OVERSIZE, f"The header of a safetensors file has {length} bytes.")
    return length


def read_layout(header: bytes, size: int) -> list[Place]:
    """The tensors in the order in which they lie; `size` is that of the whole file. [DLT-1]"""
    places: list[Place] = []
    entries = _entries(header)
    at = LENGTH_BYTES + len(header)
    for name, (dtype, shape, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if dtype not in WIDTHS:
            raise RemoteError(Code.UNKNOWN_DTYPE, f"Tensors of the type {dtype[:32]!r} have no deltas here.")
        place = Place(name, dtype, LENGTH_BYTES + len(header) + begin, _elements(shape))
        if place.offset != at or end - begin != place.elements * place.width:
            raise RemoteError(Code.SIZE_MISMATCH, f"The tensor {name[:64]!r} does not lie where it should.")
        places.append(place)
        at += end - begin
    if at != size:
        raise RemoteError(
            Code.SIZE_MISMATCH, f"A safetensors file has {size} bytes, its tensors end at {at}."
        )
    return places


Entry = tuple[str, list[int], int, int]
"""Data type, shape, begin and end of one tensor."""


def _elements(shape: list[int]) -> int:
    """How many elements a shape has, or more than any file where it has more."""
    elements = int(0 not in shape)
    for length in shape:
        elements = min(elements * length, MAX_INT)
    return elements


def _entries(header: bytes) -> dict[str, Entry]:
    if header.count(b"[") + header.count(b"{") > MAX_BRACKETS:
        raise RemoteError(Code.OUT_OF_RANGE, f"A safetensors file has more than {MAX_MAP} tensors.")
    try:
        value = json.loads(header.decode(), object_pairs_hook=_unique, parse_constant=_no_number)
        _check_texts(value)
    except (ValueError, RecursionError) as error:
        raise RemoteError(Code.MALFORMED, "The header of a safetensors file is no JSON.") from error
    if not isinstance(value, dict):
        raise RemoteError(Code.MALFORMED, "The header of a safetensors file is no JSON object.")
    metadata = value.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise RemoteError(Code.MALFORMED, "The metadata of a safetensors file are no texts.")
    return {name: _entry(name, entry) for name, entry in value.items()}


def _check_texts(value: object) -> None:
    """ValueError where a name or text, as deep as a header has any, holds half of a surrogate pair: some
    readers put another character in its place."""
    for name, entry in value.items() if isinstance(value, dict) else ():
        texts = [name, *entry, *entry.values()] if isinstance(entry, dict) else [name]
        for text in texts:
            if isinstance(text, str):
                text.encode()


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _entry(name: str, entry: object) -> Entry:
    match entry:
        case {"dtype": str() as dtype, "shape": list() as shape, "data_offsets": [begin, end], **rest} if (
            not rest
            and all(type(number) is int and 0 <= number <= MAX_INT for number in (*shape, begin, end))
        ):
            return dtype, shape, begin, end
    raise RemoteError(Code.MALFORMED, f"The header of a safetensors file is wrong at {name[:64]!r}.")
