"""What a node does about a trainer that signed two checkpoints of one version: the proof is kept, and
the run left.

Which of the two is right cannot be told from them, and others may follow the other one: rollouts, receipts
and updates of such a run mean two things. So a person has to look. [CKP-17]

equivocation-VERSION.proof   in the folder of the run: canonical msgpack {first, second}, both envelopes as
                             they were signed. While it is there the run is not entered again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import trio

from nous_node.protocol.equivocation import MAX_PROOF, open_equivocation
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.runs import RunManifest

from .following import Following
from .home import disk_errors, write_atomic

PATTERN = "equivocation-*.proof"

PARTING_SECONDS = 1.0
"""Until a node leaves: what came by gossip has gone on to others by then."""


class EquivocationError(LocalError):
    """The run is halted on this node: one of its trainer keys signed two checkpoints of one version."""

    code = Code.EQUIVOCATION


async def halt_on_conflict(following: Following, folder: Path) -> NoReturn:
    """Waits for a conflict, keeps its proof in the folder of the run, and raises EquivocationError once it
    has gone on to others."""
    conflict = await following.conflicted()
    data = conflict.to_bytes()
    proven = open_equivocation(data, following.run, following.manifest)
    file = folder / f"equivocation-{proven.version}.proof"
    await trio.to_thread.run_sync(write_atomic, file, data)
    await trio.sleep(PARTING_SECONDS)
    raise _halted(file, proven.version, proven.key)


def refuse_halted(folder: Path, run: bytes, manifest: RunManifest) -> None:
    """Raises EquivocationError where the folder of a run holds a proof. A file that proves nothing of this
    run halts nobody."""
    with disk_errors(folder):
        files = sorted(folder.glob(PATTERN))
        for file in files:
            with file.open("rb") as stream:
                data = stream.read(MAX_PROOF + 1)
            try:
                proven = open_equivocation(data, run, manifest)
            except RemoteError:
                continue
            raise _halted(file, proven.version, proven.key)


def _halted(file: Path, version: int, key: bytes) -> EquivocationError:
    return EquivocationError(
        f"A trainer of this run (key {key.hex()[:16]}) signed two checkpoints of version {version}: "
        "nobody can tell which of them the run is, so this node takes no part in it any more. Both are in "
        f"{file}: show it to the run's owner, and delete it once that is settled to take part again."
    )
