"""Whether a version goes out as a full checkpoint or as a delta, and when a delta is tried. Spec: chapter 09.

Pure: sizes and numbers in, a manifest or a yes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from nous_node.protocol.checkpoints import DELTA, FULL, CheckpointManifest, FileEntry

CHAIN_SHARE = 0.5
"""Of a full checkpoint that the deltas of a chain may have together: who begins with the full one and takes
the deltas behind it fetches one and a half at the most."""

DELTA_SHARE = 0.25
"""Of a full checkpoint that one delta may have for a trainer to make it: a chain would hold one or two larger
ones, and making them takes as long as making any."""

LONGEST_PAUSE = 64
"""Versions between two tries where deltas do not pay: a try takes as long as writing a checkpoint, and a
learning rate that falls may make them pay later."""


@dataclass(frozen=True, slots=True)
class Chain:
    """How one comes to the newest version: a full checkpoint, and the deltas behind it."""

    hashes: tuple[bytes, ...] = ()
    """From the full one to the newest; empty where the next version has to be full."""
    spent: int = 0
    """Bytes of their deltas."""

    def after(self, digest: bytes, manifest: CheckpointManifest) -> Chain:
        """With the version that was published last."""
        if manifest.kind == FULL:
            return Chain((digest,))
        return Chain((*manifest.chain, digest), self.spent + manifest.delta_size)

    def link(
        self, full: CheckpointManifest, deltas: Sequence[FileEntry] | None, longest: int
    ) -> CheckpointManifest:
        """`full`, the version that follows, as a delta where that pays: a chain has at most `longest` hashes.

        `deltas`: what makes its files from those of the version before; None where nothing does.
        """
        if deltas is None or not 0 < len(self.hashes) <= longest:
            return full
        if self.spent + sum(entry.size for entry in deltas) > CHAIN_SHARE * full.size:
            return full
        return msgspec.structs.replace(full, kind=DELTA, deltas=list(deltas), chain=list(self.hashes))


@dataclass(slots=True)
class Tries:
    """When a delta is tried: for each version, and after one that did not pay for the first, second, fourth,
    ... one after it."""

    _pause: int = 0
    _next: int = 0

    def due(self, version: int) -> bool:
        return version >= self._next

    def paid(self) -> None:
        self._pause = 0

    def failed(self, version: int) -> None:
        """The delta of `version` did not pay, or could not be written."""
        self._pause = min(LONGEST_PAUSE, max(1, 2 * self._pause))
        self._next = version + self._pause + 1
