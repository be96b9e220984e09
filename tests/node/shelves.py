"""Homes with checkpoints in them: a trainer's run of two versions, the same run as a volunteer holds it, and
deltas beside."""

from __future__ import annotations

import shutil
from pathlib import Path

from nous_node.node.create import base_tensors, folder_entries
from nous_node.node.joined import JoinedFolder
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal, StoredCheckpoint
from nous_node.protocol.checkpoints import DELTA, CheckpointManifest, checkpoint_hash, file_entry
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.identity import Identity

WEIGHTS = "model.safetensors"
DELTA_BYTES = b"what makes it from its parent"
EVALUATION = {"greedy": 0.5, "evil\x1b[2J": 0.25}
STATS = {"reward": 0.125}
MIRROR = "https://mirror.example.org/run"


def trained(home: Path, base: RunFolder, other: Path, identity: Identity) -> RunFolder:
    """`runs/run` with version 0 and version 1, a delta, whose weights are those of `other`."""
    path = shutil.copytree(base.path, home / "runs" / "run")
    shutil.copytree(other, path / "checkpoints" / "000001")
    run = RunFolder.open(path)
    deltas = path / "deltas" / "000001"
    deltas.mkdir(parents=True, exist_ok=True)
    (deltas / WEIGHTS).write_bytes(DELTA_BYTES)
    with Journal.open(run.journal) as journal:
        parent: bytes | None = None
        for version in (0, 1):
            manifest = manifest_of(run.checkpoint(version), version, parent)
            parent = publish(run, journal, identity, manifest)
    return run


def manifest_of(folder: Path, version: int, parent: bytes | None) -> CheckpointManifest:
    manifest = CheckpointManifest(
        version, "full", folder_entries(folder), base_tensors(folder), bytes([version]) * 32, parent
    )
    if parent is None:
        return manifest
    return CheckpointManifest(
        version,
        DELTA,
        manifest.files,
        manifest.tensors,
        manifest.beacon,
        parent,
        stats=STATS,
        eval=EVALUATION,
        deltas=[file_entry(WEIGHTS, [DELTA_BYTES])],
        chain=[parent],
        mirrors=[MIRROR],
    )


def publish(run: RunFolder, journal: Journal, identity: Identity, manifest: CheckpointManifest) -> bytes:
    """Its hash."""
    body = manifest.to_bytes()
    digest = checkpoint_hash(body)
    data = seal(
        identity,
        Kind.CHECKPOINT,
        run.run,
        body,
        seq=journal.next_seq(),
        ts=1_750_000_000_000,
        limit=MAX_MANIFEST,
    )
    folder = f"checkpoints/{manifest.version:06d}"
    journal.publish(
        StoredCheckpoint(manifest.version, digest, data, folder, 1_750_000_000_000, STATS, manifest.eval), []
    )
    return digest


def joined(home: Path, run: RunFolder) -> JoinedFolder:
    """The same checkpoints in `joined/`, as a volunteer of the run has them."""
    folder = JoinedFolder(home / "joined" / run.run.hex()[:16])
    folder.checkpoints.mkdir(parents=True)
    shutil.copy(run.path / "run.envelope", folder.manifest)
    parent: bytes | None = None
    for version in (0, 1):
        manifest = manifest_of(run.checkpoint(version), version, parent)
        parent = checkpoint_hash(manifest.to_bytes())
        shutil.copytree(run.checkpoint(version), folder.checkpoint(parent))
        beside(folder, parent, "manifest").write_bytes(manifest.to_bytes())
        if version:
            shutil.copytree(run.path / "deltas" / "000001", beside(folder, parent, "deltas"))
    return folder


def beside(folder: JoinedFolder, digest: bytes, suffix: str) -> Path:
    return folder.checkpoints / f"{digest.hex()[:16]}.{suffix}"


def flip(file: Path, offset: int) -> None:
    """One bit of a file on the disk."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
