"""Chunks that this node holds: served from the files they lie in, verified before they go out.

A chunk is known by its SHA-256 and may lie in several places: a download that is under way, versions that
share it. Where one of them turns out to be damaged or gone, the next serves it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import trio

from nous_node.protocol.checkpoints import FileEntry, check_chunk
from nous_node.protocol.encoding import read
from nous_node.protocol.errors import Code, NousError, RemoteError
from nous_node.protocol.streams import MAX_REQUEST, BlobRequest, blob_reply_parts

from .chunk_files import read_chunks

Place = tuple[Path, int, int]
"""File, offset, length."""

PROVEN_SECONDS = 600.0
"""For which a chunk is not hashed again before it is served, while its file has not changed: hashing would
take an eighth of the time that a stream takes."""

SETTLED_NS = 1_000_000_000
"""A file that was written within this time may change again under the same time stamp."""


class FetchError(NousError):
    """No source could deliver what was needed; what was verified is kept for the next try."""


@dataclass(slots=True)
class BlobIndex:
    """Chunk hash -> where its bytes lie. May be read from several threads."""

    damaged: Callable[[Path], None]
    """Told of each file that is found to be not what it was."""
    places: dict[bytes, list[Place]] = field(default_factory=dict)
    """The newest last."""
    elsewhere: Callable[[str, bytes], Awaitable[bytes | None]] | None = None
    """Asked for blobs of peers' requests that are not here: groups by reference. Given the peer and the hash;
    RemoteError(BUSY) where there is no time now. [ROL-16] [ROL-18]"""
    _bytes: dict[bytes, bytes] = field(default_factory=dict)
    _broken: list[Path] = field(default_factory=list)
    _proven: dict[bytes, tuple[Path, int, int, float]] = field(default_factory=dict)
    """Chunks that were right: of which file, its inode and time of change, and when."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a place is looked up and its file opened, so that folders can be renamed in between."""

    def add(self, folder: Path, files: Sequence[FileEntry]) -> None:
        """Files of a verified checkpoint in `folder`."""
        for entry in files:
            for number, digest in enumerate(entry.hashes()):
                self.add_chunk(digest, folder / entry.path, number * entry.chunk, entry.length(number))

    def add_chunk(self, digest: bytes, path: Path, offset: int, length: int) -> None:
        """A verified chunk, also of a file that is not complete yet."""
        place = (path, offset, length)
        with self._lock:
            known = self.places.setdefault(digest, [])
            if place in known:
                known.remove(place)
            known.append(place)

    def add_bytes(self, data: bytes) -> bytes:
        """A blob that is held in memory, such as a manifest; its hash. `drop_bytes` lets it go."""
        digest = sha256(data).digest()
        self._bytes[digest] = data
        return digest

    def drop_bytes(self, digest: bytes) -> None:
        self._bytes.pop(digest, None)

    def place(self, digest: bytes) -> Place | None:
        """File, offset and length of a chunk that lies on the disk."""
        with self._lock:
            known = self.places.get(digest)
            return known[-1] if known else None

    def drop(self, folder: Path) -> None:
        """Forgets what lies in a folder that is about to be deleted."""
        with self._lock:
            for digest, known in list(self.places.items()):
                if any(folder in place[0].parents for place in known):
                    self._keep(digest, [place for place in known if folder not in place[0].parents])

    @contextmanager
    def moving(self, before: Path, after: Path) -> Iterator[None]:
        """While a folder is renamed nobody looks into it; then its chunks are known under the new name."""
        with self._lock:
            yield
            for known in self.places.values():
                for number, (path, offset, length) in enumerate(known):
                    if before in path.parents:
                        known[number] = (after / path.relative_to(before), offset, length)

    def holds(self, digest: bytes) -> bool:
        """Whether it is here, as far as is known without reading it."""
        return digest in self._bytes or digest in self.places

    def read(self, digest: bytes) -> bytes | None:
        """The blob, or None where it is not held, or no longer what it was."""
        held = self._bytes.get(digest)
        if held is not None:
            return held
        while True:
            with self._lock:
                known = self.places.get(digest)
                if not known:
                    return None
                place = known[-1]
                try:
                    file = place[0].open("rb")
                except OSError:  # deleted under us: we do not hold it any more
                    self._keep(digest, known[:-1])
                    continue
            with file:
                data = self._proved(digest, place, file)
            if data is not None:
                return data
            self._lose(digest, place)

    def _proved(self, digest: bytes, place: Place, file: BinaryIO) -> bytes | None:
        """What lies there, where it is the chunk."""
        path, offset, length = place
        try:
            state = os.fstat(file.fileno())
            file.seek(offset)
            data = file.read(length)
        except OSError:
            return None
        mark = (path, state.st_ino, state.st_mtime_ns)
        now = time.monotonic()
        proven = self._proven.get(digest)
        if proven is not None and proven[:3] == mark and now - proven[3] < PROVEN_SECONDS:
            return data
        try:
            check_chunk(data, digest)
        except RemoteError:
            self._broken.append(path)
            return None
        if time.time_ns() - state.st_mtime_ns > SETTLED_NS:
            self._proven[digest] = (*mark, now)
        return data

    def _lose(self, digest: bytes, place: Place) -> None:
        with self._lock:
            self._keep(digest, [other for other in self.places.get(digest, ()) if other != place])

    def _keep(self, digest: bytes, places: list[Place]) -> None:
        self._proven.pop(digest, None)
        if places:
            self.places[digest] = places
        else:
            self.places.pop(digest, None)

    def tell_damage(self) -> None:
        """Of what `read` has found since; apart from it, which runs in threads."""
        while self._broken:
            self.damaged(self._broken.pop())

    async def answer(self, peer: str, request: bytes) -> tuple[bytes, ...]:
        """The handler of /nous/blob/1, for what is here."""
        wanted = read(request, BlobRequest, MAX_REQUEST)
        data = await trio.to_thread.run_sync(self.read, wanted.hash)
        self.tell_damage()
        return blob_reply_parts(data)


def verify_folder(folder: Path, files: Sequence[FileEntry]) -> None:
    """Raises RemoteError(HASH_MISMATCH or SIZE_MISMATCH) where a file of a checkpoint is not what the
    manifest says, or cannot be read (a bad sector)."""
    for entry in files:
        path = folder / entry.path
        try:
            if not path.is_file():
                raise RemoteError(Code.SIZE_MISMATCH, f"{path} is missing.")
            for _ in read_chunks(path, entry):
                pass
        except OSError as error:
            raise RemoteError(Code.HASH_MISMATCH, f"{path} cannot be read ({error.strerror}).") from error
