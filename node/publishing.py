"""A trainer's checkpoints: published once, in order, with the groups that made them; old ones deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from nous_node.protocol.checkpoints import FULL, CheckpointManifest, checkpoint_hash, files_hash
from nous_node.protocol.constants import MAX_ENVELOPE, MAX_MANIFEST
from nous_node.protocol.encoding import read
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.identity import Identity

from .blobs import BlobIndex, verify_folder
from .create import base_tensors, folder_entries
from .following import Following, Head, now_ms
from .home import DamagedError
from .learner_messages import Updated
from .runfolder import RunFolder
from .store import Journal, StoredCheckpoint


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
    ) -> None:
        self.heads: dict[bytes, Head] = {}
        self.folders: dict[int, Path] = {}
        self._identity, self._folder, self._journal = identity, folder, journal
        self._following, self.index, self._entropy = following, index, entropy
        self._held = folder.manifest.staleness + 2

    @property
    def head(self) -> Head:
        """The newest version; there is one from `resume` on."""
        head = self._following.head
        assert head is not None
        return head

    def resume(self) -> str:
        """Takes up the journal's checkpoints, or publishes version 0.

        Where the newest is damaged on disk (a power failure, a bad sector) the run goes on from the newest
        that is whole, published again under the next number; the sentence returned says so. Raises
        DamagedError where none is whole.
        """
        path = self._folder.path
        for half in (
            *path.glob("checkpoints/.*"),
            *path.glob("optimizer/.*"),
        ):  # a crash while it was written
            shutil.rmtree(half, ignore_errors=True)
        stored = [(_head(row), path / row.folder) for row in self._journal.checkpoints(self._held)]
        base = self._folder.checkpoint(0)
        if not stored:
            self._publish(base, self._base(base))
            return ""
        for head, folder in stored:
            self._take(head, folder)
        whole = []
        for head, folder in stored:
            if _is_whole(head, folder):
                whole.append((head.manifest, folder))
            else:  # nothing can be verified against it: its groups are answered as those of old versions
                del self.folders[head.version]
        if whole and whole[-1][0] is self.head.manifest:
            return ""
        manifest, folder = whole[-1] if whole else (self._base(base), base)
        damaged = self.head.version
        renewed = self._publish(folder, self._renewed(manifest)).version
        return (
            f"Version {damaged} is damaged on this disk: the run goes on from version {manifest.version}, "
            f"published again as version {renewed}."
        )

    def _base(self, folder: Path) -> CheckpointManifest:
        """Version 0, checked against the run's manifest."""
        files = folder_entries(folder)
        if files_hash(files) != self._folder.manifest.base:
            raise DamagedError(
                f"The base checkpoint {folder} is not what the run began with, and no newer one is whole. "
                "Restore the run's folder from a backup, or make a new run with `nous-node init`."
            )
        return CheckpointManifest(0, FULL, files, base_tensors(folder), self._entropy(32))

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
        )
        return self._publish(Path(updated.folder), manifest, updated.used)

    def renew(self) -> Head:
        """Publishes the same weights again with a new beacon, for keys that came after the last one."""
        head = self.head
        return self._publish(self.folders[head.version], self._renewed(head.manifest))

    def _renewed(self, manifest: CheckpointManifest) -> CheckpointManifest:
        """The content of `manifest` as the version after the newest."""
        head = self.head
        return msgspec.structs.replace(
            manifest, version=head.version + 1, parent=head.hash, beacon=self._entropy(32)
        )

    def prune(self, keep: int, good: int = 0) -> None:
        """Deletes folders of versions that nobody needs: all but the base, the newest `keep`, those that
        rollouts may still be verified against, and `good`, which the run may have to go back to; of optimizer
        states all but the newest and that of `good`."""
        folders = sorted(self._folder.path.glob("checkpoints/[0-9]*"), key=_number)
        needed = {folder.name for folder in (*self.folders.values(), *folders[-keep:], *folders[:1])}
        for folder in folders:
            if folder.name not in needed and _number(folder) != good:
                self.index.drop(folder)
                shutil.rmtree(folder, ignore_errors=True)
        newest = _number(self.folders[self.head.version])
        for folder in self._folder.path.glob("optimizer/[0-9]*"):
            if _number(folder) < newest and _number(folder) != good:
                shutil.rmtree(folder, ignore_errors=True)

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

    def _publish(self, folder: Path, manifest: CheckpointManifest, used: Sequence[bytes] = ()) -> Head:
        body = manifest.to_bytes()
        data = self.seal(Kind.CHECKPOINT, body)
        head = Head(checkpoint_hash(body), manifest, data)
        place = str(folder.relative_to(self._folder.path))  # a run's folder may be moved
        self._journal.publish(
            StoredCheckpoint(head.version, head.hash, data, place, now_ms(), manifest.stats, manifest.eval),
            used,
        )
        self._take(head, folder)
        return head

    def _take(self, head: Head, folder: Path) -> None:
        self._following.take(head)
        self.heads[head.hash] = head
        self.folders[head.version] = folder
        self.index.add(folder, head.manifest.files)
        oldest = head.version - self._held + 1
        self.folders = {version: place for version, place in self.folders.items() if version >= oldest}
        self.heads = {digest: known for digest, known in self.heads.items() if known.version >= oldest}


def _number(folder: Path) -> int:
    """The version that a folder is named for: names of more than six digits do not sort as text."""
    return int(folder.name) if folder.name.isdigit() else 0


def damage(file: Path) -> str:
    """What a person is told about a published file that has changed."""
    return (
        f"{file} is no longer what was published, and is served to nobody. Check the disk; put the file back "
        "from a backup, or from a volunteer's folder of this run, and start again."
    )


def _head(row: StoredCheckpoint) -> Head:
    content = unseal(row.envelope, MAX_MANIFEST).content(MAX_MANIFEST)
    manifest = read(content, CheckpointManifest, MAX_MANIFEST)
    return Head(row.hash, manifest, row.envelope)


def _is_whole(head: Head, folder: Path) -> bool:
    try:
        verify_folder(folder, head.manifest.files)
    except RemoteError:
        return False
    return True
