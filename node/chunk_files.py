"""Chunks as they lie in files: read and compared with their hashes, one at a time in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from nous_node.protocol.checkpoints import FileEntry, check_chunk
from nous_node.protocol.errors import Code, RemoteError


def read_chunks(path: Path, entry: FileEntry) -> Iterator[tuple[bytes, bytes]]:
    """Hash and bytes of each chunk of a file. Raises RemoteError(SIZE_MISMATCH), RemoteError(HASH_MISMATCH)
    for the first that is not what it has to be, and OSError."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != entry.size:
            raise RemoteError(Code.SIZE_MISMATCH, f"{path.name} has another size than its manifest says.")
        for number, digest in enumerate(entry.hashes()):
            data = file.read(entry.length(number))
            check_chunk(data, digest)
            yield digest, data


def stands(file: FileIO, offset: int, length: int, digest: bytes) -> bool:
    """Whether a chunk lies there. Raises OSError where that cannot be read."""
    file.seek(offset)
    try:
        check_chunk(file.read(length), digest)
    except RemoteError:
        return False
    return True
