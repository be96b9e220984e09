"""What a volunteer is told that it has contributed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node import contribution as module
from nous_node.node.contribution import Contribution
from nous_node.node.following import Following, Head
from nous_node.node.outbox import Outbox
from nous_node.node.runfolder import RunFolder
from nous_node.node.worker_messages import Group
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import accepted, refused

KEY = Identity.from_seed(b"v" * 32)
NOW = 1_800_000_000_000
GROUP = Group(0, b"body", 40)


class Clock:
    """Stands where it is put."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox.open(tmp_path / "outbox.sqlite") as outbox:
        yield outbox


@pytest.fixture
def contribution(base_run: RunFolder, outbox: Outbox, clock: Clock) -> Contribution:
    return Contribution(Following.of(base_run.run, base_run.envelope), outbox)


def yes(number: int, credit: int = 40) -> Any:
    return accepted(bytes([number]) * 32, KEY.key, credit)


def no(number: int, code: Code = Code.STALE) -> Any:
    return refused(bytes([number]) * 32, KEY.key, RemoteError(code, "no"))


def test_nothing_is_said_of_what_has_not_begun(contribution: Contribution, base_run: RunFolder) -> None:
    status = contribution.status(3)
    assert (status.run, status.name, status.version, status.checkpoint) == (base_run.run.hex(), "run", -1, "")
    assert (status.peers, status.doing) == (3, "starting")
    assert (status.tokens_per_second, status.generating_share, status.seconds) == (0, 0, 0)


def test_the_checkpoint_in_use_is_told(contribution: Contribution) -> None:
    files = [file_entry("model.safetensors", [b"weights"])]
    manifest = CheckpointManifest(7, FULL, files, {"w": bytes(32)}, bytes(32), b"p" * 32)
    contribution.generates_with(Head(b"\xab" * 32, manifest, b""))
    status = contribution.status(0)
    assert (status.version, status.checkpoint) == (7, "ab" * 32)


def test_receipts_are_counted_by_what_they_say(contribution: Contribution) -> None:
    for _ in range(4):
        contribution.sent(GROUP)
    for receipt in (yes(1), yes(2, 30), no(3), no(4, Code.REWARD_MISMATCH), no(5)):
        contribution.note(receipt)
    contribution.give_up(2)
    status = contribution.status(0)
    assert (status.groups_sent, status.accepted, status.credit, status.groups_given_up) == (4, 2, 70, 2)
    assert status.refused == {"stale": 2, "reward-mismatch": 1}


def test_tokens_a_second_are_those_of_the_last_ten(contribution: Contribution, clock: Clock) -> None:
    with contribution.working():
        contribution.sampled(100)
        clock.now += 5
        contribution.sampled(50)
        assert contribution.status(0).tokens_per_second == 30
        clock.now += 5
        assert contribution.status(0).tokens_per_second == 15
        clock.now += 0.5
        assert contribution.status(0).tokens_per_second == 5
        clock.now += 100
    status = contribution.status(0)
    assert (status.tokens_per_second, status.generated_tokens) == (0, 150)


def test_the_first_second_does_not_exaggerate(contribution: Contribution, clock: Clock) -> None:
    with contribution.working():
        clock.now += 0.01
        contribution.sampled(100)
        assert contribution.status(0).tokens_per_second == 100


def test_the_share_of_work_begins_with_the_first_batch(contribution: Contribution, clock: Clock) -> None:
    clock.now += 60  # to fetch the checkpoint
    with contribution.working():
        clock.now += 3
    clock.now += 1
    assert contribution.status(0).generating_share == 0.75
    with contribution.working():
        clock.now += 4
    assert contribution.status(0).generating_share == 0.875
    assert contribution.status(0).seconds == 68


def test_work_that_fails_was_work(contribution: Contribution, clock: Clock) -> None:
    def work() -> None:
        with contribution.working():
            clock.now += 1
            raise ValueError("the worker died")

    with pytest.raises(ValueError, match="died"):
        work()
    clock.now += 1
    assert contribution.status(0).generating_share == 0.5


def test_what_the_rest_of_the_time_went_to_is_told(contribution: Contribution, clock: Clock) -> None:
    with contribution.spending("loading"):
        clock.now += 5  # before the first batch: a cold start
    with contribution.working():
        clock.now += 6
    for phase, seconds in (("waiting", 1), ("loading", 1), ("waiting", 2)):
        with contribution.spending(phase):  # type: ignore[arg-type]
            clock.now += seconds
    status = contribution.status(0)
    assert (status.generating_share, status.spent) == (0.6, {"loading": 0.1, "waiting": 0.3})
    assert contribution.summary().text.endswith("It generated for 60 % of the time since its first batch.")


def test_groups_that_are_made_and_not_stored_yet_count_towards_a_goal(contribution: Contribution) -> None:
    contribution.reached(5)
    contribution.in_hand = 3
    assert contribution.wanted(64) == 2


def test_a_goal_is_reached_by_acknowledged_groups_refused_ones_included(contribution: Contribution) -> None:
    two, three = contribution.reached(2), contribution.reached(3)
    contribution.note(yes(1))
    contribution.give_up(5)
    assert not two.is_set()
    contribution.note(no(2))
    assert two.is_set()
    assert not three.is_set()
    contribution.note(yes(3))
    assert three.is_set()


def test_no_more_groups_are_wanted_than_a_goal_leaves(contribution: Contribution, outbox: Outbox) -> None:
    assert contribution.wanted(64) == 64
    contribution.reached(5)
    assert (contribution.wanted(64), contribution.wanted(3)) == (5, 3)
    contribution.note(yes(1))
    contribution.note(no(2))
    for counter in range(2):  # made, and without a receipt
        data = seal(KEY, Kind.ROLLOUT, bytes(32), b"body", seq=outbox.next_seq(), ts=NOW)
        outbox.put(data, checkpoint=bytes(32), version=0, counter=counter)
    assert contribution.wanted(64) == 1
    contribution.note(no(3))
    assert contribution.wanted(64) == 0
    outbox.drop_stale(horizon=1)
    assert contribution.wanted(64) == 2


async def test_whoever_waits_is_woken_by_each_receipt_and_by_groups_given_up(
    contribution: Contribution,
) -> None:
    woken: list[str] = []

    async def wait() -> None:
        await contribution.changed()
        woken.append("receipt")
        await contribution.changed()
        woken.append("given up")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        contribution.note(yes(1))
        await wait_all_tasks_blocked()
        assert woken == ["receipt"]
        contribution.give_up(1)
    assert woken == ["receipt", "given up"]


async def test_the_end_waits_for_every_groups_receipt(
    contribution: Contribution, outbox: Outbox, base_run: RunFolder
) -> None:
    def put(counter: int) -> bytes:
        data = seal(KEY, Kind.ROLLOUT, base_run.run, b"body", seq=outbox.next_seq(), ts=NOW)
        return outbox.put(data, checkpoint=bytes(32), version=0, counter=counter)

    ids = [put(counter) for counter in range(2)]
    ended = trio.Event()

    async def wait() -> None:
        await contribution.all_acknowledged()
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for group in ids:
            await wait_all_tasks_blocked()
            assert not ended.is_set()
            (receipt,) = outbox.acknowledge([accepted(group, KEY.key, 40)], b"proof")
            contribution.note(receipt)
    assert contribution.status(0).groups_waiting == 0
    await contribution.all_acknowledged()


def test_the_summary_is_one_sentence(contribution: Contribution, clock: Clock, outbox: Outbox) -> None:
    contribution.note(yes(1))
    contribution.note(no(2))
    clock.now += 90
    summary = contribution.summary()
    assert summary.text == (
        "Contributed 1 accepted rollout groups (40 trained tokens) to run in 1.5 minutes; 1 were refused."
    )
    data = seal(KEY, Kind.ROLLOUT, bytes(32), b"body", seq=1, ts=NOW)
    outbox.put(data, checkpoint=bytes(32), version=0, counter=0)
    assert contribution.summary().text.endswith("1 were refused, 1 wait for a receipt.")
