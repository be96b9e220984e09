"""The checkpoints that recorded groups belong to: found on this disk, and proven to be what was published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nous_node.envs.environment import PolicySettings
from nous_node.protocol.checkpoints import (
    CheckpointManifest,
    FileEntry,
    checkpoint_hash,
    files_hash,
    open_checkpoint,
)
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import Code, NousError, RemoteError
from nous_node.protocol.runs import RunManifest
from nous_node.trainer.errors import ModelError
from nous_node.trainer.model_folder import read_config
from nous_node.trainer.policy import Policy
from nous_node.trainer.tokenizer import load_tokenizer

from .blobs import verify_folder
from .create import folder_entries
from .policy_settings import policy_settings
from .recorded import Published

GONE = "checkpoint gone"
"""What a person reads of a group whose checkpoint is not on this disk any more."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is left of a checkpoint."""

    manifest: CheckpointManifest | None
    """None where not even its signed manifest is left: nothing says which tasks it assigned."""
    settings: PolicySettings | None
    """For replays; None where no tokenizer of the run is left."""
    policy: Policy | None
    """With its weights, in the dtype of verification; None where they are gone."""
    lack: str = ""
    """Why something is missing."""


class RecordedCheckpoints:
    """`find(hash)` gives what is left of a checkpoint; one policy is in memory at a time.

    `root` is the run's folder, `given` another folder that may hold the weights of some version.
    """

    def __init__(
        self,
        run: bytes,
        manifest: RunManifest,
        root: Path,
        given: Path | None,
        published: Sequence[Callable[[bytes], Published | None]],
        tell: Callable[[str], None],
    ) -> None:
        self._run, self._manifest, self._root, self._given = run, manifest, root, given
        self._published, self._tell = published, tell
        self._policy: tuple[bytes, Policy] | None = None
        """With the hash of its files."""
        self._base: PolicySettings | None = None

    def find(self, checkpoint: bytes) -> Found:
        """Raises ModelError for a checkpoint that is whole and cannot be loaded."""
        recorded = [found for look_up in self._published if (found := look_up(checkpoint)) is not None]
        try:
            manifest = self._opened(checkpoint, [one.envelope for one in recorded])
        except RemoteError as error:
            return Found(None, self._base_settings(), None, f"its recorded checkpoint is damaged: {error}")
        if manifest is None:
            return Found(None, self._base_settings(), None, f"{GONE}, and its manifest with it")
        folders = [one.folder for one in recorded if one.folder]
        policy, lack = self._loaded(manifest, self._places(checkpoint, folders))
        if policy is None and self._given is not None:
            policy, lack = self._loaded(manifest, [self._given])
            if policy is not None:
                self._tell(f"Version {manifest.version} is verified against {self._given}.")
        if policy is None:
            return Found(manifest, self._base_settings(), None, lack)
        return Found(manifest, policy_settings(self._manifest, policy.tokenizer, policy.folder), policy)

    def _opened(self, checkpoint: bytes, envelopes: Sequence[bytes]) -> CheckpointManifest | None:
        """Raises RemoteError where what was recorded is not what a trainer signed."""
        for data in envelopes:
            if data:
                envelope = unseal(data, MAX_MANIFEST)
                manifest = open_checkpoint(envelope, self._run, self._manifest)
                if checkpoint_hash(envelope.content(MAX_MANIFEST)) != checkpoint:
                    raise RemoteError(Code.HASH_MISMATCH, "It has another hash than the groups name.")
                return manifest
        return None

    def _places(self, checkpoint: bytes, folders: Sequence[str]) -> Iterator[Path]:
        """Where its files may lie in the run's folder: a trainer's, or a volunteer's."""
        root = self._root.resolve()
        for folder in folders:
            place = (root / folder).resolve()
            if place.is_relative_to(root):  # a journal may come from somebody else
                yield place
        yield root / "checkpoints" / checkpoint.hex()[:16]

    def _loaded(self, manifest: CheckpointManifest, places: Iterable[Path]) -> tuple[Policy | None, str]:
        """The policy, or None and why."""
        digest = files_hash(manifest.files)
        if self._policy is not None and self._policy[0] == digest:
            return self._policy[1], ""
        self._policy, lack = None, GONE  # before the next one is in memory
        for place in places:
            policy, why = self._load(place, manifest)
            if policy is None:
                lack = why or lack
                continue
            self._policy = digest, policy
            return policy, ""
        return None, lack

    def _load(self, place: Path, manifest: CheckpointManifest) -> tuple[Policy | None, str]:
        """From a folder, if it is what was published; None and why, or nothing where there is no folder."""
        if not place.is_dir():
            return None, ""
        try:
            verify_folder(place, manifest.files)
        except RemoteError as error:
            return None, f"{place} is not version {manifest.version}: {error}"
        try:
            return Policy.load(place, self._manifest.thresholds.verifier), ""
        except ModelError:
            if _is_whole(place, manifest):
                raise
            return None, ""  # a trainer deleted it meanwhile

    def _base_settings(self) -> PolicySettings | None:
        """Of version 0, whose folder is never deleted: enough for replays without weights."""
        folder = self._root / "checkpoints" / f"{0:06d}"
        if self._base is None and folder.is_dir():
            try:
                entries: list[FileEntry] = folder_entries(folder)
                if files_hash(entries) == self._manifest.base:
                    tokenizer = load_tokenizer(folder, read_config(folder))
                    self._base = policy_settings(self._manifest, tokenizer, folder)
            except (OSError, NousError):
                return None
        return self._base


def _is_whole(folder: Path, manifest: CheckpointManifest) -> bool:
    try:
        verify_folder(folder, manifest.files)
    except RemoteError:
        return False
    return True
