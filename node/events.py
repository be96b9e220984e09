"""What a role tells whoever watches it: the live view, a log, `--json`, or the demo's parent process.

Each event is one JSON line under `--json`, tagged by `event`. Snapshots (`*Status`) say how things stand
and supersede each other; notes and version reports happen once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec


class _Event(msgspec.Struct, frozen=True, tag_field="event", omit_defaults=False):
    pass


class Note(_Event, frozen=True, tag="note"):
    """One sentence for a person."""

    text: str
    level: Literal["info", "warning", "error"] = "info"


class RunReady(_Event, frozen=True, tag="run"):
    """A trainer is reachable."""

    run: str
    """Run id, hex."""
    name: str
    invite: str
    addresses: list[str]


class VolunteerStatus(_Event, frozen=True, tag="volunteer"):
    """How a volunteer stands."""

    run: str = ""
    name: str = ""
    version: int = -1
    """Version of the checkpoint it generates with; -1 before the first."""
    checkpoint: str = ""
    """Its hash, hex."""
    peers: int = 0
    doing: str = "starting"
    tokens_per_second: float = 0.0
    """Sampled tokens, over the last ten seconds."""
    generated_tokens: int = 0
    groups_sent: int = 0
    groups_waiting: int = 0
    """Sent or to be sent, and not yet acknowledged by a receipt."""
    groups_given_up: int = 0
    """Lost with a worker that crashed, or expired before a receipt came."""
    accepted: int = 0
    refused: dict[str, int] = {}
    """Groups by code."""
    credit: int = 0
    """Trained tokens credited by receipts."""
    state: str = ""
    """How the trainer treats this key, by its last word; empty before the first."""
    rank: int = 0
    """Place by credit among the keys of the run, 1 for the most; 0 without any."""
    of: int = 0
    """Keys with a rank."""
    generating_share: float = 0.0
    """Share of wall time since the first batch in which the engine made groups or verified its own."""
    spent: dict[str, float] = {}
    """Shares of it that went elsewhere: `loading` a version, `waiting` for receipts, `sending`."""
    working_seconds: float = 0.0
    """In which the worker made groups."""
    environment_seconds: float = 0.0
    """Of them, those that environments took: prompts, scores and their sandbox."""
    network: dict[str, int] = {}
    """What was dropped or survived, by name, where there was any: `NetworkStats.losses`."""
    seconds: float = 0.0


class VersionReport(_Event, frozen=True, tag="version"):
    """A checkpoint was published."""

    version: int
    checkpoint: str
    reward: float = 0.0
    """Mean reward of the groups that made it."""
    correct: float = 0.0
    """Share of sampled trajectories with the full reward component `correct`, where there is one."""
    greedy: float | None = None
    """Held-out greedy accuracy, where it was measured for this version."""
    staleness: float = 0.0
    """Mean age of its groups in versions."""
    groups: int = 0
    zero_variance: int = 0
    """Groups that taught nothing because all rewards were equal."""
    tokens: int = 0
    """Trained tokens."""
    loss: float = 0.0
    kl: float = 0.0
    grad_norm: float = 0.0
    rolled_back: int | None = None
    """The version whose weights these are again, because the policy had collapsed."""
    seconds: float = 0.0
    """Since the trainer started."""


class TrainerStatus(_Event, frozen=True, tag="trainer"):
    """How a trainer stands."""

    run: str = ""
    name: str = ""
    version: int = -1
    checkpoint: str = ""
    volunteers: int = 0
    """Keys heard of in the last minute."""
    peers: int = 0
    doing: str = "starting"
    reward: float = 0.0
    correct: float = 0.0
    greedy: float | None = None
    greedy_base: float | None = None
    staleness: float = 0.0
    tokens_verified: int = 0
    tokens_trained: int = 0
    accepted: int = 0
    refused: dict[str, int] = {}
    waiting: int = 0
    """Journalled groups that the learner has not judged yet."""
    keys: dict[str, int] = {}
    """Keys ever heard of by state; those without any are left out. [REP-1]"""
    rollbacks: int = 0
    """Versions of this session that had collapsed and were rolled back."""
    groups_per_second: float = 0.0
    wire_bytes: int = 0
    """Bytes of rollout envelopes received."""
    network: dict[str, int] = {}
    """As a volunteer's."""
    seconds: float = 0.0


class RelayStatus(_Event, frozen=True, tag="relay"):
    """How a relay stands."""

    run: str = ""
    name: str = ""
    version: int = -1
    peers: int = 0
    forwarded: int = 0
    refused: dict[str, int] = {}
    chunks: int = 0
    network: dict[str, int] = {}
    """As a volunteer's."""
    seconds: float = 0.0


class Summary(_Event, frozen=True, tag="summary"):
    """The last word of a role: what was contributed, in one sentence, and its final figures."""

    text: str
    status: VolunteerStatus | TrainerStatus | RelayStatus


Event = Note | RunReady | VolunteerStatus | VersionReport | TrainerStatus | RelayStatus | Summary

Report = Callable[[Event], None]
"""Where a role sends its events. Must not block."""


def to_line(event: Event) -> str:
    return msgspec.json.encode(event).decode()


def from_line(line: str | bytes) -> Event:
    """Raises msgspec.DecodeError for anything that is no event."""
    return msgspec.json.decode(line, type=Event)
