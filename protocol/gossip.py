"""What a node does with a gossiped message: ACCEPT, IGNORE or REJECT. Spec: `specs/04-gossip.md`.

A pure function of the message, the clock and a `GossipView`, cheapest check first:

    size -> strict decode -> run and protocol -> expiry and replay -> signature -> role, quarantine and rate
    -> known checkpoint within staleness

REJECT is for what no correct node forwards, since it costs the forwarder its standing. What depends on
time, order or what a node happens to know (stale, duplicate, unknown checkpoint, rate) is IGNORE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from .checkpoints import CheckpointManifest, check_files, open_checkpoint
from .constants import MAX_ENVELOPE, MAX_REMEMBERED
from .encoding import read
from .envelope import Envelope, Kind, unseal
from .errors import Code, RemoteError
from .receipts import Hello, Receipts, open_receipts
from .rollouts import RolloutGroup
from .runs import RunManifest, shard_of

BURST_SECONDS = 60.0
"""How many seconds' worth of its rate a key may send at once: a node that was cut off catches up."""

_MINUTE_MS = 60_000

IGNORED = frozenset(
    {
        Code.EXPIRED,
        Code.FUTURE_DATED,
        Code.DUPLICATE,
        Code.SEQUENCE_REUSED,
        Code.RATE,
        Code.QUARANTINED,
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


Body = RolloutGroup | Hello | CheckpointManifest | Receipts


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with all that was learnt on the way."""

    verdict: Verdict
    error: RemoteError | None = None
    """Why it is not ACCEPT."""
    envelope: Envelope | None = None
    """Present once decoded."""
    body: Body | None = None
    """Present with ACCEPT, and where a signed rollout is stale or of an unknown checkpoint."""


@dataclass(slots=True)
class Memory:
    """Digests and sequence numbers of signed messages that have not expired."""

    ids: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    """Envelope id -> (sender, seq)."""
    numbers: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    """(sender, seq) -> envelope id."""
    minutes: dict[int, list[bytes]] = field(default_factory=dict)
    """Minute of expiry -> ids, so that forgetting costs nothing for what stays."""

    def check(self, envelope: Envelope) -> None:
        """RemoteError(DUPLICATE | SEQUENCE_REUSED | BUSY). [GOS-5]"""
        if envelope.id in self.ids:
            raise RemoteError(Code.DUPLICATE, "The message was seen before.")
        known = self.numbers.get((envelope.head.sender, envelope.head.seq))
        if known is not None:
            raise RemoteError(
                Code.SEQUENCE_REUSED,
                f"Another message of this sender has the sequence number {envelope.head.seq}.",
                measured=envelope.head.seq,
            )
        if len(self.ids) >= MAX_REMEMBERED:
            raise RemoteError(
                Code.BUSY,
                "Too many messages are remembered; new ones wait.",
                measured=len(self.ids),
                threshold=MAX_REMEMBERED,
            )

    def add(self, envelope: Envelope) -> None:
        number = (envelope.head.sender, envelope.head.seq)
        self.ids[envelope.id] = number
        self.numbers[number] = envelope.id
        self.minutes.setdefault(envelope.head.exp // _MINUTE_MS, []).append(envelope.id)

    def forget(self, now: int) -> None:
        """Drops what expired at least a minute ago; a replay of it fails its expiry check."""
        for minute in [minute for minute in self.minutes if (minute + 1) * _MINUTE_MS <= now]:
            for digest in self.minutes.pop(minute):
                self.numbers.pop(self.ids.pop(digest), None)


@dataclass(slots=True)
class Bucket:
    """A token bucket: `level` messages may still be sent at `at` (Unix milliseconds)."""

    level: float
    at: int

    def take(self, rate: float, now: int) -> None:
        """Takes one, or raises RemoteError(RATE). [GOS-6]"""
        capacity = max(rate * BURST_SECONDS, 1.0)
        self.level = min(capacity, self.level + rate * max(0, now - self.at) / 1000)
        self.at = max(self.at, now)
        if self.level < 1:
            raise RemoteError(
                Code.RATE,
                f"The sender exceeds {rate} groups a second.",
                measured=rate,
                threshold=rate,
            )
        self.level -= 1


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
    buckets: dict[bytes, Bucket] = field(default_factory=dict)

    def learn(self, checkpoint: bytes, version: int) -> None:
        """Makes a checkpoint known, and forgets those too old for any verdict but STALE."""
        self.versions[checkpoint] = version
        self.newest = max(self.newest, version)
        horizon = self.newest - 4 * (self.manifest.staleness + 1)
        for old in [known for known, number in self.versions.items() if number < horizon]:
            del self.versions[old]


def judge_rollout(view: GossipView, shard: int, data: bytes, now: int) -> Judgement:
    """The verdict on a message of a rollout topic: a `rollout` or a `hello`. `now`: Unix milliseconds."""

    def check(envelope: Envelope) -> Body:
        sender = envelope.head.sender
        if shard_of(sender, view.manifest.shards) != shard:  # [GOS-4]
            raise RemoteError(Code.WRONG_SHARD, f"The sender does not belong to shard {shard}.")
        _check_standing(view, sender, now)
        if envelope.head.kind == Kind.HELLO:
            return read(envelope.content(), Hello, MAX_ENVELOPE)
        return RolloutGroup.from_bytes(envelope.content())

    judgement = _judge(view, data, now, {Kind.ROLLOUT, Kind.HELLO}, check)
    if isinstance(judgement.body, RolloutGroup):
        try:
            check_freshness(view, judgement.body.checkpoint)
        except RemoteError as error:
            return Judgement(Verdict.IGNORE, error, judgement.envelope, judgement.body)
    return judgement


def judge_checkpoint(view: GossipView, data: bytes, now: int) -> Judgement:
    """The verdict on a message of the checkpoints topic."""

    def check(envelope: Envelope) -> Body:
        checkpoint = open_checkpoint(envelope, view.run, view.manifest)
        check_files(checkpoint)
        return checkpoint

    return _judge(view, data, now, {Kind.CHECKPOINT}, check)


def judge_receipts(view: GossipView, data: bytes, now: int) -> Judgement:
    """The verdict on a message of the receipts topic."""

    def check(envelope: Envelope) -> Body:
        return open_receipts(envelope, view.run, view.manifest)

    return _judge(view, data, now, {Kind.RECEIPTS}, check)


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


def _judge(
    view: GossipView,
    data: bytes,
    now: int,
    kinds: set[Kind],
    check: Callable[[Envelope], Body],
) -> Judgement:
    """The checks that all topics share, in their order. [GOS-1]"""
    envelope: Envelope | None = None
    view.memory.forget(now)
    try:
        envelope = unseal(data)
        if envelope.head.run != view.run:  # [GOS-3]
            raise RemoteError(Code.WRONG_RUN, "The message belongs to another run.")
        if envelope.head.kind not in kinds:
            raise RemoteError(Code.WRONG_KIND, f"A {envelope.head.kind} does not belong on this topic.")
        envelope.check_time(now)
        view.memory.check(envelope)
        envelope.verify_signature()
        view.memory.add(envelope)
        return Judgement(Verdict.ACCEPT, None, envelope, check(envelope))
    except RemoteError as error:
        verdict = Verdict.IGNORE if error.code in IGNORED else Verdict.REJECT
        return Judgement(verdict, error, envelope)


def _check_standing(view: GossipView, sender: bytes, now: int) -> None:
    until = view.quarantined.get(sender)
    if until is not None and now < until:
        raise RemoteError(
            Code.QUARANTINED,
            f"The sender is in quarantine for another {(until - now) / 1000:.0f} s.",
            measured=float(now),
            threshold=float(until),
        )
    rate = view.manifest.limits.groups_per_second
    bucket = view.buckets.get(sender)
    if bucket is None:
        bucket = view.buckets[sender] = Bucket(max(rate * BURST_SECONDS, 1.0), now)
    bucket.take(rate, now)
