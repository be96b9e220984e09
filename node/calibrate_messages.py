"""What `nous-node calibrate` and its judging process say to each other. Both are ours and of one version."""

from __future__ import annotations

import msgspec

from nous_node.envs.access import NONE, Access

from .calibrate_figures import Observation
from .learner_messages import Candidate


class Begin(msgspec.Struct, tag=True):
    """Take the run in `folder`, with the weights of its base in the dtype of the verifier."""

    folder: str
    checkpoint: str
    threads: int
    access: Access = NONE
    """What environments may do here."""


class Judge(msgspec.Struct, tag=True):
    """Replay and recompute these."""

    groups: list[Candidate]
    single: bool = False
    """Whether each trajectory is recomputed by itself, without a batch."""
    strange: bool = False
    """Whether the distances are to be those of other sampler keys: what a group shows that is not honest."""


class Begun(msgspec.Struct, tag=True):
    pass


class Seen(msgspec.Struct, tag=True):
    groups: list[Observation]


class Unfit(msgspec.Struct, tag=True):
    """These groups cannot be judged at all; the sentence says why."""

    text: str


ToJudge = Begin | Judge
FromJudge = Begun | Seen | Unfit
