"""Chunks over HTTP as clients see it: what is served, and what is refused."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from .web import CHUNK, CONTENT, GET, HASHES, Web, everything


@pytest.fixture
def web(tmp_path: Path) -> Web:
    return Web(tmp_path)


async def test_every_chunk_of_a_file_is_served_again_and_again(web: Web) -> None:
    async with web.open():
        for number, name in [*enumerate(HASHES), *enumerate(HASHES)]:
            status, headers, body = await web.ask(f"/blob/{name}")
            assert (status, body) == (200, CONTENT[number * CHUNK : (number + 1) * CHUNK])
            assert headers["etag"] == f'"{name}"'
            assert headers["content-length"] == str(len(body))
            assert "immutable" in headers["cache-control"]
        assert not web.faults


async def test_a_blob_in_memory_is_served_too(web: Web) -> None:
    name = web.index.add_bytes(b"a manifest").hex()
    async with web.open():
        assert (await web.ask(f"/blob/{name}"))[2] == b"a manifest"
        assert (await web.ask(f"/blob/{name}", "Range: bytes=2-5"))[2] == b"mani"


@pytest.mark.parametrize("name", [HASHES[0], "00" * 32])
async def test_head_answers_as_get_would_without_the_body(web: Web, name: str) -> None:
    async with web.open():
        status, headers, _ = await web.ask(f"/blob/{name}")
        asked = await web.ask(f"/blob/{name}", "Range: bytes=0-1", method="HEAD")
        assert asked[0] == status
        assert {**asked[1], "date": ""} == {**headers, "date": ""}
        assert asked[2] == b""


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("0-0", 0, 0),
        ("5-9", 5, 9),
        ("16000-", 16_000, 16_383),
        ("-10", 16_374, 16_383),
        ("10-999999", 10, 16_383),
        ("-999999", 0, 16_383),
        ("0-16383", 0, 16_383),
    ],
)
async def test_one_range_is_served(web: Web, asked: str, first: int, last: int) -> None:
    async with web.open():
        status, headers, body = await web.ask(f"/blob/{HASHES[1]}", f"Range: bytes={asked}")
        assert body == CONTENT[CHUNK + first : CHUNK + last + 1]
        whole = (first, last) == (0, CHUNK - 1)
        assert status == (200 if whole else 206)
        assert headers.get("content-range") == (None if whole else f"bytes {first}-{last}/{CHUNK}")


@pytest.mark.parametrize("asked", ["16384-", "99999-100000", "-0"])
async def test_a_range_that_does_not_exist_is_refused(web: Web, asked: str) -> None:
    async with web.open():
        status, headers, _ = await web.ask(f"/blob/{HASHES[1]}", f"Range: bytes={asked}")
        assert (status, headers["content-range"]) == (416, f"bytes */{CHUNK}")


@pytest.mark.parametrize(
    "header",
    [
        "Range: bytes=9-5",
        "Range: bytes=0-1,4-5",
        "Range: items=0-1",
        "Range: bytes=-",
        "Range: bytes=a-b",
        'Range: bytes=0-1\r\nIf-Range: "other"',
        "Range: bytes=0-1\r\nRange: bytes=2-3",
        f"Range: bytes=0-{'9' * 400}",
    ],
)
async def test_a_range_that_says_nothing_is_passed_over(web: Web, header: str) -> None:
    async with web.open():
        assert (await web.ask(f"/blob/{HASHES[0]}", header))[::2] == (200, CONTENT[:CHUNK])


async def test_who_has_the_chunk_already_is_told_so(web: Web) -> None:
    async with web.open():
        status, headers, body = await web.ask(f"/blob/{HASHES[0]}", f'If-None-Match: "x", "{HASHES[0]}"')
        assert (status, headers["etag"], body) == (304, f'"{HASHES[0]}"', b"")
        assert (await web.ask(f"/blob/{HASHES[0]}", 'If-None-Match: "x"'))[0] == 200
        assert (await web.ask(f"/blob/{HASHES[0]}", f'Range: bytes=0-1\r\nIf-Range: "{HASHES[0]}"'))[0] == 206


NONSENSE = [
    "/",
    "/blob/",
    "/blob",
    "*",
    f"/blob/{HASHES[0].upper()}",
    f"/blob/{HASHES[0][:-1]}",
    f"/blob/{HASHES[0]}0",
    f"/blob/{HASHES[0]}/",
    f"/blob/{HASHES[0]}?x=1",
    f"/blob/../blob/{HASHES[0]}",
    f"//blob/{HASHES[0]}",
    f"http://there/blob/{HASHES[0]}",
    "/blob/..%2f..%2fidentity",
    "/<script>",
]


@pytest.mark.parametrize("target", NONSENSE)
async def test_nothing_but_chunks_can_be_asked_for(web: Web, target: str) -> None:
    async with web.open():
        status, headers, body = await web.ask(target)
        assert (status, headers["content-type"]) == (400, "text/plain")
        assert body == b"Ask for /blob/ and the 64 hexadecimal digits of a hash.\n"


async def test_what_is_not_held_is_not_found_and_may_be_later(web: Web) -> None:
    data = b"comes later"
    name = hashlib.sha256(data).hexdigest()
    async with web.open():
        status, headers, _ = await web.ask(f"/blob/{name}")
        assert (status, headers["cache-control"]) == (404, "no-store")
        web.index.add_bytes(data)
        assert (await web.ask(f"/blob/{name}"))[2] == data


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
async def test_nothing_can_be_changed(web: Web, method: str) -> None:
    async with web.open():
        status, headers, _ = await web.ask(f"/blob/{HASHES[0]}", method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")


MALFORMED = {
    "no request": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "no host": (GET + b"\r\n", 400),
    "two hosts": (GET + b"Host: a\r\nHost: b\r\n\r\n", 400),
    "a body": (GET + b"Host: a\r\nContent-Length: 5\r\n\r\nhello", 400),
    "a chunked body": (GET + b"Host: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 400),
    "two lengths": (GET + b"Host: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
    "a long target": (b"GET /" + b"a" * 100_000, 431),
    "long headers": (GET + b"Host: a\r\n" + b"X: y\r\n" * 20_000, 431),
    "another protocol": (b"/multistream/1.0.0\n\x13/noise\n\r\n\r\n", 400),
    "a null byte": (GET[:20] + b"\x00" + GET[20:] + b"Host: a\r\n\r\n", 400),
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_what_is_no_request_is_refused_and_ends_its_connection(web: Web, kind: str) -> None:
    wire, code = MALFORMED[kind]
    async with web.open():
        status, headers, _ = await web.say(wire)
        assert (status, headers["connection"]) == (code, "close")
        assert web.faults == {"http-malformed": 1}
        assert (await web.ask(f"/blob/{HASHES[0]}"))[0] == 200


async def test_a_connection_serves_one_request_after_the_other_also_when_they_come_at_once(web: Web) -> None:
    requests = [f"GET /blob/{name} HTTP/1.1\r\nHost: a\r\n\r\n".encode() for name in (*HASHES, "00" * 32)]
    async with web.open(), await web.connect() as stream:
        await stream.send_all(b"".join(requests) + b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        wire = await everything(stream)
        assert wire.count(b"HTTP/1.1 200") == len(HASHES)
        assert wire.index(b"HTTP/1.1 404") < wire.index(b"HTTP/1.1 400")
        for at in range(0, len(CONTENT), CHUNK):
            assert CONTENT[at : at + CHUNK] in wire


async def test_random_bytes_leave_the_server_standing(web: Web) -> None:
    entropy = random.Random(7)
    start = GET + b"Host: a\r\n\r\n"
    async with web.open():
        for _ in range(150):
            wire = bytearray(start if entropy.random() < 0.7 else entropy.randbytes(200))
            for _ in range(entropy.randrange(1, 6)):
                wire[entropy.randrange(len(wire))] = entropy.randrange(256)
            async with await web.connect() as stream:
                await stream.send_all(wire)
                await stream.send_eof()
                await everything(stream)
        assert (await web.ask(f"/blob/{HASHES[0]}"))[0] == 200
        assert set(web.faults) <= {"http-malformed"}
