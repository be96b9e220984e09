"""Which counters a volunteer uses, and when it waits for another checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nous_node.node.assignments import MAX_PASSED_OVER, Assignments
from nous_node.node.following import Head
from nous_node.node.outbox import Outbox
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.runs import EnvironmentEntry, RunManifest
from nous_node.protocol.tasks import assign, task_seed

RUN, KEY = b"r" * 32, b"k" * 32


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


def test_counters_are_not_used_again_after_a_restart(base_run: RunFolder, outbox: Outbox) -> None:
    first, second = (
        Assignments(RUN, KEY, base_run.manifest, {"sort-digits"}, outbox).take(head(1), 3) for _ in range(2)
    )
    assert not {order.counter for order in first} & {order.counter for order in second}


def test_tasks_of_other_environments_are_passed_over(base_run: RunFolder, outbox: Outbox) -> None:
    manifest = mixed(base_run, 3)
    orders = Assignments(RUN, KEY, manifest, {"sort-digits"}, outbox).take(head(1), 20)
    assert len(orders) == 20
    beacon = head(1).manifest.beacon
    for order in orders:
        assert order.seed == task_seed(RUN, head(1).hash, beacon, KEY, order.counter)
        assert assign(order.seed, manifest.weights, 1).environment == 0
    assert 40 < orders[-1].counter < 160


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
