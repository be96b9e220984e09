"""What is put into a trainer's journal."""

from __future__ import annotations

from hashlib import sha256

from nous_node.node.store import StoredCheckpoint, StoredGroup
from nous_node.protocol.errors import Code, RemoteError

ALICE, BOB = b"A" * 32, b"B" * 32
OLD, NEW = b"0" * 32, b"1" * 32
NOW = 1_000_000


def group(
    counter: int,
    key: bytes = ALICE,
    version: int = 1,
    checkpoint: bytes = NEW,
    size: int = 100,
    salt: bytes = b"",
    seal: bytes = b"",
) -> StoredGroup:
    """`salt` is in the content, `seal` in the envelope only."""
    digest = sha256(b"%d %d" % (counter, version) + key + checkpoint + salt).digest()
    rollout = sha256(digest + seal).digest()
    return StoredGroup(rollout, key, checkpoint, version, counter, digest, NOW, bytes(size))


def checkpoint(version: int) -> StoredCheckpoint:
    digest = sha256(b"%d" % version).digest()
    return StoredCheckpoint(
        version, digest, b"manifest", f"/c/{version}", NOW, {"loss": 0.5}, {"greedy": 0.75}
    )


def codes(errors: list[RemoteError | None]) -> list[Code | None]:
    return [None if error is None else error.code for error in errors]
