"""The last versions of a policy, for verifying rollouts against the one that made them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from nous_node.trainer.checkpoint import read_tensors
from nous_node.trainer.errors import CheckpointError
from nous_node.trainer.model_folder import weight_files
from nous_node.trainer.policy import Policy

IN_MEMORY_BYTES = 256 << 20
"""Weights of old versions kept in memory; above it they are read from their folders when needed."""


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, from however many files. Raises CheckpointError."""
    try:
        files = weight_files(folder)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {folder} is gone ({error.strerror}).") from error
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


class Versions:
    """`policy(version)` gives a policy with the weights of a version; it is one model whose weights are
    exchanged, so a second call makes the first result mean something else."""

    def __init__(
        self, policy: Policy, verifier: Policy, version: int, folders: Mapping[int, str], keep: int
    ) -> None:
        self._keep = keep
        self._folders = {number: Path(folder) for number, folder in folders.items()}
        self._tensors: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._model = verifier
        self._loaded = version
        self._source = policy

    def __contains__(self, version: int) -> bool:
        return version in self._folders

    @property
    def newest(self) -> int:
        return max(self._folders)

    def folder(self, version: int) -> Path:
        """Where its weights lie. Raises KeyError for a version that is not held."""
        return self._folders[version]

    def before(self, version: int) -> int | None:
        """The last version before it that has other weights; None where that is not held."""
        folder = self._folders[version]
        earlier = [number for number in self._folders if number < version and self._folders[number] != folder]
        return max(earlier, default=None)

    def remember(self, version: int, folder: Path) -> None:
        """The training policy as it is now is `version`, and is stored in `folder`."""
        self._folders[version] = folder
        tensors = {name: tensor.clone() for name, tensor in self._source.tensors().items()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        self._tensors[version] = tensors
        while self._tensors and len(self._tensors) * size > IN_MEMORY_BYTES:
            self._tensors.popitem(last=False)
        self._forget()

    def alias(self, version: int, same_as: int) -> None:
        """`version` has the weights of `same_as`."""
        self._folders[version] = self._folders[same_as]
        if same_as in self._tensors:
            self._tensors[version] = self._tensors[same_as]
        if self._loaded == same_as:
            self._loaded = version
        self._forget()

    def policy(self, version: int) -> Policy:
        """Raises KeyError for a version that is not held."""
        if version != self._loaded:
            tensors = self._tensors.get(version)
            self._model.load_tensors(
                tensors if tensors is not None else folder_tensors(self._folders[version])
            )
            self._loaded = version
        return self._model

    def _forget(self) -> None:
        """By number, as the trainer does: where a damaged version is missing, one more of the old ones would
        be held whose beacon is not known any more."""
        for version in [number for number in self._folders if number <= self.newest - self._keep]:
            del self._folders[version]
            self._tensors.pop(version, None)
