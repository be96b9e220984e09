"""A run's folder with a journal as a trainer would have made it, for audits: honest groups, a refused one,
one without a verdict, and two versions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from nous_node.node.create import base_tensors, folder_entries
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal, StoredCheckpoint, StoredGroup
from nous_node.node.worker_messages import Generate, Load, Order
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, checkpoint_hash
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipt, accepted, refused
from nous_node.protocol.rollouts import RolloutGroup, trained_tokens
from nous_node.protocol.tasks import task_seed

VOLUNTEER = Identity.from_seed(b"v" * 32)
NOW = 1_750_000_000_000
HONEST = 3
"""Accepted groups of each version."""


@dataclass
class Record:
    """A run's folder with a journal: HONEST accepted groups of version 0, one refused for its reward and one
    pending, and HONEST accepted ones of version 1, which has other weights."""

    folder: RunFolder
    envelopes: list[bytes] = field(default_factory=list)
    """In their order, as gossiped: each version, then its groups."""
    receipts: list[Receipt] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder.path

    def change(self, statement: str, *values: Any) -> None:
        """What somebody does to a journal with an editor."""
        with closing(sqlite3.connect(self.folder.journal)) as connection, connection:
            assert connection.execute(statement, values).rowcount > 0

    def rollouts(self) -> list[bytes]:
        return [data for data in self.envelopes if unseal(data, MAX_MANIFEST).head.kind == Kind.ROLLOUT]


def edited_reward(body: bytes) -> bytes:
    group = RolloutGroup.from_bytes(body)
    first, *others = group.trajectories
    false = msgspec.structs.replace(first, reward=first.reward + 0.125)
    return msgspec.structs.replace(group, trajectories=[false, *others]).to_bytes()


class Recorder:
    """Makes a Record as a trainer would have."""

    def __init__(self, path: Path, root: Identity, worked: Callable[..., list[Any]]) -> None:
        self.record, self.root, self.worked = Record(RunFolder.open(path)), root, worked
        self.seq = 0

    def seal(self, identity: Identity, kind: Kind, body: bytes) -> bytes:
        self.seq += 1
        run = self.record.folder.run
        return seal(identity, kind, run, body, seq=self.seq, ts=NOW, limit=MAX_MANIFEST)

    def publish(self, journal: Journal, version: int, parent: bytes | None) -> tuple[bytes, bytes]:
        folder = self.record.folder.checkpoint(version)
        beacon = bytes([version + 1]) * 32
        manifest = CheckpointManifest(
            version, FULL, folder_entries(folder), base_tensors(folder), beacon, parent
        )
        data, digest = self.seal(self.root, Kind.CHECKPOINT, manifest.to_bytes()), b""
        digest = checkpoint_hash(manifest.to_bytes())
        place = f"checkpoints/{version:06d}"
        journal.publish(StoredCheckpoint(version, digest, data, place, NOW, {}, {}), [])
        self.record.envelopes.append(data)
        return digest, beacon

    def groups(self, version: int, digest: bytes, beacon: bytes, count: int) -> list[StoredGroup]:
        folder = self.record.folder
        place = str(folder.checkpoint(version))
        orders = [
            Order(counter, task_seed(folder.run, digest, beacon, VOLUNTEER.key, counter), {})
            for counter in range(count)
        ]
        load = Load(place, digest, "cpu", 1, folder.manifest.to_bytes())
        made = self.worked(load, Generate(orders))[-1].groups
        stored = []
        for number, group in enumerate(made):
            body = edited_reward(group.body) if number == HONEST else group.body
            data = self.seal(VOLUNTEER, Kind.ROLLOUT, body)
            envelope = unseal(data)
            place_of = (envelope.id, VOLUNTEER.key, digest, version, group.counter)
            stored.append(StoredGroup(*place_of, bytes(31) + bytes([self.seq]), NOW, data))
            self.record.envelopes.append(data)
        return stored

    def decide(self, journal: Journal, groups: Sequence[StoredGroup]) -> None:
        for number, group in enumerate(groups):
            if number < HONEST:
                body = RolloutGroup.from_bytes(unseal(group.envelope).content())
                credit = sum(map(trained_tokens, body.trajectories))
                self.record.receipts.append(accepted(group.id, group.key, credit))
            elif number == HONEST:
                error = RemoteError(Code.REWARD_MISMATCH, "", measured=0.125, threshold=1e-6)
                self.record.receipts.append(refused(group.id, group.key, error))
        journal.decide(self.record.receipts, NOW)

    def make(self) -> Record:
        """All of it."""
        with Journal.open(self.record.folder.journal) as journal:
            journal.hear(VOLUNTEER.key, "test/1", NOW, -1)
            parent = None
            for version, count in ((0, HONEST + 2), (1, HONEST)):
                parent, beacon = self.publish(journal, version, parent)
                groups = self.groups(version, parent, beacon, count)
                assert journal.add_many(groups) == [None] * count
                self.decide(journal, groups)
        return self.record


def outcomes(groups: Sequence[dict[str, Any]]) -> list[str]:
    return [group["outcome"] for group in groups]


AS_RECORDED = ["confirmed"] * (HONEST + 1) + ["unjudged"] + ["confirmed"] * HONEST
"""Outcomes of its groups in their order."""
