"""Clients under test for the live checks: our relay, whole, and such that break one rule."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from nous_node.node import live
from nous_node.node.conformance_table import Outcome, Sheet
from nous_node.node.create import folder_entries
from nous_node.node.events import Event
from nous_node.node.following import Following, now_ms
from nous_node.node.home import Home
from nous_node.node.joined import JoinedFolder
from nous_node.node.network import Network, NetworkConfig, open_network
from nous_node.node.relay import _Relay
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, checkpoint_hash
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import run_id

LOCAL = "/ip4/127.0.0.1/tcp/0"
AGO_MS = 3_600_000
"""Age of the checkpoint's envelope: expired long ago, as that of most checkpoints."""

Breaks = Callable[[Network], None]
"""Makes a client do something wrong."""


class Client:
    """A relay of ours, which holds a checkpoint."""

    def __init__(self, path: Path, base: RunFolder, root: Identity) -> None:
        manifest = msgspec.structs.replace(base.manifest, shards=2).to_bytes()
        self.run = run_id(manifest)
        self.seq = itertools.count()
        envelope = seal(root, Kind.RUN, self.run, manifest, seq=next(self.seq), ts=now_ms())
        files = folder_entries(base.checkpoint(0))
        content = CheckpointManifest(3, FULL, files, {"w": bytes(32)}, bytes(32), b"p" * 32).to_bytes()
        head = seal(root, Kind.CHECKPOINT, self.run, content, seq=next(self.seq), ts=now_ms() - AGO_MS)
        self.folder = JoinedFolder.of(Home.open(path / "home"), self.run)
        self.folder.make()
        shutil.copytree(base.checkpoint(0), self.folder.checkpoint(checkpoint_hash(content)))
        self.following = Following.of(self.run, envelope)
        self.following.offer(head)
        self.events: list[Event] = []

    @asynccontextmanager
    async def open(self, breaks: Breaks | None = None, **settings: Any) -> AsyncIterator[str]:
        """Its address."""
        stop = trio.Event()
        config = NetworkConfig(listen=(LOCAL,), **settings)
        async with open_network(b"c" * 32, config) as network, trio.open_nursery() as nursery:
            relay = _Relay(self.folder, network, self.following, 1 << 30, self.events.append)
            nursery.start_soon(relay.run, stop)
            while relay.holdings.newest is None:
                await relay.holdings.changed()
            if breaks is not None:
                breaks(network)
            yield network.addresses[0]
            stop.set()

    async def play(self, address: str, *only: str, checks: Collection[Any] = live.CHECKS) -> Sheet:
        return await live.played([address], self.run, only, checks=tuple(checks))


def failed(sheet: Sheet) -> set[str]:
    """Names of the checks that failed."""
    return {row.check for row in sheet.rows if row.outcome is Outcome.FAIL}


def notes(sheet: Sheet) -> dict[str, str]:
    return {row.check: f"{row.outcome.value}: {row.note}" for row in sheet.rows}
