"""A small Llama and the embedded default, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nous_node.trainer.policy import DEFAULT_FOLDER, Policy
from nous_node.trainer.warmstart import make_tokenizer


@pytest.fixture(scope="session")
def default_policy() -> Policy:
    return Policy.load(DEFAULT_FOLDER, threads=1)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped keys, an untied head and a vocabulary of more than one block."""
    folder = tmp_path_factory.mktemp("small-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1500,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=258,
        pad_token_id=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def small_policy(small_folder: Path) -> Policy:
    return Policy.load(small_folder, threads=1)
