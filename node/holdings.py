"""The checkpoints that a volunteer or relay holds: the newest is brought here and served, old ones go.

    head -> manifests of its chain -> plan -> deltas, full one -> HEX.part -> verified -> HEX -> `newest`

Each loop of `run` is one task. Whatever way a checkpoint takes, it ends with the download of its own files:
chunks that are right already are kept, and only what has all hashes is renamed, which makes it visible in one
step. So what a delta could not make is fetched, and a node that was killed goes on where it was.
Spec: `specs/09-checkpoints.md` [CKP-11] [CKP-15].
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import trio

from nous_node.protocol.checkpoints import CheckpointManifest
from nous_node.protocol.errors import NousError, RemoteError

from .blobs import BlobIndex, FetchError, verify_folder
from .chain_manifests import fetch_chain
from .config import DEFAULT_NEIGHBOURS
from .equivocation import halt_on_conflict
from .events import Note, Report
from .fetch_plan import Plan, Target, is_left_for, needed_manifests, plans
from .following import Following, Head, ask_head
from .held import Held
from .home import UNDER_WAY, StorageError, disk_errors, write_atomic
from .joined import JoinedFolder, TooLargeError, refuse_checkpoint
from .keeping import FILES, Use, kept, total
from .making import adopt, make_files, recipes
from .neighbours import Neighbours
from .network import Network
from .swarm import Swarm

HEAD_SECONDS = 15.0
"""Between questions for a newer head, in case gossip lost one or the network was cut."""

RETRY_SECONDS = 1.0

DELTA_TRIES = 3
"""Downloads of deltas before the files are fetched instead, which are a hundred times more: right after a
version was published few have them."""


class Holdings:
    """`newest` is complete on disk; `changed()` waits for another one."""

    def __init__(
        self,
        network: Network,
        following: Following,
        folder: JoinedFolder,
        disk: int,
        report: Report,
        keep: int | None = None,
        neighbours: int = DEFAULT_NEIGHBOURS,
    ) -> None:
        """`disk`: bytes that checkpoints may take. `keep`: checkpoints to hold at least while they fit; None:
        what the run needs. `neighbours`: see `config.Settings`."""
        self.index = BlobIndex(self._tell_damage)
        self.swarm = Swarm(network, following.run, self.index, introductions=Neighbours(network, neighbours))
        self.newest: Head | None = None
        self.in_use: Head | None = None
        """What the worker reads or is about to: a cold start takes it seconds, in which many versions may
        come and go."""
        self._network, self._following, self._folder, self._report = network, following, folder, report
        self._disk, self._keep = disk, keep or 0
        self._held = Held(folder, self.index, self.swarm)
        self._before: Head | None = None
        self._changed = trio.Event()
        self._doubted: Head | None = None
        self._waiting = trio.CancelScope()

    def doubt(self, head: Head) -> None:
        """It could not be loaded. The newest is verified once more then, and what is damaged fetched again:
        `newest` is another object afterwards."""
        if head is self.newest:
            self._doubted = head
            self._waiting.cancel()

    async def changed(self) -> None:
        await self._changed.wait()

    def _tell_damage(self, file: Path) -> None:
        self._report(
            Note(f"{file} is no longer what was fetched, and is served to nobody: check the disk.", "warning")
        )

    def folder(self, head: Head) -> Path:
        return self._folder.checkpoint(head.hash)

    async def run(self) -> None:
        """All of it, until it is cancelled. Raises as `fetch_loop` does, and EquivocationError."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(halt_on_conflict, self._following, self._folder.path)
            for loop in (self.head_loop, self.memory_loop, self.fetch_loop, self.swarm.run):
                nursery.start_soon(loop)

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

    async def memory_loop(self) -> None:
        """Keeps the newest head over restarts, so that an older one, or another of its version, is known as
        such then. [CKP-9] Raises StorageError."""
        version = -1
        while True:
            head = await self._following.newer_than(version)
            await trio.to_thread.run_sync(write_atomic, self._folder.head, head.envelope)
            version = head.version

    async def fetch_loop(self) -> None:
        """Keeps the newest checkpoint on disk; versions that came and went meanwhile are skipped, and so are
        those that are too large, unless there is nothing else (TooLargeError). Where nobody has the newest,
        whose trainer may be gone, the one before it has to do that somebody has.

        Raises StorageError where the disk refuses.
        """
        self._held.scan()
        version = -1
        while True:
            head = await self._wanted(version)
            doubted, self._doubted = self._doubted, None
            try:
                if head is doubted and await self._is_whole(head):
                    continue
                refuse_checkpoint(self._following.manifest, head.manifest.size, self._disk)
                head = await self._fetch_latest(head)
            except TooLargeError as error:
                if self.newest is None:
                    raise
                self._report(Note(str(error), "warning"))
                version = head.version
                continue
            except FetchError as error:
                self._report(Note(str(error), "warning"))
                await self._fetch_older(head)
                await trio.sleep(RETRY_SECONDS)
                self._doubted = doubted
                continue
            version = head.version
            self._show(head)

    async def _wanted(self, version: int) -> Head:
        """One above `version` as soon as there is one, or the newest here where it is doubted."""
        with trio.CancelScope() as self._waiting:
            if self._doubted is not None:
                self._waiting.cancel()
            return await self._following.newer_than(version)
        assert self._doubted is not None  # `doubt` cancels
        return self._doubted

    def _show(self, head: Head) -> None:
        """It is complete, and newer than what was, or mended."""
        if head is self.newest:
            self.newest = replace(head)
        else:
            self._before, self.newest = self.newest, head
        self._make_room(self._disk)
        self._changed.set()
        self._changed = trio.Event()

    async def _fetch_older(self, newest: Head) -> None:
        """Brings what may stand in for a head that nobody has, if there is something newer than what is here
        and rollouts of it would not be stale."""
        here = -1 if self.newest is None else self.newest.version
        oldest = max(here + 1, newest.version - self._following.manifest.staleness)
        for head in list(self._following.recent):
            if oldest <= head.version < newest.version:
                try:
                    refuse_checkpoint(self._following.manifest, head.manifest.size, self._disk)
                    await self._fetch(head)
                except (FetchError, TooLargeError):
                    continue
                self._show(head)
                return

    # --- one checkpoint --------------------------------------------------------------------------

    async def _fetch_latest(self, head: Head) -> Head:
        """Brings the head here, or a newer one for which it was given up."""
        again = False
        while True:
            newer = await self._fetch_unless_left(head, again=again)
            if newer is None:
                return head
            head, again = newer, True

    async def _fetch_unless_left(self, head: Head, *, again: bool) -> Head | None:
        """None once it is here, else the newer head."""
        left: Head | None = None
        problem: NousError | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal left
                newer = head
                while left is None:
                    newer = await self._following.newer_than(newer.version)
                    if self._leaves(head, newer, again=again):
                        left = newer
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                await self._fetch(head)
                left = None
            except NousError as error:  # raised below: the nursery would wrap it
                problem = error
            nursery.cancel_scope.cancel()
        if left is None and problem is not None:
            raise problem
        return left

    def _leaves(self, head: Head, newer: Head, *, again: bool) -> bool:
        staleness = self._following.manifest.staleness
        current = Target(head.hash, head.manifest)
        if not is_left_for(current, newer.manifest, self._done(head.manifest), staleness, again=again):
            return False
        try:
            refuse_checkpoint(self._following.manifest, newer.manifest.size, self._disk)
        except TooLargeError:
            return False
        return True

    def _done(self, manifest: CheckpointManifest) -> float:
        """Share of its chunks that are here."""
        chunks = [digest for entry in manifest.files for digest in entry.hashes()]
        return sum(self._has(digest) for digest in chunks) / max(1, len(chunks))

    def _has(self, digest: bytes) -> bool:
        return self.index.place(digest) is not None

    async def _fetch(self, head: Head) -> None:
        """Raises FetchError, or StorageError."""
        target = Target(head.hash, head.manifest)
        await trio.to_thread.run_sync(self._held.add_manifest, head.hash, head.content, head.manifest)
        if await self._is_whole(head):
            return
        tried = await self._plans(target)
        for plan in tried:
            try:
                await self._carry_out(target, plan)
                return
            except StorageError:
                raise
            except NousError as error:
                alone = isinstance(error, FetchError) and not self._network.peers()
                if plan is tried[-1] or alone:  # deltas can do once somebody is there
                    raise FetchError(str(error)) from error
                problem = f"Version {head.version} is not made of deltas, its files are fetched: {error}"
                self._report(Note(problem, "warning"))

    async def _is_whole(self, head: Head) -> bool:
        """Whether it lies here from an earlier start."""
        folder = self.folder(head)
        if not folder.is_dir():
            return False
        try:
            await trio.to_thread.run_sync(verify_folder, folder, head.manifest.files)
        except NousError:
            self._report(Note("A stored checkpoint is damaged; what is broken is fetched again.", "warning"))
            self._held.drop_files(head.hash)
            with disk_errors(folder):
                await trio.to_thread.run_sync(_set_aside, folder)
            return False
        self._held.add_files(head.hash)
        return True

    async def _plans(self, target: Target) -> list[Plan]:
        """Those that fit the disk, the best first; never none. Fetches manifests of the chain."""
        chain = await self._learn_chain(target)
        files = {digest: self._held.manifests[digest] for digest in self._held.files}
        found = plans(target, files, chain, self._held.deltas, self._has)
        return [plan for plan in found[:-1] if self._fits(plan)] + found[-1:]

    async def _learn_chain(self, target: Target) -> dict[bytes, CheckpointManifest]:
        """Those manifests that are needed to plan, fetched and in their places; none where one of them cannot
        be had, or the chain is none. [CKP-14]"""
        needed = needed_manifests(target, self._held.files)
        try:
            return await fetch_chain(self.swarm, target, needed, self._held.add_manifest)
        except FetchError:
            return {}
        except RemoteError as error:
            self._report(Note(f"A chain of deltas is not used: {error}", "warning"))
            return {}

    def _fits(self, plan: Plan) -> bool:
        """Whether there is room for it beside what stays whatever the room."""
        always = self._always() | ({plan.base.hash} if plan.base is not None else set())
        stay = [thing for thing in self._held.things() if thing.what == FILES and thing.checkpoint in always]
        return total(stay) + plan.scratch <= self._disk

    async def _carry_out(self, target: Target, plan: Plan) -> None:
        """Raises FetchError, RemoteError where deltas do not make what they should, or StorageError."""
        await self._adopt(target, plan)
        self._make_room(self._disk - plan.scratch, target, plan)
        if plan.base is not None:
            await self._bring_files(plan.base)
            for step in plan.steps:
                await self._bring_deltas(step)
        files = {digest: self._held.manifests[digest] for digest in self._held.files}
        made_of = recipes(target.manifest, plan, files)
        try:
            with disk_errors(self._folder.checkpoints):
                await trio.to_thread.run_sync(make_files, self._folder, target, made_of)
        except RemoteError:
            if plan.base is not None:
                await self._drop_damaged(plan)
                raise
        await self._bring_files(target)

    async def _adopt(self, target: Target, plan: Plan) -> None:
        """Takes over what was left of a download that was given up."""
        fetched = [target.hash]
        if plan.base is not None and plan.base.hash not in self._held.files:
            fetched.insert(0, plan.base.hash)
        with disk_errors(self._folder.checkpoints):
            left = await trio.to_thread.run_sync(adopt, self._folder, fetched[0], fetched)
        if left is not None:
            self.index.drop(left)

    async def _bring_files(self, target: Target) -> None:
        if target.hash not in self._held.files:
            folder = self._folder.checkpoint(target.hash)
            await self.swarm.fetch(target.hash, target.manifest, target.manifest.files, folder)
            self._held.add_files(target.hash)

    async def _bring_deltas(self, step: Target) -> None:
        if step.hash in self._held.deltas or not step.manifest.deltas:
            return
        folder = self._folder.deltas(step.hash)
        for more in reversed(range(DELTA_TRIES)):
            try:
                await self.swarm.fetch(step.hash, step.manifest, step.manifest.deltas, folder)
                break
            except FetchError:
                if not more or not self._network.peers():
                    raise
                await trio.sleep(RETRY_SECONDS)
        self._held.add_deltas(step.hash)

    async def _drop_damaged(self, plan: Plan) -> None:
        """Deltas that are no longer what was fetched are fetched again the next time."""
        for step in plan.steps:
            folder = self._folder.deltas(step.hash)
            try:
                await trio.to_thread.run_sync(verify_folder, folder, step.manifest.deltas)
            except RemoteError:
                self._held.drop_deltas(step.hash)
                shutil.rmtree(folder, ignore_errors=True)

    # --- what stays ------------------------------------------------------------------------------

    def _always(self) -> set[bytes]:
        return {head.hash for head in (self.newest, self.in_use) if head is not None}

    def _make_room(self, room: int, target: Target | None = None, plan: Plan | None = None) -> None:
        """Deletes what does not stay in `room` bytes while `target` is brought here. Raises StorageError."""
        newest, always = self.newest, self._always()
        under_way = [] if target is None else [target.hash]
        if plan is not None and plan.base is not None:
            always.add(plan.base.hash)
            under_way += [plan.base.hash, *(step.hash for step in plan.steps)]
        use = Use(
            newest=None if newest is None else newest.hash,
            before=self._last_here() if self._before is None else self._before.hash,
            chain=() if newest is None else newest.manifest.chain,
            always=always,
        )
        stay = kept(self._held.things(), use, self._keep, room)
        self._held.keep(stay, [*use.chain, *(() if target is None else target.manifest.chain)], under_way)

    def _last_here(self) -> bytes | None:
        """What an earlier start of this node had as its newest."""
        here = {self._held.manifests[digest].version: digest for digest in self._held.files}
        return here[max(here)] if here else None


def _set_aside(folder: Path) -> None:
    """Makes a damaged checkpoint the beginning of its own download: what is whole in it stays."""
    part = folder.with_name(folder.name + UNDER_WAY)
    shutil.rmtree(part, ignore_errors=True)
    folder.rename(part)
