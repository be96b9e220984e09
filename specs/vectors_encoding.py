"""Vectors of chapters 01 and 02: values, identities, signatures."""

from __future__ import annotations

from typing import Any

from vectors_world import ALICE, SEEDS, case

from nous_node.protocol.constants import (
    MAX_ARRAY,
    MAX_DEPTH,
    MAX_INT,
    MAX_TEXT,
)
from nous_node.protocol.encoding import encode
from nous_node.protocol.identity import SMALL_ORDER, Identity

VALUES: list[tuple[str, object]] = [
    ("nil", None),
    ("false", False),
    ("true", True),
    ("zero", 0),
    ("largest one-byte integer", 127),
    ("smallest uint 8", 128),
    ("largest uint 8", 255),
    ("smallest uint 16", 256),
    ("largest uint 16", 65_535),
    ("smallest uint 32", 65_536),
    ("largest uint 32", (1 << 32) - 1),
    ("smallest uint 64", 1 << 32),
    ("beyond the integers of a double", (1 << 53) + 1),
    ("largest integer", MAX_INT),
    ("minus one", -1),
    ("smallest one-byte integer", -32),
    ("largest int 8", -33),
    ("smallest int 8", -128),
    ("largest int 16", -129),
    ("smallest int 16", -32_768),
    ("largest int 32", -32_769),
    ("smallest int 32", -(1 << 31)),
    ("largest int 64", -(1 << 31) - 1),
    ("smallest integer", -MAX_INT - 1),
    ("a float that is whole stays a float", 1.0),
    ("one tenth", 0.1),
    ("smallest denormal", 5e-324),
    ("largest float", 1.7976931348623157e308),
    ("minus zero keeps its sign", -0.0),
    ("empty text", ""),
    ("text of 31 bytes", "a" * 31),
    ("text of 32 bytes", "a" * 32),
    ("text of 256 bytes", "a" * 256),
    ("text of three-byte characters", "€€"),
    ("text beyond the basic plane", "\U0001f600"),
    ("text with a zero character", "a\0b"),
    ("empty bin", b""),
    ("bin of 255 bytes", b"\xff" * 255),
    ("bin of 256 bytes", bytes(256)),
    ("empty array", []),
    ("array of 15", [0] * 15),
    ("array of 16", [0] * 16),
    ("empty map", {}),
    ("a key before the longer key that it begins", {"a": 1, "aa": 2, "b": 3}),
    ("keys in code-point order, which is not UTF-16 order", {"\ufffd": 1, "\U0001f600": 2}),
    ("upper case before lower case", {"B": 1, "a": 2}),
    ("map of 16", {f"{number:02}": number for number in range(16)}),
    ("deepest nesting", [[[[[[[[]]]]]]]]),
]
assert MAX_DEPTH == 8

REFUSED: list[tuple[str, str, str, str]] = [
    ("no bytes", "", "malformed", "ENC-2"),
    ("a second value", "0000", "malformed", "ENC-2"),
    ("a newline behind the value", "c00a", "malformed", "ENC-2"),
    ("text cut short", "a2ff", "malformed", "ENC-2"),
    ("integer cut short", "cd01", "malformed", "ENC-2"),
    ("float cut short", "cb3ff0", "malformed", "ENC-2"),
    ("array cut short", "92c0", "malformed", "ENC-2"),
    ("map without a value", "81a161", "malformed", "ENC-2"),
    ("bin cut short", "c403ab", "malformed", "ENC-2"),
    ("bin of 4 GiB announced", "c6ffffffff", "malformed", "ENC-2"),
    ("the unused byte", "c1", "malformed", "ENC-3"),
    ("fixext 1", "d40100", "malformed", "ENC-3"),
    ("fixext 2", "d5010000", "malformed", "ENC-3"),
    ("timestamp (fixext 4)", "d6ff00000000", "malformed", "ENC-3"),
    ("timestamp (fixext 8)", "d7ff0000000000000000", "malformed", "ENC-3"),
    ("fixext 16", "d801" + "00" * 16, "malformed", "ENC-3"),
    ("ext 8", "c70001", "malformed", "ENC-3"),
    ("ext 16", "c8000001", "malformed", "ENC-3"),
    ("ext 32", "c90000000001", "malformed", "ENC-3"),
    ("text that is no UTF-8", "a1ff", "malformed", "ENC-3"),
    ("overlong UTF-8", "a2c080", "malformed", "ENC-3"),
    ("surrogate in UTF-8", "a3eda080", "malformed", "ENC-3"),
    ("code point above U+10FFFF", "a4f4908080", "malformed", "ENC-3"),
    ("UTF-8 cut within a character", "a2e282", "malformed", "ENC-3"),
    ("integer as key", "8101c0", "wrong-type", "ENC-4"),
    ("nil as key", "81c0c0", "wrong-type", "ENC-4"),
    ("bool as key", "81c3c0", "wrong-type", "ENC-4"),
    ("bin as key", "81c40161c0", "wrong-type", "ENC-4"),
    ("array as key", "8190c0", "wrong-type", "ENC-4"),
    ("map as key", "8180c0", "wrong-type", "ENC-4"),
    ("keys out of order", "82a162c0a161c0", "not-canonical", "ENC-4"),
    ("a key behind the longer key that it begins", "82a26161c0a161c0", "not-canonical", "ENC-4"),
    ("keys in UTF-16 order", "82a4f09f9880c0a3efbfbdc0", "not-canonical", "ENC-4"),
    ("keys in order of length", "82a162c0a26161c0", "not-canonical", "ENC-4"),
    ("a key twice", "82a161c0a161c0", "not-canonical", "ENC-5"),
    ("a key twice with different values", "82a16101a16102", "not-canonical", "ENC-5"),
    ("the empty key twice", "82a0c0a0c0", "not-canonical", "ENC-5"),
    ("127 in two bytes", "cc7f", "not-canonical", "ENC-6"),
    ("255 in three bytes", "cd00ff", "not-canonical", "ENC-6"),
    ("65,535 in five bytes", "ce0000ffff", "not-canonical", "ENC-6"),
    ("2^32 - 1 in nine bytes", "cf00000000ffffffff", "not-canonical", "ENC-6"),
    ("a positive number as int 8", "d001", "not-canonical", "ENC-6"),
    ("a positive number as int 16", "d10100", "not-canonical", "ENC-6"),
    ("a positive number as int 32", "d200010000", "not-canonical", "ENC-6"),
    ("a positive number as int 64", "d30000000100000000", "not-canonical", "ENC-6"),
    ("-32 in two bytes", "d0e0", "not-canonical", "ENC-6"),
    ("-128 in three bytes", "d1ff80", "not-canonical", "ENC-6"),
    ("-32,768 in five bytes", "d2ffff8000", "not-canonical", "ENC-6"),
    ("-2^31 in nine bytes", "d3ffffffff80000000", "not-canonical", "ENC-6"),
    ("str 8 for one byte", "d90161", "not-canonical", "ENC-6"),
    ("str 16 for one byte", "da000161", "not-canonical", "ENC-6"),
    ("str 32 for one byte", "db0000000161", "not-canonical", "ENC-6"),
    ("31 bytes of text in str 8", "d91f" + "61" * 31, "not-canonical", "ENC-6"),
    ("255 bytes of text in str 16", "da00ff" + "61" * 255, "not-canonical", "ENC-6"),
    ("bin 16 for one byte", "c50001ab", "not-canonical", "ENC-6"),
    ("255 bytes in bin 16", "c500ff" + "00" * 255, "not-canonical", "ENC-6"),
    ("bin 32 for one byte", "c600000001ab", "not-canonical", "ENC-6"),
    ("array 16 for one element", "dc0001c0", "not-canonical", "ENC-6"),
    ("array 32 for one element", "dd00000001c0", "not-canonical", "ENC-6"),
    ("15 elements in array 16", "dc000f" + "c0" * 15, "not-canonical", "ENC-6"),
    ("map 16 for one entry", "de0001a161c0", "not-canonical", "ENC-6"),
    (
        "15 entries in map 16",
        "de000f" + "".join(f"a1{97 + n:02x}c0" for n in range(15)),
        "not-canonical",
        "ENC-6",
    ),
    ("map 32 for one entry", "df00000001a161c0", "not-canonical", "ENC-6"),
    ("2^63", "cf8000000000000000", "out-of-range", "ENC-7"),
    ("2^64 - 1", "cfffffffffffffffff", "out-of-range", "ENC-7"),
    ("float 32", "ca3f800000", "not-canonical", "ENC-8"),
    ("NaN", "cb7ff8000000000000", "not-finite", "ENC-8"),
    ("signalling NaN", "cb7ff0000000000001", "not-finite", "ENC-8"),
    ("infinity", "cb7ff0000000000000", "not-finite", "ENC-8"),
    ("minus infinity", "cbfff0000000000000", "not-finite", "ENC-8"),
    ("one array too deep", "91" * MAX_DEPTH + "90", "too-deep", "ENC-9"),
    ("one map too deep", "81a161" * MAX_DEPTH + "80", "too-deep", "ENC-9"),
    ("arrays and maps count alike", "9181a161" * 4 + "90", "too-deep", "ENC-9"),
    ("a thousand arrays deep", "91" * 1000, "too-deep", "ENC-9"),
    ("array of 2^31 announced", "dd7fffffff", "out-of-range", "ENC-11"),
    ("map of 2^32 - 1 announced", "dfffffffff", "out-of-range", "ENC-11"),
]
LONG: list[tuple[str, list[tuple[str, int]], str]] = [
    ("array one too long", [("dc4001", 1), ("c0", MAX_ARRAY + 1)], "out-of-range"),
    ("text one byte too long", [("da1001", 1), ("61", MAX_TEXT + 1)], "out-of-range"),
    (
        "too many values in a few arrays",
        [("95dc4000", 1), ("c0", 16_384)] + 4 * [("dc4000", 1), ("c0", 16_384)],
        "out-of-range",
    ),
    ("a hundred thousand empty maps", [("98", 1)] + 8 * [("dc4000", 1), ("80", 16_384)], "out-of-range"),
]
"""Runs of bytes: [hex, count]."""


def tagged(value: object) -> Any:
    """A value as JSON that says its type: integers and floats as decimal text, bin as hex."""
    match value:
        case None | bool():
            return value
        case int():
            return {"int": str(value)}
        case float():
            return {"float": repr(value)}
        case str():
            return {"text": value}
        case bytes():
            return {"bin": value.hex()}
        case list():
            return {"array": [tagged(item) for item in value]}
        case dict():
            return {"map": [[key, tagged(item)] for key, item in sorted(value.items())]}
    raise TypeError(value)


def encoding() -> list[dict[str, Any]]:
    positive = [
        case(comment, "ENC-13", "valid", bytes=encode(value).hex(), value=tagged(value))
        for comment, value in VALUES
    ]
    negative = [
        case(comment, rule, "invalid", bytes=data, code=code) for comment, data, code, rule in REFUSED
    ]
    nested = [
        case(f"{comment}, within a map", rule, "invalid nested", bytes="82a161c0a162" + data, code=code)
        for comment, data, code, rule in REFUSED
        if rule in ("ENC-3", "ENC-6", "ENC-7", "ENC-8")
    ]
    oversize = case(
        "one byte more than the limit, and not msgpack: the size is judged first",
        "ENC-1",
        "invalid",
        bytes="c1" * 11,
        limit=10,
        code="oversize",
    )
    long = [case(comment, "ENC-11", "invalid", bytes=runs, code=code) for comment, runs, code in LONG]
    return [*positive, *negative, *nested, *long, oversize]


def identities() -> list[dict[str, Any]]:
    keys = [
        case(
            f"the key called {name} in other vectors",
            "IDN-1",
            "valid",
            seed=seed.hex(),
            key=(identity := Identity.from_seed(seed)).key.hex(),
            peer_id=identity.peer_id,
        )
        for name, seed in SEEDS.items()
    ]
    return [*keys, case("the seed of zeros", "IDN-1", "valid", **_zero())]


def _zero() -> dict[str, str]:
    identity = Identity.from_seed(bytes(32))
    return {"seed": bytes(32).hex(), "key": identity.key.hex(), "peer_id": identity.peer_id}


def signatures() -> list[dict[str, Any]]:
    message, good = b"message", ALICE.sign(b"message")
    order = (1 << 252) + 27742317777372353535851937790883648493
    large = (int.from_bytes(good[32:], "little") + order).to_bytes(32, "little")
    rows = [
        ("a signature", ALICE.key, good, None, "IDN-2"),
        ("S plus the group order", ALICE.key, good[:32] + large, "bad-signature", "IDN-2"),
        ("R changed", ALICE.key, bytes([good[0] ^ 1]) + good[1:], "bad-signature", "IDN-2"),
        ("S changed", ALICE.key, good[:-1] + bytes([good[-1] ^ 1]), "bad-signature", "IDN-2"),
        ("another key", Identity.from_seed(bytes(32)).key, good, "bad-signature", "IDN-2"),
        ("a key that is no point", b"\2" + bytes(31), good, "bad-signature", "IDN-2"),
        ("63 bytes", ALICE.key, good[:63], "bad-signature", "IDN-2"),
    ]
    small = [
        (f"small-order key {number}; the equation may hold", key, b"\1" + bytes(63), "bad-signature", "IDN-3")
        for number, key in enumerate(sorted(SMALL_ORDER))
    ]
    return [
        case(
            comment,
            rule,
            "invalid" if code else "valid",
            key=key.hex(),
            message=message.hex(),
            signature=signature.hex(),
            **({"code": code} if code else {}),
        )
        for comment, key, signature, code, rule in rows + small
    ]
