"""The learner's deltas: written beside a new version, where they pay. Spec: `specs/09-checkpoints.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nous_node.protocol.checkpoints import FileEntry
from nous_node.trainer.checkpoint import write_whole
from nous_node.trainer.errors import CheckpointError
from nous_node.trainer.model_folder import WEIGHTS_SUFFIX

from .chaining import DELTA_SHARE, Tries
from .create import folder_entries
from .delta_files import write_delta
from .runfolder import RunFolder


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a try."""

    deltas: list[FileEntry] | None = None
    """None where there are none."""
    note: str = ""
    """What a person has to be told."""


@dataclass(slots=True)
class DeltaWriter:
    """Writes the deltas of a run's versions into its folder, and tries less often where they do not pay."""

    folder: RunFolder
    tries: Tries = field(default_factory=Tries)

    def write(
        self, version: int, before: Path, place: Path, files: Sequence[FileEntry], *, durable: bool = True
    ) -> Written:
        """Those of `version` with its `files` in `place`, against the folder `before`: all of them, or none.

        A delta that cannot be written costs nobody the version, which is whole without it.
        """
        if not self.tries.due(version):
            return Written()
        target = self.folder.deltas(version)
        paths = [entry.path for entry in files if entry.path.endswith(WEIGHTS_SUFFIX)]
        most = int(DELTA_SHARE * sum(entry.size for entry in files))
        try:
            write_whole(target, lambda out: _write(before, place, out, paths, most), durable=durable)
            deltas = folder_entries(target)
        except _NotWorthIt:
            self.tries.failed(version)
            return Written()
        except (CheckpointError, OSError) as error:
            self.tries.failed(version)
            return Written(note=f"Version {version} is published in full, since its delta failed: {error}")
        self.tries.paid()
        return Written(deltas)


class _NotWorthIt(Exception):
    """There is no delta, or it would be too large."""


def _write(before: Path, place: Path, out: Path, paths: Sequence[str], most: int) -> None:
    for path in paths:
        if not (before / path).is_file():
            raise _NotWorthIt
        written = write_delta(before / path, place / path, out / path, most=most)
        if written is None:
            raise _NotWorthIt
        most -= written
