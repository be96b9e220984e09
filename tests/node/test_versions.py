"""Rollouts are verified against the very weights that they name, whatever became of those meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nous_node.node import versions as module
from nous_node.node.runfolder import RunFolder
from nous_node.node.versions import Versions, folder_tensors
from nous_node.trainer.checkpoint import save_checkpoint
from nous_node.trainer.errors import CheckpointError, TensorError
from nous_node.trainer.policy import Policy

KEEP = 3


class Training:
    """A policy whose weights say which version they are: every tensor is filled with its number."""

    def __init__(self, folder: Path, base: RunFolder) -> None:
        self.folder = folder
        self.policy = Policy.load(base.checkpoint(0), "float32")
        self.fill(0)
        save_checkpoint(self.policy, self.place(0))
        verifier = Policy.load(self.place(0), "float32")
        self.versions = Versions(self.policy, verifier, 0, {0: str(self.place(0))}, KEEP)

    def place(self, version: int) -> Path:
        return self.folder / str(version)

    def fill(self, number: float) -> None:
        self.policy.load_tensors(
            {name: torch.full_like(tensor, number) for name, tensor in self.policy.tensors().items()}
        )

    def train(self, version: int) -> None:
        self.fill(version)
        save_checkpoint(self.policy, self.place(version))
        self.versions.remember(version, self.place(version))

    def weights(self, version: int) -> float:
        tensors = self.versions.policy(version).tensors().values()
        (found,) = {float(value) for tensor in tensors for value in (tensor.min(), tensor.max())}
        return found


@pytest.fixture
def training(tmp_path: Path, base_run: RunFolder) -> Training:
    return Training(tmp_path, base_run)


def test_each_version_has_its_own_weights_in_any_order(training: Training) -> None:
    training.train(1)
    training.train(2)
    assert [training.weights(version) for version in (2, 0, 1, 1, 0, 2)] == [2, 0, 1, 1, 0, 2]


def test_training_on_changes_no_version_that_is_remembered(training: Training) -> None:
    training.train(1)
    training.fill(7)
    assert training.weights(1) == 1
    assert training.weights(0) == 0


def test_versions_are_forgotten_by_number_also_where_one_is_missing(training: Training) -> None:
    training.train(2)  # version 1 was damaged
    training.train(3)
    assert [version in training.versions for version in range(4)] == [False, False, True, True]


def test_a_renewed_beacon_has_the_weights_of_the_version_before(training: Training) -> None:
    training.train(1)
    training.versions.alias(2, 1)
    training.train(3)
    assert [training.weights(version) for version in (2, 3, 1, 2)] == [1, 3, 1, 1]


def test_a_renewed_beacon_of_what_is_loaded_costs_no_load(training: Training) -> None:
    model = training.versions.policy(0)
    training.versions.alias(1, 0)
    before = [tensor.data_ptr() for tensor in model.tensors().values()]
    assert training.weights(1) == 0
    assert [tensor.data_ptr() for tensor in training.versions.policy(1).tensors().values()] == before
    assert training.weights(0) == 0


def test_old_versions_are_forgotten_and_said_to_be(training: Training) -> None:
    for version in range(1, 6):
        training.train(version)
    assert [version for version in range(7) if version in training.versions] == [3, 4, 5]
    with pytest.raises(KeyError):
        training.versions.policy(1)


def test_aliases_count_among_the_versions_that_are_kept(training: Training) -> None:
    training.train(1)
    for version in range(2, 6):
        training.versions.alias(version, version - 1)
    assert [version for version in range(7) if version in training.versions] == [3, 4, 5]
    assert [training.weights(version) for version in (3, 4, 5)] == [1, 1, 1]


def test_weights_that_do_not_fit_into_memory_come_from_their_folders(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 1)
    training.train(1)
    training.train(2)
    assert [training.weights(version) for version in (1, 2, 0)] == [1, 2, 0]


def test_tensors_of_a_folder_come_from_all_its_files(base_run: RunFolder, base_policy: Any) -> None:
    tensors = folder_tensors(base_run.checkpoint(0))
    assert tensors.keys() == base_policy.tensors().keys()


@pytest.mark.parametrize("damage", ["gone", "empty", "cut"])
def test_a_version_whose_folder_is_damaged_is_told_and_the_others_stay(
    damage: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 1)
    training.train(1)
    training.train(2)
    place = training.place(1)
    if damage == "gone":
        place.rename(place.with_name("elsewhere"))
    elif damage == "empty":
        (place / "model.safetensors").unlink()
    else:
        os.truncate(place / "model.safetensors", 1000)
    with pytest.raises((CheckpointError, TensorError)):
        training.versions.policy(1)
    assert [training.weights(version) for version in (0, 2)] == [0, 2]
