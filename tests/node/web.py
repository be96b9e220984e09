"""Chunks of a small file served over HTTP on loopback, and raw clients that see every byte."""

from __future__ import annotations

import hashlib
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import trio

from nous_node.node.blobs import BlobIndex
from nous_node.node.http_server import serve_chunks
from nous_node.node.upload_limit import UploadLimit
from nous_node.protocol.checkpoints import file_entry

CHUNK = 1 << 14
CONTENT = random.Random(3).randbytes(3 * CHUNK + 5)
HASHES = [hashlib.sha256(CONTENT[at : at + CHUNK]).hexdigest() for at in range(0, len(CONTENT), CHUNK)]
GET = f"GET /blob/{HASHES[0]} HTTP/1.1\r\n".encode()
"""The beginning of a request for the first of them."""


class Web:
    """A served index and its clients."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.safetensors"
        self.path.write_bytes(CONTENT)
        self.damaged: list[Path] = []
        self.index = BlobIndex(self.damaged.append)
        pieces = [CONTENT[at : at + CHUNK] for at in range(0, len(CONTENT), CHUNK)]
        self.index.add(folder, [file_entry(self.path.name, pieces, CHUNK)])
        self.faults: Counter[str] = Counter()
        self.port = 0

    @asynccontextmanager
    async def open(self, rate: float | None = None) -> AsyncIterator[UploadLimit]:
        limit = UploadLimit(rate)
        serve = partial(serve_chunks, hosts=("127.0.0.1",), fault=lambda name: self.faults.update([name]))
        async with trio.open_nursery() as nursery:
            self.port = await nursery.start(serve, self.index, 0, limit)
            yield limit
            nursery.cancel_scope.cancel()

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def ask(self, target: str, *headers: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        lines = [f"{method} {target} HTTP/1.1", "Host: here", "Connection: close", *headers, "", ""]
        return await self.say("\r\n".join(lines).encode())

    async def say(self, wire: bytes) -> tuple[int, dict[str, str], bytes]:
        """What comes back until the server closes."""
        async with await self.connect() as stream:
            await stream.send_all(wire)
            return read_answer(await everything(stream))

    async def deaf(self, name: str) -> trio.SocketStream:
        """A client that asks and does not read."""
        plain = trio.socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await plain.connect(("127.0.0.1", self.port))
        stream = trio.SocketStream(plain)
        await stream.send_all(f"GET /blob/{name} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        return stream

    def large(self) -> str:
        """The hash of a chunk that no socket buffers whole; its file is a sparse one."""
        path = self.path.with_name("large")
        with path.open("wb") as file:
            file.truncate(1 << 25)
        digest = hashlib.sha256(bytes(1 << 25)).digest()
        self.index.add_chunk(digest, path, 0, 1 << 25)
        return digest.hex()

    async def until(self, status: int) -> tuple[int, dict[str, str], bytes]:
        """Asks until the answer is that."""
        while True:
            answer = await self.ask(f"/blob/{HASHES[0]}")
            if answer[0] == status:
                return answer


class Nowhere(trio.abc.HostnameResolver):
    """Names that nobody has."""

    async def getaddrinfo(self, host: bytes | None, *more: object, **others: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "no such host")

    async def getnameinfo(self, sockaddr: object, flags: int) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "no such host")


async def everything(stream: trio.SocketStream) -> bytes:
    return b"".join([piece async for piece in stream])


def read_answer(wire: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = wire.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    assert status.startswith("HTTP/1.1 ")
    pairs = (line.split(": ", 1) for line in lines)
    return int(status.split()[1]), {name.lower(): value for name, value in pairs}, body
