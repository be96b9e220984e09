"""What a model folder holds, read without torch: used to refuse it before anything heavy is loaded.

A folder is the plain transformers layout: config.json, tokenizer.json and safetensors weights. Pickled
weights and code are refused outright: whoever opens such a file runs it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .errors import ModelError
from .tokenizer import TOKENIZER_FILE

CONFIG_FILE = "config.json"
WEIGHTS_SUFFIX = ".safetensors"

# Formats that execute what they contain when loaded (Python pickle).
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})

# The largest config.json of a published model is under 100 KB; ten times that is no config any more.
MAX_CONFIG_BYTES = 1 << 20

# Bytes an element, by the names safetensors uses; other dtypes (packed, quantized) cannot be trained on.
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """`parameters` counts each stored tensor once; `weight_bytes` is their size as stored in `dtype`
    (a safetensors name such as BF16); `context` is the number of positions, prompt and answer together."""

    model_type: str
    parameters: int
    weight_bytes: int
    dtype: str
    vocab_size: int
    context: int


def model_facts(folder: Path) -> ModelFacts:
    """Reads config.json and the safetensors headers of `folder`. ModelError says what is missing."""
    check_folder(folder)
    config = read_config(folder)
    shapes = _tensor_shapes(folder)
    dtypes = {dtype for dtype, _ in shapes.values()}
    unknown = dtypes - DTYPE_BYTES.keys()
    if unknown:
        raise ModelError(
            f"The weights of {folder} are stored as {', '.join(sorted(unknown))}; "
            "save them as bfloat16 or float32 first."
        )
    counts = [(DTYPE_BYTES[dtype], size) for dtype, size in shapes.values()]
    context = config.get("max_position_embeddings", config.get("n_positions"))
    vocab = config.get("vocab_size")
    if not isinstance(context, int) or not isinstance(vocab, int):
        raise ModelError(
            f"The config.json of {folder} names no vocab_size or max_position_embeddings; "
            "only causal language models can be trained."
        )
    return ModelFacts(
        model_type=str(config.get("model_type", "")),
        parameters=sum(size for _, size in counts),
        weight_bytes=sum(width * size for width, size in counts),
        dtype=max(dtypes, key=lambda name: sum(s for d, s in shapes.values() if d == name)),
        vocab_size=vocab,
        context=context,
    )


def check_folder(folder: Path) -> None:
    """Raises ModelError unless `folder` has config, tokenizer and safetensors weights, and no pickle."""
    if not folder.is_dir():
        raise ModelError(f"There is no model folder {folder}; give the path of a transformers model folder.")
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise ModelError(
            f"The model folder {folder} holds {pickled[0]}, a pickle file, which can run code when loaded; "
            "save the model with save_pretrained (safetensors) and delete that file."
        )
    for name, what in ((CONFIG_FILE, "config"), (TOKENIZER_FILE, "tokenizer")):
        if not (folder / name).is_file():
            raise ModelError(
                f"The model folder {folder} has no {name}; save the {what} into it with save_pretrained."
            )
    if not weight_files(folder):
        raise ModelError(
            f"The model folder {folder} has no weights; save the model into it with save_pretrained."
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix == WEIGHTS_SUFFIX)


def read_config(folder: Path) -> dict[str, object]:
    """config.json as a mapping; ModelError if it is none or larger than MAX_CONFIG_BYTES."""
    path = folder / CONFIG_FILE
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: not a model configuration.")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); copy the folder again from its source.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object; copy the folder again from its source.")
    return config


def _tensor_shapes(folder: Path) -> dict[str, tuple[str, int]]:
    """name -> (dtype name, number of elements), over all weight files, from their headers alone."""
    shapes: dict[str, tuple[str, int]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    part = tensors.get_slice(name)
                    shapes[name] = (part.get_dtype(), _product(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}); fetch it again from its source.") from error
    return shapes


def _product(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
