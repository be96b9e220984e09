"""Chunks of checkpoints: served from the files they lie in, fetched from any peer, verified before use.

A checkpoint that arrives is written to `NAME.part` and renamed when every chunk of it has the hash that
the signed manifest names. What a `.part` folder already holds is checked and kept, so a download resumes.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import trio

from nous_node.protocol.checkpoints import FileEntry, check_chunk
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.envelope import Hash
from nous_node.protocol.errors import Code, NousError, RemoteError
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_REQUEST,
    BlobRequest,
    blob_reply,
    read_blob,
)

from .home import disk_errors

PARALLEL = 4
"""Chunks asked for at once: enough to hide a round trip, few enough to keep 16 MiB in memory."""

CHUNK_SECONDS = 60.0
"""Deadline of one chunk: 4 MiB at 70 KB/s."""


class FetchError(NousError):
    """No connected peer could deliver what was needed; what was verified is kept for the next try."""


class Requester(Protocol):
    """The part of the network that a download needs."""

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes: ...

    async def disconnect(self, peer: str) -> None: ...


@dataclass(slots=True)
class BlobIndex:
    """Chunk hash -> the file, offset and length where its bytes lie."""

    damaged: Callable[[Path], None]
    """Told of each file that is found to be not what it was."""
    places: dict[bytes, tuple[Path, int, int]] = field(default_factory=dict)
    elsewhere: Callable[[bytes], Awaitable[bytes | None]] | None = None
    """Asked for blobs of peers' requests that are not here: groups by reference. [ROL-16] [ROL-18]"""
    _bytes: dict[bytes, bytes] = field(default_factory=dict)
    _broken: list[Path] = field(default_factory=list)

    def add(self, folder: Path, files: Sequence[FileEntry]) -> None:
        """Files of a verified checkpoint in `folder`."""
        for entry in files:
            for number, digest in enumerate(entry.hashes()):
                self.places[digest] = (folder / entry.path, number * entry.chunk, entry.length(number))

    def add_chunk(self, digest: bytes, path: Path, offset: int, length: int) -> None:
        """A verified chunk of a file that is not complete yet."""
        self.places[digest] = (path, offset, length)

    def add_bytes(self, data: bytes) -> bytes:
        """A blob that is held in memory, such as a manifest; its hash. `drop_bytes` lets it go."""
        digest = hashlib.sha256(data).digest()
        self._bytes[digest] = data
        return digest

    def drop_bytes(self, digest: bytes) -> None:
        self._bytes.pop(digest, None)

    def place(self, digest: bytes) -> tuple[Path, int, int] | None:
        """File, offset and length of a chunk that lies on the disk."""
        return self.places.get(digest)

    def drop(self, folder: Path) -> None:
        """Forgets what lies in a folder that is about to be deleted."""
        for digest in [known for known, place in self.places.items() if folder in place[0].parents]:
            del self.places[digest]

    def read(self, digest: bytes) -> bytes | None:
        """The chunk, or None where it is not held, or no longer what it was."""
        if digest in self._bytes:
            return self._bytes[digest]
        place = self.places.get(digest)
        if place is None:
            return None
        path, offset, length = place
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(length)
            check_chunk(data, digest)
        except OSError:  # deleted under us: we do not hold it any more
            self.places.pop(digest, None)
            return None
        except RemoteError:
            self.places.pop(digest, None)
            self._broken.append(path)
            return None
        return data

    async def answer(self, peer: str, request: bytes) -> bytes:
        """The handler of /nous/blob/1."""
        wanted = read(request, BlobRequest, MAX_REQUEST)
        data = await trio.to_thread.run_sync(self.read, wanted.hash)
        while self._broken:
            self.damaged(self._broken.pop())
        if data is None and self.elsewhere is not None:
            data = await self.elsewhere(wanted.hash)
        return blob_reply(data)


@dataclass(slots=True)
class _Missing:
    path: Path
    offset: int
    digest: Hash


async def fetch_files(
    network: Requester,
    peers: Sequence[str],
    files: Sequence[FileEntry],
    folder: Path,
    index: BlobIndex,
    entropy: random.Random,
) -> int:
    """Puts files of a checkpoint into `folder`, which then exists and is complete; bytes fetched.

    Raises FetchError when no peer delivers a chunk (what was verified stays for the next try), and
    LocalError when the disk is full.
    """
    part = folder.with_name(folder.name + ".part")
    missing = deque(await trio.to_thread.run_sync(_prepare, part, files, index))
    sources = _Sources(entropy.sample(peers, len(peers)))
    fetched = 0

    async def work(shift: int) -> None:
        nonlocal fetched
        while missing:
            chunk = missing.popleft()
            data = await _from_any(network, sources, shift, chunk.digest)
            with disk_errors(part):
                await trio.to_thread.run_sync(_write, chunk.path, chunk.offset, data)
            fetched += len(data)

    try:
        async with trio.open_nursery() as nursery:
            for shift in range(min(PARALLEL, len(missing))):
                nursery.start_soon(work, shift)
    except* NousError as group:
        raise _first(group) from None
    with disk_errors(folder):
        await trio.to_thread.run_sync(_complete, part, folder)
    index.add(folder, files)
    return fetched


def _first(group: BaseExceptionGroup[NousError]) -> NousError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, NousError)
    return error


@dataclass(slots=True)
class _Sources:
    """Peers that are asked for chunks; those whose last answer was a failure come last."""

    good: list[str]
    failed: list[str] = field(default_factory=list)

    def order(self, shift: int) -> list[str]:
        """Workers of different shifts begin with different peers."""
        start = shift % max(1, len(self.good))
        return self.good[start:] + self.good[:start] + self.failed

    def drop(self, peer: str) -> None:
        for peers in (self.good, self.failed):
            if peer in peers:
                peers.remove(peer)

    def move(self, peer: str, to: list[str]) -> None:
        self.drop(peer)
        to.append(peer)


async def _from_any(network: Requester, sources: _Sources, shift: int, digest: bytes) -> bytes:
    """One verified chunk. A source that fails is asked last from now on; one that lies is cut off."""
    reasons: list[str] = []
    for peer in sources.order(shift):
        try:
            frame = await network.request(
                peer,
                BLOB_PROTOCOL,
                encode(BlobRequest(digest)),
                max_response=MAX_BLOB_REPLY,
                deadline=CHUNK_SECONDS,
            )
            data = read_blob(frame)
            check_chunk(data, digest)
        except NousError as error:
            reasons.append(f"{peer[-8:]}: {error}")
            if isinstance(error, RemoteError) and error.code == Code.HASH_MISMATCH:
                sources.drop(peer)
                await network.disconnect(peer)
            else:
                sources.move(peer, sources.failed)
        else:
            if peer in sources.failed:
                sources.move(peer, sources.good)
            return data
    raise FetchError(
        "No connected peer delivers a chunk of the checkpoint"
        + (f" ({'; '.join(reasons[:3])})" if reasons else " (no peer is connected)")
        + "; it is tried again."
    )


def _prepare(part: Path, files: Sequence[FileEntry], index: BlobIndex) -> list[_Missing]:
    """Lays out the folder and finds what is still missing; chunks held elsewhere are copied."""
    missing: list[_Missing] = []
    for entry in files:
        path = part / entry.path
        with disk_errors(part):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.truncate(entry.size)
            missing += _missing(path, entry, index)
    return missing


def _missing(path: Path, entry: FileEntry, index: BlobIndex) -> list[_Missing]:
    missing: list[_Missing] = []
    with path.open("r+b") as file:
        for number, digest in enumerate(entry.hashes()):
            offset = number * entry.chunk
            file.seek(offset)
            if _stands(file, entry.length(number), digest):
                continue
            known = index.read(digest)
            if known is None:
                missing.append(_Missing(path, offset, digest))
            else:
                _write(path, offset, known)
    return missing


def _stands(file: BinaryIO, length: int, digest: bytes) -> bool:
    """Whether the chunk comes next in a file; one that cannot be read is written anew."""
    try:
        check_chunk(file.read(length), digest)
    except (RemoteError, OSError):
        return False
    return True


def _write(path: Path, offset: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)


def _complete(part: Path, folder: Path) -> None:
    if folder.exists():  # a damaged earlier copy: what was verified replaces it
        shutil.rmtree(folder)
    part.rename(folder)


def verify_folder(folder: Path, files: Sequence[FileEntry]) -> None:
    """Raises RemoteError(HASH_MISMATCH or SIZE_MISMATCH) where a file of a checkpoint is not what the
    manifest says, or cannot be read (a bad sector)."""
    for entry in files:
        path = folder / entry.path
        try:
            if not path.is_file() or path.stat().st_size != entry.size:
                raise RemoteError(Code.SIZE_MISMATCH, f"{path} is missing or has another size.")
            with path.open("rb") as file:
                for digest in entry.hashes():
                    check_chunk(file.read(entry.chunk), digest)
        except OSError as error:
            raise RemoteError(Code.HASH_MISMATCH, f"{path} cannot be read ({error.strerror}).") from error
