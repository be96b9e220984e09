"""What of a run's checkpoints lies complete in a joined folder: on the disk, in the index, and announced.

A folder `HEX` or `HEX.deltas` is there only when all in it was verified, so what is found at a start is held;
chunks are verified again whenever they are read. A manifest is known by its hash, its file named for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from nous_node.protocol.checkpoints import CheckpointManifest, checkpoint_hash, read_manifest
from nous_node.protocol.constants import MAX_CHUNK, MAX_MANIFEST
from nous_node.protocol.errors import RemoteError

from .blobs import BlobIndex
from .home import disk_errors, write_atomic
from .joined import JoinedFolder
from .keeping import DELTAS, FILES, Thing
from .swarm import Swarm


class Held:
    """Checkpoints of one run by their hashes. All else in the folder is nobody's, and is cleared away."""

    def __init__(self, folder: JoinedFolder, index: BlobIndex, swarm: Swarm) -> None:
        self.manifests: dict[bytes, CheckpointManifest] = {}
        self.files: set[bytes] = set()
        """Checkpoints with all their files."""
        self.deltas: set[bytes] = set()
        """Checkpoints with all their deltas."""
        self._folder, self._index, self._swarm = folder, index, swarm

    def scan(self) -> None:
        """Takes up what an earlier start of this node left. Raises StorageError."""
        with disk_errors(self._folder.checkpoints):
            self._folder.checkpoints.mkdir(parents=True, exist_ok=True)
            for file in sorted(self._folder.checkpoints.glob("*.manifest")):
                with suppress(RemoteError):  # damaged: fetched again
                    data = _read(file)
                    digest = checkpoint_hash(data)
                    if self._folder.checkpoint_manifest(digest) == file:
                        self._know(digest, data, read_manifest(data, digest))
            for digest in self.manifests:
                if self._folder.checkpoint(digest).is_dir():
                    self.add_files(digest)
                if self._folder.deltas(digest).is_dir():
                    self.add_deltas(digest)

    def add_manifest(self, digest: bytes, data: bytes, manifest: CheckpointManifest) -> None:
        """Keeps a manifest, for us and for those who fetch it by its hash. Raises StorageError."""
        if digest not in self.manifests:
            write_atomic(self._folder.checkpoint_manifest(digest), data)
            self._know(digest, data, manifest)

    def add_files(self, digest: bytes) -> None:
        self.files.add(digest)
        self._index.add(self._folder.checkpoint(digest), self.manifests[digest].files)
        self._announce(digest)

    def add_deltas(self, digest: bytes) -> None:
        self.deltas.add(digest)
        self._index.add(self._folder.deltas(digest), self.manifests[digest].deltas)
        self._announce(digest)

    def drop_files(self, digest: bytes) -> None:
        """They are not what they were, or are about to go."""
        self.files.discard(digest)
        self._index.drop(self._folder.checkpoint(digest))
        self._announce(digest)

    def drop_deltas(self, digest: bytes) -> None:
        self.deltas.discard(digest)
        self._index.drop(self._folder.deltas(digest))
        self._announce(digest)

    def things(self) -> list[Thing]:
        """What of it takes room, with the bytes of each file."""
        found = [self._thing(digest, FILES, self._folder.checkpoint(digest)) for digest in self.files]
        return found + [self._thing(digest, DELTAS, self._folder.deltas(digest)) for digest in self.deltas]

    def keep(
        self, things: Collection[Thing], manifests: Collection[bytes] = (), under_way: Collection[bytes] = ()
    ) -> None:
        """Deletes all but these, their manifests and those of `manifests`, and all but the files of what is
        `under_way`: downloads, deltas, what is made of them.

        What cannot be deleted is tried again the next time. Raises StorageError where the folder cannot be
        read.
        """
        files = {thing.checkpoint for thing in things if thing.what == FILES}
        deltas = {thing.checkpoint for thing in things if thing.what == DELTAS} | (
            self.deltas & set(under_way)
        )
        known = files | deltas | {*manifests, *under_way}
        stay = {self._folder.checkpoint(digest) for digest in files}
        stay |= {self._folder.deltas(digest) for digest in deltas}
        stay |= {self._folder.checkpoint_manifest(digest) for digest in known}
        making = tuple(f"{self._folder.checkpoint(digest).name}." for digest in under_way)
        for digest in self.files - files:
            self.drop_files(digest)
        for digest in self.deltas - deltas:
            self.drop_deltas(digest)
        for digest in self.manifests.keys() - known:
            del self.manifests[digest]
            self._index.drop_bytes(digest)
            self._swarm.release(digest)
        with disk_errors(self._folder.checkpoints):
            places = list(self._folder.checkpoints.iterdir())
        gone = [place for place in places if place not in stay and not place.name.startswith(making)]
        for place in gone:
            self._index.drop(place)
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                with suppress(OSError):
                    place.unlink()

    def _know(self, digest: bytes, data: bytes, manifest: CheckpointManifest) -> None:
        self.manifests[digest] = manifest
        if len(data) <= MAX_CHUNK:  # what a reply of /nous/blob/1 holds
            self._index.add_bytes(data)

    def _announce(self, digest: bytes) -> None:
        files, deltas = digest in self.files, digest in self.deltas
        if files or deltas:
            self._swarm.hold(digest, self.manifests[digest], files=files, deltas=deltas)
        else:
            self._swarm.release(digest)

    def _thing(self, digest: bytes, what: str, folder: Path) -> Thing:
        manifest = self.manifests[digest]
        parts: dict[object, int] = {}
        for entry in manifest.files if what == FILES else manifest.deltas:
            try:
                found = (folder / entry.path).stat()
            except OSError:
                continue  # deleted under us: it takes no room
            parts[found.st_dev, found.st_ino] = found.st_size
        return Thing(digest, manifest.version, what, parts)


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MAX_MANIFEST + 1)
