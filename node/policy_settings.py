"""What all policies of a run have in common, with the conversation format that its manifest names."""

from __future__ import annotations

from pathlib import Path

from nous_node.envs.chat import load_chat
from nous_node.envs.environment import PolicySettings, Tokenizer
from nous_node.protocol.runs import RunManifest


def policy_settings(manifest: RunManifest, tokenizer: Tokenizer, folder: Path) -> PolicySettings:
    """`folder`: of any checkpoint of the run, since all have the base's tokenizer and template.

    Raises BadChat where this node does not know the run's format."""
    chat = load_chat(folder, manifest.chat, manifest.created) if manifest.chat else None
    return PolicySettings.of(manifest, tokenizer, chat)
