"""What a request for a chunk asks for, by its target and headers. No I/O. [STR-6]"""

from __future__ import annotations

import re

import h11

_TARGET = re.compile(rb"/blob/([0-9a-f]{64})")
_RANGE = re.compile(rb"bytes=([0-9]{0,15})-([0-9]{0,15})")


class Asked:
    """A request, read."""

    def __init__(self, request: h11.Request) -> None:
        self.method = request.method.decode()
        match = _TARGET.fullmatch(request.target)
        self.name = None if match is None else match[1].decode()
        """The hash in hexadecimal; None where the target is another."""
        self._values: dict[bytes, list[bytes]] = {}
        for name, value in request.headers:
            self._values.setdefault(name, []).append(value)

    def holds(self, etag: str) -> bool:
        """Whether the client has it already and only asks if that is still so."""
        held = b",".join(self._values.get(b"if-none-match", []))
        return etag in {tag.strip().removeprefix("W/") for tag in held.decode("latin-1").split(",")}

    def part(self, length: int, etag: str) -> range | None:
        """The bytes that are asked for: all of them where the range is several, of another entity or
        nonsense, as RFC 9110 has it; None where there are no such bytes."""
        asked = self._values.get(b"range", []) if self.method == "GET" else []
        match = _RANGE.fullmatch(asked[0]) if len(asked) == 1 else None
        if match is None or self._values.get(b"if-range", [etag.encode()]) != [etag.encode()]:
            return range(length)
        first, last = match[1], match[2]
        if (first and last and int(last) < int(first)) or not first + last:
            return range(length)
        if not first:
            part = range(max(0, length - int(last)), length)
        else:
            part = range(int(first), min(length, int(last) + 1) if last else length)
        return part or None
