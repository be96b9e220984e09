"""A volunteer's or relay's folder of one run, and how a node gets into a run from an invite.

run.envelope                 the signed run manifest
head.envelope                the newest checkpoint manifest that was heard of, as it was signed
outbox.sqlite                groups made and what became of them
checkpoints/HEX/             files of a checkpoint, all of them and verified; HEX: 16 hex digits of its hash
checkpoints/HEX.deltas/      its deltas, all of them and verified, each at the path of the file that it makes
checkpoints/HEX.manifest     bytes of its manifest, which its hash is of
checkpoints/HEX.part/        a download under way, and HEX.deltas.part/ one of deltas
checkpoints/HEX.made/        files that are being made of deltas
equivocation-VERSION.proof   two checkpoints of one version that one key signed (`node/equivocation.py`)
worker.log                   what the worker process printed
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from nous_node.envs.access import NONE, Access
from nous_node.envs.registry import check_entry
from nous_node.envs.remote import close_all
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import Code, LocalError, NousError, RemoteError
from nous_node.protocol.runs import Invite, RunManifest, open_manifest

from .equivocation import refuse_halted
from .events import Note, Report
from .following import Following, ask_head
from .home import UNDER_WAY, Home, StorageError, disk_errors, write_atomic
from .network import Network

CONNECT_SECONDS = 30.0
"""Until a person is told that nobody answers: several dials with backoff."""

ASK_AGAIN_SECONDS = 1.0

RUNTIME_BYTES = 400 << 20
"""Memory of a worker without a model: interpreter, torch, transformers."""

HELD_CHECKPOINTS = 3
"""The newest, the one in use, and one that arrives or is made of deltas. All others, deltas among them, take
only what is left, and go where another one needs their room."""

BESIDE_WEIGHTS = 256 << 20
"""Of a checkpoint: tokenizer, configuration and licences; the largest tokenizers have some 35 MB."""

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class JoinedFolder:
    path: Path

    @classmethod
    def of(cls, home: Home, run: bytes) -> JoinedFolder:
        """Where it is or will be; `make` makes it."""
        return cls(home.path / "joined" / run.hex()[:16])

    def make(self) -> None:
        """Raises StorageError."""
        with disk_errors(self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)

    @property
    def manifest(self) -> Path:
        return self.path / "run.envelope"

    @property
    def outbox(self) -> Path:
        return self.path / "outbox.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def worker_log(self) -> Path:
        return self.path / "worker.log"

    @property
    def head(self) -> Path:
        return self.path / "head.envelope"

    def checkpoint(self, digest: bytes) -> Path:
        return self.checkpoints / digest.hex()[:16]

    def part(self, digest: bytes) -> Path:
        return self.checkpoints / f"{digest.hex()[:16]}{UNDER_WAY}"

    def deltas(self, digest: bytes) -> Path:
        return self.checkpoints / f"{digest.hex()[:16]}.deltas"

    def checkpoint_manifest(self, digest: bytes) -> Path:
        return self.checkpoints / f"{digest.hex()[:16]}.manifest"

    def made(self, digest: bytes) -> Path:
        return self.checkpoints / f"{digest.hex()[:16]}.made"

    def read_manifest(self, run: bytes) -> bytes | None:
        """The stored manifest envelope; None where there is none, or a damaged one (it is fetched again)."""
        try:
            data = self.manifest.read_bytes()
            open_manifest(unseal(data, MAX_MANIFEST), run)
        except (OSError, RemoteError):
            return None
        return data

    def read_head(self) -> bytes | None:
        """The stored head's envelope, unchecked; None where there is none."""
        try:
            with self.head.open("rb") as file:
                return file.read(MAX_MANIFEST + 1)
        except OSError:
            return None


def connecting(invite: Invite) -> Note:
    """What a person reads while nobody has answered yet."""
    return Note(f"connecting to the run {invite.run.hex()[:16]} at {', '.join(invite.addresses[:3])}")


def entered(following: Following) -> Note:
    """Which run it is."""
    return Note(f"this is the run {following.manifest.name} ({following.run.hex()[:16]})")


async def enter(network: Network, invite: Invite, folder: JoinedFolder, report: Report) -> Following:
    """Follows the run of an invite: manifest and newest head, from whoever answers first. Where nobody does
    and the run was entered before, with what is stored. Makes the folder once there is a manifest to keep.

    The caller keeps the network dialling. Raises LocalError when nobody who follows the run answers within
    CONNECT_SECONDS, EquivocationError when the run was halted, and RemoteError when the run is not for this
    node (too new a protocol).
    """
    stored = folder.read_manifest(invite.run)
    following = None
    if stored is not None:
        following = Following.of(invite.run, stored)
        refuse_halted(folder.path, invite.run, following.manifest)
        folder.make()  # its checkpoints may have been cleared away
        head = folder.read_head()
        if head is not None:
            with suppress(RemoteError):  # damaged: others tell it again
                following.offer(head)
    problem: NousError | None = None
    with trio.move_on_after(CONNECT_SECONDS):
        while True:
            for peer in network.peers():
                try:
                    reply = await ask_head(network, peer.peer_id, invite.run)
                    if following is None and reply.run is not None:
                        following = Following.of(invite.run, reply.run)
                        folder.make()
                        write_atomic(folder.manifest, reply.run)
                    if following is not None and reply.checkpoint is not None:
                        following.offer(reply.checkpoint)
                        following.heard = True
                        return following
                except StorageError:
                    raise
                except NousError as error:
                    if isinstance(error, RemoteError) and error.code == Code.UNSUPPORTED_VERSION:
                        raise
                    problem = error
            await trio.sleep(ASK_AGAIN_SECONDS / 4 if not network.peers() else ASK_AGAIN_SECONDS)
    if following is not None:
        report(Note("Nobody of the run answers yet; what is stored here is used until they do.", "warning"))
        return following
    where = ", ".join(invite.addresses[:3])
    raise UnreachableRunError(
        f"Nobody who follows this run answers at {where}"
        + (f" ({problem})" if problem is not None else "")
        + ". Does the trainer run, and can that address be reached from here? If it moved, ask for a new "
        "invite."
    )


class TooLargeError(LocalError):
    """A checkpoint is not fetched for its size."""


class UnreachableRunError(LocalError):
    """No peer of the invite could be reached, or none follows the run."""


def refuse_too_large(manifest: RunManifest, memory: int, disk: int) -> None:
    """Raises LocalError, before anything is downloaded, where the model cannot fit what is allowed."""
    model = manifest.model
    needed = model.parameters * BYTES_OF[model.dtype] * 5 // 4 + RUNTIME_BYTES
    if needed > memory:
        raise LocalError(
            f"The model of this run needs about {needed / 2**30:.1f} GiB of memory and this node may use "
            f"{memory / 2**30:.1f} GiB. Allow more with --memory if the machine has it, or join another run."
        )
    refuse_disk(model.bytes, disk)


def refuse_disk(checkpoint: int, disk: int) -> None:
    """Raises TooLargeError where checkpoints of that many bytes do not fit on the disk allowed."""
    stored = HELD_CHECKPOINTS * checkpoint
    if stored > disk:
        raise TooLargeError(
            f"Checkpoints of this run need about {stored / 2**30:.1f} GiB of disk and this node may use "
            f"{disk / 2**30:.1f} GiB. Allow more with --disk if there is room, or join another run."
        )


def refuse_checkpoint(manifest: RunManifest, checkpoint: int, disk: int) -> None:
    """Raises TooLargeError where a checkpoint of that many bytes is more than the run's model can need, or
    does not fit on the disk allowed."""
    model = manifest.model
    most = max(model.bytes, model.parameters * BYTES_OF["float32"]) * 5 // 4 + BESIDE_WEIGHTS
    if checkpoint > most:
        raise TooLargeError(
            f"A checkpoint of {checkpoint / 2**30:.1f} GiB was published, but the model of this run can need "
            f"{most / 2**30:.1f} GiB at most. It is not fetched; tell the run's owner."
        )
    refuse_disk(checkpoint, disk)


def playable(
    manifest: RunManifest, only: Sequence[str], report: Report, access: Access = NONE
) -> frozenset[str]:
    """The run's environments that this node may and can run.

    Raises LocalError where there is none; says which are passed over for not being installed.
    """
    wanted = [entry for entry in manifest.environments if not only or entry.id in only]
    if not wanted:
        has = ", ".join(entry.id for entry in manifest.environments)
        raise LocalError(
            f"This run has none of the environments allowed by --env ({', '.join(only)}); it has {has}."
        )
    able: set[str] = set()
    problem: NousError | None = None
    for entry in wanted:
        try:
            check_entry(entry, access)
            able.add(entry.id)
        except NousError as error:
            problem = error
            report(Note(f"Tasks of {entry.id} are passed over: {error}", "warning"))
    close_all()  # whoever plays them has processes of its own
    if not able and problem is not None:
        raise LocalError(f"This node can run no environment of this run: {problem}")
    return frozenset(able)
