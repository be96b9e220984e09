"""A group that was lost on its way arrives all the same, and is credited once. [GOS-12]"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from nous_node.node.calibration import embedded_thresholds
from nous_node.node.outbox import Outbox
from nous_node.node.store import Journal, StoredGroup
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import Code
from nous_node.protocol.gossip import GossipView, Verdict, judge_rollout
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipt, accepted
from nous_node.protocol.rollouts import (
    Engine,
    Role,
    RolloutGroup,
    Segment,
    Trajectory,
    pack_floats,
    pack_tokens,
)
from nous_node.protocol.runs import (
    EnvironmentEntry,
    Limits,
    ModelFacts,
    RunManifest,
    SamplingRules,
    run_id,
)

ROOT, VOLUNTEER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))
NOW = 1_800_000_000_000
CHECKPOINT = b"c" * 32
MANIFEST = RunManifest(
    name="repeats",
    created=NOW,
    protocol=[1, 1],
    root=ROOT.key,
    trainers=[ROOT.key],
    base=bytes(32),
    model=ModelFacts("llama", 1, 1, 259, 64, "float32"),
    environments=[EnvironmentEntry("sort-digits", "1", 1)],
    sampling=SamplingRules("seeded", 1.0, 8, [258], "f32"),
    group=2,
    staleness=2,
    shards=1,
    thresholds=embedded_thresholds(),
    limits=Limits(10.0, 100_000),
)
RUN = run_id(MANIFEST.to_bytes())
TRAJECTORY = Trajectory(
    tokens=pack_tokens([61, 50, 258]),
    segments=[Segment(1, Role.RAW, False), Segment(2, Role.ASSISTANT, True)],
    logprobs=pack_floats([-0.5, -0.25]),
    reward=1.0,
    finish="stop",
)
BODY = RolloutGroup(
    CHECKPOINT, 0, "sort-digits", Engine("test", "1", "float32", "cpu"), [TRAJECTORY] * 2
).to_bytes()


@dataclass
class Line:
    """A volunteer, a relay that forwards what its gossip path accepts, and a trainer behind it."""

    outbox: Outbox
    journal: Journal
    relay: GossipView
    trainer: GossipView
    first: bytes = b""

    def made(self, now: int) -> bytes:
        data = self.sealed(now)
        self.first = self.outbox.put(data, checkpoint=CHECKPOINT, version=1, counter=0)
        return data

    def made_again(self, now: int) -> bytes:
        content = self.outbox.content(self.first)
        assert content is not None
        data = self.sealed(now, content[1])
        self.outbox.repeat(self.first, data)
        self.outbox.was_repeated(self.first, now)
        return data

    def sealed(self, now: int, content: bytes = BODY) -> bytes:
        return seal(VOLUNTEER, Kind.ROLLOUT, RUN, content, seq=self.outbox.next_seq(), ts=now)

    def forwards(self, data: bytes, now: int) -> bool:
        return judge_rollout(self.relay, 0, data, now).verdict is Verdict.ACCEPT

    def takes(self, data: bytes, now: int) -> Code | None:
        """The trainer's gossip path and journal."""
        judgement = judge_rollout(self.trainer, 0, data, now)
        assert judgement.verdict is Verdict.ACCEPT
        (error,) = self.journal.add_many([stored(data)])
        return None if error is None else error.code

    def receipts(self) -> list[Receipt]:
        """What the trainer sends, and what of it is news to the volunteer."""
        sent = self.journal.unsent_receipts(99)
        self.journal.receipts_sent(sent)
        return self.outbox.acknowledge(sent, b"proof")


def stored(data: bytes) -> StoredGroup:
    envelope = unseal(data)
    digest = sha256(envelope.content()).digest()
    return StoredGroup(envelope.id, envelope.head.sender, CHECKPOINT, 1, 0, digest, NOW, data)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    with Outbox.open(tmp_path / "outbox") as outbox, Journal.open(tmp_path / "journal") as journal:
        made = Line(outbox, journal, GossipView(RUN, MANIFEST), GossipView(RUN, MANIFEST))
        made.relay.learn(CHECKPOINT, 1)
        made.trainer.learn(CHECKPOINT, 1)
        journal.hear(VOLUNTEER.key, "test", NOW, 0)
        yield made


def test_a_group_lost_behind_a_relay_arrives_when_it_is_sealed_anew(line: Line) -> None:
    first = line.made(NOW)
    assert line.forwards(first, NOW)  # and then the relay's connection broke
    assert not line.forwards(first, NOW + 10_000)
    again = line.made_again(NOW + 10_000)
    assert line.forwards(again, NOW + 10_000)
    assert line.takes(again, NOW + 10_000) is None
    line.journal.decide([accepted(unseal(again).id, VOLUNTEER.key, 4)], NOW)
    assert line.receipts() == [accepted(line.first, VOLUNTEER.key, 4)]
    assert line.outbox.waiting() == 0


def test_a_receipt_that_was_lost_comes_for_the_repeat_and_credits_nothing_twice(line: Line) -> None:
    assert line.takes(line.made(NOW), NOW) is None
    line.journal.decide([accepted(line.first, VOLUNTEER.key, 4)], NOW)
    line.journal.receipts_sent(line.journal.unsent_receipts(9))  # which nobody heard
    again = line.made_again(NOW + 10_000)
    assert line.forwards(again, NOW + 10_000)
    assert line.takes(again, NOW + 10_000) is Code.DUPLICATE
    assert line.receipts() == [accepted(line.first, VOLUNTEER.key, 4)]
    assert (line.outbox.totals().credit, line.journal.stats().credit) == (4, 4)


def test_a_repeat_that_comes_too_late_has_the_verdict_of_the_group_that_was_in_time(line: Line) -> None:
    assert line.takes(line.made(NOW), NOW) is None
    line.journal.decide([accepted(line.first, VOLUNTEER.key, 4)], NOW)
    line.journal.receipts_sent(line.journal.unsent_receipts(9))
    line.trainer.learn(b"d" * 32, 9)
    again = line.made_again(NOW + 10_000)
    judgement = judge_rollout(line.trainer, 0, again, NOW + 10_000)
    assert judgement.error is not None
    assert judgement.error.code is Code.STALE
    assert line.journal.repeated(stored(again))
    assert line.receipts() == [accepted(line.first, VOLUNTEER.key, 4)]


def test_two_envelopes_before_the_verdict_are_one_group_with_two_receipts(line: Line) -> None:
    assert line.takes(line.made(NOW), NOW) is None
    assert line.takes(line.made_again(NOW + 10_000), NOW + 10_000) is Code.DUPLICATE
    line.journal.decide([accepted(line.first, VOLUNTEER.key, 4)], NOW)
    assert len(line.journal.unsent_receipts(9)) == 2
    assert line.receipts() == [accepted(line.first, VOLUNTEER.key, 4)]
    assert (line.outbox.totals().credit, line.journal.stats().accepted) == (4, 1)
