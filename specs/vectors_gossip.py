"""Vectors of chapter 04: what a node knows, what comes in at which time, and the verdict on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vectors_references import reference
from vectors_world import (
    ALICE,
    BASE,
    BOB,
    ENGINE,
    MANIFEST,
    NOW,
    TRAINER,
    case,
    forged,
    group,
    sealed,
    trajectory,
)

from nous_node.protocol.checkpoints import checkpoint_hash
from nous_node.protocol.encoding import encode
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Hello, Known, Receipts, accepted
from nous_node.protocol.runs import shard_of

replace = msgspec.structs.replace

HELLO = Hello("vectors/1", ENGINE).to_bytes()
KNOWN = {number: bytes([number]) * 32 for number in range(5)}
ACCEPT = "accept"


@dataclass
class Scene:
    """Messages in their order."""

    comment: str
    requires: str
    known: list[int] = field(default_factory=lambda: [0])
    """Versions of checkpoints known; the hash of version n is 32 bytes of n."""
    quarantined: dict[bytes, int] = field(default_factory=dict)
    banned: list[bytes] = field(default_factory=list)
    throttled: list[bytes] = field(default_factory=list)
    bounds: dict[str, int] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def hears(self, message: Any, verdict: str, after: int = 0, topic: str | None = None) -> Scene:
        """`verdict` is `accept`, or `ignore` or `reject` with a code behind a space."""
        what, _, code = verdict.partition(" ")
        self.steps.append(
            {
                "topic": topic or topic_of(ALICE),
                "now": NOW + after,
                "message": message if isinstance(message, list) else message.hex(),
                "verdict": what,
                **({"code": code} if code else {}),
            }
        )
        return self

    def case(self) -> dict[str, Any]:
        return case(
            self.comment,
            self.requires,
            "scene",
            known=[{"checkpoint": KNOWN[number].hex(), "version": number} for number in self.known],
            quarantined=[{"key": key.hex(), "until": until} for key, until in self.quarantined.items()],
            banned=[key.hex() for key in self.banned],
            throttled=[key.hex() for key in self.throttled],
            **({"bounds": self.bounds} if self.bounds else {}),
            steps=self.steps,
        )


def topic_of(sender: Identity) -> str:
    return f"rollouts/{shard_of(sender.key, MANIFEST.shards)}"


def hello(sender: Identity = ALICE, seq: int = 0, **changes: Any) -> bytes:
    return sealed(sender, "hello", HELLO, seq, **changes)


def rollout(version: int, seq: int = 0, **changes: Any) -> bytes:
    return sealed(ALICE, "rollout", group(checkpoint=KNOWN[version]).to_bytes(), seq, **changes)


def referred(version: int, seq: int = 0, /, sender: Identity = ALICE, **changes: Any) -> bytes:
    """A group by reference; `changes` are of the reference."""
    said = reference(group(checkpoint=KNOWN[version]), **changes)
    return sealed(sender, "reference", encode(said), seq)


def later(after: int, what: Callable[..., bytes] | None = None, seq: int = 2) -> bytes:
    """Alice's hello, or group of version 0, sealed that much later."""
    times = {"ts": NOW + after, "exp": NOW + after + 60_000}
    return hello(seq=seq, **times) if what is None else what(0, seq, **times)


def unfolding(size: int, kind: str = "rollout") -> bytes:
    """A message that declares this size; its frame is none, which shows only where the size is let pass."""
    return sealed(ALICE, kind, b"none", enc="zstd", size=size)


def gossip() -> list[dict[str, Any]]:
    scenes: list[Callable[[], list[Scene]]] = [
        _plain,
        _references,
        _replays,
        _rates,
        _fresh,
        _trainers,
        _order,
        _bounds,
    ]
    return [scene.case() for make in scenes for scene in make()]


def _plain() -> list[Scene]:
    other = f"rollouts/{(shard_of(ALICE.key, MANIFEST.shards) + 1) % MANIFEST.shards}"
    return [
        Scene("a group of a known checkpoint", "GOS-1 GOS-2").hears(rollout(0), ACCEPT),
        Scene("a hello", "GOS-1 HEL-1").hears(hello(), ACCEPT),
        Scene("no msgpack", "GOS-2 ENV-1").hears(b"\xc1", "reject malformed"),
        Scene("nothing", "GOS-2 ENV-1").hears(b"", "reject malformed"),
        Scene("larger than any envelope", "ENV-9 GOS-2").hears([["00", 1_000_001]], "reject oversize"),
        Scene("larger than this run's envelopes, and no msgpack besides", "ROL-14 GOS-1 GOS-2").hears([["c1", 100_001]], "reject oversize"),
        Scene("as large as this run's envelopes may be", "ROL-14 GOS-1").hears([["c1", 100_000]], "reject malformed"),
        Scene("a rollout that unfolds to more than this run's rules can hold", "ROL-14 GOS-2").hears(unfolding(262_145), "reject oversize"),
        Scene("a rollout that unfolds to as much as they can hold", "ROL-14").hears(unfolding(262_144), "reject bad-compression"),
        Scene("a hello that unfolds to more than any hello", "HEL-1 GOS-2").hears(unfolding(4_097, "hello"), "reject oversize"),
        Scene("another protocol is nobody's fault", "ENV-3 GOS-2").hears(hello(v=2), "ignore unsupported-version"),
        Scene("an unknown kind is nobody's fault", "ENV-4 GOS-2").hears(hello(kind="gift"), "ignore unknown-kind"),
        Scene("of another run", "GOS-3").hears(hello(run=bytes(32)), "reject wrong-run"),
        *(
            Scene(f"a {kind} on a rollout topic", "GOS-3").hears(sealed(ALICE, kind, HELLO), "reject wrong-kind")
            for kind in ("run", "checkpoint", "receipts")
        ),
        Scene("on another shard's topic", "GOS-4").hears(hello(), "reject wrong-shard", topic=other),
        Scene("expired", "ENV-7 GOS-2").hears(hello(), "ignore expired", 60_000),
        Scene("from the future", "ENV-7 GOS-2").hears(hello(), "ignore future-dated", -30_001),
        Scene("30 seconds from the future", "ENV-7").hears(hello(), ACCEPT, -30_000),
        Scene("too long a life", "ENV-7 GOS-2").hears(hello(exp=NOW + 600_001), "reject lifetime"),
        Scene("a forged signature", "ENV-5 GOS-2").hears(forged(hello()), "reject bad-signature"),
        Scene("a body that is no group", "ROL-13 GOS-2").hears(sealed(ALICE, "rollout", b"\x80"), "reject wrong-type"),
        Scene("a body that is not msgpack", "ENC-3 GOS-2").hears(sealed(ALICE, "hello", b"\xc1"), "reject malformed"),
        Scene("tokens of five bytes: the trainer's matter", "GOS-2 ROL-10").hears(sealed(ALICE, "rollout", group(checkpoint=KNOWN[0], trajectories=[trajectory(tokens=bytes(5))] * 2).to_bytes()), ACCEPT),
        Scene("a body that says it is compressed", "ENV-8 GOS-2").hears(sealed(ALICE, "hello", HELLO, enc="zstd", size=5), "reject bad-compression"),
    ]  # fmt: skip


def _bounds() -> list[Scene]:
    """Scenes with smaller bounds than those of the chapter."""
    carol, dave = Identity.from_seed(bytes([5]) * 32), Identity.from_seed(bytes([6]) * 32)
    times = {"ts": NOW + 121_000, "exp": NOW + 181_000}

    def scene(comment: str, remembered: int, shares: int, senders: int) -> Scene:
        return Scene(
            comment, "GOS-9", bounds={"remembered": remembered, "shares": shares, "senders": senders}
        )

    def hears(one: Scene, sender: Identity, seq: int, verdict: str, after: int = 0, **changes: Any) -> None:
        one.hears(hello(sender, seq, **changes), verdict, after, topic_of(sender))

    full = scene("a full memory holds rollout topics off, trainers never, and has room again", 3, 1, 9)
    for number, sender in enumerate((ALICE, BOB, carol)):
        hears(full, sender, number, ACCEPT)
    hears(full, dave, 3, "ignore busy")
    hears(full, ALICE, 0, "ignore duplicate")
    published = sealed(TRAINER, "checkpoint", BASE.to_bytes())
    full.hears(published, ACCEPT, topic="checkpoints")
    hears(full, dave, 3, "ignore busy")
    hears(full, dave, 4, ACCEPT, 121_000, **times)
    share = scene("half of the memory in use: a sender has a share of it, the rest is for others", 8, 4, 9)
    for number in range(4):
        hears(share, ALICE, number, ACCEPT)
    hears(share, ALICE, 4, "ignore rate")
    share.hears(rollout(0, 5), "ignore rate")
    hears(share, BOB, 0, ACCEPT)
    hears(share, BOB, 1, ACCEPT)
    hears(share, BOB, 2, "ignore rate")
    hears(share, carol, 0, ACCEPT)
    alone = scene("less than half in use: one sender may have all of it", 16, 8, 9)
    for number in range(4):
        hears(alone, ALICE, number, ACCEPT)
    alone.hears(rollout(0, 4), ACCEPT).hears(rollout(0, 5), ACCEPT)
    many = scene(
        "as many buckets as are kept: a sender without one waits until others are full again", 99, 1, 2
    )
    hears(many, ALICE, 0, ACCEPT)
    hears(many, BOB, 0, ACCEPT, 10_000)
    hears(many, carol, 0, "ignore busy", 10_000)
    many.hears(rollout(0, 1), ACCEPT, 10_000)
    hears(many, ALICE, 2, ACCEPT, 10_000)
    hears(many, carol, 1, ACCEPT, 31_000)
    hears(many, dave, 0, ACCEPT, 31_000)
    hears(many, BOB, 1, "ignore busy", 31_000)
    return [full, share, alone, many]


def _references() -> list[Scene]:
    many = Scene("a group by reference takes as much of the rate as any other", "GOS-6")
    many.hears(rollout(0), ACCEPT).hears(referred(0, 1), ACCEPT).hears(referred(0, 2), ACCEPT)
    many.hears(referred(0, 3), "ignore rate").hears(rollout(0, 4), "ignore rate")
    slow = Scene("a throttled key's groups by reference, too", "GOS-6", throttled=[ALICE.key])
    slow.hears(referred(0), ACCEPT).hears(referred(0, 1), "ignore rate", 0)
    elsewhere = Scene("a group by reference on a trainers' topic", "GOS-3")
    for topic in ("checkpoints", "receipts"):
        elsewhere.hears(referred(0), "reject wrong-kind", topic=topic)
    return [
        Scene("a group by reference", "GOS-1 GOS-3 GOS-7").hears(referred(0), ACCEPT),
        Scene("again", "GOS-5").hears(referred(0), ACCEPT).hears(referred(0), "ignore duplicate", 1),
        Scene("of a version too stale", "GOS-7", known=[0, 1, 2, 3]).hears(referred(0), "ignore stale"),
        Scene("of a checkpoint that is not known", "GOS-7").hears(referred(1), "ignore unknown-checkpoint"),
        Scene("shape before freshness", "GOS-1 ROL-15").hears(referred(1, chunks=b""), "reject size-mismatch"),
        Scene("chunks that are too few", "ROL-15 GOS-2").hears(referred(0, chunks=b""), "reject size-mismatch"),
        Scene("as large as any group of the run", "ROL-14").hears(referred(0, size=262_144), ACCEPT),
        Scene("larger than any group of the run", "ROL-14 GOS-2").hears(referred(0, size=262_145), "reject oversize"),
        Scene("a reference that is none", "ROL-15 GOS-2").hears(sealed(ALICE, "reference", b"\x80"), "reject wrong-type"),
        Scene("a reference that unfolds to more than any", "ROL-15 GOS-2").hears(unfolding(135_169, "reference"), "reject oversize"),
        Scene("of a key in quarantine", "GOS-10", quarantined={ALICE.key: NOW + 1}).hears(referred(0), "ignore quarantined"),
        many,
        slow,
        elsewhere,
    ]  # fmt: skip


def _replays() -> list[Scene]:
    return [
        Scene("the same message again", "GOS-5").hears(hello(), ACCEPT).hears(hello(), "ignore duplicate", 1),
        Scene("again with a broken signature", "GOS-5").hears(hello(), ACCEPT).hears(forged(hello()), "ignore duplicate"),
        Scene("a forged message is not remembered", "GOS-11").hears(forged(hello()), "reject bad-signature").hears(hello(), ACCEPT),
        Scene("another message with a used number", "GOS-5").hears(hello(seq=5), ACCEPT).hears(hello(seq=5, ts=NOW + 1), "ignore sequence-reused", 1),
        Scene("numbers need not come in order", "GOS-5").hears(hello(seq=5), ACCEPT).hears(hello(seq=3), ACCEPT),
        Scene("the same number from another key", "GOS-5").hears(hello(seq=5), ACCEPT).hears(hello(BOB, 5), ACCEPT, topic=topic_of(BOB)),
        Scene("a group that is sent again, sealed anew, is a new message", "GOS-12")
        .hears(rollout(0), ACCEPT)
        .hears(rollout(0), "ignore duplicate", 10_000)
        .hears(rollout(0, 1, ts=NOW + 10_000, exp=NOW + 70_000), ACCEPT, 10_000),
        Scene("again after it expired", "GOS-5").hears(hello(), ACCEPT).hears(hello(), "ignore expired", 120_000),
        Scene("a number may serve again when its message has expired", "GOS-5")
        .hears(hello(seq=5), ACCEPT)
        .hears(hello(seq=5, ts=NOW + 120_000, exp=NOW + 180_000), ACCEPT, 120_000),
        Scene("until the minute is over in which it expires it may not", "GOS-5")
        .hears(hello(seq=5), ACCEPT)
        .hears(hello(seq=5, ts=NOW + 119_000, exp=NOW + 180_000), "ignore sequence-reused", 119_999),
        Scene("a malformed body is remembered: whoever forwards it next is not punished again", "GOS-11")
        .hears(sealed(ALICE, "hello", b"\x80"), "reject wrong-type")
        .hears(sealed(ALICE, "hello", b"\x80"), "ignore duplicate"),
    ]  # fmt: skip


def _rates() -> list[Scene]:
    burst = Scene("0.05 a second make a burst of 3 groups, and one more every 20 seconds", "GOS-6")
    for seq in range(3):
        burst.hears(rollout(0, seq), ACCEPT)
    burst.hears(rollout(0, 3), "ignore rate").hears(rollout(0, 4), "ignore rate", 19_999)
    burst.hears(rollout(0, 5), ACCEPT, 20_000).hears(rollout(0, 6), "ignore rate", 20_000)
    greetings = Scene(
        "4 hellos at once, and one more every 5 seconds; groups have their own rate", "GOS-6 HEL-1"
    )
    for seq in range(4):
        greetings.hears(hello(seq=seq), ACCEPT)
    greetings.hears(hello(seq=4), "ignore rate").hears(rollout(0, 9), ACCEPT).hears(
        hello(seq=5), "ignore rate", 4_999
    )
    greetings.hears(hello(seq=6), ACCEPT, 5_000).hears(hello(seq=7), "ignore rate", 5_000)
    again = Scene("a message beyond the rate is not remembered", "GOS-6 GOS-11")
    for seq in range(3):
        again.hears(rollout(0, seq), ACCEPT)
    again.hears(rollout(0, 3), "ignore rate").hears(rollout(0, 3), ACCEPT, 20_000)
    forgery = Scene("forged messages take nothing from the rate of the key that they name", "GOS-6 GOS-11")
    for seq in range(4):
        forgery.hears(forged(hello(seq=seq)), "reject bad-signature")
    forgery.hears(hello(seq=9), ACCEPT)
    apart = Scene("each key has its own rate", "GOS-6")
    for seq in range(4):
        apart.hears(hello(seq=seq), ACCEPT)
    apart.hears(hello(seq=4), "ignore rate").hears(hello(BOB), ACCEPT, topic=topic_of(BOB))
    quarantine = Scene("a quarantine ends by itself", "GOS-10", quarantined={ALICE.key: NOW + 1000})
    quarantine.hears(hello(), "ignore quarantined", 999).hears(hello(), ACCEPT, 1000)
    ban = Scene("a ban does not end, and concerns nobody else", "GOS-10", banned=[ALICE.key])
    ban.hears(hello(), "ignore banned").hears(later(86_400_000), "ignore banned", 86_400_000)
    ban.hears(hello(BOB), ACCEPT, topic=topic_of(BOB))
    slow = Scene(
        "a group of a throttled key takes the whole of a small bucket; hellos take what they always do",
        "GOS-6",
        throttled=[ALICE.key],
    )
    slow.hears(rollout(0), ACCEPT).hears(rollout(0, 1), "ignore rate", 59_999)
    slow.hears(later(60_000, rollout), ACCEPT, 60_000)
    for seq in range(3, 7):
        slow.hears(later(60_000, seq=seq), ACCEPT, 60_000)
    return [burst, greetings, again, forgery, apart, quarantine, ban, slow]


def _fresh() -> list[Scene]:
    return [
        Scene("as stale as may be", "GOS-7", known=[0, 1, 2]).hears(rollout(0), ACCEPT),
        Scene("a version too stale", "GOS-7", known=[0, 1, 2, 3]).hears(rollout(0), "ignore stale"),
        Scene("staleness is counted in versions, not in known checkpoints", "GOS-7", known=[0, 3]).hears(rollout(0), "ignore stale"),
        Scene("a checkpoint that is not known", "GOS-7").hears(rollout(1), "ignore unknown-checkpoint"),
        Scene("before any checkpoint is known", "GOS-7", known=[]).hears(rollout(0), "ignore unknown-checkpoint"),
        Scene("a hello names no checkpoint", "GOS-7", known=[]).hears(hello(), ACCEPT),
    ]  # fmt: skip


def _trainers() -> list[Scene]:
    manifest = BASE.to_bytes()
    receipts = Receipts([accepted(checkpoint_hash(manifest), ALICE.key, 5)]).to_bytes()
    scenes = []
    for topic, kind, body in (("checkpoints", "checkpoint", manifest), ("receipts", "receipts", receipts)):
        many = Scene(f"{topic} have no rate", "GOS-6 GOS-8")
        for seq in range(5):
            many.hears(sealed(TRAINER, kind, body, seq), ACCEPT, topic=topic)
        scenes += [
            many,
            Scene(f"{topic} of a volunteer", "GOS-8").hears(sealed(ALICE, kind, body), "reject wrong-role", topic=topic),
            Scene(f"a hello on {topic}", "GOS-3").hears(sealed(TRAINER, "hello", HELLO), "reject wrong-kind", topic=topic),
            Scene(f"forged {topic}", "ENV-5").hears(forged(sealed(TRAINER, kind, body)), "reject bad-signature", topic=topic),
            Scene(f"expired {topic}", "ENV-7").hears(sealed(TRAINER, kind, body), "ignore expired", 60_000, topic=topic),
            Scene(f"malformed {topic}", "GOS-2").hears(sealed(TRAINER, kind, b"\x80"), "reject wrong-type", topic=topic),
        ]  # fmt: skip
    later = replace(BASE, version=1, parent=bytes(32))
    odd = [
        ("of another base", replace(BASE, files=BASE.files[:1]), "reject hash-mismatch"),
        ("with a path that leads elsewhere", replace(later, files=[replace(BASE.files[0], path="../a.json")]), "reject path"),
        ("with a chunk too many", replace(later, files=[replace(BASE.files[0], chunks=bytes(64))]), "reject size-mismatch"),
        ("of a later kind", replace(later, kind="sketch"), "ignore unknown-kind"),
        ("without its parent", replace(later, parent=None), "reject wrong-type"),
        ("with a chain, though it is whole", replace(later, chain=[bytes(32)]), "reject wrong-type"),
        ("with a mirror that is none", replace(later, mirrors=["ftp://a"]), "reject wrong-type"),
        ("of a version that is not the next", replace(later, version=7), ACCEPT),
    ]  # fmt: skip
    scenes += [
        Scene(f"a checkpoint {what}", "GOS-1 GOS-2").hears(
            sealed(TRAINER, "checkpoint", one.to_bytes()), verdict, topic="checkpoints"
        )
        for what, one, verdict in odd
    ]
    sketch = sealed(TRAINER, "checkpoint", encode({"kind": "sketch", "outlines": [1, 2]}))
    scenes.append(
        Scene("a checkpoint of a later kind and of another shape is nobody's fault", "CKP-6 GOS-2").hears(
            sketch, "ignore unknown-kind", topic="checkpoints"
        )
    )
    answers = Receipts([], known=[Known(ALICE.key, 0)]).to_bytes()
    scenes.append(
        Scene("receipts that only answer hellos", "GOS-8 HEL-2").hears(
            sealed(TRAINER, "receipts", answers), ACCEPT, topic="receipts"
        )
    )
    return scenes


def _order() -> list[Scene]:
    """Each message breaks two neighbouring rules of the order, and is answered for the first."""
    other = f"rollouts/{(shard_of(ALICE.key, MANIFEST.shards) + 1) % MANIFEST.shards}"
    held = {ALICE.key: NOW + 1_000_000}
    pairs: list[tuple[str, bytes, str, int, str | None]] = [
        ("protocol before run", hello(v=2, run=bytes(32)), "ignore unsupported-version", 0, None),
        ("kind before run", hello(kind="gift", run=bytes(32)), "ignore unknown-kind", 0, None),
        ("run before the topic's kind", hello(kind="run", run=bytes(32)), "reject wrong-run", 0, None),
        ("the topic's kind before times", hello(kind="run"), "reject wrong-kind", 60_000, None),
        ("life before the clock", hello(exp=NOW - 1), "reject lifetime", 60_000, None),
        ("times before the shard", hello(), "ignore expired", 60_000, other),
        ("shard before signature", forged(hello()), "reject wrong-shard", 0, other),
        ("signature before quarantine", forged(hello()), "reject bad-signature", 0, None),
        ("quarantine before the body", sealed(ALICE, "hello", b"\x80"), "ignore quarantined", 0, None),
    ]
    scenes = [
        Scene(f"order: {comment}", "GOS-1", quarantined=held).hears(message, verdict, after, topic)
        for comment, message, verdict, after, topic in pairs
    ]
    replay = Scene("order: replay before the shard", "GOS-1").hears(hello(), ACCEPT)
    return [*scenes, replay.hears(hello(), "ignore duplicate", topic=other)]
