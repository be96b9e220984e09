"""The op of any small Llama: its configuration and weights come with the question. [MDL-2]"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.layout import LENGTH_BYTES, header_length, read_layout

from .adapter_question import Answer, Ask, BadQuestion, Ops, Raw

if TYPE_CHECKING:
    from torch import Tensor

STORED: Final = frozenset({"F32", "BF16"})
"""Types in which a checkpoint of a Llama may hold its tensors."""

MAX_WEIGHTS: Final = 1 << 24
"""Elements of a model that a question may ask for: 100 times those of nous-default."""

PLAIN: Final = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
"""What the chapter's formulas are for."""


class Forward(Ask, frozen=True):
    config: dict[str, Any]
    weights: Raw
    tokens: list[int]


def forward(ask: Forward) -> Answer:
    import torch

    from nous_node.trainer.decoder import LlamaDecoder

    _check_plain(ask.config)
    model = _model(ask.config)
    if not ask.tokens or not all(0 <= token < model.config.vocab_size for token in ask.tokens):
        raise BadQuestion("The question's `tokens` are none of this vocabulary.")
    _fill(dict(model.named_parameters()), ask.weights)
    with torch.no_grad():
        logits = LlamaDecoder(model).prefill(torch.tensor([ask.tokens]), torch.tensor([0]))[0]
    return {"logits": logits.tolist()}


def _check_plain(config: dict[str, Any]) -> None:
    for name, value in PLAIN.items():
        if config.get(name, value) != value:
            raise RemoteError(
                Code.WRONG_TYPE, f"A model whose {name} is not {value} cannot be computed here."
            )
    if config.get("rope_parameters", {}).get("rope_type") != "default":
        raise RemoteError(
            Code.WRONG_TYPE, "Positions of another type than `default` cannot be computed here."
        )


def _model(config: dict[str, Any]) -> Any:
    """Without weights yet. Raises BadQuestion."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        with torch.device("meta"):
            size = sum(one.numel() for one in LlamaForCausalLM(LlamaConfig(**config)).parameters())
        if size > MAX_WEIGHTS:
            raise BadQuestion(f"A model of {size} weights is too large for a question.")
        return LlamaForCausalLM(LlamaConfig(**config)).eval()
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise BadQuestion(f"The question's `config` is no model's: {type(error).__name__}.") from error


def _fill(weights: dict[str, Any], data: bytes) -> None:
    """Reads all weights of a model from a safetensors file. Raises RemoteError."""
    found = _tensors(data)
    for name, weight in weights.items():
        if name not in found or found[name].shape != weight.shape:
            raise RemoteError(Code.WRONG_TYPE, f"The tensor {name} is missing or has another shape.")
        weight.data.copy_(found[name])


def _tensors(data: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    length = header_length(data[:LENGTH_BYTES])
    header = data[LENGTH_BYTES : LENGTH_BYTES + length]
    if any(place.dtype not in STORED for place in read_layout(header, len(data))):
        raise RemoteError(Code.WRONG_TYPE, "A tensor has another type than F32 and BF16.")
    return dict(load(data))


OPS: Final[Ops] = {"forward": forward}
