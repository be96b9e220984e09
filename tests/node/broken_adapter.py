"""Our own adapter with one fault, named by the first argument: what the conformance kit has to find."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

from nous_node.node import adapter
from nous_node.protocol import encoding, identity, reader
from nous_node.protocol.errors import Code, RemoteError

ORDER = 2**252 + 27742317777372353535851937790883648493
"""Of the group of Ed25519: S of a signature has to be smaller."""


class Duplicates(reader.Reader):
    """Takes a key that is there already."""

    __slots__ = ()

    def _map(self, length: int, depth: int) -> dict[str, reader.Value]:
        self._enter("map", length, reader.MAX_MAP, depth)
        result: dict[str, reader.Value] = {}
        last = ""
        for _ in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise RemoteError(Code.WRONG_TYPE, "no text")
            if key < last:
                raise RemoteError(Code.NOT_CANONICAL, "out of order")
            result[key] = self.value(depth + 1)
            last = key
        return result


class Utf16(reader.Reader):
    """Compares keys as languages do whose text is UTF-16."""

    __slots__ = ()

    def _map(self, length: int, depth: int) -> dict[str, reader.Value]:
        self._enter("map", length, reader.MAX_MAP, depth)
        result: dict[str, reader.Value] = {}
        last = b""
        for index in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise RemoteError(Code.WRONG_TYPE, "no text")
            units = key.encode("utf-16-be")
            if index and units <= last:
                raise RemoteError(Code.NOT_CANONICAL, "a duplicate or out of order")
            result[key] = self.value(depth + 1)
            last = units
        return result


def high_s(key: bytes, signature: bytes, message: bytes) -> None:
    """Reduces S, as readers do that follow an older text than RFC 8032."""
    if len(signature) != 64:
        raise RemoteError(Code.BAD_SIGNATURE, "no signature")
    reduced = int.from_bytes(signature[32:], "little") % ORDER
    VERIFY(key, signature[:32] + reduced.to_bytes(32, "little"), message)


VERIFY, ANSWERED = identity.verify, adapter.answered


def rounded(line: bytes) -> dict[str, Any]:
    """A float as 32 bits hold it."""
    answer = ANSWERED(line)
    match answer:
        case {"ok": {"value": {"float": str() as text}, **rest}} if abs(float(text)) < 3e38:
            (value,) = struct.unpack("f", struct.pack("f", float(text)))
            return {"ok": {"value": {"float": repr(value)}, **rest}}
    return answer


def wrong_code(line: bytes) -> dict[str, Any]:
    """One code has another name."""
    answer = ANSWERED(line)
    return {**answer, "error": "malformed"} if answer.get("error") == "too-deep" else answer


def use_reader(kind: type[reader.Reader]) -> None:
    encoding.Reader = kind  # type: ignore[misc]


def use_verify() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("nous_node.") and getattr(module, "verify", None) is VERIFY:
            module.verify = high_s  # type: ignore[attr-defined]


def use_answers(answers: Callable[[bytes], dict[str, Any]]) -> None:
    adapter.answered = answers


FAULTS: dict[str, Callable[[], None]] = {
    "duplicates": lambda: use_reader(Duplicates),
    "utf-16": lambda: use_reader(Utf16),
    "high-s": use_verify,
    "float32": lambda: use_answers(rounded),
    "code": lambda: use_answers(wrong_code),
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    adapter.serve(sys.stdin.buffer, sys.stdout.buffer)
