"""Mutations of bytes: some of any bytes, others of the values in msgpack.

Flips of bits hardly ever get past the first check of a reader. Where the bytes are msgpack they are taken
apart, so that a key, a length, a type or the form of a header changes and all the rest still fits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Final

from .conformance_json import is_json, mutated_json
from .conformance_trees import Blob, Branch, Leaf, parsed, written

MOST: Final = 3
"""Mutations of one input: more are refused for one of them all the same."""
STRUCTURED: Final = 0.75
"""How often bytes that have a structure are mutated in it."""
GRAFTED: Final = 0.15
"""How often a part of another message is put in."""
RUN: Final = 8
"""Bytes that one mutation inserts or deletes, at most."""
DEPTHS: Final = (1, 1, 2, 3, 4, 5, 6, 7, 8, 40)
"""Levels of arrays around a value: up to the limit and a little beyond, or far."""

NIL: Final = b"\xc0"
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


_POWERS: Final = (*range(9), 10, 12, 14, 15, 16, 20, 22, 24, 26, 31, 32, 42, 63)
LIMITS: Final = (
    *sorted({(1 << bits) + near for bits in _POWERS for near in (-1, 0, 1)}),
    *(number + near for number in (1_000_000, 8_000_000, 16_000_000) for near in (0, 1)),
    *(-2, -32, -33, -128, -129, -32768, -32769, -(1 << 31), -(1 << 31) - 1, -(1 << 63)),
)
"""Numbers at which messages and msgpack's forms have their limits."""
REALS: Final = (0.0, -0.0, 5e-324, 1.0, 1.0 + 2**-52, -1.0, 1e6, 1e6 + 2**-33, -1e6, 1.7e308)
"""Those of reals."""
LENGTHS: Final = (0, 1, 16, 31, 32, 33, 63, 64, 65, 128, 255, 256, 257, 1024, 4095, 4096, 4097, 65535, 65536)
"""Of texts and bytes: limits of the messages, and those of msgpack's headers."""
COUNTS: Final = (0, 1, 2, 8, 9, 15, 16, 17, 64, 65, 256, 1024, 1025, 4096, 4097, 16384, 16385, 65535, 65536)
"""Of entries, likewise."""
FILL_BYTES: Final = 1 << 17
"""Bytes that so many entries may take: large questions take their time."""
KEY_BYTES: Final = 7
"""Of a key that is made up."""
WIDENED: Final = 0.2
"""How often what has been put at a limit gets a longer header than it needs."""
_UNSIGNED: Final = ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))
_SIGNED: Final = ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8))
_TEXTS: Final = ((0xD9, 1), (0xDA, 2), (0xDB, 4))
_BINS: Final = ((0xC4, 1), (0xC5, 2), (0xC6, 4))
CHARACTERS: Final = ("a", "é", "\uffff", "\0", "\U0001f600", "\U0010ffff")
"""Of one to four bytes, and of one or two units where a language counts text in UTF-16."""
INSERTED: Final[tuple[str, ...]] = (*CHARACTERS, *"AZ0Il./-_: \n\x7f\u202e", "")
"""Those, others that the forms of texts have or forbid, and none."""


def mutated(data: bytes, entropy: Random, others: Sequence[bytes]) -> bytes:
    """`data` with one to MOST mutations; `others` are inputs to splice with."""
    if is_json(data) and entropy.random() < STRUCTURED:
        return mutated_json(data, entropy, _times(entropy))
    tree = parsed(data) if entropy.random() < STRUCTURED else None
    if tree is not None:
        for _ in range(_times(entropy)):
            if entropy.random() < GRAFTED and others:
                _graft(tree, entropy, entropy.choice(others))
            else:
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
    if parent.is_map and index % 2 == 0 and entropy.random() < STRUCTURED:
        index += 1  # a value instead of its key: most mutations of a key tell the same
    entropy.choice(_TREE)(parent, index, entropy)


def _graft(tree: Branch, entropy: Random, other: bytes) -> None:
    """An entry of another message in a map of this one, with its value or with nil; or a value alone."""
    source = parsed(other)
    if source is None or not source.items:
        return
    giver, at = entropy.choice(list(_places(source)))
    taker, index = entropy.choice([(tree, 0), *_places(tree)])
    entry = giver.items[_entry(giver, at)]
    if giver.is_map and taker.is_map:
        value = Leaf(NIL) if entropy.random() < 0.5 else entry[1]
        names = [written(key) for key in taker.items[::2]]
        place = 2 * names.index(written(entry[0])) if written(entry[0]) in names else len(taker.items)
        taker.items[place : place + 2] = [entry[0], value]
        _sort(taker)
    elif entry and index < len(taker.items):
        taker.items[index] = entry[-1]


def _replace(parent: Branch, index: int, entropy: Random) -> None:
    parent.items[index] = Leaf(entropy.choice(TELLING))


def _edit(parent: Branch, index: int, entropy: Random) -> None:
    """A value of the same kind."""
    node = parent.items[index]
    match node:
        case Leaf():
            parent.items[index] = Leaf(_number(node.data, entropy))
        case Blob(text=True) if entropy.random() < STRUCTURED:
            parent.items[index] = Blob(True, _text(node.data, entropy))
        case Blob():
            data = bytearray(node.data)
            _mutate_bytes(data, entropy, (node.data,))
            parent.items[index] = Blob(node.text, bytes(data))
        case Branch(items=items):
            entropy.shuffle(items)


def _text(data: bytes, entropy: Random) -> bytes:
    """With another character, which is still text."""
    text = data.decode(errors="replace")
    at = entropy.randrange(len(text) + 1)
    inserted = entropy.choice(INSERTED)
    return (text[:at] + inserted + text[at + entropy.randrange(2) :]).encode()


def _limit(parent: Branch, index: int, entropy: Random) -> None:
    """A number at a limit, mostly in its shortest form."""
    shortest, *longer = _forms(entropy.choice(LIMITS))
    widened = longer and entropy.random() < WIDENED
    parent.items[index] = Leaf(entropy.choice(longer) if widened else shortest)


def _forms(number: int) -> list[bytes]:
    """An integer as msgpack can write it, the shortest form first."""
    forms = [number.to_bytes(1, "big", signed=True)] if -32 <= number < 128 else []
    for heads, signed in ((_UNSIGNED, False), (_SIGNED, True)):
        for head, width in heads:
            with suppress(OverflowError):
                forms.append(bytes([head]) + number.to_bytes(width, "big", signed=signed))
    return forms


def _integer(data: bytes) -> int | None:
    """The integer that is written so."""
    first = data[0]
    if len(data) == 1 and (first < 0x80 or first >= 0xE0):
        return int.from_bytes(data, "big", signed=True)
    if 0xCC <= first <= 0xD3:
        return int.from_bytes(data[1:], "big", signed=first >= 0xD0)
    return None


def _numbers(parent: Branch, index: int, entropy: Random) -> None:
    """A number of the branch becomes one at a limit, if there is any."""
    places = [at for at, item in enumerate(parent.items) if isinstance(item, Leaf) and len(item.data) != 9]
    if parent.is_map:
        places = [at for at in places if at % 2]
    if places:
        _limit(parent, entropy.choice(places), entropy)


def _absent(parent: Branch, index: int, entropy: Random) -> None:
    """Nil for a value."""
    parent.items[_entry(parent, index).stop - 1] = Leaf(NIL)


def _stretch(parent: Branch, index: int, entropy: Random) -> None:
    """A text or bytes of another length."""
    node = parent.items[index]
    if isinstance(node, Blob):
        length = entropy.choice(LENGTHS)
        node.data = _long_text(node.data, length, entropy) if node.text else _long(node.data, length)
        if entropy.random() < WIDENED:
            _widen(parent, index, entropy)


def _long(data: bytes, length: int) -> bytes:
    """So many bytes, the first ones as they were."""
    return data[:length] + (data or b"\0")[:1] * (length - len(data))


def _long_text(data: bytes, length: int, entropy: Random) -> bytes:
    """So many characters: all the same, or with the text around them, whose form may be right then."""
    text, character = data.decode(errors="replace"), entropy.choice(CHARACTERS)
    if entropy.random() < 0.5 or len(text) >= length:
        return (character * length).encode()
    at = entropy.randrange(len(text) + 1)
    return (text[:at] + character * (length - len(text)) + text[at:]).encode()


def _fill(parent: Branch, index: int, entropy: Random) -> None:
    """Another number of entries: of those that are there, then of copies; a map's get keys of their own."""
    node = parent.items[index]
    branch = node if isinstance(node, Branch) and node.items else parent
    count = entropy.choice(COUNTS)
    copy = Leaf(written(branch.items[-1]))  # its bytes: what is changed later is changed in one place
    missing = count - len(branch.items) // branch.step
    if missing * (len(copy.data) + KEY_BYTES * branch.is_map) > FILL_BYTES:
        return
    for number in range(missing):
        branch.items += [Blob(True, b"z%05d" % number), copy] if branch.is_map else [copy]
    del branch.items[max(0, count) * branch.step :]
    branch.wide = branch.wide or int(entropy.random() < WIDENED)


def _number(data: bytes, entropy: Random) -> bytes:
    """Near the one before, or any other of its form."""
    if data[0] == 0xCB:
        value = struct.unpack(">d", data[1:])[0]
        near = (-value, value * 2, value + 1, value / 3, entropy.uniform(-1e3, 1e3), *REALS)
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
        size, own = len(node.data), len(written(node))
        heads = [(head, width) for head, width in (_TEXTS if node.text else _BINS) if 1 + width + size > own]
        if heads:
            head, width = entropy.choice(heads)
            parent.items[index] = Leaf(bytes([head]) + size.to_bytes(width, "big") + node.data)
    elif (number := _integer(node.data)) is not None and len(forms := _forms(number)) > 1:
        parent.items[index] = Leaf(entropy.choice(forms[1:]))


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
    for _ in range(entropy.choice(DEPTHS)):
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
    _fill,
    _fill,
    _numbers,
    _numbers,
    _numbers,
    _absent,
    _widen,
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
