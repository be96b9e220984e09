"""Mutations of JSON, token by token: headers of safetensors are JSON, and readers of JSON differ."""

from __future__ import annotations

import re
from random import Random
from typing import Final

_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|[a-z]+|\s+|.', re.DOTALL)

TELLING: Final = (
    *rb"""0 -0 1 -1 1.0 1e3 1E+2 01 +1 .5 1. 0x10 4294967296 9007199254740993 9223372036854775807
    9223372036854775808 18446744073709551616 1e400 -1e400 NaN Infinity -Infinity null true false True
    {} [] [[]] {"a":1} [0] [0,0] [,] {,} {"a"} "" "F32" "BF16" "F16" "I64" "f32" "\u0077" "\ud800"
    "\ud83d\ude00" "\u0000" "\/" "\q" "\n" "a 'w' dtype "shape" "data_offsets" "__metadata__" "w" "W"
    // /**/ , : [ ] { } "\x80" """.split(),
    *(b" ", b"\n", b"\t", b"\r", b"\x0c", b"\x0b", b"\xc2\xa0", b"\xef\xbb\xbf", b"\0", b'"\x01"', b'"\xff"'),
)
"""Numbers at the ends of ranges, spellings that only some readers take, and names of such headers."""


def is_json(data: bytes) -> bool:
    """Whether it looks like an object."""
    return data.lstrip()[:1] == b"{" and data.rstrip()[-1:] == b"}"


def mutated_json(data: bytes, entropy: Random, times: int) -> bytes:
    """With so many of its tokens changed."""
    tokens = _TOKEN.findall(data)
    for _ in range(times):
        at, other = entropy.randrange(len(tokens) + 1), entropy.randrange(len(tokens) + 1)
        match entropy.randrange(7):
            case 0 | 1:
                tokens[at : at + 1] = [entropy.choice(TELLING)]
            case 2:
                tokens.insert(at, entropy.choice(TELLING))
            case 3:
                del tokens[at : at + entropy.randint(1, 4)]
            case 4:
                tokens[at:at] = tokens[other : other + entropy.randint(1, 9)]
            case 5 if max(at, other) < len(tokens):
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case _:
                tokens[at:at] = [b" "] * entropy.randint(1, 9)
    return b"".join(tokens)
