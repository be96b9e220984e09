"""The checkpoints that a volunteer or relay holds: the newest is fetched and served, old ones go."""

from __future__ import annotations

import shutil
from pathlib import Path

import trio

from nous_node.protocol.errors import NousError

from .blobs import BlobIndex, FetchError, verify_folder
from .events import Note, Report
from .following import Following, Head, ask_head
from .home import disk_errors
from .joined import JoinedFolder, TooLargeError, refuse_checkpoint
from .network import Network
from .swarm import Swarm

HEAD_SECONDS = 15.0
"""Between questions for a newer head, in case gossip lost one or the network was cut."""

RETRY_SECONDS = 1.0


class Holdings:
    """`newest` is complete on disk; `changed()` waits for another one."""

    def __init__(
        self, network: Network, following: Following, folder: JoinedFolder, disk: int, report: Report
    ) -> None:
        """`disk`: bytes that checkpoints may take."""
        self.index = BlobIndex(self._tell_damage)
        self.swarm = Swarm(network, following.run, self.index)
        self.newest: Head | None = None
        self.in_use: Head | None = None
        """What the worker reads or is about to: a cold start takes it seconds, in which many versions may
        come and go."""
        self._network, self._following, self._folder, self._report = network, following, folder, report
        self._disk = disk
        self._before: Head | None = None
        self._changed = trio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    def _tell_damage(self, file: Path) -> None:
        self._report(
            Note(f"{file} is no longer what was fetched, and is served to nobody: check the disk.", "warning")
        )

    def folder(self, head: Head) -> Path:
        return self._folder.checkpoint(head.hash)

    async def head_loop(self) -> None:
        """Asks one peer after the other for a newer head."""
        while True:
            await trio.sleep(HEAD_SECONDS)
            for peer in self._network.peers():
                try:
                    reply = await ask_head(self._network, peer.peer_id, self._following.run)
                    if reply.checkpoint is not None:
                        self._following.offer(reply.checkpoint)
                except NousError:
                    continue  # another peer is asked; a lost connection is dialled again elsewhere

    async def fetch_loop(self) -> None:
        """Keeps the newest checkpoint on disk; versions that came and went meanwhile are skipped, and so are
        those that are too large, unless there is nothing else (TooLargeError).

        Raises StorageError where the disk refuses.
        """
        version = -1
        while True:
            head = await self._following.newer_than(version)
            try:
                refuse_checkpoint(self._following.manifest, head.manifest.size, self._disk)
                await self._fetch(head)
            except TooLargeError as error:
                if self.newest is None:
                    raise
                self._report(Note(str(error), "warning"))
                version = head.version
                continue
            except FetchError as error:
                self._report(Note(str(error), "warning"))
                await trio.sleep(RETRY_SECONDS)
                continue
            version = head.version
            self._before, self.newest = self.newest, head
            self.swarm.hold(head.hash, head.manifest, files=True, deltas=False)
            self._drop_old()
            self._changed.set()
            self._changed = trio.Event()

    async def _fetch(self, head: Head) -> None:
        folder, files = self.folder(head), head.manifest.files
        if folder.is_dir():
            try:
                await trio.to_thread.run_sync(verify_folder, folder, files)
                self.index.add(folder, files)
                return
            except NousError:
                self._report(
                    Note("A stored checkpoint is damaged; what is broken is fetched again.", "warning")
                )
                with disk_errors(folder):
                    await trio.to_thread.run_sync(_set_aside, folder)
        await self.swarm.fetch(head.hash, head.manifest, files, folder)

    def _drop_old(self) -> None:
        """Keeps the newest, the one before, which others may still fetch, and what is in use here."""
        kept = (self.newest, self._before, self.in_use)
        keep = {self.folder(head) for head in kept if head is not None}
        self.swarm.retain({head.hash for head in kept if head is not None})
        with disk_errors(self._folder.checkpoints):
            folders = list(self._folder.checkpoints.iterdir())
        for folder in folders:
            if folder not in keep:
                self.index.drop(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _set_aside(folder: Path) -> None:
    """Makes a damaged checkpoint the beginning of its own download: what is whole in it stays."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    folder.rename(part)
