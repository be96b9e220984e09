"""Checkpoints are whole or absent, plain, and every changed bit is noticed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nous_node.trainer import checkpoint as checkpoint_module
from nous_node.trainer.checkpoint import (
    check_files,
    file_hashes,
    read_tensors,
    save_checkpoint,
    save_private,
    tensor_hash,
    tensor_hashes,
)
from nous_node.trainer.errors import CheckpointError, TensorError
from nous_node.trainer.optim import Optimizer, OptimizerConfig
from nous_node.trainer.policy import DEFAULT_FOLDER, Policy


@pytest.fixture
def policy() -> Policy:
    return Policy.load(DEFAULT_FOLDER)


def nudge(policy: Policy, amount: float = 0.01) -> None:
    policy.load_tensors({n: t + amount for n, t in policy.tensors().items()})


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_checkpoint_is_a_plain_transformers_folder(policy, tmp_path, dtype):
    nudge(policy)
    save_checkpoint(policy, tmp_path / "v1", dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v1", local_files_only=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "v1", local_files_only=True).eos_token_id == 258
    stored = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    assert model.dtype == stored
    for name, weight in model.named_parameters():
        assert torch.equal(weight, policy.tensors()[name].to(stored))
    again = Policy.load(tmp_path / "v1")
    assert all(torch.equal(t, policy.tensors()[n].to(stored).float()) for n, t in again.tensors().items())


def test_the_same_weights_give_the_same_files(policy, tmp_path):
    save_checkpoint(policy, tmp_path / "a", "bfloat16")
    save_checkpoint(policy, tmp_path / "b", "bfloat16")
    assert file_hashes(tmp_path / "a") == file_hashes(tmp_path / "b")
    assert file_hashes(tmp_path / "a") == file_hashes(DEFAULT_FOLDER)


def test_an_existing_folder_is_replaced_and_nothing_else_is_left(policy, tmp_path):
    save_checkpoint(policy, tmp_path / "v1")
    before = file_hashes(tmp_path / "v1")
    nudge(policy)
    save_checkpoint(policy, tmp_path / "v1")
    assert file_hashes(tmp_path / "v1")["model.safetensors"] != before["model.safetensors"]
    assert os.listdir(tmp_path) == ["v1"]


@pytest.mark.parametrize("moment", ["save_file", "_flush", "_replace"])
def test_a_failure_while_writing_leaves_the_old_folder_whole(policy, tmp_path, monkeypatch, moment):
    save_checkpoint(policy, tmp_path / "v1")
    before = file_hashes(tmp_path / "v1")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, moment, full)
    with pytest.raises(CheckpointError, match="disk is full"):
        save_checkpoint(policy, tmp_path / "v1")
    assert os.listdir(tmp_path) == ["v1"]
    assert file_hashes(tmp_path / "v1") == before


def test_a_place_that_cannot_be_written_is_told(policy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(policy, tmp_path / "file" / "v1")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_flipped_bit_is_noticed(policy, tmp_path, name):
    save_checkpoint(policy, tmp_path / "v1")
    expected = file_hashes(tmp_path / "v1")
    check_files(tmp_path / "v1", expected)
    path = tmp_path / "v1" / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        check_files(tmp_path / "v1", expected)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"no {name}"):
        check_files(tmp_path / "v1", expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_hashes_of_the_file_are_those_of_the_tensors(policy, tmp_path, dtype):
    save_checkpoint(policy, tmp_path / "v1", dtype)
    path = tmp_path / "v1" / "model.safetensors"
    before = tensor_hashes(path)
    assert before == {n: tensor_hash(t) for n, t in read_tensors(path).items()}
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert sum(before[name] != digest for name, digest in tensor_hashes(path).items()) == 1


@pytest.mark.parametrize("cut", [0, 4, 100, 5000])
def test_a_file_cut_short_is_damaged(policy, tmp_path, cut):
    save_checkpoint(policy, tmp_path / "v1")
    path = tmp_path / "v1" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match="damaged"):
        read_tensors(tmp_path / "v1" / "model.safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        tensor_hashes(path)


def test_weights_of_another_model_are_refused(small_folder, policy):
    with pytest.raises(TensorError):
        policy.load_tensors(read_tensors(small_folder / "model.safetensors"))


def train(policy: Policy, optimizer: Optimizer, steps: int) -> None:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed + optimizer.steps)
        for weight in policy.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.accumulate()
        optimizer.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_disk_as_if_it_had_not_stopped(tmp_path: Path, dtype):
    through, optimizer = Policy.load(DEFAULT_FOLDER, dtype), None
    optimizer = Optimizer(through, OptimizerConfig(weight_decay=0.1))
    train(through, optimizer, 3)
    save_checkpoint(through, tmp_path / "v1")
    save_private(optimizer, tmp_path / "private")
    resumed = Policy.load(tmp_path / "v1", dtype)
    again = Optimizer(resumed, OptimizerConfig(weight_decay=0.1))
    again.load(tmp_path / "private")
    train(through, optimizer, 3)
    train(resumed, again, 3)
    assert again.steps == optimizer.steps == 6
    assert all(torch.equal(t, resumed.tensors()[n]) for n, t in through.tensors().items())
    assert all(torch.equal(t, again.state()[n]) for n, t in optimizer.state().items())


def test_the_state_of_another_model_is_refused(small_folder, policy, tmp_path):
    other = Policy.load(small_folder)
    optimizer = Optimizer(other, OptimizerConfig())
    train(other, optimizer, 1)
    save_private(optimizer, tmp_path / "private")
    mine = Optimizer(policy, OptimizerConfig())
    with pytest.raises(CheckpointError, match="does not belong"):
        mine.load(tmp_path / "private")
    assert mine.steps == 0


def test_a_bf16_state_without_masters_is_refused(tmp_path, policy):
    save_private(Optimizer(policy, OptimizerConfig()), tmp_path / "private")
    half = Policy.load(DEFAULT_FOLDER, "bfloat16")
    with pytest.raises(CheckpointError, match="does not belong"):
        Optimizer(half, OptimizerConfig()).load(tmp_path / "private")


@pytest.mark.parametrize("name", ["optimizer.safetensors", "optimizer.json"])
@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_damaged_state_is_told(tmp_path, policy, name, content):
    optimizer = Optimizer(policy, OptimizerConfig())
    train(policy, optimizer, 1)
    save_private(optimizer, tmp_path / "private")
    path = tmp_path / "private" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        optimizer.load(tmp_path / "private")


def test_other_files_can_lie_beside_the_state(tmp_path, policy):
    optimizer = Optimizer(policy, OptimizerConfig())
    save_private(optimizer, tmp_path / "private", {"more.json": b"{}"})
    assert (tmp_path / "private" / "more.json").read_bytes() == b"{}"
    optimizer.load(tmp_path / "private")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_that_is_reset_steps_as_a_new_one_does(dtype):
    used, fresh = Policy.load(DEFAULT_FOLDER, dtype), Policy.load(DEFAULT_FOLDER, dtype)
    optimizer = Optimizer(used, OptimizerConfig())
    train(used, optimizer, 3)
    used.load_tensors(fresh.tensors())
    optimizer.reset()
    train(used, optimizer, 2)
    train(fresh, Optimizer(fresh, OptimizerConfig()), 2)
    assert all(torch.equal(t, fresh.tensors()[n]) for n, t in used.tensors().items())
