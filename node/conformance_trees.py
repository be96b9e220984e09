"""Msgpack taken apart and put together again, also wrongly: what mutations of messages are made in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_COUNT: Final = (1 << 32) - 1
"""Entries that a header can say."""


@dataclass(slots=True)
class Leaf:
    """A value without others in it, as it is written."""

    data: bytes


@dataclass(slots=True)
class Blob:
    """Text or bytes: the header is made anew."""

    text: bool
    data: bytes


@dataclass(slots=True)
class Branch:
    """An array, or a map whose keys and values take turns."""

    is_map: bool
    items: list[Node]
    lie: int = 0
    """How many more entries its header says than there are."""
    wide: int = 0
    """1: the header has more bytes than it needs, 2: the most."""

    @property
    def step(self) -> int:
        return 2 if self.is_map else 1


Node = Leaf | Blob | Branch

_NUMBERS: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_BLOBS: Final = {0xC4: (False, 1), 0xC5: (False, 2), 0xC6: (False, 4), 0xD9: (True, 1), 0xDA: (True, 2)}
_BRANCHES: Final = {0xDC: (False, 2), 0xDD: (False, 4), 0xDE: (True, 2), 0xDF: (True, 4)}


def parsed(data: bytes) -> Branch | None:
    """The one map or array in `data`; None if it is something else."""
    try:
        node, end = _parse(data, 0)
    except (IndexError, RecursionError):
        return None
    return node if end == len(data) and isinstance(node, Branch) else None


def _parse(data: bytes, at: int) -> tuple[Node, int]:
    """Raises IndexError where the bytes end too early."""
    first = data[at]
    if first < 0x80 or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
        return Leaf(data[at : at + 1]), at + 1
    if first < 0xA0:
        return _branch(data, at + 1, first & 0x0F, is_map=first < 0x90)
    if first < 0xC0:
        return _blob(data, at + 1, first & 0x1F, text=True)
    if first in _BLOBS:
        text, width = _BLOBS[first]
        return _blob(data, at + 1 + width, _length(data, at + 1, width), text=text)
    if first in _BRANCHES:
        is_map, width = _BRANCHES[first]
        return _branch(data, at + 1 + width, _length(data, at + 1, width), is_map=is_map)
    end = at + 1 + _NUMBERS.get(first, len(data))
    if end > len(data):
        raise IndexError
    return Leaf(data[at:end]), end


def _length(data: bytes, at: int, width: int) -> int:
    return int.from_bytes(data[at : at + width], "big")


def _blob(data: bytes, at: int, length: int, *, text: bool) -> tuple[Blob, int]:
    if at + length > len(data):
        raise IndexError
    return Blob(text, data[at : at + length]), at + length


def _branch(data: bytes, at: int, count: int, *, is_map: bool) -> tuple[Branch, int]:
    items: list[Node] = []
    for _ in range(count * (2 if is_map else 1)):
        node, at = _parse(data, at)
        items.append(node)
    return Branch(is_map, items), at


def written(node: Node) -> bytes:
    """The bytes of a tree: in the shortest form, but for what its nodes say."""
    match node:
        case Leaf():
            return node.data
        case Blob():
            return _blob_head(len(node.data), node.text) + node.data
    return _branch_head(node) + b"".join(map(written, node.items))


def _blob_head(length: int, text: bool) -> bytes:
    if text and length < 32:
        return bytes([0xA0 | length])
    first = 0xD9 if text else 0xC4
    for number, width in enumerate((1, 2, 4)):
        if length < 1 << 8 * width:
            return bytes([first + number]) + length.to_bytes(width, "big")
    raise ValueError("longer than msgpack can say")


def _branch_head(node: Branch) -> bytes:
    count = min(max(0, len(node.items) // node.step + node.lie), MAX_COUNT)
    if node.wide == 0 and count < 16:
        return bytes([(0x80 if node.is_map else 0x90) | count])
    first = 0xDE if node.is_map else 0xDC
    if node.wide < 2 and count < 1 << 16:
        return bytes([first]) + count.to_bytes(2, "big")
    return bytes([first + 1]) + count.to_bytes(4, "big")
