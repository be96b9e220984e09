"""Checkpoint folders: plain transformers folders, written whole or not at all, and known by their hashes.

A folder is written under a temporary name beside its place, flushed to the disk, and renamed: whoever finds
it under its name finds all of it, also after a power cut. The optimizer's state goes into a private folder of
its own, never into what is published.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError
from .model_folder import CONFIG_FILE
from .optim import Optimizer
from .policy import DTYPES, Policy
from .tokenizer import TOKENIZER_FILE

WEIGHTS_FILE = "model.safetensors"

# Copied from the base model's folder byte for byte, where present: what transformers needs beside weights.
COMPANIONS = (
    CONFIG_FILE,
    "generation_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

# Hashing reads this much at a time: large enough for the disk, small enough for any memory.
READ_BYTES = 1 << 20

# A safetensors header of a model of 10^5 tensors has 10 MB.
MAX_HEADER_BYTES = 64 << 20


def save_checkpoint(policy: Policy, folder: Path, dtype: str | None = None, *, durable: bool = True) -> None:
    """Writes the policy as a plain transformers folder, weights in `dtype` ("float32", "bfloat16"; default:
    as computed). An existing folder of that name is replaced. Raises CheckpointError if it cannot be written.

    `durable`: whether it is to survive a power failure, which costs several disk flushes; a killed process
    loses nothing either way.
    """
    stored = policy.dtype if dtype is None else DTYPES[dtype]
    weights = {n: t.to(device="cpu", dtype=stored).contiguous() for n, t in policy.tensors().items()}

    def write(place: Path) -> None:
        for name in COMPANIONS:
            if (policy.folder / name).is_file():
                shutil.copyfile(policy.folder / name, place / name)
        _set_dtype(place / CONFIG_FILE, stored)
        save_file(weights, place / WEIGHTS_FILE, metadata={"format": "pt"})

    write_whole(folder, write, durable=durable)


def save_private(
    optimizer: Optimizer, folder: Path, beside: Mapping[str, bytes] | None = None, *, durable: bool = True
) -> None:
    """Writes what only the trainer needs to go on, in the same all-or-nothing way; `beside`: more files, by
    name."""

    def write(place: Path) -> None:
        optimizer.save(place)
        for name, data in (beside or {}).items():
            (place / name).write_bytes(data)

    write_whole(folder, write, durable=durable)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises CheckpointError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch the checkpoint again.") from error


def file_hashes(folder: Path) -> dict[str, bytes]:
    """File name -> SHA-256 of its bytes, for all files of a checkpoint folder."""
    return {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}


def tensor_hashes(path: Path) -> dict[str, bytes]:
    """Tensor name -> SHA-256 of its bytes as stored in a safetensors file (little-endian, row-major).

    Raises CheckpointError if the file is no safetensors file.
    """
    hashes = {}
    try:
        with path.open("rb") as file:
            start, entries = _header(file.read)
            for name, (begin, end) in entries.items():
                file.seek(start + begin)
                hashes[name] = _digest(_pieces(file.read, end - begin))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch the checkpoint again.") from error
    return hashes


def tensor_hash(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's bytes, equal to that of `tensor_hashes` once stored."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).digest()


def check_files(folder: Path, expected: Mapping[str, bytes]) -> None:
    """Raises CheckpointError naming the first of the `expected` files that is missing or changed."""
    for name, digest in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"The checkpoint {folder} has no {name}; fetch it again.")
        if _sha256(path) != digest:
            raise CheckpointError(
                f"{name} of the checkpoint {folder} does not have the hash it was published with; "
                "delete the folder and fetch it again."
            )


def write_whole(folder: Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
    """Makes `folder` of what `write` puts into the folder it is given, or leaves what was there. Raises
    CheckpointError, and what `write` raises."""
    with _disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            write(place)
            _flush(place, durable)
            _replace(place, folder)
            if durable:
                _sync(folder.parent)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _replace(place: Path, folder: Path) -> None:
    """Puts `place` where `folder` is. A directory cannot be replaced in one step: between the two renames
    there is none of that name, never half of one."""
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        os.rename(folder, old / folder.name)
        os.rename(place, folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(place, folder)


def _flush(place: Path, durable: bool) -> None:
    place.chmod(0o755)  # mkdtemp and safetensors make things private; a checkpoint is public
    for path in place.iterdir():
        path.chmod(0o644)
        if durable:
            _sync(path)
    if durable:
        _sync(place)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(error):  # safetensors wraps the disk's error in its own
            raise CheckpointError(
                f"The disk is full: the checkpoint {folder} was not written and nothing was lost; "
                "free some space and start again."
            ) from error
        if isinstance(error, OSError):
            raise CheckpointError(f"The checkpoint {folder} cannot be written ({error}).") from error
        raise


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    """Says in config.json what the weights are stored as; an equal config stays byte for byte the same."""
    config = json.loads(config_file.read_bytes())
    name = str(dtype).removeprefix("torch.")
    if config.get("dtype", config.get("torch_dtype")) != name:
        config.pop("torch_dtype", None)
        config_file.write_text(json.dumps(config | {"dtype": name}, indent=2) + "\n")


def _header(read: Callable[[int], bytes]) -> tuple[int, dict[str, tuple[int, int]]]:
    """Where the data begin, and name -> (begin, end) in them, in the order of the names."""
    size = int.from_bytes(read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    entries = json.loads(read(size))
    entries.pop("__metadata__", None)
    offsets = {name: entry["data_offsets"] for name, entry in sorted(entries.items())}
    return 8 + size, {name: (int(begin), int(end)) for name, (begin, end) in offsets.items()}


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _digest(pieces: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _pieces(read: Callable[[int], bytes], length: int) -> Iterator[bytes]:
    while length > 0:
        piece = read(min(length, READ_BYTES))
        if not piece:
            raise ValueError("it ends too early")
        length -= len(piece)
        yield piece
