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

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from .checkpoints import CheckpointManifest, open_checkpoint
from .constants import MAX_ENVELOPE, MAX_REMEMBERED, MAX_SENDERS
from .encoding import read
from .envelope import Envelope, Kind, unseal
from .errors import Code, RemoteError
from .receipts import Hello, Receipts, open_receipts
from .rollouts import RolloutGroup
from .runs import RunManifest, shard_of

BURST_SECONDS = 60.0
"""How many seconds' worth of its rate a key may send at once: a node that was cut off catches up."""

MAX_BURST = 4_096.0
"""And never more than this many groups at once, whatever rate the run allows."""

HELLO_RATE = 0.2
"""Hellos a second of one key: an honest node sends one every ten seconds until its key counts."""

HELLO_BURST = 4.0
"""Hellos at once: a node that is started again and again."""

THROTTLE = 8.0
"""What one group of a throttled key counts for: it may send an eighth of what others may. [GOS-6]"""

MAX_HELLO = 4_096
"""Bytes of a hello's content: five names, and room for what a revision adds."""

MEMORY_SHARES = 64
"""Once half of the memory is in use, a key of which more than one share of it is remembered waits. Below
that one volunteer may use all of it, which is 218 groups a second; the other half takes 32 keys to fill."""

_MINUTE_MS = 60_000

_SWEEP_MS = 1_000
"""Looking through MAX_SENDERS buckets takes some 5 ms; once a second it does not show."""

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
    held: dict[bytes, int] = field(default_factory=dict)
    """Sender -> its messages here."""
    minutes: dict[int, list[bytes]] = field(default_factory=dict)
    """Minute of expiry -> ids, so that forgetting costs nothing for what stays."""

    def check(self, envelope: Envelope) -> None:
        """RemoteError(DUPLICATE | SEQUENCE_REUSED). [GOS-5]"""
        if envelope.id in self.ids:
            raise RemoteError(Code.DUPLICATE, "The message was seen before.")
        if (envelope.head.sender, envelope.head.seq) in self.numbers:
            raise RemoteError(
                Code.SEQUENCE_REUSED,
                f"Another message of this sender has the sequence number {envelope.head.seq}.",
                measured=envelope.head.seq,
            )

    def check_room(self) -> None:
        """RemoteError(BUSY) where as much is remembered as may be. [GOS-9]"""
        if len(self.ids) >= MAX_REMEMBERED:
            raise RemoteError(
                Code.BUSY,
                "Too many messages are remembered; new ones wait.",
                measured=len(self.ids),
                threshold=MAX_REMEMBERED,
            )

    def check_share(self, sender: bytes) -> None:
        """RemoteError(RATE) where this sender has its share of what may be remembered. [GOS-9]"""
        share = MAX_REMEMBERED // MEMORY_SHARES
        held = self.held.get(sender, 0)
        if held >= share and len(self.ids) >= MAX_REMEMBERED // 2:
            raise RemoteError(
                Code.RATE,
                f"{held} messages of this sender are remembered, which is its share.",
                measured=held,
                threshold=share,
            )

    def add(self, envelope: Envelope) -> None:
        sender = envelope.head.sender
        number = (sender, envelope.head.seq)
        self.ids[envelope.id] = number
        self.numbers[number] = envelope.id
        self.held[sender] = self.held.get(sender, 0) + 1
        self.minutes.setdefault(envelope.head.exp // _MINUTE_MS, []).append(envelope.id)

    def forget(self, now: int) -> None:
        """Drops the minutes that are over: a replay of what expired in them fails its expiry check."""
        for minute in [minute for minute in self.minutes if (minute + 1) * _MINUTE_MS <= now]:
            for digest in self.minutes.pop(minute):
                self.remove(digest)

    def remove(self, digest: bytes) -> None:
        """Forgets a message: for who could not take it after all, and takes it when it comes again."""
        number = self.ids.pop(digest, None)
        if number is None:
            return
        self.numbers.pop(number, None)
        self.held[number[0]] -= 1
        if not self.held[number[0]]:
            del self.held[number[0]]


@dataclass(frozen=True, slots=True)
class Rate:
    """What one key may send."""

    per_second: float
    burst: float
    """Messages at once."""

    @classmethod
    def of_groups(cls, per_second: float) -> Rate:
        """For a run that allows `per_second` groups a second. [GOS-6]"""
        return cls(per_second, max(1.0, min(per_second * BURST_SECONDS, MAX_BURST)))


HELLOS = Rate(HELLO_RATE, HELLO_BURST)


@dataclass(slots=True)
class Bucket:
    """A token bucket: `level` messages may still be sent at `at` (Unix milliseconds)."""

    level: float
    at: int

    @classmethod
    def full(cls, rate: Rate, now: int) -> Bucket:
        return cls(rate.burst, now)

    def take(self, rate: Rate, now: int, cost: float = 1.0) -> None:
        """Takes `cost`, or raises RemoteError(RATE). [GOS-6]"""
        self.level = min(rate.burst, self.level + rate.per_second * max(0, now - self.at) / 1000)
        self.at = max(self.at, now)
        if self.level < min(cost, rate.burst):
            raise RemoteError(
                Code.RATE,
                f"The sender exceeds {rate.per_second} messages a second.",
                measured=rate.per_second,
                threshold=rate.per_second,
            )
        self.level -= min(cost, rate.burst)


@dataclass(slots=True)
class Buckets:
    """The buckets of all senders heard of lately. A bucket that is full again is as good as none."""

    rate: Rate
    """Of one key."""
    by_key: dict[bytes, Bucket] = field(default_factory=dict)
    swept: int = 0
    """Unix milliseconds of the last sweep."""

    def take(self, key: bytes, now: int, cost: float = 1.0) -> None:
        """Takes `cost` of `key`'s, or raises RemoteError(RATE | BUSY). [GOS-6] [GOS-9]"""
        bucket = self.by_key.get(key)
        if bucket is None:
            self._make_room(now)
            bucket = self.by_key[key] = Bucket.full(self.rate, now)
        bucket.take(self.rate, now, cost)

    def _make_room(self, now: int) -> None:
        if len(self.by_key) < MAX_SENDERS:
            return
        if now - self.swept >= _SWEEP_MS:
            self.swept = now
            refilled = now - 1000 * self.rate.burst / self.rate.per_second
            self.by_key = {key: bucket for key, bucket in self.by_key.items() if bucket.at > refilled}
        if len(self.by_key) >= MAX_SENDERS:
            raise RemoteError(
                Code.BUSY,
                "Too many senders are followed; new ones wait.",
                measured=len(self.by_key),
                threshold=MAX_SENDERS,
            )


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


def judge_rollout(view: GossipView, shard: int, data: bytes, now: int) -> Judgement:
    """The verdict on a message of a rollout topic: a `rollout` or a `hello`. `now`: Unix milliseconds."""

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
        return RolloutGroup.from_bytes(envelope.content(view.manifest.rollout_body_limit))

    limit = view.manifest.rollout_envelope_limit
    judgement = _judge(view, data, now, _Topic({Kind.ROLLOUT, Kind.HELLO}, limit, admit, stand, open_body))
    if isinstance(judgement.body, RolloutGroup):
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

    kinds: set[Kind]
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
