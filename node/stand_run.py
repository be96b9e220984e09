"""The run that the kit makes for a client under test: its keys, its versions, and manifests that are wrong.

    base checkpoint -> version 0 -> small changes of the weights -> versions 1, 2, ... full or delta

Nothing is learnt: a version differs from the one before by what an optimizer's step might change, so that a
client which goes on with old weights is found by its log-probs. Everything is held in memory as chunks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from nous_node.protocol.checkpoints import (
    DELTA,
    FULL,
    CheckpointManifest,
    FileEntry,
    checkpoint_hash,
    file_entry,
)
from nous_node.protocol.constants import CHUNK, DOMAIN_ENVELOPE, MAX_LIFETIME_MS, MAX_MANIFEST
from nous_node.protocol.encoding import decode, encode
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.identity import Identity

from .create import base_tensors, create_run, first_beacon, folder_entries
from .delta_files import write_delta
from .following import Head, now_ms
from .plan import EnvironmentPlan, LimitsPlan, RunPlan

GROUP = 3
"""Samples of a task: the order of sampler keys shows, and a group is made in a moment."""
SHARDS = 4
"""So that a client which publishes to a shard of its choice is most likely found."""
STALENESS = 8
"""The most: the kit publishes a version every few seconds, and none of the groups is to be late for that."""
GROUPS_PER_SECOND = 6.0
"""Low enough that a client which makes groups without a pause meets the limit within a minute."""
PIECE = 65_536
"""Bytes of a chunk: a version of the embedded policy has ten of them, so that sources can be told apart."""
CHANGED = 0.02
"""Share of the weights that a version changes: its delta is a fraction of its files."""
STEP = 0.01
"""By how much of a tensor's spread: far beyond rounding, and the policy still sorts."""
LEVELS = 3
"""Curriculum levels go round: a client that does not look at them asks for prompts that are too short."""
WEIGHTS = "model.safetensors"
FAR_AHEAD = 1 << 40
"""Versions of manifests that have to be refused begin here: no honest one ever has such a number."""


@dataclass(frozen=True, slots=True)
class Version:
    """A published checkpoint."""

    head: Head
    folder: Path
    files: frozenset[bytes]
    """Chunks of its files that the version before does not have."""
    deltas: frozenset[bytes]
    """Chunks of its deltas."""

    @property
    def number(self) -> int:
        return self.head.version


@dataclass(frozen=True, slots=True)
class Trap:
    """A manifest that has to be refused: whoever asks for its chunks, or uses it, has taken it."""

    envelope: bytes
    checkpoint: bytes
    chunks: frozenset[bytes]


class StandRun:
    """Made in an empty folder. Imports torch."""

    def __init__(self, path: Path) -> None:
        self.trainer = Identity.from_seed(os.urandom(32))
        self.stranger = Identity.from_seed(os.urandom(32))
        """A key that is no trainer's."""
        plan = RunPlan(
            environments={"sort-digits": EnvironmentPlan()},
            group=GROUP,
            shards=SHARDS,
            staleness=STALENESS,
            limits=LimitsPlan(GROUPS_PER_SECOND),
        )
        self.folder = create_run(path / "run", "conformance", self.trainer, plan, now_ms())
        self.manifest, self.run = self.folder.manifest, self.folder.run
        self.blobs: dict[bytes, bytes] = {}
        """All that an honest peer of the run serves, by hash."""
        self.versions: list[Version] = []
        self._seq = int.from_bytes(os.urandom(6))
        self._traps = FAR_AHEAD
        self._base()

    @property
    def newest(self) -> Version:
        return self.versions[-1]

    def version_of(self, checkpoint: bytes) -> Version | None:
        return next((one for one in self.versions if one.head.hash == checkpoint), None)

    # --- messages --------------------------------------------------------------------------------

    def seal(self, kind: str, body: bytes, by: Identity | None = None, **changes: object) -> bytes:
        """A signed envelope, by the trainer unless by somebody else. `changes`: fields of the signed part
        that are to be otherwise, also such as no honest sender writes."""
        sender = by or self.trainer
        self._seq += 1
        now = now_ms()
        fields: dict[str, object] = {"v": 1, "kind": kind, "run": self.run, "from": sender.key}
        fields |= {"seq": self._seq, "ts": now, "exp": now + MAX_LIFETIME_MS, "body": body}
        signed = encode(fields | changes)
        return encode({"sig": sender.sign(DOMAIN_ENVELOPE + signed), "signed": signed})

    def resealed(self, version: Version) -> bytes:
        """The same checkpoint in a new envelope."""
        return self.seal(Kind.CHECKPOINT, version.head.content)

    # --- versions --------------------------------------------------------------------------------

    def make(self, *, delta: bool = False, broken: bool = False, extra: bool = False) -> Version:
        """The next version, known to nobody yet. `delta`: with deltas against the newest; `broken`: they are
        of other weights, so that they bring what the manifest does not say; `extra`: with a key that no
        revision knows."""
        before, number = self.newest, self.newest.number + 1
        folder = self.folder.checkpoint(number)
        _changed(before.folder, folder, number)
        deltas: list[FileEntry] = []
        if delta:
            source = self.versions[-2].folder if broken else before.folder
            deltas = self._deltas(source, folder, self.folder.deltas(number))
        manifest = CheckpointManifest(
            version=number,
            kind=DELTA if delta else FULL,
            files=self._entries(folder),
            tensors=base_tensors(folder),
            beacon=os.urandom(32),
            parent=before.head.hash,
            levels={"sort-digits": number % LEVELS},
            stats={"reward": 0.5},
            deltas=deltas,
            chain=[*(before.head.manifest.chain or []), before.head.hash] if delta else [],
        )
        body = manifest.to_bytes()
        if extra:
            body = encode({**_mapping(body), "zz-later": [1, None, {"more": 2.5}]})
        return self._published(body, manifest, folder)

    def rival(self) -> bytes:
        """Another checkpoint of the newest version, signed by the same key: equivocation. [CKP-17]"""
        other = msgspec.structs.replace(self.newest.head.manifest, beacon=os.urandom(32))
        return self.seal(Kind.CHECKPOINT, other.to_bytes())

    def _base(self) -> None:
        folder = self.folder.checkpoint(0)
        files = folder_entries(folder)
        for entry in files:
            self._hold(folder / entry.path, CHUNK)
        manifest = CheckpointManifest(
            0, FULL, files, base_tensors(folder), first_beacon(self.trainer, self.run)
        )
        self._published(manifest.to_bytes(), manifest, folder)

    def _published(self, body: bytes, manifest: CheckpointManifest, folder: Path) -> Version:
        head = Head(checkpoint_hash(body), manifest, self._compressed(body))
        older = self.versions[-1].head.manifest.files if self.versions else []
        files = _hashes(manifest.files) - _hashes(older)
        version = Version(head, folder, files, _hashes(manifest.deltas))
        self.blobs[head.hash] = body
        self.versions.append(version)
        return version

    def _compressed(self, body: bytes) -> bytes:
        """A checkpoint's envelope as a trainer writes it. [ENV-8]"""
        self._seq += 1
        facts = {"seq": self._seq, "ts": now_ms(), "limit": MAX_MANIFEST}
        return seal(self.trainer, Kind.CHECKPOINT, self.run, body, **facts)

    def _entries(self, folder: Path) -> list[FileEntry]:
        names = sorted(path.name for path in folder.iterdir())
        return [self._hold(folder / name, PIECE) for name in names]

    def _deltas(self, before: Path, after: Path, out: Path) -> list[FileEntry]:
        out.mkdir(parents=True)
        most = (after / WEIGHTS).stat().st_size
        write_delta(before / WEIGHTS, after / WEIGHTS, out / WEIGHTS, most=most)
        return [self._hold(out / WEIGHTS, PIECE)]

    def _hold(self, path: Path, chunk: int) -> FileEntry:
        pieces = list(_pieces(path.read_bytes(), chunk))
        self.blobs |= {sha256(piece).digest(): piece for piece in pieces}
        return file_entry(path.name, pieces, chunk)

    # --- what is wrong ---------------------------------------------------------------------------

    def trap(self, by: Identity | None = None, changes: Mapping[str, object] | None = None) -> Trap:
        """A manifest far above the newest. `by` whom and with which `changes` of its envelope it is signed
        makes it wrong, or what the caller does with it."""
        manifest = self._trapping()
        return self._sealed(manifest.to_bytes(), manifest.files, by, changes or {})

    def trap_with(self, **changes: object) -> Trap:
        """One with a content that has to be refused, signed as it should be."""
        manifest = msgspec.structs.replace(self._trapping(), **changes)
        return self._sealed(manifest.to_bytes(), manifest.files, None, {})

    def false_base(self) -> Trap:
        """A version 0 that is not what the run began with. [CKP-2]"""
        manifest = msgspec.structs.replace(self._trapping(), version=0, parent=None)
        return self._sealed(manifest.to_bytes(), manifest.files, None, {})

    def _sealed(
        self, body: bytes, files: Sequence[FileEntry], by: Identity | None, changes: Mapping[str, object]
    ) -> Trap:
        data = self.seal(Kind.CHECKPOINT, body, by, **changes)
        return Trap(data, checkpoint_hash(body), _hashes(files))

    def _trapping(self) -> CheckpointManifest:
        """A manifest with one file that nobody can have asked for otherwise."""
        self._traps += 1
        files = [file_entry("config.json", [os.urandom(100)], PIECE)]
        return CheckpointManifest(
            version=self._traps,
            kind=FULL,
            files=files,
            tensors=self.newest.head.manifest.tensors,
            beacon=os.urandom(32),
            parent=os.urandom(32),
        )


def unsigned(data: bytes) -> bytes:
    """The envelope with a signature that does not hold."""
    envelope = unseal(data, MAX_MANIFEST)
    return encode({"sig": envelope.sig[:-1] + bytes([envelope.sig[-1] ^ 1]), "signed": envelope.signed})


def _changed(before: Path, after: Path, seed: int) -> None:
    """Writes the policy in `before` with some of its weights a little changed."""
    import torch

    from nous_node.trainer.checkpoint import save_checkpoint
    from nous_node.trainer.policy import Policy

    policy = Policy.load(before, "float32")
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.tensors().values():
            chosen = torch.rand(weight.shape, generator=drawn) < CHANGED
            spread = float(weight.std()) if weight.numel() > 1 else 1.0
            weight += chosen * torch.randn(weight.shape, generator=drawn) * (STEP * spread)
    save_checkpoint(policy, after, durable=False)


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


def _hashes(files: Sequence[FileEntry]) -> frozenset[bytes]:
    return frozenset(digest for entry in files for digest in entry.hashes())


def _mapping(body: bytes) -> dict[str, object]:
    found = decode(body, MAX_MANIFEST)
    assert isinstance(found, dict)
    return dict(found)
