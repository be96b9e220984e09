"""Model folders: what is read from them and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nous_node.trainer.errors import ModelError, RequestError, TensorError
from nous_node.trainer.model_folder import model_facts
from nous_node.trainer.policy import DEFAULT_FOLDER, Policy
from nous_node.trainer.warmstart import warm_start, write_folder


@pytest.fixture
def folder(small_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_folder, tmp_path / "model"))


def test_the_embedded_default_is_a_plain_transformers_folder():
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_FOLDER, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_FOLDER, local_files_only=True)
    assert model.num_parameters() == 147_968
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer("sort 5283=").input_ids == list(b"sort 5283=")


@given(st.text())
@settings(deadline=None)
def test_every_text_round_trips_through_the_byte_tokenizer(text):
    tokenizer = default_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def default_tokenizer():
    from nous_node.trainer.model_folder import read_config
    from nous_node.trainer.tokenizer import load_tokenizer

    return load_tokenizer(DEFAULT_FOLDER, read_config(DEFAULT_FOLDER))


def test_text_that_spells_a_control_token_stays_text(default_policy):
    ids = default_policy.tokenizer.encode("a<eos>b")
    assert ids == list(b"a<eos>b")
    assert default_policy.tokenizer.decode([97, 258]) == "a<eos>"


def test_facts_are_read_from_the_headers():
    facts = model_facts(DEFAULT_FOLDER)
    assert (facts.parameters, facts.weight_bytes, facts.dtype) == (147_968, 295_936, "BF16")
    assert (facts.vocab_size, facts.context, facts.model_type) == (259, 1024, "llama")


def test_facts_need_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from nous_node.trainer.model_folder import model_facts;"
        f"model_facts(Path({str(DEFAULT_FOLDER)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "no weights"),
    ],
)
def test_a_folder_with_a_part_missing_is_refused(folder, missing, words):
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=words):
        Policy.load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.ckpt", "optimizer.pth"])
def test_pickled_weights_are_refused_even_beside_safe_ones(folder, name):
    (folder / name).write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=r"pickle"):
        Policy.load(folder)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no model folder"):
        Policy.load(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff" * 10, b" " * (2 << 20)])
def test_a_broken_config_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError):
        Policy.load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 20, b"\xff" * 4000])
def test_damaged_files_are_refused_in_a_sentence(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=r"again|damaged"):
        Policy.load(folder)


def test_a_model_that_is_no_language_model_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nonsense"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        Policy.load(folder)


def test_weights_that_lack_a_tensor_are_refused_not_made_up(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="missing keys"):
        Policy.load(folder)


def test_weights_of_other_shapes_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(ModelError):
        Policy.load(folder)


def test_the_shipped_folder_is_what_the_script_writes(tmp_path):
    """All but the weights, whose last bits depend on the processor that trained them."""
    write_folder(warm_start(0, steps=1), tmp_path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (DEFAULT_FOLDER / name).read_bytes()
    assert model_facts(tmp_path) == model_facts(DEFAULT_FOLDER)


def test_the_warm_start_depends_on_its_seed_alone():
    first, second, other = (dict(warm_start(seed, steps=2).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(w, second[n]) for n, w in first.items())
    assert not all(torch.equal(w, other[n]) for n, w in first.items())


def test_an_unknown_dtype_is_refused(folder):
    with pytest.raises(ModelError, match="float32 or bfloat16"):
        Policy.load(folder, dtype="int8")


def test_tensors_of_a_tied_model_appear_once_and_load_back(default_policy):
    tensors = default_policy.tensors()
    assert "lm_head.weight" not in tensors
    assert sum(t.numel() for t in tensors.values()) == 147_968
    other = Policy.load(DEFAULT_FOLDER)
    other.load_tensors({n: torch.zeros_like(t) for n, t in tensors.items()})
    assert all(not t.any() for t in other.tensors().values())
    other.load_tensors({n: t.to(torch.bfloat16) for n, t in tensors.items()})
    assert all(torch.equal(t, tensors[n]) for n, t in other.tensors().items())


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "integers"])
def test_tensors_of_another_model_are_refused_and_nothing_is_touched(small_folder, change):
    policy = Policy.load(small_folder)
    before = {n: t.clone() for n, t in policy.tensors().items()}
    given = {n: t + 1 for n, t in before.items()}
    name = list(given)[-1]
    if change == "missing":
        del given[name]
    elif change == "extra":
        given["more"] = torch.zeros(1)
    elif change == "shape":
        given[name] = torch.zeros(3)
    else:
        given[name] = given[name].long()
    with pytest.raises(TensorError):
        policy.load_tensors(given)
    assert all(torch.equal(t, before[n]) for n, t in policy.tensors().items())


def test_ids_outside_the_vocabulary_are_refused(small_policy):
    with pytest.raises(RequestError, match="1500"):
        small_policy.check_tokens(0, 1500, 3)
