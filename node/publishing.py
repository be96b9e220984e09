"""A trainer's checkpoints: published once, in order, with the groups that made them; old ones deleted.

A version is full or a delta to the one before (`chaining` says which). What leads to the newest is held for
those who join or fell behind: the manifests since its full one, their deltas, and the files of the full one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nous_node.protocol.checkpoints import (
    FULL,
    CheckpointManifest,
    FileEntry,
    check_manifest,
    checkpoint_hash,
    file_entry,
    files_hash,
)
from nous_node.protocol.constants import (
    MAX_CHAIN,
    MAX_ENVELOPE,
    MAX_MANIFEST,
    MAX_MANIFEST_VALUES,
    MAX_MIRRORS,
)
from nous_node.protocol.encoding import read
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import LocalError, RemoteError
from nous_node.protocol.identity import Identity

from .blobs import BlobIndex, verify_folder
from .chaining import Chain
from .create import base_tensors, first_beacon, folder_entries
from .following import Following, Head, now_ms
from .home import DamagedError
from .http_source import HttpSource
from .learner_messages import Updated
from .learning import Learning
from .retention import surplus
from .runfolder import RunFolder
from .store import Journal, StoredCheckpoint

LEAP = 1_024
"""Versions between the newest that a peer told of and the one that takes over from it: peers may lag, and a
number must not be signed twice."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What is here of a published version."""

    head: Head
    files: bool
    deltas: bool


class Publisher:
    """`heads` holds the versions that rollouts may still belong to, `folders` those of them on this disk."""

    def __init__(
        self,
        identity: Identity,
        folder: RunFolder,
        journal: Journal,
        following: Following,
        index: BlobIndex,
        entropy: Callable[[int], bytes],
        *,
        mirrors: Sequence[str] = (),
        full_every: int = Learning().full_every,
    ) -> None:
        """`mirrors`: base URLs that checkpoints name. Raises LocalError for what is none."""
        self.heads: dict[bytes, Head] = {}
        self.folders: dict[int, Path] = {}
        self.index = index
        self._identity, self._folder, self._journal = identity, folder, journal
        self._following, self._entropy = following, entropy
        self._mirrors = [mirror.rstrip("/") for mirror in mirrors]
        check_mirrors(self._mirrors)
        self._held = folder.manifest.staleness + 2
        self._longest = full_every - 1
        self._chain = Chain()
        self._links: dict[int, Head] = {}
        """Versions since the full one that the oldest of `heads` is made from."""
        self._full: Path | None = None
        """Folder of the full one that the newest is made from."""
        self._mending: tuple[CheckpointManifest, Path] | None = None
        """What is to be published again, since the newest is damaged on this disk."""
        self._spoilt: set[int] = set()
        """Versions whose deltas are damaged on this disk."""

    @property
    def head(self) -> Head:
        """The newest version; there is one from `resume` on."""
        head = self._following.head
        assert head is not None
        return head

    # --- after a stop ----------------------------------------------------------------------------

    def resume(self, *, mend: bool = True) -> str:
        """Takes up the journal's checkpoints, or publishes version 0.

        Where the newest is damaged on disk (a power failure, a bad sector) the run goes on from the newest
        that is whole, published again under the next number, at once or (not `mend`) by `mend`; where what
        leads to it is damaged, the next one is full. The sentence returned says so. Raises DamagedError where
        none is whole.
        """
        path = self._folder.path
        for half in path.glob("*/.[0-9]*"):  # a crash while it was written
            shutil.rmtree(half, ignore_errors=True)
        rows = [row for row in self._journal.checkpoints(self._held + MAX_CHAIN) if row.envelope]
        stored = {row.version: (_head(row), path / row.folder) for row in rows}
        base = self._folder.checkpoint(0)
        if not stored:
            self._publish(base, self._base(base))
            return ""
        for head, folder in stored.values():
            self._take(head, folder)
        whole = []
        for version, folder in sorted(self.folders.items()):
            manifest = stored[version][0].manifest
            if _is_whole(folder, manifest.files):
                whole.append((manifest, folder))
            else:  # nothing can be verified against it: its groups are answered as those of old versions
                del self.folders[version]
        if whole and whole[-1][0] is self.head.manifest:
            return self._check_chain({head.hash: folder for head, folder in stored.values()})
        self._mending = whole[-1] if whole else (self._base(base), base)
        self._chain = Chain()
        said = (
            f"Version {self.head.version} is damaged on this disk: the run goes on from version "
            f"{self._mending[0].version}, published again as version {self.head.version + 1}."
        )
        if mend:
            self.mend()
        return said

    @property
    def mending(self) -> bool:
        """Whether `mend` has to be called before a learner can be opened at the newest version."""
        return self._mending is not None

    def mend(self) -> None:
        """Publishes what is whole again, where the newest is damaged."""
        if self._mending is not None:
            (manifest, folder), self._mending = self._mending, None
            self._publish(folder, self._next(manifest))

    def _base(self, folder: Path) -> CheckpointManifest:
        """Version 0, checked against the run's manifest; the same whenever it is made: a copy of the folder,
        or one whose journal was lost, must not sign another one. [CKP-18]"""
        files = folder_entries(folder)
        if files_hash(files) != self._folder.manifest.base:
            raise DamagedError(
                f"The base checkpoint {folder} is not what the run began with, and no newer one is whole. "
                "Restore the run's folder from a backup, or make a new run with `nous-node init`."
            )
        beacon = first_beacon(self._identity, self._following.run)
        return CheckpointManifest(0, FULL, files, base_tensors(folder), beacon)

    def _check_chain(self, folders: Mapping[bytes, Path]) -> str:
        """Whether what leads to the newest version is whole; what is said where it is not."""
        known = {head.hash: head for head in self._links.values()}
        for digest in self._chain.hashes:
            head = known.get(digest)
            if head is None:
                lacks = "is no longer known"
            elif head.manifest.kind == FULL and not _is_whole(folders[digest], head.manifest.files):
                lacks = f"is damaged at version {head.version}"
            elif not _is_whole(self._folder.deltas(head.version), head.manifest.deltas):
                self._spoil(head.version)
                lacks = f"is damaged at the deltas of version {head.version}"
            else:
                continue
            self._chain = Chain()
            return (
                f"What leads to version {self.head.version} {lacks} on this disk: the next version is "
                "published in full, and until then those who join fetch the newest one whole."
            )
        return ""

    # --- new versions ----------------------------------------------------------------------------

    def update(self, updated: Updated) -> Head:
        """Publishes what the learner made, and marks its groups as used, in one transaction."""
        manifest = CheckpointManifest(
            version=updated.version,
            kind=FULL,
            files=updated.files,
            tensors=updated.tensors,
            beacon=self._entropy(32),
            parent=self.head.hash,
            levels=updated.levels,
            stats=updated.stats,
            eval=updated.eval,
            mirrors=self._mirrors,
        )
        linked = self._chain.link(manifest, updated.deltas, self._longest)
        return self._publish(Path(updated.folder), linked, updated.used)

    def renew(self) -> Head:
        """Publishes the same weights again with a new beacon, for keys that came after the last one."""
        head = self.head
        linked = self._chain.link(self._next(head.manifest), [], self._longest)
        return self._publish(self.folders[head.version], linked)

    def overtake(self, newest: Head) -> Head:
        """Publishes this folder's newest weights above a version that it does not have: the trainer's word
        that those between are given up."""
        manifest, folder = self._mending or (self.head.manifest, self.folders[self.head.version])
        self._mending = None
        above = msgspec.structs.replace(
            self._next(manifest), version=newest.version + LEAP, parent=newest.hash
        )
        return self._publish(folder, above, leap=True)

    def _next(self, manifest: CheckpointManifest) -> CheckpointManifest:
        """The content of `manifest` as the version after the newest, in full."""
        head = self.head
        return msgspec.structs.replace(
            manifest,
            version=head.version + 1,
            kind=FULL,
            parent=head.hash,
            beacon=self._entropy(32),
            deltas=[],
            chain=[],
            mirrors=self._mirrors,
        )

    def seal(self, kind: Kind, body: bytes) -> bytes:
        """A message of the trainer."""
        return seal(
            self._identity,
            kind,
            self._following.run,
            body,
            seq=self._journal.next_seq(),
            ts=now_ms(),
            limit=MAX_MANIFEST if kind is Kind.CHECKPOINT else MAX_ENVELOPE,
        )

    def _publish(
        self, folder: Path, manifest: CheckpointManifest, used: Sequence[bytes] = (), *, leap: bool = False
    ) -> Head:
        body = manifest.to_bytes()
        data = self.seal(Kind.CHECKPOINT, body)
        head = Head(checkpoint_hash(body), manifest, data)
        place = str(folder.relative_to(self._folder.path))  # a run's folder may be moved
        self._journal.keep_manifests(self._numbered("checkpoints"))
        self._journal.publish(
            StoredCheckpoint(head.version, head.hash, data, place, now_ms(), manifest.stats, manifest.eval),
            used,
            leap=leap,
        )
        self._take(head, folder)
        return head

    def _take(self, head: Head, folder: Path) -> None:
        manifest = head.manifest
        self._following.take(head)
        self.heads[head.hash] = head
        self.folders[head.version] = folder
        self._links[head.version] = head
        self._chain = self._chain.after(head.hash, manifest)
        if manifest.kind == FULL:
            self._full = folder
        if folder.is_dir():  # one that only leads to others may be deleted
            self.index.add(folder, manifest.files)
        self.index.add(self._folder.deltas(head.version), manifest.deltas)
        self.index.add_bytes(head.content)
        oldest = head.version - self._held + 1
        self.folders = {version: place for version, place in self.folders.items() if version >= oldest}
        self.heads = {digest: known for digest, known in self.heads.items() if known.version >= oldest}
        first = min(known.version - len(known.manifest.chain) for known in self.heads.values())
        for version in [version for version in self._links if version < first]:
            self.index.drop_bytes(self._links.pop(version).hash)

    # --- what is here ----------------------------------------------------------------------------

    def holdings(self) -> Iterator[Holding]:
        """The versions of which anything is here that others may need."""
        for version, head in self._links.items():
            full = head.manifest.kind == FULL and head.hash in self._chain.hashes
            deltas = bool(head.manifest.deltas) and version not in self._spoilt
            yield Holding(head, version in self.folders or full, deltas)

    def damaged(self, file: Path) -> None:
        """A published file is no longer what it was: nothing is to be made from it any more."""
        for version in self._links:
            if self._folder.deltas(version) in file.parents:
                self._spoil(version)
                self._chain = Chain()
        if self._full is not None and self._full in file.parents:
            self._chain = Chain()

    def _spoil(self, version: int) -> None:
        self._spoilt.add(version)
        self.index.drop(self._folder.deltas(version))

    def prune(self, keep: int, good: int = 0, room: int | None = None) -> int:
        """Deletes versions that nobody needs; bytes that are left of all.

        Needed are the base, those that rollouts may still be verified against (groups of older ones are
        stale, also those that wait in the journal), `good`, which the run may have to go back to, the full
        one that the newest is made from, and those that are not published yet; of optimizer states the newest
        and that of `good`, of deltas those behind the oldest full one that somebody may begin with. Beside
        them the newest `keep` stay as far as all fits `room` bytes (None: any number).
        """
        newest = _number(self.folders[self.head.version])
        self._delete(self._numbered("optimizer"), lambda number: number >= newest or number == good)
        self._delete(
            self._numbered("deltas"),
            lambda number: number > self.head.version or bool(self._deltas(number)),
        )
        beside = sum(
            _size(folder) for kind in ("deltas", "optimizer") for folder in self._numbered(kind).values()
        )
        folders = self._numbered("checkpoints")
        sizes = {number: _size(folder) for number, folder in folders.items() if number <= self.head.version}
        total = beside + sum(sizes.values())
        needed = {0, good, *map(_number, self.folders.values())}
        if self._full is not None:
            needed.add(_number(self._full))
        gone = surplus(sizes, needed, keep, (total if room is None else room) - beside)
        self._delete(folders, lambda number: number not in gone)
        return total - sum(sizes[number] for number in gone)

    def _deltas(self, version: int) -> Sequence[FileEntry]:
        """Those of a version that leads to others, or to the newest."""
        head = self._links.get(version)
        return [] if head is None else head.manifest.deltas

    def _numbered(self, kind: str) -> dict[int, Path]:
        """Folders of versions, by the numbers that they are named for."""
        return {_number(folder): folder for folder in self._folder.path.glob(f"{kind}/[0-9]*")}

    def _delete(self, folders: Mapping[int, Path], stays: Callable[[int], bool]) -> None:
        for number, folder in folders.items():
            if not stays(number):
                self.index.drop(folder)
                shutil.rmtree(folder, ignore_errors=True)


def check_mirrors(mirrors: Sequence[str]) -> None:
    """Raises LocalError for what no volunteer would take as a mirror. [CKP-16]"""
    files = [file_entry("config.json", [])]
    probe = CheckpointManifest(0, FULL, files, {"": bytes(32)}, bytes(32), mirrors=list(mirrors))
    try:
        check_manifest(read(probe.to_bytes(), CheckpointManifest, MAX_MANIFEST))
        for mirror in mirrors:
            HttpSource(mirror)
    except RemoteError as error:
        raise LocalError(
            f"The mirrors {', '.join(mirrors)} cannot be published: {error} There may be {MAX_MIRRORS}, each "
            "an http or https URL of at most 1,024 printable ASCII characters."
        ) from error


def damage(file: Path) -> str:
    """What a person is told about a published file that has changed."""
    return (
        f"{file} is no longer what was published, and is served to nobody. Check the disk; put the file back "
        "from a backup, or from a volunteer's folder of this run, and start again."
    )


def _number(folder: Path) -> int:
    """The version that a folder is named for: names of more than six digits do not sort as text."""
    return int(folder.name) if folder.name.isdigit() else 0


def _size(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:  # the learner is replacing it
        return 0


def _head(row: StoredCheckpoint) -> Head:
    content = unseal(row.envelope, MAX_MANIFEST).content(MAX_MANIFEST)
    manifest = read(content, CheckpointManifest, MAX_MANIFEST, MAX_MANIFEST_VALUES)
    return Head(row.hash, manifest, row.envelope)


def _is_whole(folder: Path, files: Sequence[FileEntry]) -> bool:
    try:
        verify_folder(folder, files)
    except RemoteError:
        return False
    return True
