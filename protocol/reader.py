"""The strict reader of canonical msgpack. Spec: `specs/01-encoding.md`.

One pass over the bytes that refuses at the first rule broken, so that what a hostile message costs is
bounded by `MAX_VALUES` and by its size. The libraries' decoders take duplicate keys and long integers, and
eight megabytes of empty maps cost them a gigabyte.
"""

from __future__ import annotations

import math
import struct

from .constants import MAX_ARRAY, MAX_DEPTH, MAX_INT, MAX_MAP, MAX_TEXT
from .errors import Code, RemoteError

Value = None | bool | int | float | str | bytes | list["Value"] | dict[str, "Value"]
"""What a message is made of."""

_FLOAT64 = struct.Struct(">d")
_UINTS = {0xCC: (1, 0x80), 0xCD: (2, 0x100), 0xCE: (4, 0x1_0000), 0xCF: (8, 0x1_0000_0000)}
"""Header -> (bytes, smallest integer that needs it)."""
_INTS = {0xD0: (1, -0x20), 0xD1: (2, -0x80), 0xD2: (4, -0x8000), 0xD3: (8, -0x8000_0000)}
"""Header -> (bytes, first integer towards zero that needs less)."""
_LENGTHS = {
    0xC4: ("bin", 1, 0),
    0xC5: ("bin", 2, 0x100),
    0xC6: ("bin", 4, 0x1_0000),
    0xD9: ("str", 1, 0x20),
    0xDA: ("str", 2, 0x100),
    0xDB: ("str", 4, 0x1_0000),
    0xDC: ("array", 2, 0x10),
    0xDD: ("array", 4, 0x1_0000),
    0xDE: ("map", 2, 0x10),
    0xDF: ("map", 4, 0x1_0000),
}
"""Header -> (family, bytes of its length, smallest length that needs it)."""


class Reader:
    """A position in bytes, and how many values may still come."""

    __slots__ = ("at", "data", "left")

    def __init__(self, data: bytes, values: int) -> None:
        self.data = data
        self.at = 0
        self.left = values

    def whole(self) -> Value:
        """The one value that the bytes are; RemoteError otherwise."""
        value = self.value(1)
        if self.at != len(self.data):  # [ENC-2]
            raise RemoteError(Code.MALFORMED, f"{len(self.data) - self.at} bytes stand behind the message.")
        return value

    def value(self, depth: int) -> Value:
        """The next value; `depth` is that of a map or array which begins here."""
        self.left -= 1
        if self.left < 0:  # [ENC-11]
            raise RemoteError(Code.OUT_OF_RANGE, "The message holds too many values.")
        header = self._take(1)[0]
        if header < 0x80:
            return header
        if header < 0x90:
            return self._map(header & 0x0F, depth)
        if header < 0xA0:
            return self._array(header & 0x0F, depth)
        if header < 0xC0:
            return self._text(header & 0x1F)
        if header >= 0xE0:
            return header - 0x100
        return self._headed(header, depth)

    def _headed(self, header: int, depth: int) -> Value:
        if header in _LENGTHS:
            return self._sized(header, depth)
        if header in _UINTS or header in _INTS:
            return self._int(header)
        match header:
            case 0xC0:
                return None
            case 0xC2:
                return False
            case 0xC3:
                return True
            case 0xCB:
                return self._float()
            case 0xCA:  # [ENC-8]
                raise RemoteError(Code.NOT_CANONICAL, "A number is a float32; only float64 is used.")
            case _:  # 0xC1 and the extension types [ENC-3]
                raise RemoteError(
                    Code.MALFORMED, f"The byte 0x{header:02x} begins no value of this protocol."
                )

    def _sized(self, header: int, depth: int) -> Value:
        family, width, least = _LENGTHS[header]
        length = int.from_bytes(self._take(width), "big")
        if length < least:  # [ENC-6]
            raise RemoteError(Code.NOT_CANONICAL, f"The length {length} of a {family} has a shorter form.")
        match family:
            case "bin":
                return self._take(length)
            case "str":
                return self._text(length)
            case "array":
                return self._array(length, depth)
            case _:
                return self._map(length, depth)

    def _int(self, header: int) -> int:
        if header in _UINTS:
            width, bound = _UINTS[header]
            value = int.from_bytes(self._take(width), "big")
            short = value < bound
        else:
            width, bound = _INTS[header]
            value = int.from_bytes(self._take(width), "big", signed=True)
            short = value >= bound
        if short:  # [ENC-6]
            raise RemoteError(Code.NOT_CANONICAL, f"The integer {value} has a shorter form.")
        if value > MAX_INT:  # [ENC-7]
            raise RemoteError(Code.OUT_OF_RANGE, f"The integer {value} does not fit a signed 64-bit word.")
        return value

    def _float(self) -> float:
        value: float = _FLOAT64.unpack(self._take(8))[0]
        if not math.isfinite(value):  # [ENC-8]
            raise RemoteError(Code.NOT_FINITE, "NaN and infinity are not allowed in a message.")
        return value

    def _text(self, length: int) -> str:
        if length > MAX_TEXT:
            raise RemoteError(
                Code.OUT_OF_RANGE, f"A text has {length} bytes; at most {MAX_TEXT} are allowed."
            )
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:  # [ENC-3]
            raise RemoteError(Code.MALFORMED, "A text is not valid UTF-8.") from error

    def _array(self, length: int, depth: int) -> list[Value]:
        self._enter("array", length, MAX_ARRAY, depth)
        return [self.value(depth + 1) for _ in range(length)]

    def _map(self, length: int, depth: int) -> dict[str, Value]:
        self._enter("map", length, MAX_MAP, depth)
        result: dict[str, Value] = {}
        last = ""
        for index in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, str):  # [ENC-4]
                raise RemoteError(Code.WRONG_TYPE, "A map has a key that is not text.")
            # Python compares text by code point, which is the order of its UTF-8 bytes.
            if index and key <= last:  # [ENC-4] [ENC-5]
                raise RemoteError(
                    Code.NOT_CANONICAL, f"The map key {key[:64]!r} is a duplicate or out of order."
                )
            result[key] = self.value(depth + 1)
            last = key
        return result

    def _enter(self, family: str, length: int, most: int, depth: int) -> None:
        if depth > MAX_DEPTH:  # [ENC-9]
            raise RemoteError(Code.TOO_DEEP, f"The message is nested deeper than {MAX_DEPTH}.")
        if length > most:
            raise RemoteError(
                Code.OUT_OF_RANGE, f"A {family} has {length} entries; at most {most} are allowed."
            )

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):  # [ENC-2]
            raise RemoteError(Code.MALFORMED, "The message ends in the middle of a value.")
        piece = self.data[self.at : end]
        self.at = end
        return piece
