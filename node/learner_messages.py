"""What a trainer's node and its learner process say to each other. Both are ours and of one version."""

from __future__ import annotations

import msgspec

from nous_node.envs.access import NONE, Access
from nous_node.protocol.checkpoints import FileEntry
from nous_node.protocol.receipts import Receipt, State

from .statistics import Drift

BASELINE = "baseline/"
"""Before an environment's id: its running mean reward, among the figures of each checkpoint, so that it
survives the learner."""


class Open(msgspec.Struct, tag=True):
    """Start at a published checkpoint."""

    folder: str
    """The run's folder."""
    version: int
    checkpoint: str
    """Folder of its checkpoint."""
    folders: dict[int, str]
    """Folders of the versions that may still be verified against, this one included."""
    levels: dict[str, int]
    device: str
    threads: int
    baselines: dict[str, float] = {}
    """Running mean reward of each environment, for advantages with a baseline."""
    evaluate: bool = False
    """Whether to measure its held-out accuracy first."""
    access: Access = NONE
    """What environments may do here."""


class Candidate(msgspec.Struct):
    """A journalled group."""

    id: bytes
    body: bytes
    """The envelope's content: a RolloutGroup."""
    key: bytes
    version: int
    """Of its checkpoint."""
    checkpoint: bytes
    beacon: bytes
    levels: dict[str, int]
    accepted: bool
    """Judged before (by a learner that is gone): it goes into the next batch unverified."""
    state: State = "probation"
    """How its key stands. [REP-1]"""
    drift: Drift = Drift()
    """Sums of its key, where the learner has none."""
    audit: bool = True
    """Whether its tokens are recomputed; drawn when it had arrived. [VER-13]"""


class Verify(msgspec.Struct, tag=True):
    """Judge these. Nothing is learnt from them before the answer to their verdicts."""

    groups: list[Candidate]


class Proceed(msgspec.Struct, tag=True):
    """The verdicts are journalled: train, as often as there are enough groups. They may have cost keys their
    standing, from whose groups nothing is to be learnt. [REP-2]"""

    distrusted: list[bytes] = []
    """Keys whose groups that wait for an update are not to be trained on any more."""


class Published(msgspec.Struct, tag=True):
    """A version was published: by an Updated, or the same weights again under a new beacon."""

    version: int


class Opened(msgspec.Struct, tag=True):
    greedy: float | None
    """Held-out accuracy of the checkpoint, where it was measured."""
    note: str = ""
    """What is not as it was left, for people."""


class Judged(msgspec.Struct):
    """What became of a candidate."""

    receipt: Receipt
    text: str = ""
    """Why it is refused, for people."""
    reward: float = 0.0
    """Mean over the group, recomputed."""
    drift: Drift | None = None
    """Sums of its key with this group, where it was audited."""


class Verdicts(msgspec.Struct, tag=True):
    """Of a Verify; a Proceed is to follow."""

    groups: list[Judged]


class Updated(msgspec.Struct, tag=True):
    """A new checkpoint stands in its folder, not yet published."""

    version: int
    folder: str
    used: list[bytes]
    """Groups that went into it, or were too old to: they are done with."""
    aged: int
    """How many of `used` were too old to train on."""
    files: list[FileEntry]
    tensors: dict[str, bytes]
    levels: dict[str, int]
    stats: dict[str, float]
    eval: dict[str, float]
    good: int = 0
    """Version that a collapse would be rolled back to: its folders are kept."""
    rolled_back: int | None = None
    """The version whose weights these are again, because the policy had collapsed. [VER-15]"""
    deltas: list[FileEntry] | None = None
    """What makes its tensors from those of the version before, by the paths of `files`; None where that does
    not pay, or was not tried. They stand in the folder of the version's deltas."""
    note: str = ""
    """What is not as it should be with it, for people."""


class Rested(msgspec.Struct, tag=True):
    """The learner has done all that the last Proceed gave it to do."""

    held: int
    """Accepted groups that wait for the next update."""


class Broken(msgspec.Struct, tag=True):
    """The learner cannot go on; the sentence says why."""

    text: str
    storage: bool = False
    """Whether the disk is the reason."""


ToLearner = Open | Verify | Proceed | Published
FromLearner = Opened | Verdicts | Updated | Rested | Broken
