"""A folder that is being downloaded: `NAME.part` beside it, renamed when every chunk in it is verified.

What a `.part` folder already holds is checked and kept, so a download resumes. Its files have their full size
from the beginning, with holes where nothing was written yet: a file system that knows its holes spares us
reading them. One chunk at a time is in memory, however large the files are.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence, Set
from io import FileIO
from pathlib import Path

from nous_node.protocol.checkpoints import FileEntry, check_chunk

from .blobs import BlobIndex, Place
from .chunk_files import stands
from .home import UNDER_WAY, disk_errors


class PartFolder:
    """The files of `entries` on their way into `folder`. The methods take long: run them in threads."""

    def __init__(self, folder: Path, entries: Sequence[FileEntry], index: BlobIndex) -> None:
        self.folder = folder
        self.part = folder.with_name(folder.name + UNDER_WAY)
        self._entries, self._index = entries, index
        self._places: dict[bytes, list[Place]] = {}
        """Where each chunk belongs: the same bytes may be wanted several times."""

    @property
    def wanted(self) -> Set[bytes]:
        """Hashes of all chunks of the folder, once it is prepared."""
        return self._places.keys()

    def prepare(self) -> Mapping[bytes, int]:
        """Lays out the files; hashes and lengths of the chunks that are missing, once each. What is held
        elsewhere is copied.

        Raises StorageError.
        """
        missing: dict[bytes, int] = {}
        with disk_errors(self.part):
            self.part.mkdir(parents=True, exist_ok=True)
            for entry in self._entries:
                path = self.part / entry.path
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.truncate(entry.size)
                with path.open("rb", buffering=0) as file:
                    self._look_through(path, entry, file, missing)
        return missing

    def _look_through(self, path: Path, entry: FileEntry, file: FileIO, missing: dict[bytes, int]) -> None:
        data_from = 0
        for number, digest in enumerate(entry.hashes()):
            place = (path, number * entry.chunk, entry.length(number))
            self._places.setdefault(digest, []).append(place)
            data_from = max(data_from, _next_data(file, place[1]))
            if data_from < place[1] + place[2] and _stands(file, place, digest):
                self._index.add_chunk(digest, *place)
            elif (known := self._index.read(digest)) is not None:
                self._write(place, known)
                self._index.add_chunk(digest, *place)
            else:
                missing[digest] = place[2]

    def put(self, digest: bytes, data: bytes | memoryview) -> None:
        """Verifies a chunk and writes it to its places; it is served from there at once.

        Raises RemoteError(HASH_MISMATCH) where it is another one, StorageError where it cannot be written.
        """
        check_chunk(data, digest)
        with disk_errors(self.part):
            for place in self._places[digest]:
                self._write(place, data)
        for place in self._places[digest]:
            self._index.add_chunk(digest, *place)

    def _write(self, place: Place, data: bytes | memoryview) -> None:
        path, offset, _ = place
        descriptor = os.open(path, os.O_WRONLY)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(descriptor)

    def complete(self) -> None:
        """Gives the folder its name, under which its chunks are served from now on. Raises StorageError."""
        with disk_errors(self.folder):
            if self.folder.exists():  # a damaged earlier copy: what was verified replaces it
                self._index.drop(self.folder)
                shutil.rmtree(self.folder)
            with self._index.moving(self.part, self.folder):
                self.part.rename(self.folder)


def _next_data(file: FileIO, offset: int) -> int:
    """Where something was written, at `offset` or behind it; `offset` itself where that is not known."""
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except AttributeError:
        return offset
    except OSError as error:
        return sys.maxsize if error.errno == errno.ENXIO else offset


def _stands(file: FileIO, place: Place, digest: bytes) -> bool:
    """Whether the chunk is there; one that cannot be read is written anew."""
    try:
        return stands(file, place[1], place[2], digest)
    except OSError:
        return False
