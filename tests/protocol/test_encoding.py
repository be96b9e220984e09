"""Strict canonical msgpack: one table of what is refused, and properties over all values."""

from __future__ import annotations

import struct
import time

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.constants import MAX_ARRAY, MAX_DEPTH, MAX_INT, MAX_TEXT, MAX_VALUES
from nous_node.protocol.encoding import decode, encode, read, shaped
from nous_node.protocol.errors import Code, LocalError, RemoteError

ROOM = 1_000_000

REFUSED = [
    ("", Code.MALFORMED, "nothing"),
    ("0000", Code.MALFORMED, "trailing byte"),
    ("c0c0", Code.MALFORMED, "two values"),
    ("a2ff", Code.MALFORMED, "text cut short"),
    ("cd01", Code.MALFORMED, "integer cut short"),
    ("cb3ff0", Code.MALFORMED, "float cut short"),
    ("92c0", Code.MALFORMED, "array cut short"),
    ("81a161", Code.MALFORMED, "map without its value"),
    ("c403ab", Code.MALFORMED, "bin cut short"),
    ("c6ffffffff", Code.MALFORMED, "bin header of 4 GiB"),
    ("c1", Code.MALFORMED, "the unused byte"),
    ("d40100", Code.MALFORMED, "fixext 1"),
    ("d6ff00000000", Code.MALFORMED, "timestamp"),
    ("c70001", Code.MALFORMED, "ext 8"),
    ("c8000001", Code.MALFORMED, "ext 16"),
    ("c90000000001", Code.MALFORMED, "ext 32"),
    ("a1ff", Code.MALFORMED, "not UTF-8"),
    ("a2c080", Code.MALFORMED, "overlong UTF-8"),
    ("a3eda080", Code.MALFORMED, "surrogate"),
    ("a4f4908080", Code.MALFORMED, "beyond U+10FFFF"),
    ("cc7f", Code.NOT_CANONICAL, "7-bit number in 8"),
    ("cd00ff", Code.NOT_CANONICAL, "8-bit number in 16"),
    ("ce0000ffff", Code.NOT_CANONICAL, "16-bit number in 32"),
    ("cf00000000ffffffff", Code.NOT_CANONICAL, "32-bit number in 64"),
    ("d07f", Code.NOT_CANONICAL, "positive number as signed"),
    ("d0e0", Code.NOT_CANONICAL, "-32 in 8 bits"),
    ("d1ff80", Code.NOT_CANONICAL, "-128 in 16 bits"),
    ("d2ffff8000", Code.NOT_CANONICAL, "-32768 in 32 bits"),
    ("d3ffffffff80000000", Code.NOT_CANONICAL, "-2^31 in 64 bits"),
    ("d30000000000000001", Code.NOT_CANONICAL, "1 as int 64"),
    ("d90161", Code.NOT_CANONICAL, "str 8 for one byte"),
    ("da000161", Code.NOT_CANONICAL, "str 16 for one byte"),
    ("db0000000161", Code.NOT_CANONICAL, "str 32 for one byte"),
    ("c50001ab", Code.NOT_CANONICAL, "bin 16 for one byte"),
    ("c600000001ab", Code.NOT_CANONICAL, "bin 32 for one byte"),
    ("dc0001c0", Code.NOT_CANONICAL, "array 16 for one element"),
    ("dd00000001c0", Code.NOT_CANONICAL, "array 32 for one element"),
    ("de0001a161c0", Code.NOT_CANONICAL, "map 16 for one entry"),
    ("df00000001a161c0", Code.NOT_CANONICAL, "map 32 for one entry"),
    ("ca3f800000", Code.NOT_CANONICAL, "float32"),
    ("82a161c0a161c0", Code.NOT_CANONICAL, "duplicate key"),
    ("82a162c0a161c0", Code.NOT_CANONICAL, "unsorted keys"),
    ("82a26161c0a161c0", Code.NOT_CANONICAL, "longer key before its prefix"),
    ("82a4f09f9880c0a3efbfbdc0", Code.NOT_CANONICAL, "UTF-16 order of keys"),
    ("8101c0", Code.WRONG_TYPE, "integer key"),
    ("81c0c0", Code.WRONG_TYPE, "nil key"),
    ("81c40161c0", Code.WRONG_TYPE, "binary key"),
    ("8190c0", Code.WRONG_TYPE, "array as key"),
    ("8180c0", Code.WRONG_TYPE, "map as key"),
    ("cf8000000000000000", Code.OUT_OF_RANGE, "2^63"),
    ("cfffffffffffffffff", Code.OUT_OF_RANGE, "2^64 - 1"),
    ("cb7ff8000000000000", Code.NOT_FINITE, "NaN"),
    ("cb7ff0000000000000", Code.NOT_FINITE, "infinity"),
    ("cbfff0000000000000", Code.NOT_FINITE, "minus infinity"),
    ("91" * MAX_DEPTH + "90", Code.TOO_DEEP, "one array too deep"),
    ("81a161" * MAX_DEPTH + "80", Code.TOO_DEEP, "one map too deep"),
    ("91" * 5000, Code.TOO_DEEP, "very deep"),
    ("dd7fffffff", Code.OUT_OF_RANGE, "array header of 2^31"),
    ("dc4001" + "c0" * (MAX_ARRAY + 1), Code.OUT_OF_RANGE, "array one too long"),
    ("dfffffffff", Code.OUT_OF_RANGE, "map header of 2^32"),
    ("da1001" + "61" * (MAX_TEXT + 1), Code.OUT_OF_RANGE, "text one too long"),
]

TAKEN = [
    ("c0", None),
    ("c2", False),
    ("c3", True),
    ("00", 0),
    ("7f", 127),
    ("cc80", 128),
    ("cd0100", 256),
    ("ce00010000", 65_536),
    ("cf0000000100000000", 1 << 32),
    ("cf7fffffffffffffff", MAX_INT),
    ("ff", -1),
    ("e0", -32),
    ("d0df", -33),
    ("d080", -128),
    ("d1ff7f", -129),
    ("d2ffff7fff", -32_769),
    ("d3ffffffff7fffffff", -(1 << 31) - 1),
    ("d38000000000000000", -MAX_INT - 1),
    ("cb3ff0000000000000", 1.0),
    ("cb0000000000000001", 5e-324),
    ("a0", ""),
    ("a3e282ac", "€"),
    ("d920" + "61" * 32, "a" * 32),
    ("c400", b""),
    ("90", []),
    ("80", {}),
    ("82a161c0a26161c0", {"a": None, "aa": None}),
    ("82a3efbfbdc0a4f09f9880c0", {"\ufffd": None, "\U0001f600": None}),
    ("91" * (MAX_DEPTH - 1) + "90", [[[[[[[[]]]]]]]]),
]


@pytest.mark.parametrize(("data", "code", "why"), REFUSED, ids=[why for _, _, why in REFUSED])
def test_reader_refuses(data: str, code: Code, why: str) -> None:
    with pytest.raises(RemoteError) as caught:
        decode(bytes.fromhex(data), ROOM)
    assert caught.value.code is code


@pytest.mark.parametrize(("data", "code", "why"), REFUSED[4:], ids=[why for _, _, why in REFUSED[4:]])
def test_reader_refuses_the_same_inside_a_map(data: str, code: Code, why: str) -> None:
    with pytest.raises(RemoteError) as caught:
        decode(bytes.fromhex("82a161c0a162" + data), ROOM)
    assert caught.value.code is code


@pytest.mark.parametrize(("data", "value"), TAKEN)
def test_writer_and_reader_agree(data: str, value: object) -> None:
    assert encode(value).hex() == data
    assert decode(bytes.fromhex(data), ROOM) == value


def test_reader_keeps_the_sign_of_zero() -> None:
    assert str(decode(bytes.fromhex("cb8000000000000000"), 9)) == "-0.0"


def test_size_is_checked_before_anything_is_parsed() -> None:
    with pytest.raises(RemoteError) as caught:
        decode(b"\xc1" * 11, 10)
    assert (caught.value.code, caught.value.measured, caught.value.threshold) == (Code.OVERSIZE, 11, 10)


def test_eight_million_empty_maps_are_refused_quickly() -> None:
    bomb = b"\xdc\x01\xe0" + (b"\xdc\x40\x00" + b"\x80" * MAX_ARRAY) * 480
    started = time.process_time()
    with pytest.raises(RemoteError) as caught:
        decode(bomb, 8_000_000)
    assert caught.value.code is Code.OUT_OF_RANGE
    assert time.process_time() - started < 1  # the library's own decoder takes 8 s and 1 GB


def test_the_number_of_values_counts_keys() -> None:
    data = encode({"a": [1, 2]})
    assert decode(data, ROOM, values=5) == {"a": [1, 2]}
    with pytest.raises(RemoteError) as caught:
        decode(data, ROOM, values=4)
    assert caught.value.code is Code.OUT_OF_RANGE


def test_headers_of_long_arrays_cost_no_memory() -> None:
    with pytest.raises(RemoteError):
        decode(b"\xdc\x40\x00" * 300_000, ROOM)


class Shape(msgspec.Struct, frozen=True):
    whole: int = 0
    real: float = 0.0
    flag: bool = False
    text: str = ""
    data: bytes = b""


@pytest.mark.parametrize(
    "value",
    [
        {"whole": True},
        {"whole": 1.0},
        {"whole": "1"},
        {"whole": None},
        {"real": True},
        {"real": "1"},
        {"flag": 1},
        {"flag": 0},
        {"text": b"a"},
        {"text": 1},
        {"data": "YQ=="},
        {"data": [97]},
        [1, 1.0],
        None,
    ],
)
def test_no_type_passes_for_another(value: object) -> None:
    with pytest.raises(RemoteError) as caught:
        read(encode(value), Shape, ROOM)
    assert caught.value.code is Code.WRONG_TYPE


def test_a_whole_number_passes_for_a_float() -> None:
    assert read(encode({"real": 1}), Shape, ROOM) == Shape(real=1.0)


def test_unknown_keys_are_ignored() -> None:
    assert read(encode({"whole": 2, "zzz": [1]}), Shape, ROOM) == Shape(whole=2)


@pytest.mark.parametrize(
    "value",
    [
        1 << 63,
        -(1 << 63) - 1,
        float("nan"),
        float("inf"),
        {1: 2},
        {b"a": 1},
        "\ud800",
        "a" * (MAX_TEXT + 1),
        [0] * (MAX_ARRAY + 1),
        object(),
        bytearray(b"a"),
        memoryview(b"a"),
        [[[[[[[[[]]]]]]]]],
    ],
)
def test_writer_refuses_what_no_reader_takes(value: object) -> None:
    with pytest.raises(LocalError):
        encode(value)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_INT - 1, MAX_INT)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=40,
)


def within_depth(value: object, depth: int = 1) -> bool:
    match value:
        case dict():
            return depth <= MAX_DEPTH and all(within_depth(item, depth + 1) for item in value.values())
        case list():
            return depth <= MAX_DEPTH and all(within_depth(item, depth + 1) for item in value)
        case _:
            return True


@given(values.filter(within_depth))
def test_every_value_survives_the_wire(value: object) -> None:
    data = encode(value)
    assert decode(data, len(data)) == value
    assert msgpack.unpackb(data) == value


@given(st.binary(max_size=64))
def test_what_the_reader_takes_has_no_other_encoding(data: bytes) -> None:
    try:
        value = decode(data, ROOM)
    except RemoteError:
        return
    assert encode(value) == data


@given(values.filter(within_depth), st.data())
def test_reader_survives_mutations(value: object, data: st.DataObject) -> None:
    wire = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        if wire:
            wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = decode(bytes(wire), ROOM)
    except RemoteError:
        return
    assert encode(again) == bytes(wire)


@given(st.binary(max_size=40))
def test_reader_refuses_every_proper_prefix(junk: bytes) -> None:
    wire = encode({"data": junk, "list": [1, 2.5, "text"]})
    for end in range(len(wire)):
        with pytest.raises(RemoteError):
            decode(wire[:end], ROOM)
    with pytest.raises(RemoteError):
        decode(wire + b"\0", ROOM)


@given(values.filter(within_depth))
def test_any_value_has_the_shape_or_is_refused(value: object) -> None:
    try:
        shaped(decode(encode(value), ROOM), Shape)
        code = Code.WRONG_TYPE
    except RemoteError as error:
        code = error.code
    assert code is Code.WRONG_TYPE


def test_the_largest_message_is_taken() -> None:
    wide = [[0] * 15] * (MAX_VALUES // 16 - 1)
    assert len(decode(encode(wide), ROOM)) == len(wide)  # type: ignore[arg-type]


def test_float32_and_float64_of_one_number_are_not_both_taken() -> None:
    assert decode(b"\xcb" + struct.pack(">d", 0.5), 9) == 0.5
    with pytest.raises(RemoteError):
        decode(b"\xca" + struct.pack(">f", 0.5), 9)
