"""What a volunteer's node and its worker process say to each other. Both are ours and of one version."""

from __future__ import annotations

import msgspec

from nous_node.envs.access import NONE, Access

ENGINE = "nous-torch"
"""What samples in the worker, as rollouts name it."""


FIRST_GROUPS = 4
"""Groups of each new worker process that are verified here before they are published: one already shows
another dtype or a wrong kernel; a batch of two or three shows padding."""


class FirstGroups(msgspec.Struct):
    """How many of the first groups of a process are verified before it hands them out, and what they are
    derived from."""

    groups: int
    run: bytes
    key: bytes
    beacon: bytes
    """Of the checkpoint."""


class Load(msgspec.Struct, tag=True):
    """Take the policy in `folder` for all orders that follow."""

    folder: str
    checkpoint: bytes
    device: str
    threads: int
    manifest: bytes
    """The run manifest: sampling rules, dtype, group size, environments."""
    memory: int = 0
    """Bytes that the worker may take; 0: no limit."""
    first: FirstGroups | None = None
    """None: groups are not verified here."""
    tensors: dict[str, bytes] = {}
    """SHA-256 of each tensor, from the checkpoint's manifest; empty: nothing is compared."""
    access: Access = NONE
    """What environments may do here."""


class Prepare(msgspec.Struct, tag=True):
    """Read the weights in `folder`, beside whatever is being done, for a Load that may follow. There is no
    answer; a later Prepare takes the place of an earlier one."""

    folder: str
    checkpoint: bytes
    tensors: dict[str, bytes]


class Order(msgspec.Struct):
    """One assigned task."""

    counter: int
    seed: bytes
    """Of the assignment: environment, task seed and sampler keys follow from it."""
    levels: dict[str, int]
    """Curriculum level of each environment, from the checkpoint manifest."""


class Generate(msgspec.Struct, tag=True):
    """Work on all orders at once and answer with Made."""

    orders: list[Order]


class Loaded(msgspec.Struct, tag=True):
    engine_name: str
    engine_version: str
    dtype: str
    device: str
    prepared: bool = False
    """Whether the weights were read beforehand."""
    crowded: bool = False
    """Whether there is no memory for reading them beforehand."""


class Progress(msgspec.Struct, tag=True):
    """A sign of life: tokens sampled since the last one."""

    tokens: int


class Checking(msgspec.Struct, tag=True):
    """The first groups are made and are verified now; this may take a while."""


class Checked(msgspec.Struct, tag=True):
    """What there is to tell of that, in one sentence."""

    text: str
    good: bool
    """False where they could not be verified, or only just pass."""


class Unfit(msgspec.Struct, tag=True):
    """A trainer would refuse what is made here, and the sentence says why: there are no groups."""

    text: str


class Group(msgspec.Struct):
    """One order's outcome: the body of a rollout envelope, or why there is none."""

    counter: int
    body: bytes
    tokens: int
    failure: str = ""
    environment: str = ""
    """Empty where it failed and no environment is to blame."""


class Made(msgspec.Struct, tag=True):
    groups: list[Group]
    seconds: float = 0.0
    """Wall time that they took."""
    environments: float = 0.0
    """Of it, what environments took: prompts, scores, sandbox; the engine had nothing to do then."""


class Failed(msgspec.Struct, tag=True):
    """The order as a whole could not be carried out; the sentence says why. The worker lives on."""

    text: str


ToWorker = Load | Prepare | Generate
FromWorker = Loaded | Progress | Checking | Checked | Unfit | Made | Failed
