"""What a node does with a gossiped message: ACCEPT, IGNORE or REJECT. Spec: `specs/04-gossip.md`.

A pure function of the message, the clock and a `GossipView`, cheapest check first:

    size -> strict decode -> protocol, run and kind -> times -> replay -> shard or role -> signature
    -> quarantine, share and rate -> remembered -> body -> known checkpoint within staleness

Nothing is remembered of a message before its signature holds and its sender is within its rate, so that
nobody fills the memory in another's name or faster than a key may send.

REJECT is for what no correct node forwards, since it costs the forwarder its standing. What depends on
time, order or what a node happens to know (stale, duplicate, unknown checkpoint, rate) is IGNORE.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from .buckets import HELLOS, THROTTLE, Buckets, Rate
from .checkpoints import CheckpointManifest, open_checkpoint
from .constants import MAX_ENVELOPE
from .encoding import read
from .envelope import Envelope, Kind, unseal
from .errors import Code, RemoteError
from .memory import Memory
from .receipts import Hello, Receipts, open_receipts
from .references import MAX_REFERENCE, read_reference
from .rollouts import Reference, RolloutGroup
from .runs import RunManifest, shard_of

MAX_HELLO = 4_096
"""Bytes of a hello's content: five names, and room for what a revision adds."""

IGNORED = frozenset(
    {
        Code.EXPIRED,
        Code.FUTURE_DATED,
        Code.DUPLICATE,
        Code.SEQUENCE_REUSED,
        Code.RATE,
        Code.QUARANTINED,
        Code.BANNED,
        Code.UNKNOWN_CHECKPOINT,
        Code.STALE,
        Code.BUSY,
        Code.UNKNOWN_KIND,
        Code.UNSUPPORTED_VERSION,
    }
)
"""Codes that never count against a forwarder. All others are REJECT. [GOS-2]"""


class Verdict(Enum):
    """The three verdicts of gossipsub v1.1 validation."""

    ACCEPT = "accept"
    IGNORE = "ignore"
    REJECT = "reject"


Body = RolloutGroup | Reference | Hello | CheckpointManifest | Receipts


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with all that was learnt on the way."""

    verdict: Verdict
    error: RemoteError | None = None
    """Why it is not ACCEPT."""
    envelope: Envelope | None = None
    """Present once decoded."""
    body: Body | None = None
    """Present with ACCEPT, and where a signed rollout or reference is stale or of an unknown
    checkpoint."""


@dataclass(slots=True)
class GossipView:
    """What one node knows of a run."""

    run: bytes
    manifest: RunManifest
    memory: Memory = field(default_factory=Memory)
    versions: dict[bytes, int] = field(default_factory=dict)
    """Checkpoint hash -> version, of all checkpoints still of interest."""
    newest: int = -1
    """Highest version known; -1 before the first."""
    quarantined: dict[bytes, int] = field(default_factory=dict)
    """Key -> Unix milliseconds at which its quarantine ends."""
    banned: set[bytes] = field(default_factory=set)
    throttled: set[bytes] = field(default_factory=set)
    """Keys that may send a THROTTLE-th of what others may."""
    groups: Buckets = field(init=False)
    hellos: Buckets = field(init=False)

    def __post_init__(self) -> None:
        self.groups = Buckets(Rate.of_groups(self.manifest.limits.groups_per_second))
        self.hellos = Buckets(HELLOS)

    def learn(self, checkpoint: bytes, version: int) -> None:
        """Makes a checkpoint known, and forgets those too old for any verdict but STALE."""
        self.versions[checkpoint] = version
        self.newest = max(self.newest, version)
        horizon = self.newest - 4 * (self.manifest.staleness + 1)
        for old in [known for known, number in self.versions.items() if number < horizon]:
            del self.versions[old]


_ROLLOUT_KINDS = frozenset({Kind.ROLLOUT, Kind.REFERENCE, Kind.HELLO})


def judge_rollout(view: GossipView, shard: int, data: bytes, now: int) -> Judgement:
    """The verdict on a message of a rollout topic: a `rollout`, a `reference` or a `hello`. `now`: Unix
    milliseconds. The content of a reference is not here, so nothing is said of it."""

    def admit(envelope: Envelope) -> None:
        if shard_of(envelope.head.sender, view.manifest.shards) != shard:  # [GOS-4]
            raise RemoteError(Code.WRONG_SHARD, f"The sender does not belong to shard {shard}.")
        view.memory.check_room()

    def stand(envelope: Envelope) -> None:
        sender = envelope.head.sender
        _check_standing(view, sender, now)
        view.memory.check_share(sender)
        if envelope.head.kind == Kind.HELLO:
            view.hellos.take(sender, now)
        else:
            view.groups.take(sender, now, THROTTLE if sender in view.throttled else 1.0)

    def open_body(envelope: Envelope) -> Body:
        if envelope.head.kind == Kind.HELLO:
            return read(envelope.content(MAX_HELLO), Hello, MAX_HELLO)
        if envelope.head.kind == Kind.REFERENCE:
            return read_reference(envelope.content(MAX_REFERENCE), view.manifest.referenced_limit)
        return RolloutGroup.from_bytes(envelope.content(view.manifest.rollout_body_limit))

    limit = view.manifest.rollout_envelope_limit
    judgement = _judge(view, data, now, _Topic(_ROLLOUT_KINDS, limit, admit, stand, open_body))
    if isinstance(judgement.body, RolloutGroup | Reference):
        try:
            check_freshness(view, judgement.body.checkpoint)
        except RemoteError as error:
            return Judgement(Verdict.IGNORE, error, judgement.envelope, judgement.body)
    return judgement


def judge_checkpoint(view: GossipView, data: bytes, now: int) -> Judgement:
    """The verdict on a message of the checkpoints topic."""

    def open_body(envelope: Envelope) -> Body:
        return open_checkpoint(envelope, view.run, view.manifest)

    return _judge(view, data, now, _trainers_topic(view, Kind.CHECKPOINT, open_body))


def judge_receipts(view: GossipView, data: bytes, now: int) -> Judgement:
    """The verdict on a message of the receipts topic."""

    def open_body(envelope: Envelope) -> Body:
        return open_receipts(envelope, view.run, view.manifest)

    return _judge(view, data, now, _trainers_topic(view, Kind.RECEIPTS, open_body))


def check_freshness(view: GossipView, checkpoint: bytes) -> None:
    """RemoteError(UNKNOWN_CHECKPOINT | STALE) unless rollouts of it can still be used. [GOS-7]"""
    version = view.versions.get(checkpoint)
    if version is None:
        raise RemoteError(Code.UNKNOWN_CHECKPOINT, "The rollout names a checkpoint that is not known here.")
    lag = view.newest - version
    if lag > view.manifest.staleness:
        raise RemoteError(
            Code.STALE,
            f"The rollout is {lag} versions old; this run takes {view.manifest.staleness}.",
            measured=lag,
            threshold=view.manifest.staleness,
        )


@dataclass(frozen=True, slots=True)
class _Topic:
    """What differs between topics."""

    kinds: Collection[Kind]
    limit: int
    """Bytes of an envelope."""
    admit: Callable[[Envelope], None]
    """Cheap checks before the signature."""
    stand: Callable[[Envelope], None]
    """Checks of the sender, who is known to be genuine."""
    open_body: Callable[[Envelope], Body]


def _trainers_topic(view: GossipView, kind: Kind, open_body: Callable[[Envelope], Body]) -> _Topic:
    """Only trainers speak here. They are never held off: a full memory of rollouts must not stop them."""

    def admit(envelope: Envelope) -> None:
        if envelope.head.sender not in view.manifest.trainers:  # [GOS-8]
            raise RemoteError(Code.WRONG_ROLE, f"The sender may not publish a {kind} message in this run.")

    return _Topic({kind}, MAX_ENVELOPE, admit, lambda envelope: None, open_body)


def _judge(view: GossipView, data: bytes, now: int, topic: _Topic) -> Judgement:
    """The checks that all topics share, in their order. [GOS-1] [GOS-11]"""
    envelope: Envelope | None = None
    view.memory.forget(now)
    try:
        envelope = unseal(data, topic.limit)
        if envelope.head.run != view.run:  # [GOS-3]
            raise RemoteError(Code.WRONG_RUN, "The message belongs to another run.")
        if envelope.head.kind not in topic.kinds:  # [GOS-3]
            raise RemoteError(Code.WRONG_KIND, f"A {envelope.head.kind} does not belong on this topic.")
        envelope.check_time(now)
        view.memory.check(envelope)
        topic.admit(envelope)
        envelope.verify_signature()
        topic.stand(envelope)
        view.memory.add(envelope)
        return Judgement(Verdict.ACCEPT, None, envelope, topic.open_body(envelope))
    except RemoteError as error:
        verdict = Verdict.IGNORE if error.code in IGNORED else Verdict.REJECT
        return Judgement(verdict, error, envelope)


def _check_standing(view: GossipView, sender: bytes, now: int) -> None:
    if sender in view.banned:  # [GOS-10]
        raise RemoteError(Code.BANNED, "The sender may take no part in this run any more.")
    until = view.quarantined.get(sender)  # [GOS-10]
    if until is not None and now < until:
        raise RemoteError(
            Code.QUARANTINED,
            f"The sender is in quarantine for another {(until - now) / 1000:.0f} s.",
            measured=float(now),
            threshold=float(until),
        )
