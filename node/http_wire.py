"""One connection of the chunk server: requests in, answers out. [STR-6]"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from email.utils import formatdate
from typing import BinaryIO, NamedTuple

import h11
import trio

from .http_asked import Asked
from .upload_limit import UploadLimit

MAX_HEAD = 8_192
"""Bytes of a request line with its headers; ours have 200."""
STALL_S = 10.0
"""For each piece of a body to be taken, and for the head of an answer."""
PARTING_S = 1.0
"""For a client that was refused to read why."""
MAX_UNREAD = 131_072
"""Bytes of its that are read for that, and dropped."""

_SENTENCES = {
    400: "Ask for /blob/ and the 64 hexadecimal digits of a hash.",
    404: "Not held here.",
    405: "Only GET and HEAD.",
    416: "No such range.",
    431: "The request is too long.",
    503: "Too many uploads; try again.",
}


class Body(NamedTuple):
    """A chunk that is about to go out: its bytes, or the open file in which they lie."""

    length: int
    data: bytes = b""
    file: BinaryIO | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Passed:
    """Bytes that h11 counts and does not touch."""

    length: int

    def __len__(self) -> int:
        return self.length


class Wire:
    """One connection: requests in, answers out."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._method = "GET"

    async def request(self) -> Asked | None:
        """The next one; None where the client has gone.

        Raises h11.RemoteProtocolError, also where a body comes along.
        """
        asked = None
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self.stream.receive_some(MAX_HEAD))
            elif isinstance(event, h11.Request):
                asked = Asked(event)
                self._method = asked.method
            elif isinstance(event, h11.EndOfMessage):
                return asked
            elif isinstance(event, h11.ConnectionClosed):
                return None
            else:
                raise h11.RemoteProtocolError("a request with a body")

    @property
    def idle(self) -> bool:
        """Whether nothing of a next request has come."""
        return not self._http.trailing_data[0]

    def again(self) -> bool:
        """Makes ready for the next request; False where there is none."""
        if self._http.our_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def refuse(self, status: int, *about: tuple[str, str]) -> None:
        text = _SENTENCES[status].encode() + b"\n"
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))]
        await self.head(status, [*headers, ("Cache-Control", "no-store"), *about])
        await self._end(text)

    async def head(self, status: int, headers: list[tuple[str, str]]) -> None:
        always = [("Date", formatdate(usegmt=True)), ("X-Content-Type-Options", "nosniff")]
        await self._out(self._http.send(h11.Response(status_code=status, headers=headers + always)))

    async def nothing(self) -> None:
        """The end of an answer without a body."""
        await self._end(b"")

    async def body(self, body: Body, part: range, piece: int, limit: UploadLimit) -> None:
        self._http.send_with_data_passthrough(h11.Data(data=_Passed(len(part))))  # type: ignore[arg-type]
        view = memoryview(body.data)
        with trio.fail_after(STALL_S) as patience:
            for start in range(part.start, part.stop, piece):
                size = min(piece, part.stop - start)
                if limit.rate is not None:
                    patience.deadline = math.inf  # for as long as it is we who are slow
                await limit.take(size)
                patience.deadline = trio.current_time() + STALL_S
                if body.file is None:
                    await self.stream.send_all(view[start : start + size])
                else:
                    await _send_file(self.stream, body.file, body.offset + start, size)
        self._http.send(h11.EndOfMessage())

    async def part(self) -> None:
        """Lets the client read the last answer: closing at once would take it back where it still writes."""
        with trio.move_on_after(PARTING_S):
            await self.stream.send_eof()
            for _ in range(MAX_UNREAD // MAX_HEAD):
                if not await self.stream.receive_some(MAX_HEAD):
                    return

    async def _end(self, text: bytes) -> None:
        data = self._http.send(h11.Data(data=text)) if text and self._method != "HEAD" else None
        await self._out((data or b"") + (self._http.send(h11.EndOfMessage()) or b""))

    async def _out(self, wire: bytes | None) -> None:
        with trio.fail_after(STALL_S):
            await self.stream.send_all(wire or b"")


async def _send_file(stream: trio.SocketStream, file: BinaryIO, offset: int, size: int) -> None:
    """Raises OSError, also where the file ends early: the answer cannot be completed any more."""
    end = offset + size
    while offset < end:
        try:
            sent = os.sendfile(stream.socket.fileno(), file.fileno(), offset, end - offset)
        except BlockingIOError:
            await trio.lowlevel.wait_writable(stream.socket.fileno())
            continue
        if sent == 0:
            raise OSError("the file has become shorter")
        offset += sent
    await trio.lowlevel.checkpoint()
