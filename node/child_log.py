"""The file into which a child process prints: its end is kept, so that years of restarts fill no disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from .home import disk_errors, write_atomic

KEPT_BYTES = 1 << 20
"""Of the log of earlier children: hundreds of tracebacks."""


def open_log(path: Path) -> BinaryIO:
    """For appending, with at most KEPT_BYTES in it. Raises StorageError."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > KEPT_BYTES:
            with path.open("rb") as file:
                file.seek(-KEPT_BYTES, os.SEEK_END)
                end = file.read(KEPT_BYTES)
            write_atomic(path, end.partition(b"\n")[2])
        return path.open("ab")
