"""Live checks of chunks by HTTP, of a client that tells a port for them. Spec: `specs/03-transport.md`."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace

import h11
import trio

from nous_node.protocol.introductions import LEAST_PORT
from nous_node.protocol.streams import MAX_BLOB_REPLY, HaveRequest

from .live_check import Checks, Failed, Untested
from .live_chunks import have, held, shared
from .live_target import Target
from .live_wire import dialled

check: Checks[Target] = Checks()

SECONDS = 60.0
ANSWER_S = 15.0
PIECE = 65_536
RANGE = 100
"""Bytes that are asked for by `Range`."""


@dataclass
class Answer:
    """What a server said to one request."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def asked(
    target: Target,
    port: int,
    method: str,
    path: str,
    headers: tuple[tuple[str, str], ...] = (),
    body: bytes = b"",
) -> Answer:
    """One request on a connection of its own, at the IP address of the client. [STR-6]"""
    with trio.fail_after(ANSWER_S):
        async with dialled(replace(target.place, port=port)) as socket:
            connection = h11.Connection(h11.CLIENT)
            size = [("Content-Length", str(len(body)))] if body else []
            request = h11.Request(
                method=method, target=path, headers=[("Host", "conformance"), *size, *headers]
            )
            sent = connection.send(request) or b""
            sent += connection.send(h11.Data(data=body)) or b"" if body else b""
            await socket.send_all(sent + (connection.send(h11.EndOfMessage()) or b""))
            return await _answer(connection, socket)


async def _answer(connection: h11.Connection, socket: trio.SocketStream) -> Answer:
    answer = Answer(0)
    while True:
        match connection.next_event():
            case h11.NEED_DATA:
                connection.receive_data(await socket.receive_some(PIECE))
            case h11.Response() as response:
                headers = {name.decode().lower(): value.decode() for name, value in response.headers}
                answer = Answer(response.status_code, headers)
            case h11.Data() as data:
                answer.body += bytes(data.data)
                if len(answer.body) > MAX_BLOB_REPLY:
                    raise Failed("Its answer by HTTP is longer than any chunk.")
            case h11.InformationalResponse():
                continue
            case _:
                return answer


async def _served(target: Target) -> tuple[int, bytes, int]:
    """Port, and hash and length of a chunk that the client has. Raises Untested where it serves no HTTP."""
    sizes, places = await held(target)
    async with target.peer() as peer:
        digest, _ = await shared(target, peer)
        port = (await have(peer, HaveRequest(target.run, digest))).http
    if port is None:
        raise Untested("It serves no chunks by HTTP, which it need not.")
    if port < LEAST_PORT:
        raise Failed(f"It tells the port {port}, which nobody asks; from {LEAST_PORT} on is right.")
    return port, places[0], sizes[places[0]]


def _expects(answer: Answer, status: int, what: str) -> Answer:
    if answer.status != status:
        raise Failed(f"{what} is answered with {answer.status} instead of {status}.")
    return answer


@check("http-chunk", "STR-6", "CKP-7", seconds=SECONDS)
async def http_chunk(target: Target) -> str:
    port, digest, size = await _served(target)
    path = f"/blob/{digest.hex()}"
    whole = _expects(await asked(target, port, "GET", path), 200, "GET of a chunk that it has")
    if hashlib.sha256(whole.body).digest() != digest or whole.headers.get("content-length") != str(size):
        raise Failed("By HTTP it sends other bytes than those of the hash, or another Content-Length.")
    if whole.headers.get("etag") != f'"{digest.hex()}"':
        raise Failed("The ETag of a chunk is not its hash in quotes.")
    head = _expects(await asked(target, port, "HEAD", path), 200, "HEAD of a chunk that it has")
    if head.body or head.headers.get("content-length") != str(size):
        raise Failed("HEAD is not answered as GET is, without a body.")
    end = min(RANGE, size) - 1
    ranged = (("Range", f"bytes=0-{end}"),)
    part = _expects(await asked(target, port, "GET", path, ranged), 206, "A range")
    if part.body != whole.body[: end + 1]:
        raise Failed("A range is answered with other bytes of the chunk.")
    beyond = (("Range", f"bytes={size}-"),)
    _expects(await asked(target, port, "GET", path, beyond), 416, "A range behind the end")
    return f"{size} bytes; HEAD; a range"


@check("http-refusals", "STR-6", seconds=SECONDS)
async def http_refusals(target: Target) -> str:
    port, digest, _ = await _served(target)
    path = f"/blob/{digest.hex()}"
    missing = f"/blob/{os.urandom(32).hex()}"
    _expects(await asked(target, port, "GET", missing), 404, "A chunk that nobody has")
    for other in ("/", "/blob/", f"/blob/{digest.hex()[:-1]}", f"/blob/../{digest.hex()}"):
        _expects(await asked(target, port, "GET", other), 400, f"The target {other[:16]}")
    _expects(await asked(target, port, "PUT", path), 405, "The method PUT")
    refused = await asked(target, port, "GET", path, body=b"a body")
    if refused.status < 400:
        raise Failed(f"A request with a body is answered with {refused.status}.")
    return "404, 400, 405, and no request with a body"
