"""Vectors of the model nous-default: the forward pass of its chapter, line by line, in float 64.

Float 64 keeps the sixth decimal of a logit the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vectors_world import case

FOLDER = Path(__file__).parents[1] / "trainer" / "default"
TOLERANCE = 1e-3
"""Float 32 in another order of sums stays below 1e-4; another formula does not stay below 1e-1."""

TEXTS = ("sort 5283=", "sort 5283=23", "=", "sort 000000000000=0123456789ab")

Array = NDArray[np.float64]


def model() -> list[dict[str, Any]]:
    config = json.loads((FOLDER / "config.json").read_bytes())
    weights = read_tensors((FOLDER / "model.safetensors").read_bytes())
    digest = hashlib.sha256(b"".join(weights[name].astype("<f4").tobytes() for name in sorted(weights)))
    made = []
    for text in TEXTS:
        tokens = list(text.encode())
        logits = [round(float(value), 6) for value in forward(config, weights, tokens)]
        data = {"tokens": tokens, "logits": logits, "tolerance": TOLERANCE, "weights": digest.hexdigest()}
        made.append(case(f"logits behind {text!r}", "MDL-1 MDL-2", text=text, **data))
    return made


def read_tensors(data: bytes) -> dict[str, Array]:
    """The tensors of a safetensors file of F32 or BF16."""
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data[begin:end], "<u2").astype("<u4") << 16).view("<f4")
        else:
            assert entry["dtype"] == "F32"
            values = np.frombuffer(data[begin:end], "<f4")
        tensors[name] = values.reshape(entry["shape"]).astype(np.float64)
    return tensors


def forward(config: dict[str, Any], weights: dict[str, Array], tokens: list[int]) -> Array:
    """Logits of the token behind `tokens`. [MDL-2]"""
    eps, head = config["rms_norm_eps"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    angles = np.arange(len(tokens))[:, None] * config["rope_parameters"]["rope_theta"] ** (
        -2.0 * np.arange(head // 2) / head
    )
    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        w = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = _norm(hidden, w["input_layernorm"], eps)
        outputs = []
        for number in range(heads):
            own = slice(number * head, (number + 1) * head)
            group = number * groups // heads
            shared = slice(group * head, (group + 1) * head)
            q = _rotated(x @ w["self_attn.q_proj"][own].T, angles)
            k = _rotated(x @ w["self_attn.k_proj"][shared].T, angles)
            v = x @ w["self_attn.v_proj"][shared].T
            scores = np.where(np.tri(len(tokens), dtype=bool), q @ k.T / np.sqrt(head), -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(shares / shares.sum(-1, keepdims=True) @ v)
        hidden = hidden + np.concatenate(outputs, -1) @ w["self_attn.o_proj"].T
        x = _norm(hidden, w["post_attention_layernorm"], eps)
        gate = x @ w["mlp.gate_proj"].T
        up = x @ w["mlp.up_proj"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj"].T
    last = _norm(hidden, weights["model.norm.weight"], eps)[-1]
    logits: Array = weights["model.embed_tokens.weight"] @ last
    return logits


def _norm(x: Array, weight: Array, eps: float) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return scaled


def _rotated(x: Array, angles: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ],
        -1,
    )
