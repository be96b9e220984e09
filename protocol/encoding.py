"""Strict canonical msgpack. Spec: `specs/01-encoding.md`.

One value has one encoding: text keys in code-point order, shortest integers and lengths, float64, no
extension types, no NaN or infinity. A reader decodes, encodes again and compares, which msgpack's and
msgspec's own decoders do not do (both take duplicate keys and long integers).
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgpack
import msgspec

from .constants import MAX_ARRAY, MAX_DEPTH, MAX_INT, MAX_MAP, MAX_TEXT
from .errors import Code, LocalError, RemoteError

Value = None | bool | int | float | str | bytes | list["Value"] | dict[str, "Value"]
"""What a message is made of."""

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Canonical bytes of plain values and msgspec structs.

    Raises LocalError where the value has no encoding (an int beyond 64 bits, NaN, a key that is no text).
    """
    plain = msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=False)
    try:
        packed: bytes = msgpack.packb(_arranged(plain, 1), use_bin_type=True)
    except RemoteError as error:
        raise LocalError(f"This message cannot be encoded: {error}") from error
    return packed


def decode(data: bytes, limit: int) -> Value:
    """The one value in `data`, or a RemoteError with the code of the first rule broken.

    `limit` is the largest size in bytes that the caller takes; it is checked before anything is parsed.
    """
    if len(data) > limit:  # [ENC-1]
        raise RemoteError(
            Code.OVERSIZE,
            f"The message has {len(data)} bytes; at most {limit} are allowed.",
            measured=len(data),
            threshold=limit,
        )
    value = _parsed(data)
    if msgpack.packb(_arranged(value, 1), use_bin_type=True) != data:  # [ENC-4] [ENC-5] [ENC-6]
        raise RemoteError(
            Code.NOT_CANONICAL,
            "The message is not in canonical form (sorted unique keys, shortest lengths).",
        )
    return value


def read(data: bytes, struct: type[T], limit: int) -> T:
    """Decode `data` and check it against a struct's types and ranges. Unknown keys are ignored [ENC-10]."""
    return shaped(decode(data, limit), struct)


def shaped(value: Value, struct: type[T]) -> T:
    """A decoded value as `struct`; WRONG_TYPE names the path that does not fit."""
    try:
        return msgspec.convert(value, struct, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise RemoteError(Code.WRONG_TYPE, f"The message has a wrong shape: {error}.") from error


def _parsed(data: bytes) -> Value:
    try:
        value: Value = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_array_len=MAX_ARRAY,
            max_map_len=MAX_MAP,
            max_str_len=MAX_TEXT,
            max_bin_len=len(data),
            max_ext_len=0,
        )
    except msgpack.StackError as error:
        raise RemoteError(Code.TOO_DEEP, "The message is nested too deeply.") from error
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # [ENC-2] [ENC-3]
        raise RemoteError(Code.MALFORMED, f"The message is not msgpack as used here: {error}") from error
    return value


def _arranged(value: object, depth: int) -> object:
    """`value` with sorted maps, or the error that it deserves."""
    match value:
        case None | bool() | bytes():
            return value
        case str():
            return _text(value)
        case int():
            if not -MAX_INT - 1 <= value <= MAX_INT:  # [ENC-7]
                raise RemoteError(Code.OUT_OF_RANGE, f"The integer {value} does not fit 64 bits.")
            return value
        case float():
            if not math.isfinite(value):  # [ENC-8]
                raise RemoteError(Code.NOT_FINITE, "NaN and infinity are not allowed in a message.")
            return value
        case dict():
            return _arranged_map(value, depth)
        case list() | tuple():
            _check_depth(depth)
            if len(value) > MAX_ARRAY:
                raise RemoteError(Code.OUT_OF_RANGE, f"An array has {len(value)} > {MAX_ARRAY} elements.")
            return [_arranged(item, depth + 1) for item in value]
        case _:  # a timestamp or other extension [ENC-3]
            raise RemoteError(Code.MALFORMED, f"A {type(value).__name__} is no value of this protocol.")


def _arranged_map(value: dict[object, object], depth: int) -> dict[str, object]:
    _check_depth(depth)
    if len(value) > MAX_MAP:
        raise RemoteError(Code.OUT_OF_RANGE, f"A map has {len(value)} > {MAX_MAP} entries.")
    for key in value:
        if not isinstance(key, str):  # [ENC-4]
            raise RemoteError(Code.WRONG_TYPE, "A map has a key that is not text.")
    # Python compares text by code point, which is the order of its UTF-8 bytes.
    return {_text(key): _arranged(value[key], depth + 1) for key in sorted(value)}  # type: ignore[type-var,arg-type]


def _text(value: str) -> str:
    if len(value) > MAX_TEXT or len(value.encode("utf-8", "surrogatepass")) > MAX_TEXT:
        raise RemoteError(Code.OUT_OF_RANGE, f"A text has more than {MAX_TEXT} bytes.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RemoteError(Code.MALFORMED, "A text is not valid UTF-8.") from error
    return value


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:  # [ENC-9]
        raise RemoteError(Code.TOO_DEEP, f"The message is nested deeper than {MAX_DEPTH}.")
