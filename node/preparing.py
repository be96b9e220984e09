"""The next checkpoint's weights, read, checked and converted while the worker generates with the present.

    Prepare -> a thread: tensors of the files -> their hashes [CKP-10] -> dtype and device of the policy
    Load    -> waits for that thread where it is about the same checkpoint, and exchanges the weights

A later Prepare overtakes one that is under way. What is wrong with a prepared checkpoint is told when it is
asked for, and never where it is not. With no room for two copies of the weights nothing is prepared.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open
from torch import Tensor, uint8

from nous_node.protocol.errors import LocalError
from nous_node.trainer.errors import CheckpointError
from nous_node.trainer.model_folder import weight_files
from nous_node.trainer.policy import Policy

COPY_SHARE = 1.6
"""What a second copy of the weights takes at its peak, by their bytes: the files are mapped meanwhile."""


class Overtaken(LocalError):
    """Another checkpoint is prepared instead."""


class Preparing:
    """For one policy. `memory`: bytes that the process may take, 0 for no limit."""

    def __init__(self, policy: Policy, memory: int) -> None:
        self._policy, self._memory = policy, memory
        self._size = sum(weight.nbytes for weight in policy.tensors().values())
        self._work: _Work | None = None
        self._turn = threading.Lock()

    @property
    def crowded(self) -> bool:
        """Whether a second copy of the weights does not fit beside what the process takes now."""
        if not self._memory:
            return False
        return bool(psutil.Process().memory_info().rss + COPY_SHARE * self._size > self._memory)

    def begin(self, folder: Path, checkpoint: bytes, tensors: Mapping[str, bytes]) -> None:
        """Reads a checkpoint in a thread, unless there is no room. `tensors`: hashes by name, as its manifest
        has them; empty: nothing is compared."""
        with self._turn:
            if self._work is not None:
                if self._work.checkpoint == checkpoint:
                    return
                self._work.end()
                self._work = None
            if not self.crowded:
                self._work = _Work(self._policy, folder, checkpoint, tensors)

    def take(self, checkpoint: bytes) -> dict[str, Tensor] | None:
        """The weights of a checkpoint that was prepared; None where it was not. Raises CheckpointError where
        it is damaged. Waits for what is left to do."""
        with self._turn:
            work, self._work = self._work, None
            if work is None:
                return None
            if work.checkpoint != checkpoint:
                work.end()
                return None
            return work.result()


class _Work:
    """One checkpoint under preparation."""

    def __init__(self, policy: Policy, folder: Path, checkpoint: bytes, tensors: Mapping[str, bytes]) -> None:
        self.checkpoint = checkpoint
        self._overtaken = threading.Event()
        self._weights: dict[str, Tensor] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(policy, folder, tensors), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Leaves it; its memory is free afterwards."""
        self._overtaken.set()
        self._thread.join()

    def result(self) -> dict[str, Tensor]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._weights

    def _run(self, policy: Policy, folder: Path, tensors: Mapping[str, bytes]) -> None:
        try:
            self._weights = read_weights(policy, folder, tensors, self._overtaken)
        except Exception as error:  # told by `result`, where anybody asks
            self._error = error


def read_weights(
    policy: Policy, folder: Path, tensors: Mapping[str, bytes], overtaken: threading.Event | None = None
) -> dict[str, Tensor]:
    """The weights of a folder in the policy's dtype and on its device, checked against their hashes. Raises
    CheckpointError, and Overtaken once that event is set."""
    found = {}
    for name, tensor in _stored(folder):
        if overtaken is not None and overtaken.is_set():
            raise Overtaken("Another checkpoint is prepared instead.")
        _check(folder, name, tensor, tensors)
        found[name] = tensor.to(policy.device, policy.dtype, copy=True)
    _check_names(folder, found.keys(), tensors)
    return found


def check_weights(folder: Path, tensors: Mapping[str, bytes]) -> None:
    """The same checks, a tensor at a time and without keeping any. Raises CheckpointError."""
    names = set[str]()
    for name, tensor in _stored(folder) if tensors else ():
        _check(folder, name, tensor, tensors)
        names.add(name)
    _check_names(folder, names, tensors)


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder, each mapped only while it is looked at."""
    try:
        files = weight_files(folder)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {folder} is gone ({error.strerror}).") from error
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                names = stored.keys()
                for name in names:
                    yield name, stored.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); fetch the checkpoint again.") from error


def _check(folder: Path, name: str, tensor: Tensor, tensors: Mapping[str, bytes]) -> None:
    """[CKP-10]"""
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"Tensor {name!r} of the checkpoint {folder} is {tensor.dtype}; it is no weight."
        )
    if not tensors:
        return
    data = tensor.contiguous().flatten().view(uint8).numpy().data
    if tensors.get(name) != hashlib.sha256(data).digest():
        raise CheckpointError(
            f"Tensor {name!r} of the checkpoint {folder} does not have the hash it was published with; "
            "delete the folder and fetch it again."
        )


def _check_names(folder: Path, names: Set[str], tensors: Mapping[str, bytes]) -> None:
    if tensors and tensors.keys() != names:
        raise CheckpointError(
            f"The checkpoint {folder} lacks a tensor; delete the folder and fetch it again."
        )
