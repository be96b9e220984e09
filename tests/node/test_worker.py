"""The worker's side of its conversation with the node, over pipes in memory."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nous_node.node.pipe import ParentPipe
from nous_node.node.runfolder import RunFolder
from nous_node.node.worker import serve
from nous_node.node.worker_messages import Failed, Generate, Load, Loaded, Made, Order, Progress, ToWorker
from nous_node.protocol.rollouts import RolloutGroup, trained_tokens
from nous_node.protocol.runs import EnvironmentEntry
from nous_node.protocol.tasks import assign

CHECKPOINT = b"c" * 32


def load(folder: RunFolder, place: Path | None = None, **changes: Any) -> Load:
    manifest = msgspec.structs.replace(folder.manifest, **changes)
    return Load(str(place or folder.checkpoint(0)), CHECKPOINT, "cpu", 1, manifest.to_bytes())


def order(counter: int, level: int = 0) -> Order:
    return Order(counter, bytes([counter]) * 32, {"sort-digits": level} if level else {})


def test_groups_come_back_in_the_order_of_their_orders(base_run, worked) -> None:
    loaded, *told, made = worked(load(base_run), Generate([order(7), order(3), order(5)]))
    assert isinstance(loaded, Loaded)
    assert (loaded.engine_name, loaded.dtype, loaded.device) == ("nous-torch", "float32", "cpu")
    assert [group.counter for group in made.groups] == [7, 3, 5]
    for group in made.groups:
        body = RolloutGroup.from_bytes(group.body)
        assert (body.checkpoint, body.counter, body.env) == (CHECKPOINT, group.counter, "sort-digits")
        assert body.engine.name == "nous-torch"
        assert len(body.trajectories) == base_run.manifest.group
        assert group.tokens == sum(map(trained_tokens, body.trajectories))
    assert sum(message.tokens for message in told) == sum(group.tokens for group in made.groups)
    assert {type(message) for message in told} == {Progress}


def test_a_group_is_the_same_alone_and_in_company(base_run, worked) -> None:
    alone = worked(load(base_run), Generate([order(3)]))[-1]
    company = worked(load(base_run), Generate([order(counter) for counter in range(6)]))[-1]
    mine, theirs = (RolloutGroup.from_bytes(group.body) for group in (alone.groups[0], company.groups[3]))
    assert [one.tokens for one in mine.trajectories] == [one.tokens for one in theirs.trajectories]


def test_the_curriculum_level_of_an_order_makes_longer_tasks(base_run, worked) -> None:
    easy, hard = (
        worked(load(base_run), Generate([order(counter, level) for counter in range(8)]))[-1]
        for level in (0, 8)
    )
    prompts = [
        sum(RolloutGroup.from_bytes(group.body).trajectories[0].segments[0].length for group in made.groups)
        for made in (easy, hard)
    ]
    assert prompts[0] < prompts[1]


@pytest.fixture
def two_environments(base_run) -> tuple[Load, list[bytes], list[bytes]]:
    """A run of which one environment is not installed here, and seeds of the tasks of either."""
    entries = [base_run.manifest.environments[0], EnvironmentEntry("ghost", "1", 1)]
    seeds = [bytes([number]) * 32 for number in range(12)]
    known = [seed for seed in seeds if assign(seed, [1, 1]).environment == 0]
    ghosts = [seed for seed in seeds if assign(seed, [1, 1]).environment == 1]
    assert known
    assert ghosts
    return load(base_run, environments=entries), known, ghosts


def test_an_environment_that_cannot_be_made_loses_only_its_own_groups(two_environments, worked) -> None:
    message, known, ghosts = two_environments
    orders = [Order(counter, seed, {}) for counter, seed in enumerate([*ghosts, *known, *ghosts])]
    *_, made = worked(message, Generate(orders))
    assert isinstance(made, Made)
    by_counter = {group.counter: group for group in made.groups}
    assert len(by_counter) == len(orders)
    for one in orders:
        group = by_counter[one.counter]
        assert bool(group.body) == (one.seed in known)
        assert ("ghost failed: There is no environment 'ghost'" in group.failure) == (one.seed in ghosts)


def test_a_task_that_cannot_be_made_loses_only_its_own_group(base_run, worked) -> None:
    *_, made = worked(load(base_run), Generate([order(1, level=-1), order(2)]))
    failed, fine = made.groups
    assert (failed.counter, failed.body, failed.tokens) == (1, b"", 0)
    assert "sort-digits failed" in failed.failure
    assert (fine.counter, fine.failure) == (2, "")


def test_no_orders_make_no_groups(base_run, worked) -> None:
    assert worked(load(base_run), Generate([]))[-1].groups == []


def test_an_order_before_any_policy_is_told(worked) -> None:
    (answer,) = worked(Generate([order(0)]))
    assert isinstance(answer, Failed)
    assert "before it had a policy" in answer.text


def test_a_checkpoint_that_cannot_be_loaded_is_told_and_the_next_one_is_taken(
    base_run, worked, tmp_path: Path
) -> None:
    failed, loaded, *_, made = worked(load(base_run, tmp_path / "none"), load(base_run), Generate([order(0)]))
    assert isinstance(failed, Failed)
    assert str(tmp_path) in failed.text
    assert isinstance(loaded, Loaded)
    assert made.groups[0].body


def test_a_second_checkpoint_that_is_damaged_is_told(base_run, worked, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    _, failed = worked(load(base_run), load(base_run, tmp_path))
    assert isinstance(failed, Failed)
    assert "model.safetensors" in failed.text


def test_a_second_checkpoint_is_what_is_sampled_from_and_named(base_run, worked, other_weights) -> None:
    second = msgspec.structs.replace(load(base_run, other_weights), checkpoint=b"d" * 32)
    _, *_, before = worked(load(base_run), Generate([order(0)]))
    *_, after = worked(load(base_run), second, Generate([order(0)]))
    old, new = (RolloutGroup.from_bytes(made.groups[0].body) for made in (before, after))
    assert (old.checkpoint, new.checkpoint) == (CHECKPOINT, b"d" * 32)
    assert [one.logprobs for one in old.trajectories] != [one.logprobs for one in new.trajectories]


def test_a_pipe_that_closes_within_a_message_ends_the_worker() -> None:
    back = io.BytesIO()
    received: Any = ToWorker
    serve(ParentPipe(io.BytesIO(b"\x00\x00\x00\x64half"), back, received))
    assert back.getvalue() == b""


def test_a_worker_steps_back_behind_all_sessions_of_the_machine() -> None:
    """Also where the processor is shared among sessions first; elsewhere there is no such file."""
    script = (
        "from pathlib import Path; import os; from nous_node.node.niceness import step_back; step_back(7); "
        "group = Path('/proc/self/autogroup'); "
        "print(os.nice(0), group.read_text().split()[-1] if group.exists() else 7)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        check=True,
        text=True,
        start_new_session=True,
    )
    assert done.stdout.split() == [str(min(19, os.nice(0) + 7)), "7"]
