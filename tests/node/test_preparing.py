"""The next checkpoint, read while the present one is in use: in this process, and in a real worker."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nous_node.node.engine import Engine, LoadError
from nous_node.node.preparing import COPY_SHARE, Preparing, read_weights
from nous_node.node.runfolder import RunFolder
from nous_node.node.worker_messages import Generate, Load, Order, Prepare
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.trainer.checkpoint import WEIGHTS_FILE, tensor_hashes
from nous_node.trainer.errors import CheckpointError
from nous_node.trainer.policy import Policy

OLD, NEW, NEWER = b"o" * 32, b"n" * 32, b"N" * 32
ORDERS = [Order(counter, bytes([counter]) * 32, {}) for counter in range(2)]


def hashes(folder: Path) -> dict[str, bytes]:
    return tensor_hashes(folder / WEIGHTS_FILE)


@pytest.fixture
def policy(base_run: RunFolder) -> Policy:
    return Policy.load(base_run.checkpoint(0), "float32")


@pytest.fixture
def damaged(other_weights: Path, tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """One bit of a tensor is another, and the hashes from before."""
    folder = shutil.copytree(other_weights, tmp_path / "damaged")
    wanted = hashes(folder)
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    data[-3] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(data)
    return folder, wanted


def same(policy: Policy, folder: Path) -> bool:
    stored = Policy.load(folder, "float32").tensors()
    return all(torch.equal(weight, stored[name]) for name, weight in policy.tensors().items())


def test_prepared_weights_are_those_of_the_folder_and_nothing_changes_before(
    policy: Policy, base_run: RunFolder, other_weights: Path
) -> None:
    preparing = Preparing(policy, 0)
    preparing.begin(other_weights, NEW, hashes(other_weights))
    weights = preparing.take(NEW)
    assert weights is not None
    assert same(policy, base_run.checkpoint(0))
    policy.swap_tensors(weights)
    assert same(policy, other_weights)
    assert preparing.take(NEW) is None


def test_swapped_weights_are_what_is_computed_with(policy: Policy, other_weights: Path) -> None:
    from nous_node.trainer.generate import Request, generate

    request = Request(policy.tokenizer.encode("3142="), bytes(32), 0, 8)
    policy.swap_tensors(read_weights(policy, other_weights, {}))
    fresh = Policy.load(other_weights, "float32")
    (swapped,), (loaded,) = (
        generate(one, [request], 1.0, [], lambda tokens: None) for one in (policy, fresh)
    )
    assert swapped.tokens == loaded.tokens
    assert swapped.logprobs.tolist() == loaded.logprobs.tolist()


def test_weights_are_converted_to_what_the_policy_computes_in(
    base_run: RunFolder, other_weights: Path
) -> None:
    narrow = Policy.load(base_run.checkpoint(0), "bfloat16")
    weights = read_weights(narrow, other_weights, hashes(other_weights))
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    narrow.swap_tensors(weights)


def test_later_checkpoint_overtakes_the_one_under_way(
    policy: Policy, base_run: RunFolder, other_weights: Path
) -> None:
    preparing = Preparing(policy, 0)
    preparing.begin(base_run.checkpoint(0), NEW, {})
    preparing.begin(other_weights, NEWER, hashes(other_weights))
    weights = preparing.take(NEWER)
    assert weights is not None
    policy.swap_tensors(weights)
    assert same(policy, other_weights)


def test_checkpoint_that_was_not_prepared_is_not_taken_for_another(
    policy: Policy, other_weights: Path
) -> None:
    preparing = Preparing(policy, 0)
    preparing.begin(other_weights, NEW, {})
    assert preparing.take(NEWER) is None
    assert preparing.take(NEW) is None


def test_damage_is_told_to_whoever_asks_and_to_nobody_else(
    policy: Policy, damaged: tuple[Path, dict[str, bytes]], other_weights: Path
) -> None:
    folder, wanted = damaged
    preparing = Preparing(policy, 0)
    preparing.begin(folder, NEW, wanted)
    with pytest.raises(CheckpointError, match="does not have the hash"):
        preparing.take(NEW)
    preparing.begin(folder, NEW, wanted)
    preparing.begin(other_weights, NEWER, hashes(other_weights))
    assert preparing.take(NEWER) is not None


@pytest.mark.parametrize("change", ["lacks a tensor", "has one more", "is cut", "is gone"])
def test_folder_that_is_not_what_the_manifest_says_is_refused(
    policy: Policy, other_weights: Path, tmp_path: Path, change: str
) -> None:
    folder, wanted = shutil.copytree(other_weights, tmp_path / "new"), hashes(other_weights)
    if change == "lacks a tensor":
        wanted["another"] = bytes(32)
    elif change == "has one more":
        del wanted[min(wanted)]
    elif change == "is cut":
        data = (folder / WEIGHTS_FILE).read_bytes()
        (folder / WEIGHTS_FILE).write_bytes(data[:-10])
    else:
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError):
        read_weights(policy, folder, wanted)


def test_nothing_is_prepared_where_two_copies_do_not_fit(
    policy: Policy, other_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(weight.nbytes for weight in policy.tensors().values())
    taken = 1 << 30

    class Process:
        def memory_info(self) -> Any:
            return type("", (), {"rss": taken})

    monkeypatch.setattr("nous_node.node.preparing.psutil.Process", Process)
    for room, crowded in ((int(size * COPY_SHARE) + 1, False), (size, True)):
        preparing = Preparing(policy, taken + room)
        assert preparing.crowded is crowded
        preparing.begin(other_weights, NEW, {})
        assert (preparing.take(NEW) is None) is crowded


# --- a worker process ----------------------------------------------------------------------------


def engine_of(tmp_path: Path) -> Engine:
    return Engine(memory=1 << 32, nice=0, threads=1, log=tmp_path / "worker.log")


def load(run: RunFolder, folder: Path, checkpoint: bytes, tensors: dict[str, bytes], memory: int = 0) -> Load:
    return Load(str(folder), checkpoint, "cpu", 1, run.manifest.to_bytes(), memory=memory, tensors=tensors)


async def made(engine: Engine) -> set[bytes]:
    """Checkpoints that the next groups name."""
    groups = await engine.generate(ORDERS, lambda tokens: None)
    return {RolloutGroup.from_bytes(group.body).checkpoint for group in groups}


async def test_worker_swaps_in_what_it_prepared_and_keeps_what_it_has_where_that_is_damaged(
    base_run: RunFolder, other_weights: Path, damaged: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    engine, first = engine_of(tmp_path), base_run.checkpoint(0)
    broken, wanted = damaged
    try:
        loaded = await engine.load(load(base_run, first, OLD, hashes(first)))
        assert (loaded.prepared, loaded.crowded) == (False, False)
        await engine.prepare(Prepare(str(broken), NEW, wanted))
        worker = engine.pid
        with pytest.raises(LoadError, match="does not have the hash"):
            await engine.load(load(base_run, broken, NEW, wanted))
        assert await made(engine) == {OLD}
        await engine.prepare(Prepare(str(broken), NEW, wanted))
        await engine.prepare(Prepare(str(other_weights), NEWER, hashes(other_weights)))
        assert await made(engine) == {OLD}
        loaded = await engine.load(load(base_run, other_weights, NEWER, hashes(other_weights)))
        assert loaded.prepared
        assert await made(engine) == {NEWER}
        assert engine.pid == worker
    finally:
        await engine.close()


def test_worker_without_room_for_two_copies_says_so_and_loads_between_batches(
    base_run: RunFolder, other_weights: Path, worked: Any
) -> None:
    first = base_run.checkpoint(0)
    one, another, *_, groups = worked(
        load(base_run, first, OLD, hashes(first), memory=1),
        load(base_run, other_weights, NEW, hashes(other_weights), memory=1),
        Generate(ORDERS),
    )
    assert (one.crowded, another.crowded, another.prepared) == (True, True, False)
    assert {RolloutGroup.from_bytes(group.body).checkpoint for group in groups.groups} == {NEW}


async def test_preparing_without_a_worker_is_nothing(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    await engine.prepare(Prepare("nowhere", NEW, {}))
    assert engine.pid is None
