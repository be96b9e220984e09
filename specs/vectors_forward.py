"""Vectors of the model nous-default with other numbers: small models that come with their weights."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from vectors_deltas import Tensor, safetensors
from vectors_model import forward, read_tensors
from vectors_world import case

TOLERANCE = 1e-4
"""Logits here are of some ones; float 32 in another order of sums stays below 1e-5."""

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]


def shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    queries = config["num_attention_heads"] * width
    keys = config.get("num_key_value_heads", config["num_attention_heads"]) * width
    layer = {
        "input_layernorm": [hidden],
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "post_attention_layernorm": [hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }
    return {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        **{
            f"model.layers.{number}.{name}.weight": shape
            for number in range(config["num_hidden_layers"])
            for name, shape in layer.items()
        },
        "model.norm.weight": [hidden],
    }


def tensors(config: dict[str, Any], dtype: str = "F32") -> dict[str, Tensor]:
    """Weights between -1 and 1 that a BF16 holds exactly."""
    return {name: (dtype, shape, _weights(name, shape, dtype)) for name, shape in shapes(config).items()}


def _weights(name: str, shape: list[int], dtype: str) -> bytes:
    count = int(np.prod(shape))
    octets = hashlib.shake_256(name.encode()).digest(count)
    words = [struct.pack("<f", (octet - 127.5) / 128) for octet in octets]
    return b"".join(word[2:] if dtype == "BF16" else b"\0\0" + word[2:] for word in words)


def models() -> list[dict[str, Any]]:
    plain = {key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")}
    one = {**SMALL, "num_key_value_heads": 1, "num_hidden_layers": 1}
    rows: list[tuple[str, dict[str, Any], str, list[int]]] = [
        ("one token", SMALL, "F32", TOKENS[:1]),
        ("two heads of queries share one of keys and values", SMALL, "F32", TOKENS[:2]),
        ("30 tokens", SMALL, "F32", TOKENS),
        ("stored as BF16", SMALL, "BF16", TOKENS[:9]),
        ("as many heads of keys as of queries, where neither is said", plain, "F32", TOKENS[:9]),
        ("one head of keys for all", one, "F32", TOKENS[:9]),
        ("another base of positions", {**SMALL, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, "F32", TOKENS),
    ]  # fmt: skip
    return [_model(*row) for row in rows] + _refused()


def _model(comment: str, config: dict[str, Any], dtype: str, tokens: list[int]) -> dict[str, Any]:
    data = safetensors(tensors(config, dtype), __metadata__={"format": "pt"})
    width = config["hidden_size"] // config["num_attention_heads"]
    whole = {"head_dim": width, "num_key_value_heads": config["num_attention_heads"], **config}
    logits = [round(float(value), 6) for value in forward(whole, read_tensors(data), tokens)]
    return case(
        comment, "MDL-2", "valid", config=config, weights=data.hex(), tokens=tokens, logits=logits, tolerance=TOLERANCE
    )  # fmt: skip


def _refused() -> list[dict[str, Any]]:
    least = {**SMALL, "num_hidden_layers": 1, "vocab_size": 4}
    given = tensors(least)
    name = "model.layers.0.mlp.up_proj.weight"
    dtype, (rows, columns), data = given[name]
    rest = {one: tensor for one, tensor in given.items() if one != name}
    found: list[tuple[str, dict[str, Any], dict[str, Tensor]]] = [
        ("a tensor is missing", least, rest),
        ("a tensor lies on its side", least, {**given, name: (dtype, [columns, rows], data)}),
        ("a tensor of integers", least, {**given, name: ("I32", [rows, columns], data)}),
        ("another kind of model", {**least, "model_type": "mamba"}, given),
        ("another kind of positions", {**least, "rope_parameters": {"rope_theta": 100.0, "rope_type": "dynamic"}}, given),
        ("another activation", {**least, "hidden_act": "gelu"}, given),
        ("biases", {**least, "attention_bias": True}, given),
    ]  # fmt: skip
    return [
        case(comment, "MDL-2", "invalid", config=config, weights=safetensors(some).hex(), tokens=[1], code="wrong-type")
        for comment, config, some in found
    ]  # fmt: skip
