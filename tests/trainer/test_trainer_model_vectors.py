"""Beyond the vectors of specs/models/nous-default.md: how near, and what a published checkpoint holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nous_node.trainer.checkpoint import save_checkpoint, tensor_hashes
from nous_node.trainer.decoder import make_decoder
from nous_node.trainer.model_folder import read_config
from nous_node.trainer.policy import DEFAULT_FOLDER, Policy

SPECS = Path(__file__).parents[2] / "specs"
CASES = json.loads((SPECS / "vectors" / "nous-default.json").read_text())["cases"]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load(DEFAULT_FOLDER, "float32")


@pytest.mark.parametrize("case", CASES, ids=[case["text"] for case in CASES])
def test_logits_come_ten_times_nearer_than_the_vectors_ask(policy: Policy, case: dict[str, Any]) -> None:
    logits = make_decoder(policy).prefill(torch.tensor([case["tokens"]]), torch.tensor([0]))[0]
    assert (logits - torch.tensor(case["logits"])).abs().max() < case["tolerance"] / 10


def test_a_published_checkpoint_has_the_files_types_and_settings_of_the_chapter(
    policy: Policy, tmp_path: Path
) -> None:
    text = (SPECS / "models" / "nous-default.md").read_text()
    save_checkpoint(policy, tmp_path / "0", durable=False)
    assert all(f"`{path.name}`" in text for path in (tmp_path / "0").iterdir())
    config = read_config(tmp_path / "0")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `") and line.count("|") == 4]
    told = {cells[1].strip().strip("`"): cells[2].strip().strip("`") for cells in rows}
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"):
        assert told[key] == str(config[key])
    for key in ("model_type", "hidden_act"):
        assert told[key] == config[key]
    assert float(told["rms_norm_eps"]) == config["rms_norm_eps"]
    assert set(tensor_hashes(tmp_path / "0" / "model.safetensors")) == set(policy.tensors())
    header = (tmp_path / "0" / "model.safetensors").read_bytes()[:8000]
    assert b'"F32"' in header
    assert b'"BF16"' not in header
