"""Which counters a volunteer uses, and when it waits for another checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nous_node.node.assignments import BLOCK, MAX_PASSED_OVER, Assignments
from nous_node.node.following import Head
from nous_node.node.outbox import Outbox
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import EnvironmentEntry, RunManifest
from nous_node.protocol.tasks import assign, task_seed

RUN, KEY = b"r" * 32, b"k" * 32
ME = Identity.from_seed(bytes(32))


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox.open(tmp_path / "outbox.sqlite") as outbox:
        yield outbox


def head(number: int) -> Head:
    files = [file_entry("model.safetensors", [b"weights"])]
    manifest = CheckpointManifest(number, FULL, files, {"w": bytes(32)}, bytes(32), b"p" * 32)
    return Head(bytes([number]) * 32, manifest, b"")


def mixed(base_run: RunFolder, weight: int) -> RunManifest:
    """With another environment of that weight beside sort-digits."""
    entries = [base_run.manifest.environments[0], EnvironmentEntry("ghost", "1", weight)]
    return msgspec.structs.replace(base_run.manifest, environments=entries)


def test_every_task_is_taken_up_where_all_environments_are_played(
    base_run: RunFolder, outbox: Outbox
) -> None:
    taking = Assignments(RUN, KEY, base_run.manifest, {"sort-digits"}, outbox)
    counters = [order.counter for size in (1, 2, 100) for order in taking.take(head(1), size)]
    assert counters == list(range(103))
    assert taking.take(head(2), 1)[0].counter == 0


def test_a_restart_begins_with_the_tasks_that_became_no_group(base_run: RunFolder, outbox: Outbox) -> None:
    def taken(size: int) -> list[int]:
        fresh = Assignments(RUN, KEY, base_run.manifest, {"sort-digits"}, outbox)
        return [order.counter for order in fresh.take(head(1), size)]

    assert taken(5) == [0, 1, 2, 3, 4]
    for counter in (0, 1, 3):
        data = seal(ME, Kind.ROLLOUT, RUN, b"body", seq=outbox.next_seq(), ts=1_000_000)
        outbox.put(data, checkpoint=head(1).hash, version=1, counter=counter)
    assert taken(4) == [2, 4, 5, 6]
    assert taken(BLOCK) == [2, *range(4, BLOCK + 3)]


def test_orders_that_a_worker_took_with_it_are_given_out_again_alone_and_first(
    base_run: RunFolder, outbox: Outbox
) -> None:
    taking = Assignments(RUN, KEY, base_run.manifest, {"sort-digits"}, outbox)
    orders = taking.take(head(1), 3)
    assert taking.lost(orders) is None
    assert [taking.take(head(1), 64) for _ in range(3)] == [[order] for order in orders]
    assert [order.counter for order in taking.take(head(1), 2)] == [3, 4]


def test_an_order_over_which_the_worker_dies_twice_is_given_up(base_run: RunFolder, outbox: Outbox) -> None:
    taking = Assignments(RUN, KEY, base_run.manifest, {"sort-digits"}, outbox)
    orders = taking.take(head(1), 3)
    taking.lost(orders)
    taking.take(head(1), 64)
    again = taking.take(head(1), 64)
    guilty = taking.lost(again)
    assert guilty == orders[1]
    taking.gave_up(head(1).hash, guilty.counter)
    assert taking.take(head(1), 64) == [orders[2]]
    assert outbox.unfinished(head(1).hash) == [0, *range(2, BLOCK)]
    assert taking.given_up == 1
    taking.take(head(2), 1)
    taking.gave_up(head(1).hash, 2)  # a group of the version before, which is stored only now
    assert taking.given_up == 0
    assert outbox.unfinished(head(1).hash) == [0, *range(3, BLOCK)]
    assert not taking.has_none(head(2))


def test_lost_orders_of_a_checkpoint_that_is_no_longer_current_are_left(
    base_run: RunFolder, outbox: Outbox
) -> None:
    taking = Assignments(RUN, KEY, base_run.manifest, {"sort-digits"}, outbox)
    taking.lost(taking.take(head(1), 3))
    assert [order.counter for order in taking.take(head(2), 2)] == [0, 1]


def test_tasks_of_other_environments_are_passed_over(base_run: RunFolder, outbox: Outbox) -> None:
    manifest = mixed(base_run, 3)
    orders = Assignments(RUN, KEY, manifest, {"sort-digits"}, outbox).take(head(1), 20)
    assert len(orders) == 20
    beacon = head(1).manifest.beacon
    for order in orders:
        assert order.seed == task_seed(RUN, head(1).hash, beacon, KEY, order.counter)
        assert assign(order.seed, manifest.weights, 1).environment == 0
    assert 40 < orders[-1].counter < 160


def test_no_counter_is_used_that_a_trainer_would_call_far_ahead(base_run: RunFolder, outbox: Outbox) -> None:
    def all_taken() -> list[int]:
        fresh = Assignments(RUN, KEY, mixed(base_run, 19), {"sort-digits"}, outbox)
        taken: list[int] = []
        while orders := fresh.take(head(1), 64):
            taken += [order.counter for order in orders]
        assert fresh.has_none(head(1))
        assert not fresh.has_none(head(2))
        return taken

    taken = all_taken()
    missing = next(counter for counter in range(len(taken) + 1) if counter not in taken)
    assert missing + MAX_COUNTER_GAP - 200 < max(taken) <= missing + MAX_COUNTER_GAP
    assert all_taken() == taken  # none of them became a group before the restart


def test_checkpoint_that_has_no_task_for_us_is_left_and_burns_no_more_counters(
    base_run: RunFolder, outbox: Outbox
) -> None:
    taking = Assignments(RUN, KEY, mixed(base_run, 1_000_000), {"sort-digits"}, outbox)
    assert not taking.has_none(head(1))
    for _ in range(3):
        assert taking.take(head(1), 8) == []
    assert taking.has_none(head(1))
    assert outbox.counters(head(1).hash)[0] == MAX_PASSED_OVER
    assert not taking.has_none(head(2))
