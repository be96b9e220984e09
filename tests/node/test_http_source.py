"""Chunks from web servers: good ones, static ones, and those that would rather harm whoever asks."""

from __future__ import annotations

import datetime
import http.server
import ipaddress
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from nous_node.node import http_server, http_source
from nous_node.node.http_source import HttpSource, peer_url
from nous_node.node.network_errors import RequestFailedError, RequestTimeoutError, UnreachableError
from nous_node.protocol.errors import NousError, RemoteError

from .web import CHUNK, CONTENT, HASHES, Nowhere, Web

DIGESTS = [bytes.fromhex(name) for name in HASHES]
LENGTHS = [min(CHUNK, len(CONTENT) - at) for at in range(0, len(CONTENT), CHUNK)]
DATA = CONTENT[:CHUNK]


@pytest.fixture
def web(tmp_path: Path) -> Web:
    return Web(tmp_path)


async def code(source: HttpSource, digest: bytes) -> str:
    """Of the refusal."""
    with pytest.raises(RequestFailedError) as caught:
        await source.fetch(digest, CHUNK)
    return caught.value.code


async def test_chunks_come_over_few_connections(web: Web) -> None:
    got: dict[bytes, bytes] = {}

    async def fetch(source: HttpSource, digest: bytes, length: int) -> None:
        got[digest] = await source.fetch(digest, length)

    async with web.open():
        source = HttpSource(f"http://127.0.0.1:{web.port}/")
        async with trio.open_nursery() as nursery:
            for digest, length in zip(DIGESTS, LENGTHS, strict=True):
                nursery.start_soon(fetch, source, digest, length)
        assert b"".join(got[digest] for digest in DIGESTS) == CONTENT
        assert not web.faults
        source.close()


async def test_a_lacking_chunk_leaves_the_connection_for_the_next(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 1)
    async with web.open():
        source = HttpSource(f"http://127.0.0.1:{web.port}")
        assert await code(source, bytes(32)) == "not-found"
        assert await source.fetch(DIGESTS[0], CHUNK) == DATA
        assert await source.fetch(DIGESTS[3], 5) == CONTENT[3 * CHUNK :]
        assert not web.faults
        source.close()


async def test_a_server_that_is_full_is_busy(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_UPLOADS", 1)
    async with web.open(), await web.deaf(web.large()):
        await web.until(503)
        source = HttpSource(f"http://127.0.0.1:{web.port}/")
        assert await code(source, DIGESTS[0]) == "busy"
        source.close()


async def test_a_connection_that_the_server_has_closed_meanwhile_is_no_failure(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.05)
    async with web.open():
        source = HttpSource(f"http://127.0.0.1:{web.port}/")
        assert await source.fetch(DIGESTS[0], CHUNK) == DATA
        await trio.sleep(0.3)  # the server's clock
        assert await source.fetch(DIGESTS[1], CHUNK) == CONTENT[CHUNK : 2 * CHUNK]
        source.close()


async def test_proxies_of_the_environment_are_not_asked(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    async with web.open():
        source = HttpSource(f"http://127.0.0.1:{web.port}/")
        assert await source.fetch(DIGESTS[0], CHUNK) == DATA
        source.close()


# --- mirrors ---------------------------------------------------------------------------------------


@contextmanager
def static(folder: Path, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Any web server with files, such as a bucket; its port."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A folder that holds one chunk."""
    blobs = tmp_path / "mirror" / "runs" / "blob"
    blobs.mkdir(parents=True)
    (blobs / HASHES[0]).write_bytes(DATA)
    return tmp_path / "mirror"


async def test_a_mirror_is_a_folder_behind_any_web_server(mirror: Path) -> None:
    with static(mirror) as port:
        source = HttpSource(f"http://localhost:{port}/runs/")
        assert await source.fetch(DIGESTS[0], CHUNK) == DATA
        assert await code(source, DIGESTS[1]) == "not-found"


def certificate(folder: Path) -> Path:
    """Key and certificate of 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mirror")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path = folder / "mirror.pem"
    path.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_mirror_by_https_needs_a_certificate_that_this_machine_trusts(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    pem = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    http_source._trusted.cache_clear()
    with static(mirror, context) as port:
        source = HttpSource(f"https://127.0.0.1:{port}/runs")
        if trusted:
            assert await source.fetch(DIGESTS[0], CHUNK) == DATA
        else:
            with pytest.raises(UnreachableError, match="certificate"):
                await source.fetch(DIGESTS[0], CHUNK)
    http_source._trusted.cache_clear()


# --- servers that do not behave --------------------------------------------------------------------

Server = Callable[[trio.SocketStream], Awaitable[None]]


@asynccontextmanager
async def hostile(answer: Server) -> AsyncIterator[HttpSource]:
    """A server that reads a request and then does as it likes."""

    async def serve(stream: trio.SocketStream) -> None:
        try:
            await stream.receive_some(4096)
            await answer(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield HttpSource(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/")
        nursery.cancel_scope.cancel()


def says(head: str, body: bytes = b"") -> Server:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.send_all(head.replace("\n", "\r\n").encode() + body)

    return answer


def trickles(head: str, body: bytes, pause: float) -> Server:
    """A byte after each pause."""

    async def answer(stream: trio.SocketStream) -> None:
        await stream.send_all(head.replace("\n", "\r\n").encode())
        for byte in body:
            await stream.send_all(bytes([byte]))
            await trio.sleep(pause)

    return answer


def endless(head: str, line: bytes) -> Server:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.send_all(head.replace("\n", "\r\n").encode())
        while True:
            await stream.send_all(line)

    return answer


OK = f"HTTP/1.1 200 OK\nContent-Length: {CHUNK}\n"
HOSTILE: dict[str, Server] = {
    "redirect": says("HTTP/1.1 302 Found\nLocation: http://127.0.0.1:9/\nContent-Length: 0\n\n"),
    "redirect for ever": says("HTTP/1.1 308 Again\nLocation: /\n\n"),
    "a part": says(f"HTTP/1.1 206 Partial\nContent-Length: {CHUNK}\n\n", DATA),
    "a byte too few": says(f"HTTP/1.1 200 OK\nContent-Length: {CHUNK - 1}\n\n", DATA[:-1]),
    "a byte too many": says(f"HTTP/1.1 200 OK\nContent-Length: {CHUNK + 1}\n\n", DATA + b"!"),
    "a terabyte": endless("HTTP/1.1 200 OK\nContent-Length: 1000000000000\n\n", bytes(1 << 16)),
    "no length": says("HTTP/1.1 200 OK\n\n", DATA),
    "a length that is none": says("HTTP/1.1 200 OK\nContent-Length: many\n\n", DATA),
    "two lengths": says(f"{OK}Content-Length: 7\n\n", DATA),
    "chunked": endless("HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n", b"1\r\nx\r\n"),
    "packed": says(f"{OK}Content-Encoding: gzip\n\n", DATA),
    "ends early": says(f"{OK}\n", DATA[:-1]),
    "closes at once": says(""),
    "no HTTP": says("", b"\x13/multistream/1.0.0\n"),
    "HTTP 0.9": says("", DATA),
    "headers without end": endless("HTTP/1.1 200 OK\n", b"X-More: yes\r\n"),
    "a header without end": endless("HTTP/1.1 200 OK\nX: ", bytes(1 << 10).replace(b"\0", b"a")),
    "preludes without end": endless("", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "nine preludes": says("HTTP/1.1 100 Continue\n\n" * 9 + f"{OK}\n", DATA),
    "a long refusal": endless("HTTP/1.1 418 No\nContent-Length: 1000000000\n\n", bytes(1 << 16)),
    "nothing": trickles("", bytes(20), 60.0),
    "a byte a second": trickles(f"{OK}\n", DATA, 0.05),
    "a head a byte a second": trickles("", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000, 0.05),
    "a refusal a byte a second": trickles("HTTP/1.1 418 No\nContent-Length: 8000\n\n", DATA, 0.05),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_server_that_does_not_behave_fails_soon_and_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_source, "STALL_S", 0.2)
    monkeypatch.setattr(http_source, "HEAD_S", 0.4)
    async with hostile(HOSTILE[kind]) as source:
        with trio.fail_after(60), pytest.raises(RequestFailedError) as caught:
            await source.fetch(DIGESTS[0], CHUNK)
        assert caught.value.code == "malformed" or isinstance(caught.value, RequestTimeoutError)
        source.close()


async def test_few_preludes_do_not_matter() -> None:
    async with hostile(says("HTTP/1.1 100 Continue\n\n" * 8 + f"{OK}\n", DATA)) as source:
        assert await source.fetch(DIGESTS[0], CHUNK) == DATA
        source.close()


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64, "*", "a%zz", "xn--a"])
async def test_a_host_that_can_have_no_address_cannot_be_reached(host: str) -> None:
    trio.socket.set_custom_hostname_resolver(Nowhere())
    for scheme in ("http", "https"):
        with pytest.raises(UnreachableError):
            await HttpSource(f"{scheme}://{host}/").fetch(DIGESTS[0], CHUNK)


async def test_a_server_that_is_not_there_cannot_be_reached(web: Web) -> None:
    async with web.open():
        port = web.port
    with pytest.raises(UnreachableError, match=str(port)):
        await HttpSource(f"http://127.0.0.1:{port}/").fetch(DIGESTS[0], CHUNK)


async def test_a_server_that_answers_no_handshake_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_source, "DIAL_S", 0.2)
    async with hostile(trickles("", bytes(20), 60.0)) as plain:
        with pytest.raises(NousError):
            await HttpSource(plain.name.replace("http:", "https:")).fetch(DIGESTS[0], CHUNK)


# --- where requests go -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("/ip4/192.0.2.7/tcp/4001", "http://192.0.2.7:8080/"),
        ("/ip6/2001:db8::7/tcp/4001", "http://[2001:db8::7]:8080/"),
        ("", None),
        ("/dns4/example.org/tcp/4001", None),
        ("/ip4/192.0.2.7@example.org/tcp/1", None),
    ],
)
def test_a_peer_is_asked_at_the_address_of_its_connection(address: str, url: str | None) -> None:
    assert peer_url(address, 8080) == url
    assert peer_url(address, 1023) is None
    if url is not None:
        HttpSource(url)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://mirror.example/",
        "file:///etc/passwd",
        "http://",
        "http:///blob",
        "http://user:secret@mirror.example/",
        "http://mirror.example/?a=b",
        "http://mirror.example/#a",
        "http://mirror.example:99999/",
        "http://mirror.example:0/",
        "http://mirror.example:x/",
        "http://[::1/",
        "http://mirror.example/a b",
        "http://mirror.example/\r\nX: y",
        "http://mirror.exämple/",
        "mirror.example",
        "http://mirror.example/" + "a" * 1024,
    ],
)
def test_what_is_no_url_of_a_mirror_is_refused(url: str) -> None:
    with pytest.raises(RemoteError, match="no URL of a mirror"):
        HttpSource(url)


async def test_a_request_names_host_and_path_and_nothing_of_this_node() -> None:
    seen = b""

    async def answer(stream: trio.SocketStream) -> None:
        await says(f"{OK}Set-Cookie: a=b\nConnection: close\n\n", DATA)(stream)

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal seen
        seen = await stream.receive_some(4096)
        await answer(stream)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        source = HttpSource(f"http://127.0.0.1:{port}/some/where")
        for _ in range(2):
            assert await source.fetch(DIGESTS[0], CHUNK) == DATA
            lines = seen.decode().split("\r\n")
            assert lines == [
                f"GET /some/where/blob/{HASHES[0]} HTTP/1.1",
                f"Host: 127.0.0.1:{port}",
                "Accept-Encoding: identity",
                "User-Agent: nous-node",
                "",
                "",
            ]
        nursery.cancel_scope.cancel()
