"""Every verdict with its code, the order of checks, and what a view remembers."""

from __future__ import annotations

from typing import Any

import pytest

from nous_node.protocol.constants import MAX_ENVELOPE, MAX_LIFETIME_MS
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.gossip import (
    IGNORED,
    GossipView,
    Judgement,
    Verdict,
    judge_checkpoint,
    judge_receipts,
    judge_rollout,
)
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Hello, Receipts, accepted
from nous_node.protocol.rollouts import Engine
from nous_node.protocol.runs import shard_of

KNOWN = bytes([9]) * 32


@pytest.fixture
def view(world: Any) -> GossipView:
    view = GossipView(world.run, world.manifest)
    view.learn(KNOWN, 0)
    return view


@pytest.fixture
def hello(world: Any) -> bytes:
    return Hello("test/1", Engine("test", "1", "float32", "cpu")).to_bytes()


@pytest.fixture
def rollout(world: Any, group: Any) -> Any:
    """A sealed group of the known checkpoint with this counter and sequence number."""

    def sealed(number: int) -> bytes:
        body = group(checkpoint=KNOWN, counter=number).to_bytes()
        data: bytes = world.sealed(Kind.ROLLOUT, body, world.volunteer, number)
        return data

    return sealed


@pytest.fixture
def judge(world: Any, view: GossipView) -> Any:
    """Judges a message on its sender's shard at the world's time, or later by `after` milliseconds."""

    def judged(data: bytes, after: int = 0, sender: Identity | None = None) -> Judgement:
        shard = shard_of((sender or world.volunteer).key, world.manifest.shards)
        return judge_rollout(view, shard, data, world.now + after)

    return judged


def outcome(judgement: Judgement) -> tuple[Verdict, Code | None]:
    return judgement.verdict, judgement.error and judgement.error.code


ACCEPTED = (Verdict.ACCEPT, None)


def refused(code: Code) -> tuple[Verdict, Code]:
    return (Verdict.IGNORE if code in IGNORED else Verdict.REJECT), code


def test_a_fresh_group_is_accepted_once(world: Any, group: Any, judge: Any) -> None:
    body = group(checkpoint=KNOWN)
    data = world.sealed(Kind.ROLLOUT, body.to_bytes(), world.volunteer)
    first = judge(data)
    assert outcome(first) == ACCEPTED
    assert first.body == body
    assert outcome(judge(data)) == refused(Code.DUPLICATE)


def test_a_hello_is_accepted(world: Any, hello: bytes, judge: Any) -> None:
    judgement = judge(world.sealed(Kind.HELLO, hello, world.volunteer))
    assert outcome(judgement) == ACCEPTED
    assert judgement.body.agent == "test/1"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", Code.MALFORMED),
        (b"\xc1", Code.MALFORMED),
        (b"\x80", Code.WRONG_TYPE),
        (bytes(MAX_ENVELOPE + 1), Code.OVERSIZE),
        (encode({"sig": bytes(64), "signed": b""}), Code.MALFORMED),
    ],
)
def test_garbage_is_rejected(judge: Any, data: bytes, code: Code) -> None:
    assert outcome(judge(data)) == (Verdict.REJECT, code)


def test_a_rollout_has_no_more_than_the_rules_of_its_run_can_hold(world: Any, group: Any, judge: Any) -> None:
    trajectory = group().trajectories[0]
    most = world.manifest.rollout_body_limit
    assert most == 65_536 + 16 * 2 * (32 * 64 + 4_096)
    names = {"x" * 250 + str(number): 0.0 for number in range(60)}
    padded = type(trajectory)(trajectory.tokens, trajectory.segments, trajectory.logprobs, 0.5, "stop", names)
    body = group(checkpoint=KNOWN, trajectories=[padded] * 30).to_bytes()
    assert most < len(body)
    data = world.sealed(Kind.ROLLOUT, body, world.volunteer)  # repeats well: the envelope is small
    assert len(data) < 10_000
    assert outcome(judge(data)) == refused(Code.OVERSIZE)
    with pytest.raises(LocalError, match=f"at most {most} can be sent"):
        world.sealed(Kind.ROLLOUT, body, world.volunteer, body_limit=most)


def test_an_envelope_on_a_rollout_topic_keeps_to_the_limit_of_its_run(judge: Any) -> None:
    assert outcome(judge(bytes(100_001))) == refused(Code.OVERSIZE)
    assert outcome(judge(bytes(100_000))) == refused(Code.MALFORMED)


def test_another_run_is_rejected(world: Any, view: GossipView, hello: bytes, judge: Any) -> None:
    data = world.sealed(Kind.HELLO, hello, world.volunteer)
    view.run = bytes(32)
    assert outcome(judge(data)) == refused(Code.WRONG_RUN)


@pytest.mark.parametrize("kind", [Kind.RUN, Kind.CHECKPOINT, Kind.RECEIPTS])
def test_another_kind_is_rejected_on_a_rollout_topic(
    world: Any, hello: bytes, judge: Any, kind: Kind
) -> None:
    assert outcome(judge(world.sealed(kind, hello, world.volunteer))) == refused(Code.WRONG_KIND)


def test_another_shard_is_rejected_before_the_signature_is_looked_at(
    world: Any, view: GossipView, hello: bytes
) -> None:
    data = bytearray(world.sealed(Kind.HELLO, hello, world.volunteer))
    data[10] ^= 1
    shard = (shard_of(world.volunteer.key, world.manifest.shards) + 1) % world.manifest.shards
    assert outcome(judge_rollout(view, shard, bytes(data), world.now)) == refused(Code.WRONG_SHARD)


def test_times_are_ignored_but_a_long_life_is_rejected(world: Any, hello: bytes, judge: Any) -> None:
    data = world.sealed(Kind.HELLO, hello, world.volunteer)
    assert outcome(judge(data, MAX_LIFETIME_MS)) == (Verdict.IGNORE, Code.EXPIRED)
    assert outcome(judge(data, -30_001)) == (Verdict.IGNORE, Code.FUTURE_DATED)
    long = world.sealed(Kind.HELLO, hello, world.volunteer, lifetime=MAX_LIFETIME_MS + 1)
    assert outcome(judge(long)) == (Verdict.REJECT, Code.LIFETIME)


def test_a_forged_message_is_rejected_and_not_remembered(
    world: Any, view: GossipView, hello: bytes, judge: Any
) -> None:
    data = bytearray(world.sealed(Kind.HELLO, hello, world.volunteer))
    data[10] ^= 1  # within `sig`
    assert outcome(judge(bytes(data))) == refused(Code.BAD_SIGNATURE)
    data[10] ^= 1
    assert outcome(judge(bytes(data))) == ACCEPTED


def test_a_sequence_number_serves_one_message(world: Any, hello: bytes, judge: Any) -> None:
    assert outcome(judge(world.sealed(Kind.HELLO, hello, world.volunteer, 5))) == ACCEPTED
    again = world.sealed(Kind.HELLO, hello, world.volunteer, 5, ts=world.now + 1)
    assert outcome(judge(again, 1)) == refused(Code.SEQUENCE_REUSED)
    assert outcome(judge(world.sealed(Kind.HELLO, hello, world.volunteer, 4))) == ACCEPTED


def test_what_could_not_be_taken_may_come_again(
    world: Any, view: GossipView, hello: bytes, judge: Any
) -> None:
    data = world.sealed(Kind.HELLO, hello, world.volunteer, 5)
    first = judge(data)
    view.memory.remove(first.envelope.id)
    view.memory.remove(first.envelope.id)
    assert outcome(judge(data)) == ACCEPTED
    assert outcome(judge(data)) == refused(Code.DUPLICATE)
    view.memory.forget(world.now + 2 * MAX_LIFETIME_MS)  # its minute names it twice
    assert (view.memory.ids, view.memory.numbers, view.memory.held) == ({}, {}, {})


def test_two_senders_may_use_one_sequence_number(world: Any, hello: bytes, judge: Any) -> None:
    assert outcome(judge(world.sealed(Kind.HELLO, hello, world.volunteer, 5))) == ACCEPTED
    other = world.sealed(Kind.HELLO, hello, world.root, 5)
    assert outcome(judge(other, sender=world.root)) == ACCEPTED


def test_what_expired_is_forgotten_and_stays_refused(
    world: Any, view: GossipView, hello: bytes, judge: Any
) -> None:
    data = world.sealed(Kind.HELLO, hello, world.volunteer, lifetime=1000)
    assert outcome(judge(data)) == ACCEPTED
    assert outcome(judge(data, 61_000)) == refused(Code.EXPIRED)
    assert (len(view.memory.ids), len(view.memory.numbers), len(view.memory.minutes)) == (0, 0, 0)


def test_a_burst_is_taken_then_the_rate_holds(rollout: Any, judge: Any) -> None:
    # 0.05 a second: a bucket of 3
    messages = [rollout(number) for number in range(6)]
    assert [outcome(judge(data)) for data in messages[:4]] == [ACCEPTED] * 3 + [refused(Code.RATE)]
    assert outcome(judge(messages[4], 19_999)) == refused(Code.RATE)
    assert outcome(judge(messages[5], 20_000)) == ACCEPTED


def test_what_exceeds_the_rate_is_not_remembered(view: GossipView, rollout: Any, judge: Any) -> None:
    for number in range(20):
        judge(rollout(number))
    assert len(view.memory.ids) == 3
    assert outcome(judge(rollout(19), 20_000)) == ACCEPTED


def test_hellos_have_a_rate_of_their_own(world: Any, hello: bytes, rollout: Any, judge: Any) -> None:
    hellos = [world.sealed(Kind.HELLO, hello, world.volunteer, 100 + seq) for seq in range(6)]
    assert [outcome(judge(data)) for data in hellos[:5]] == [ACCEPTED] * 4 + [refused(Code.RATE)]
    assert [outcome(judge(rollout(number))) for number in range(3)] == [ACCEPTED] * 3
    assert outcome(judge(hellos[5], 4_999)) == refused(Code.RATE)
    assert outcome(judge(hellos[5], 5_000)) == ACCEPTED


def test_few_keys_cannot_fill_the_memory(
    world: Any, view: GossipView, hello: bytes, judge: Any, replaced: Any
) -> None:
    view.memory.room = 1280
    message = world.opened(Kind.HELLO, hello, world.volunteer)

    def fill(key: bytes) -> None:
        for seq in range(2000):
            view.memory.check_share(key)
            head = replaced(message.head, sender=key, seq=seq)
            view.memory.add(replaced(message, head=head, id=key + seq.to_bytes(2)))

    for number in range(31):
        with pytest.raises(RemoteError, match="share") as caught:
            fill(number.to_bytes(32))
        assert caught.value.code is Code.RATE
        assert len(view.memory.ids) == 640 + 20 * number  # the first alone has half, each other one a share
    assert outcome(judge(world.sealed(Kind.HELLO, hello, world.volunteer))) == ACCEPTED


def test_a_forged_message_takes_nothing_from_its_victims_rate(world: Any, hello: bytes, judge: Any) -> None:
    for seq in range(20):
        data = bytearray(world.sealed(Kind.HELLO, hello, world.volunteer, seq))
        data[10] ^= 1
        judge(bytes(data))
    assert outcome(judge(world.sealed(Kind.HELLO, hello, world.volunteer, 99))) == ACCEPTED


def test_a_clock_that_steps_back_gives_nothing(rollout: Any, judge: Any) -> None:
    for number in range(3):
        judge(rollout(number), 10_000)
    assert outcome(judge(rollout(3))) == refused(Code.RATE)
    assert outcome(judge(rollout(4), 10_000)) == refused(Code.RATE)


def test_quarantine_ends_by_itself(world: Any, view: GossipView, hello: bytes, judge: Any) -> None:
    view.quarantined[world.volunteer.key] = world.now + 1000
    assert outcome(judge(world.sealed(Kind.HELLO, hello, world.volunteer, 0))) == refused(Code.QUARANTINED)
    assert outcome(judge(world.sealed(Kind.HELLO, hello, world.volunteer, 1), 1000)) == ACCEPTED


def test_freshness(world: Any, view: GossipView, group: Any, judge: Any) -> None:
    old = world.sealed(Kind.ROLLOUT, group(checkpoint=KNOWN).to_bytes(), world.volunteer, 0)
    late = world.sealed(Kind.ROLLOUT, group(checkpoint=KNOWN, counter=1).to_bytes(), world.volunteer, 1)
    unknown = world.sealed(Kind.ROLLOUT, group(checkpoint=bytes(32)).to_bytes(), world.volunteer, 2)
    view.learn(bytes([2]) * 32, 2)
    assert outcome(judge(old)) == ACCEPTED
    view.learn(bytes([3]) * 32, 3)
    stale = judge(late)
    assert outcome(stale) == (Verdict.IGNORE, Code.STALE)
    assert stale.body is not None
    assert (stale.error.measured, stale.error.threshold) == (3, 2)
    assert outcome(judge(unknown)) == (Verdict.IGNORE, Code.UNKNOWN_CHECKPOINT)


def test_a_malformed_body_is_rejected(world: Any, judge: Any) -> None:
    assert outcome(judge(world.sealed(Kind.ROLLOUT, b"\x80", world.volunteer))) == refused(Code.WRONG_TYPE)
    assert outcome(judge(world.sealed(Kind.HELLO, b"\xc1", world.volunteer, 1))) == refused(Code.MALFORMED)


def test_a_full_memory_holds_volunteers_off_but_not_trainers(
    world: Any, view: GossipView, hello: bytes, judge: Any
) -> None:
    view.memory.room = view.memory.shares = 1
    assert outcome(judge(world.sealed(Kind.HELLO, hello, world.volunteer, 0))) == ACCEPTED
    assert outcome(judge(world.sealed(Kind.HELLO, hello, world.volunteer, 1))) == refused(Code.BUSY)
    data = world.sealed(Kind.CHECKPOINT, world.base.to_bytes(), world.trainer)
    assert outcome(judge_checkpoint(view, data, world.now)) == ACCEPTED


def test_only_trainers_publish_checkpoints_and_receipts(world: Any, view: GossipView) -> None:
    receipts = Receipts([accepted(bytes(32), world.volunteer.key, 7)]).to_bytes()
    for judge, kind, body in (
        (judge_checkpoint, Kind.CHECKPOINT, world.base.to_bytes()),
        (judge_receipts, Kind.RECEIPTS, receipts),
    ):
        mine = judge(view, world.sealed(kind, body, world.volunteer), world.now)
        assert outcome(mine) == refused(Code.WRONG_ROLE)
        assert outcome(judge(view, world.sealed(kind, body, world.trainer, len(kind)), world.now)) == ACCEPTED
        wrong = judge(view, world.sealed(Kind.HELLO, body, world.trainer), world.now)
        assert outcome(wrong) == refused(Code.WRONG_KIND)
    assert len(view.memory.ids) == 2


def test_trainers_have_no_rate(world: Any, view: GossipView) -> None:
    body = Receipts([accepted(bytes(32), world.volunteer.key, 7)]).to_bytes()
    for seq in range(50):
        data = world.sealed(Kind.RECEIPTS, body, world.trainer, seq)
        assert outcome(judge_receipts(view, data, world.now)) == ACCEPTED


def test_a_checkpoint_of_a_kind_from_the_future_is_ignored(
    world: Any, view: GossipView, replaced: Any
) -> None:
    body = replaced(world.base, kind="sketch").to_bytes()
    data = world.sealed(Kind.CHECKPOINT, body, world.trainer)
    assert outcome(judge_checkpoint(view, data, world.now)) == (Verdict.IGNORE, Code.UNKNOWN_KIND)


def test_checks_come_in_their_order(world: Any, view: GossipView, hello: bytes, judge: Any) -> None:
    """A message that breaks everything is answered for the first thing; mended one by one, for the next."""
    view.quarantined[world.volunteer.key] = world.now + 10_000_000
    ours = {"run": world.run, "kind": "hello", "v": 1, "ts": world.now, "exp": world.now + 1000}
    worst = {"run": bytes(32), "kind": "run", "v": 2, "ts": world.now, "exp": world.now}
    head = {"from": world.volunteer.key, "seq": 0, "body": b"\xc1", **worst}
    seen = []
    for mended in ("v", "run", "kind", "exp", "sig", ""):
        signed = encode(head)
        sig = world.volunteer.sign(b"nous/envelope/1\0" + signed) if mended == "" else bytes(64)
        seen.append(judge(encode({"sig": sig, "signed": signed})).error.code)
        if mended in ours:
            head[mended] = ours[mended]
    assert seen == [
        Code.UNSUPPORTED_VERSION,
        Code.WRONG_RUN,
        Code.WRONG_KIND,
        Code.LIFETIME,
        Code.BAD_SIGNATURE,
        Code.QUARANTINED,
    ]
    view.quarantined.clear()
    data = encode({"sig": world.volunteer.sign(b"nous/envelope/1\0" + signed), "signed": signed})
    assert judge(data).error.code is Code.MALFORMED


def test_ignored_codes_are_those_that_depend_on_time_order_or_knowledge() -> None:
    assert {code.value for code in IGNORED} == {
        "expired",
        "future-dated",
        "duplicate",
        "sequence-reused",
        "rate",
        "quarantined",
        "banned",
        "unknown-checkpoint",
        "stale",
        "busy",
        "unknown-kind",
        "unsupported-version",
    }
