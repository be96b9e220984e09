"""Strict canonical msgpack. Spec: `specs/01-encoding.md`.

One value has one encoding: text keys in code-point order, shortest integers and lengths, float64, no
extension types, no NaN or infinity. The writer is msgpack behind checks; the reader is `reader.Reader`.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgpack
import msgspec

from .absence import check_absence
from .constants import MAX_ARRAY, MAX_DEPTH, MAX_INT, MAX_MAP, MAX_TEXT, MAX_VALUES
from .errors import Code, LocalError, RemoteError
from .reader import Reader, Value

__all__ = ["Value", "decode", "encode", "read", "shaped"]

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Canonical bytes of plain values and msgspec structs.

    Raises LocalError where the value has no encoding (an int beyond 64 bits, NaN, a key that is no text).
    """
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray, memoryview), str_keys=False)
        packed: bytes = msgpack.packb(_arranged(plain, 1), use_bin_type=True)
    except (TypeError, RecursionError) as error:
        raise LocalError(f"This message cannot be encoded: {error}.") from error
    return packed


def decode(data: bytes, limit: int, values: int = MAX_VALUES) -> Value:
    """The one value in `data`, or a RemoteError with the code of the first rule broken.

    `limit` is the largest size in bytes that the caller takes, checked before anything is parsed; `values`
    how many values and keys the message may hold, which bounds what parsing costs.
    """
    if len(data) > limit:  # [ENC-1]
        raise RemoteError(
            Code.OVERSIZE,
            f"The message has {len(data)} bytes; at most {limit} are allowed.",
            measured=len(data),
            threshold=limit,
        )
    return Reader(data, values).whole()


def read(data: bytes, struct: type[T], limit: int, values: int = MAX_VALUES) -> T:
    """Decode `data` and check it against a struct's types and ranges. Unknown keys are ignored [ENC-10]."""
    return shaped(decode(data, limit, values), struct)


def shaped(value: Value, struct: type[T]) -> T:
    """A decoded value as `struct`; WRONG_TYPE names the path that does not fit."""
    try:
        result = msgspec.convert(value, struct, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise RemoteError(Code.WRONG_TYPE, f"The message has a wrong shape: {error}.") from error
    check_absence(value, struct)
    return result


def _arranged(value: object, depth: int) -> object:
    """`value` with sorted maps; LocalError where it breaks a rule that the reader enforces."""
    match value:
        case None | bool() | bytes():
            return value
        case str():
            return _text(value)
        case int():
            if not -MAX_INT - 1 <= value <= MAX_INT:
                raise LocalError(f"The integer {value} does not fit a signed 64-bit word.")
            return value
        case float():
            if not math.isfinite(value):
                raise LocalError("NaN and infinity cannot be encoded.")
            return value
        case dict():
            _enter("map", len(value), MAX_MAP, depth)
            if not all(isinstance(key, str) for key in value):
                raise LocalError("A map with a key that is not text cannot be encoded.")
            # Python compares text by code point, which is the order of its UTF-8 bytes.
            return {_text(key): _arranged(value[key], depth + 1) for key in sorted(value)}
        case list() | tuple():
            _enter("array", len(value), MAX_ARRAY, depth)
            return [_arranged(item, depth + 1) for item in value]
        case _:
            raise LocalError(f"A {type(value).__name__} cannot be encoded.")


def _text(value: str) -> str:
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise LocalError("A text with a lone surrogate cannot be encoded.") from error
    if size > MAX_TEXT:
        raise LocalError(f"A text has {size} bytes; at most {MAX_TEXT} can be encoded.")
    return value


def _enter(family: str, length: int, most: int, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise LocalError(f"A message nested deeper than {MAX_DEPTH} cannot be encoded.")
    if length > most:
        raise LocalError(f"A {family} has {length} entries; at most {most} can be encoded.")
