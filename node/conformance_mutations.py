"""Mutations of bytes: some of any bytes, others of the values in msgpack.

Flips of bits hardly ever get past the first check of a reader. Where the bytes are msgpack they are taken
apart, so that a key, a length, a type or the form of a header changes and all the rest still fits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from .conformance_json import is_json, mutated_json

MOST: Final = 3
"""Mutations of one input: more are refused for one of them all the same."""
STRUCTURED: Final = 0.75
"""How often bytes that have a structure are mutated in it."""
RUN: Final = 8
"""Bytes that one mutation inserts or deletes, at most."""
DEPTH: Final = 40
"""Levels of arrays around a value: more than any reader follows."""

MAX_COUNT: Final = (1 << 32) - 1
"""Entries that a header can say."""

TELLING: Final = tuple(
    bytes.fromhex(text)
    for text in (
        "c0 c1 c2 c3 00 01 7f ff e0 cc80 ccff cc7f cd0100 cdffff cd00ff ce00010000 ceffffffff ce0000ffff"
        " cf0000000100000000 cf0020000000000000 cf0020000000000001 cf7fffffffffffffff cf8000000000000000"
        " cfffffffffffffffff cf00000000ffffffff d0df d080 d0ff d1ff7f d18000 d2ffff7fff d280000000"
        " d3ffffffff7fffffff d38000000000000000 d3ffdfffffffffffff d3ffffffffffffffff"
        " cb0000000000000000 cb8000000000000000 cb3ff0000000000000 cb3fe0000000000000 cbbff0000000000000"
        " cb7ff0000000000000 cbfff0000000000000 cb7ff8000000000000 cb0000000000000001 cb7fefffffffffffff"
        " cb4340000000000000 cb3fb999999999999a ca3f800000 a0 a161 a100 a1c3 a1ff a2c3a9 a3efbfbd a3eda080"
        " a4f09f9880 a2c080 c400 c40100 d90161 da000161 db0000000161 c5000100 c600000001ff 90 91c0 80"
        " 81a161c0 dc0000 de0000 dd00000000 df00000000 d40100 c7000100 c420" + "00" * 32
    ).split()
)
"""Values at the ends of ranges, in right and in wrong forms, and headers that are none."""


LENGTHS: Final = (0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 512, 1024, 4096)
"""Of texts and bytes: limits of the messages, and those of msgpack's headers."""
CHARACTERS: Final = ("a", "/", "é", "\uffff", "\0", "\U0001f600", "\U0010ffff")
"""Of one to four bytes, and of one or two units where a language counts text in UTF-16."""


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


def mutated(data: bytes, entropy: Random, others: Sequence[bytes]) -> bytes:
    """`data` with one to MOST mutations; `others` are inputs to splice with."""
    if is_json(data) and entropy.random() < STRUCTURED:
        return mutated_json(data, entropy, _times(entropy))
    tree = parsed(data) if entropy.random() < STRUCTURED else None
    if tree is not None:
        for _ in range(_times(entropy)):
            _mutate_tree(tree, entropy)
        return written(tree)
    changed = bytearray(data)
    for _ in range(_times(entropy)):
        _mutate_bytes(changed, entropy, others)
    return bytes(changed)


def _times(entropy: Random) -> int:
    """Mostly one: what breaks two rules shows less."""
    return 1 if entropy.random() < 0.7 else entropy.randint(2, MOST)


def _mutate_bytes(data: bytearray, entropy: Random, others: Sequence[bytes]) -> None:
    at = entropy.randrange(len(data) + 1)
    match entropy.randrange(8):
        case 0 | 1 if at < len(data):
            data[at] ^= 1 << entropy.randrange(8)
        case 2:
            data[at:at] = entropy.randbytes(entropy.randint(1, RUN))
        case 3:
            del data[at : at + entropy.randint(1, RUN)]
        case 4:
            data[at : at + 1] = entropy.choice(TELLING)
        case 5:
            other = entropy.choice(others)
            data[at:] = other[entropy.randrange(len(other) + 1) :]
        case 6:
            del data[at:]
        case _:
            data[at:at] = data[at : at + RUN * RUN]  # a piece, or its end, twice


def _places(node: Branch) -> Iterator[tuple[Branch, int]]:
    """Each value of a tree: whose it is, and where."""
    for index, item in enumerate(node.items):
        yield node, index
        if isinstance(item, Branch):
            yield from _places(item)


def _mutate_tree(tree: Branch, entropy: Random) -> None:
    places = list(_places(tree))
    if not places:
        tree.lie += entropy.choice((-1, 1))
        return
    parent, index = entropy.choice(places)
    entropy.choice(_TREE)(parent, index, entropy)


def _replace(parent: Branch, index: int, entropy: Random) -> None:
    parent.items[index] = Leaf(entropy.choice(TELLING))


def _edit(parent: Branch, index: int, entropy: Random) -> None:
    """A value of the same kind."""
    node = parent.items[index]
    match node:
        case Leaf():
            parent.items[index] = Leaf(_number(node.data, entropy))
        case Blob():
            data = bytearray(node.data)
            _mutate_bytes(data, entropy, (node.data,))
            parent.items[index] = Blob(node.text, bytes(data))
        case Branch(items=items):
            entropy.shuffle(items)


def _stretch(parent: Branch, index: int, entropy: Random) -> None:
    """A text or bytes of another length."""
    node = parent.items[index]
    if isinstance(node, Blob):
        length = entropy.choice(LENGTHS)
        text = (entropy.choice(CHARACTERS) * length).encode()
        node.data = text if node.text else (node.data or b"\0")[:1] * length


def _number(data: bytes, entropy: Random) -> bytes:
    """Near the one before, or any other of its form."""
    if data[0] == 0xCB:
        value = struct.unpack(">d", data[1:])[0]
        near = (-value, value * 2, value + 1, value / 3, entropy.uniform(-1e3, 1e3))
        return b"\xcb" + struct.pack(">d", entropy.choice(near))
    if len(data) == 1:
        return bytes([data[0] ^ 1 << entropy.randrange(8)])
    changed = int.from_bytes(data[1:], "big") + entropy.choice((-2, -1, 1, 2, 1 << 8 * len(data) - 9))
    return data[:1] + (changed % (1 << 8 * (len(data) - 1))).to_bytes(len(data) - 1, "big")


def _widen(parent: Branch, index: int, entropy: Random) -> None:
    """A longer form of the same value."""
    node = parent.items[index]
    if isinstance(node, Branch):
        node.wide = entropy.randint(1, 2)
    elif isinstance(node, Blob):
        first = (0xDA if node.text else 0xC5) + entropy.randrange(2)
        width = 2 if first in (0xDA, 0xC5) else 4
        parent.items[index] = Leaf(bytes([first]) + len(node.data).to_bytes(width, "big") + node.data)
    elif node.data[0] < 0x80:
        form, width = entropy.choice(((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8), (0xD0, 1), (0xD3, 8)))
        parent.items[index] = Leaf(bytes([form]) + node.data.rjust(width, b"\0"))


def _entry(parent: Branch, index: int) -> slice:
    start = index - index % parent.step
    return slice(start, start + parent.step)


def _delete(parent: Branch, index: int, entropy: Random) -> None:
    del parent.items[_entry(parent, index)]


def _repeat(parent: Branch, index: int, entropy: Random) -> None:
    place = _entry(parent, index)
    parent.items[place.stop : place.stop] = parent.items[place]


def _swap(parent: Branch, index: int, entropy: Random) -> None:
    one = _entry(parent, index)
    other = _entry(parent, entropy.randrange(len(parent.items)))
    first, second = parent.items[one], parent.items[other]
    parent.items[one], parent.items[other] = second, first


def _add(parent: Branch, index: int, entropy: Random) -> None:
    """One more entry: an array's at its end, where arrays may grow, a map's where its key belongs."""
    value = Leaf(entropy.choice(TELLING))
    if not parent.is_map:
        parent.items.append(value)
        return
    name = bytes(entropy.choice(b"abcmnz") for _ in range(entropy.randint(1, 6)))
    parent.items += [Blob(True, name), value]
    _sort(parent)


def _rename(parent: Branch, index: int, entropy: Random) -> None:
    """A key with another name, where that belongs."""
    key = parent.items[_entry(parent, index).start]
    if parent.is_map and isinstance(key, Blob):
        key.data = entropy.choice((key.data[:-1], key.data + b"x", key.data.upper(), key.data[:1]))
        _sort(parent)


def _sort(parent: Branch) -> None:
    pairs = [tuple(parent.items[at : at + 2]) for at in range(0, len(parent.items) - 1, 2)]
    pairs.sort(key=lambda pair: pair[0].data if isinstance(pair[0], Blob) else b"")
    parent.items = [node for pair in pairs for node in pair]


def _copy(parent: Branch, index: int, entropy: Random) -> None:
    """A value from elsewhere in the same branch."""
    parent.items[index] = entropy.choice(parent.items)


def _nest(parent: Branch, index: int, entropy: Random) -> None:
    node = parent.items[index]
    for _ in range(entropy.choice((1, 1, 2, 12, DEPTH))):
        node = Branch(False, [node])
    parent.items[index] = node


def _lie(parent: Branch, index: int, entropy: Random) -> None:
    parent.lie += entropy.choice((-1, 1, 1, 1 << 16, 1 << 31))


_TREE: Final[tuple[Callable[[Branch, int, Random], None], ...]] = (
    _replace,
    _replace,
    _replace,
    _edit,
    _edit,
    _edit,
    _stretch,
    _stretch,
    _widen,
    _delete,
    _repeat,
    _swap,
    _add,
    _rename,
    _copy,
    _nest,
    _lie,
)
"""The more often, the likelier it passes the first check."""
