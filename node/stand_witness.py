"""What the kit's trainer sees of a client, judged: each message, each group, each token.

    message -> gossip path -> hello, or a group -> counter, freshness -> structure, replay -> tokens

A fault is noted under the name of the check that it belongs to, a success likewise; `verdict` says how one
went. Nothing here waits or sends, so that a volunteer which is broken on purpose can be judged in a test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

from nous_node.envs.environment import PolicySettings
from nous_node.envs.registry import make_entry
from nous_node.protocol.envelope import Envelope
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.gossip import GossipView, judge_rollout
from nous_node.protocol.receipts import Hello
from nous_node.protocol.references import MAX_REFERENCE
from nous_node.protocol.rollouts import Reference, RolloutGroup
from nous_node.trainer.policy import Policy

from .learner_messages import Candidate
from .stand_run import StandRun, Version
from .statistics import Figures
from .verification import CheckedGroup, Verifier

ENVELOPES = "envelopes"
TIMES = "envelope-times"
SHARD = "own-shard"
KEY = "own-key"
SEQUENCE = "seq-once"
RATE = "rate"
HELLO = "hello-first"
ANSWER = "answer-first"
COUNTS = "counts-for-key"
FRESH = "fresh"
COUNTERS = "counters"
ONCE = "counter-once"
SEALED_ANEW = "sealed-anew"
SETTLED = "settled"
STRUCTURE = "structure"
TASKS = "tasks"
REWARDS = "rewards"
LOGPROBS = "logprobs"
DRAWN = "drawn"

_OF_CODE: dict[Code, str] = {
    Code.EXPIRED: TIMES,
    Code.FUTURE_DATED: TIMES,
    Code.LIFETIME: TIMES,
    Code.WRONG_SHARD: SHARD,
    Code.SEQUENCE_REUSED: SEQUENCE,
    Code.DUPLICATE: SEALED_ANEW,
    Code.RATE: RATE,
    Code.STALE: FRESH,
    Code.UNKNOWN_CHECKPOINT: FRESH,
    Code.WRONG_ENVIRONMENT: TASKS,
    Code.PROMPT_MISMATCH: TASKS,
    Code.ENVIRONMENT_FAILED: TASKS,
    Code.REWARD_MISMATCH: REWARDS,
    Code.LOGPROB_MISMATCH: LOGPROBS,
    Code.SAMPLING_MISMATCH: DRAWN,
}
"""Where a refusal belongs; all others are matters of structure, or of the envelope."""

GOSSIPED = (ENVELOPES, TIMES, SHARD, SEQUENCE, RATE, KEY)
VERIFIED = (STRUCTURE, TASKS, REWARDS, LOGPROBS, DRAWN)

GRACE_MS = 2_000
"""Between a receipt that was published and a repeat that counts as one too many: they may cross."""

MOST_POLICIES = 3
"""Versions whose weights are at hand: groups are of the newest, or of the one before."""

MOST_KEPT = 100_000
"""Groups of a client that are remembered: more than it can send within its rate in a play."""


@dataclass(slots=True)
class Group:
    """One of the client's, whatever envelopes brought it."""

    checkpoint: bytes
    counter: int
    version: int
    body: bytes
    digest: bytes
    ids: list[bytes]
    sent: list[int]
    """`ts` of its envelopes."""
    heard: float
    """When it came for the first time, by the kit's clock."""
    receipted: int = 0
    """Unix milliseconds of its receipt; 0 where it has none."""
    error: RemoteError | None = None
    figures: Figures | None = None
    """Once its tokens were recomputed."""


@dataclass(slots=True)
class Verdict:
    """What is known of one check."""

    good: int = 0
    bad: int = 0
    note: str = ""
    """Of the first fault."""


@dataclass(slots=True)
class Worst:
    """The largest figures of the groups that were recomputed."""

    groups: int = 0
    mad: float = 0.0
    distance: float = 0.0
    largest: float = 0.0

    def add(self, figures: Figures) -> None:
        self.groups += 1
        self.mad = max(self.mad, figures.logprob)
        self.distance = max(self.distance, figures.distance)
        self.largest = max(self.largest, figures.largest)


@dataclass
class Witness:
    """Of one client in one run. `key` is that of its connection, as soon as there is one."""

    run: StandRun
    key: bytes | None = None
    groups: dict[tuple[bytes, int], Group] = field(default_factory=dict)
    hellos: list[tuple[float, Hello]] = field(default_factory=list)
    repeats: int = 0
    messages: int = 0
    answered: bool = False
    """Whether its hello was answered."""
    counts_from: int = 0
    """The newest version that does not count for its key, once it was answered."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    worst: Worst = field(default_factory=Worst)

    def __post_init__(self) -> None:
        manifest = self.run.manifest
        self._view = GossipView(self.run.run, manifest)
        environments = [make_entry(entry) for entry in manifest.environments]
        self._verifier = Verifier(self.run.run, manifest, environments)
        self._policies: dict[bytes, Policy] = {}

    # --- what it knows ---------------------------------------------------------------------------

    def published(self, version: Version) -> None:
        """From now on groups of it may come."""
        self._view.learn(version.head.hash, version.number)

    def verdict(self, check: str) -> Verdict:
        return self.verdicts.setdefault(check, Verdict())

    def good(self, *checks: str) -> None:
        for check in checks:
            self.verdict(check).good += 1

    def bad(self, check: str, note: str) -> None:
        found = self.verdict(check)
        found.bad += 1
        found.note = found.note or note

    def unsettled(self) -> list[Group]:
        """Groups without a receipt."""
        return [group for group in self.groups.values() if not group.receipted]

    def allowance(self) -> float:
        """Share of what its key may send at once that is left. [GOS-6]"""
        buckets = self._view.groups
        bucket = buckets.by_key.get(self.key or b"")
        return 1.0 if bucket is None else bucket.level / buckets.rate.burst

    # --- messages --------------------------------------------------------------------------------

    def hear(self, shard: int, data: bytes, at: float, now: int) -> Group | None:
        """A message of a rollout topic; the group, where it is a new one. `now`: Unix milliseconds."""
        self.messages += 1
        judgement = judge_rollout(self._view, shard, data, now)
        envelope, error = judgement.envelope, judgement.error
        if error is not None:
            self.bad(_OF_CODE.get(error.code, ENVELOPES), f"{error.code}: {error}")
        if envelope is None or (error is not None and judgement.body is None):
            return None
        self._sender(envelope)
        self.good(*(check for check in GOSSIPED if error is None))
        match judgement.body:
            case Hello() as hello:
                self.hellos.append((at, hello))
            case RolloutGroup() as group:
                return self._group(envelope, group.checkpoint, group.counter, at)
            case Reference() as reference:
                self.bad(STRUCTURE, f"a group of {reference.size} bytes came by reference, though it fits.")
                envelope.content(MAX_REFERENCE)
        return None

    def _sender(self, envelope: Envelope) -> None:
        if self.key is not None and envelope.head.sender != self.key:
            self.bad(KEY, f"an envelope is from {envelope.head.sender.hex()}, the peer is {self.key.hex()}.")

    def _group(self, envelope: Envelope, checkpoint: bytes, counter: int, at: float) -> Group | None:
        body = envelope.content(self.run.manifest.rollout_body_limit)
        digest = sha256(body).digest()
        known = self.groups.get((checkpoint, counter))
        if known is not None:
            self._again(known, envelope, digest)
            return None
        if len(self.groups) >= MOST_KEPT:
            return None
        version = self.run.version_of(checkpoint)
        number = -1 if version is None else version.number
        self._early(number)
        group = Group(checkpoint, counter, number, body, digest, [envelope.id], [envelope.head.ts], at)
        self.groups[checkpoint, counter] = group
        return group

    def _early(self, version: int) -> None:
        """What has to come before a group of this version. [HEL-1] [HEL-2] [TSK-6]"""
        if version >= 0:
            self.good(FRESH)
        if self.hellos:
            self.good(HELLO)
        else:
            self.bad(HELLO, "a group came, and no hello before it.")
        if self.answered:
            self.good(ANSWER)
        else:
            self.bad(ANSWER, "a group came before its hello was answered.")
            return
        if version > self.counts_from:
            self.good(COUNTS)
        elif version >= 0:
            self.bad(
                COUNTS, f"a group is of version {version}; those above {self.counts_from} count for its key."
            )

    def _again(self, known: Group, envelope: Envelope, digest: bytes) -> None:
        """Another envelope for a counter that is known. [TSK-5] [GOS-12] [RCP-4]"""
        if digest != known.digest:
            self.bad(ONCE, f"counter {known.counter} of version {known.version} came with two contents.")
            return
        self.repeats += 1
        self.good(SEALED_ANEW)
        known.ids.append(envelope.id)
        known.sent.append(envelope.head.ts)
        if known.receipted and envelope.head.ts > known.receipted + GRACE_MS:
            late = (envelope.head.ts - known.receipted) / 1000
            self.bad(SETTLED, f"a group was repeated {late:.1f} s after its receipt.")

    def settle(self, group: Group, now: int) -> None:
        """Its receipt goes out."""
        group.receipted = now
        self.good(SETTLED)

    def count(self) -> None:
        """Judges the counters of all checkpoints: those taken, and the holes below them. [TSK-5] [TSK-7]"""
        taken: dict[bytes, set[int]] = {}
        for checkpoint, counter in self.groups:
            taken.setdefault(checkpoint, set()).add(counter)
        for checkpoint, counters in taken.items():
            holes = max(counters) + 1 - len(counters)
            version = self.run.version_of(checkpoint)
            if holes > 2 + (len(counters) + holes) / 8:
                first = min(set(range(max(counters) + 1)) - counters)
                of = "?" if version is None else version.number
                self.bad(COUNTERS, f"of version {of} {holes} counters never came, the first of them {first}.")
            else:
                self.good(COUNTERS)
        if taken:
            self.good(ONCE)

    # --- content ---------------------------------------------------------------------------------

    def verify(self, group: Group) -> None:
        """Runs the environment and the model again. Takes milliseconds; any thread will do, one at a time."""
        version = self.run.version_of(group.checkpoint)
        if version is None:
            return
        try:
            checked = self._checked(group, version)
            self.good(STRUCTURE, TASKS, REWARDS)
            self._recompute(group, checked, version)
        except RemoteError as error:
            group.error = error
            check = _OF_CODE.get(error.code, STRUCTURE)
            self.bad(check, _told(group, error))

    def _checked(self, group: Group, version: Version) -> CheckedGroup:
        manifest = version.head.manifest
        candidate = Candidate(
            id=group.ids[0],
            body=group.body,
            key=self.key or b"",
            version=version.number,
            checkpoint=version.head.hash,
            beacon=manifest.beacon,
            levels=manifest.levels,
            accepted=False,
        )
        settings = PolicySettings.of(self.run.manifest, self._policy(version).tokenizer)
        return self._verifier.check(candidate, settings)

    def _recompute(self, group: Group, checked: CheckedGroup, version: Version) -> None:
        (recomputed,) = self._verifier.recompute(self._policy(version), [checked])
        measured = self._verifier.measure(checked, recomputed)
        group.figures = measured.figures
        if measured.error is not None:
            raise measured.error
        self.worst.add(measured.figures)
        self.good(LOGPROBS, DRAWN)

    def _policy(self, version: Version) -> Policy:
        """That of a version; a few are kept."""
        policy = self._policies.get(version.head.hash)
        if policy is None:
            while len(self._policies) >= MOST_POLICIES:
                del self._policies[next(iter(self._policies))]
            policy = self._policies[version.head.hash] = Policy.load(version.folder, "float32", threads=1)
        return policy


def _told(group: Group, error: RemoteError) -> str:
    figures = "" if error.measured is None else f" (measured {error.measured:.3g}"
    figures += "" if not figures else f", threshold {error.threshold or 0:.3g})"
    return f"counter {group.counter} of version {group.version}: {error.code}: {error}{figures}"
