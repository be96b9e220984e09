"""A trainer's folder of one run.

run.envelope      the signed run manifest, as it goes over the wire
learning.toml     how the trainer learns: its own matter, not part of the protocol
journal.sqlite    accepted groups, published checkpoints, keys
checkpoints/NNNNNN/    plain transformers folders, one a version
deltas/NNNNNN/         what makes their tensors from those of the version before, where that was published
optimizer/NNNNNN/      optimizer state beside them, never published
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Envelope, unseal
from nous_node.protocol.errors import LocalError, RemoteError
from nous_node.protocol.runs import RunManifest, open_manifest

from .home import DamagedError, write_atomic

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


def check_name(name: str) -> None:
    """Raises LocalError for what cannot be the name of a run's folder."""
    if not _NAME.match(name):
        raise LocalError(
            f"A run cannot be called {name!r}: a name has up to 64 letters, digits, '.', '_' and '-', "
            "and begins with a letter or digit."
        )


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths in a run's folder, and its manifest."""

    path: Path
    run: bytes
    """Run id."""
    envelope: bytes
    manifest: RunManifest

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def learning(self) -> Path:
        return self.path / "learning.toml"

    def checkpoint(self, version: int) -> Path:
        return self.path / "checkpoints" / f"{version:06d}"

    def deltas(self, version: int) -> Path:
        return self.path / "deltas" / f"{version:06d}"

    def optimizer(self, version: int) -> Path:
        return self.path / "optimizer" / f"{version:06d}"

    def optimizer_of(self, checkpoint: Path) -> Path:
        """The state that belongs to a checkpoint's folder; a version that only renews a beacon has none of
        its own."""
        return self.path / "optimizer" / checkpoint.name

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Raises LocalError where the folder holds no run, and DamagedError where that is not what it was."""
        file = path / "run.envelope"
        if not file.is_file():
            raise LocalError(
                f"There is no run in {path}. Make one with `nous-node init {path.name}`, "
                "or see `nous-node train --help`."
            )
        data = file.read_bytes()
        try:
            envelope = unseal(data, MAX_MANIFEST)
            manifest = open_manifest(envelope, envelope.head.run)
        except RemoteError as error:
            raise DamagedError(
                f"The run manifest {file} is damaged, or another release made it ({error}) Restore it "
                "from a backup, go on with the release that made it, or make a new run with `nous-node init`."
            ) from error
        return cls(path, envelope.head.run, data, manifest)

    @classmethod
    def create(cls, path: Path, envelope: Envelope, data: bytes, learning: str) -> RunFolder:
        """Writes a new run; LocalError where the folder already holds one."""
        if (path / "run.envelope").exists():
            raise LocalError(f"{path} already holds a run; give the new one another name.")
        for folder in ("checkpoints", "deltas", "optimizer"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        write_atomic(path / "learning.toml", learning.encode())
        write_atomic(path / "run.envelope", data)
        return cls(path, envelope.head.run, data, open_manifest(envelope, envelope.head.run))
