"""The parts of a trainer that publishing needs, with versions as a learner would leave them."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nous_node.node.blobs import BlobIndex
from nous_node.node.create import folder_entries
from nous_node.node.following import Following
from nous_node.node.learner_messages import Updated
from nous_node.node.publishing import Publisher
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal
from nous_node.protocol.identity import Identity

WEIGHTS = "model.safetensors"


class Press:
    """Takes up a run; `said` is what it says of it."""

    def __init__(self, folder: RunFolder, root: Identity, *, mend: bool = True, **choices: Any) -> None:
        self.folder, self.root = folder, root
        self.journal = Journal.open(folder.journal)
        self.following = Following.of(folder.run, folder.envelope)
        self.damaged: list[Path] = []
        self.index = BlobIndex(self.damaged.append)
        entropy = random.Random(0).randbytes
        self.publisher = Publisher(root, folder, self.journal, self.following, self.index, entropy, **choices)
        self.said = self.publisher.resume(mend=mend)

    def update(self, used: list[bytes] | None = None, delta: int | None = None) -> int:
        """A version with weights of its own, and with a delta of so many bytes where one is given."""
        version = self.publisher.head.version + 1
        made = self.made(version, used or [], delta)
        assert self.publisher.update(made).version == version
        return version

    def made(self, version: int, used: list[bytes], delta: int | None = None) -> Updated:
        """What the learner says of a version that it has written, which is not published yet."""
        place = shutil.copytree(self.folder.checkpoint(0), self.folder.checkpoint(version))
        data = (place / WEIGHTS).read_bytes()
        (place / WEIGHTS).write_bytes(data[:-2] + version.to_bytes(2))
        self.folder.optimizer(version).mkdir(parents=True)
        beside = self.folder.deltas(version)
        if delta is not None:
            beside.mkdir(parents=True)
            (beside / WEIGHTS).write_bytes(random.Random(version).randbytes(delta))
        return Updated(
            version=version,
            folder=str(place),
            used=used,
            aged=0,
            files=folder_entries(place),
            tensors={"w": bytes(32)},
            levels={"sort-digits": version},
            stats={"reward": 0.5},
            eval={"greedy": 0.25},
            deltas=None if delta is None else folder_entries(beside),
        )

    def harm(self, version: int) -> None:
        os.truncate(self.folder.checkpoint(version) / WEIGHTS, 1000)

    def folders(self, kind: str = "checkpoints") -> list[str]:
        return sorted(path.name for path in (self.folder.path / kind).iterdir())


Start = Callable[..., Press]
