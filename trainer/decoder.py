"""Token by token forward passes with a key-value cache, for generation.

Two of them behind one interface: `LlamaDecoder`, a plain forward of the Llama architecture (half the time of
a small model's step is otherwise spent in the general model's Python), and `ModelDecoder`, the transformers
model itself, for every other architecture and as the reference the first is tested against.

Prompts of different lengths are padded on the left, so that all rows write the same column of the cache.
Shape suffixes: B rows, T positions, V vocabulary, D hidden, H heads, G key-value heads, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache, LlamaForCausalLM

from .policy import Policy

# The cache grows by this many positions at a time: few copies, little memory in advance.
GROWTH = 64


class Decoder(Protocol):
    """A batch in the middle of generation; rows can be repeated or dropped between steps."""

    def prefill(self, tokens_BT: Tensor, pads_B: Tensor) -> Tensor:
        """Reads left-padded prompts (`pads_B` pad tokens each); the logits [B, V] after their last token."""
        ...

    def step(self, tokens_B: Tensor) -> Tensor:
        """Appends one token to each row; the logits [B, V] after it."""
        ...

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was."""
        ...


def make_decoder(policy: Policy) -> Decoder:
    """The fastest decoder that computes what `policy.model` computes, over its present weights."""
    return LlamaDecoder(policy.model) if _is_plain_llama(policy.model) else ModelDecoder(policy.model)


def _is_plain_llama(model: Any) -> bool:
    if type(model) is not LlamaForCausalLM:
        return False
    config = model.config
    rope_varies = config.rope_parameters.get("rope_type") in ("dynamic", "longrope")
    plain = config.hidden_act == "silu" and not config.attention_bias and not config.mlp_bias
    return bool(plain and not rope_varies and config._attn_implementation == "sdpa")


class ModelDecoder:
    """The transformers model with its own DynamicCache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._mask_BT = torch.empty(0)

    def prefill(self, tokens_BT: Tensor, pads_B: Tensor) -> Tensor:
        columns_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        self._cache = DynamicCache(config=self._model.config)
        self._mask_BT = (columns_T >= pads_B[:, None]).long()
        return self._forward(tokens_BT, (columns_T - pads_B[:, None]).clamp(min=0))

    def step(self, tokens_B: Tensor) -> Tensor:
        self._mask_BT = torch.cat((self._mask_BT, self._mask_BT.new_ones(len(tokens_B), 1)), 1)
        return self._forward(tokens_B[:, None], self._mask_BT.sum(1, keepdim=True) - 1)

    def select(self, rows: Tensor) -> None:
        self._mask_BT = self._mask_BT[rows]
        self._cache.batch_select_indices(rows)

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        output = self._model(
            input_ids=tokens_BT,
            attention_mask=self._mask_BT,
            position_ids=positions_BT,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer, the projections that read the same input stacked into one."""

    attention_norm: Tensor
    query_key_value: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaDecoder:
    """Llama's forward pass on stacked weights; equal to the transformers model up to rounding."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._width, self._eps = config.head_dim, config.rms_norm_eps
        self._rotary = model.model.rotary_emb
        self._embedding = model.model.embed_tokens.weight.detach()
        self._norm = model.model.norm.weight.detach()
        self._head = model.lm_head.weight.detach()
        self._layers = [_stack(layer) for layer in model.model.layers]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._pads_B = torch.empty(0)
        self._padded = False
        self._length = 0

    def prefill(self, tokens_BT: Tensor, pads_B: Tensor) -> Tensor:
        rows, length = tokens_BT.shape
        shape = (rows, self._groups, length + GROWTH, self._width)
        self._keys = [self._embedding.new_empty(shape) for _ in self._layers]
        self._values = [self._embedding.new_empty(shape) for _ in self._layers]
        self._pads_B, self._padded, self._length = pads_B, bool((pads_B > 0).any()), 0
        return self._forward(tokens_BT)

    def step(self, tokens_B: Tensor) -> Tensor:
        if self._length == self._keys[0].shape[2]:
            self._grow()
        return self._forward(tokens_B[:, None])

    def select(self, rows: Tensor) -> None:
        # Only the columns in use are copied, with room for some more: most answers of a batch end together.
        self._keys = [_roomier(keys[rows, :, : self._length], GROWTH) for keys in self._keys]
        self._values = [_roomier(values[rows, :, : self._length], GROWTH) for values in self._values]
        self._pads_B = self._pads_B[rows]

    def _grow(self) -> None:
        # Half again at least, so that long answers do not copy the cache every GROWTH tokens.
        room = max(GROWTH, self._length // 2)
        self._keys = [_roomier(keys, room) for keys in self._keys]
        self._values = [_roomier(values, room) for values in self._values]

    def _forward(self, tokens_BT: Tensor) -> Tensor:
        start, end = self._length, self._length + tokens_BT.shape[1]
        hidden_BTD = self._embedding[tokens_BT]
        columns_T = torch.arange(start, end, device=tokens_BT.device)
        positions_BT = (columns_T - self._pads_B[:, None]).clamp_(min=0) if self._padded else columns_T[None]
        rotation = self._rotation(hidden_BTD, positions_BT)
        mask = self._mask(columns_T, end) if self._padded else None
        for index, layer in enumerate(self._layers):
            normed_BTD = rms_norm(hidden_BTD, (hidden_BTD.shape[-1],), layer.attention_norm, self._eps)
            mixed_BTD = self._attend(index, linear(normed_BTD, layer.query_key_value), rotation, mask, end)
            hidden_BTD = hidden_BTD + linear(mixed_BTD, layer.output)
            normed_BTD = rms_norm(hidden_BTD, (hidden_BTD.shape[-1],), layer.mlp_norm, self._eps)
            gate, up = linear(normed_BTD, layer.gate_up).chunk(2, -1)
            hidden_BTD = hidden_BTD + linear(silu(gate) * up, layer.down)
        self._length = end
        last_BD = rms_norm(hidden_BTD[:, -1], (hidden_BTD.shape[-1],), self._norm, self._eps)
        return linear(last_BD, self._head)

    def _rotation(self, hidden_BTD: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, T, 1, E]; the sign of rotate-half is folded into the sin."""
        cos, sin = self._rotary(hidden_BTD, positions_BT)
        half = self._width // 2
        return cos[:, :, None], torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, :, None]

    def _mask(self, columns_T: Tensor, end: int) -> Tensor:
        """[B, 1, T, end]: tokens see columns up to their own but no pad; a pad sees itself."""
        keys = torch.arange(end, device=columns_T.device)
        causal_TK = keys <= columns_T[:, None]
        real_B1K = (keys >= self._pads_B[:, None])[:, None]
        return ((causal_TK & real_B1K) | (keys == columns_T[:, None]))[:, None]

    def _attend(
        self, index: int, mixed_BTD: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, end: int
    ) -> Tensor:
        rows, length, _ = mixed_BTD.shape
        heads_BTHE = mixed_BTD.view(rows, length, self._heads + 2 * self._groups, self._width)
        turning = self._heads + self._groups
        turned_BTHE = _rotate(heads_BTHE[:, :, :turning], *rotation)
        keys, values = self._keys[index], self._values[index]
        keys[:, :, end - length : end] = turned_BTHE[:, :, self._heads :].transpose(1, 2)
        values[:, :, end - length : end] = heads_BTHE[:, :, turning:].transpose(1, 2)
        queries = turned_BTHE[:, :, : self._heads]
        seen = (keys[:, :, :end], values[:, :, :end])
        if length == 1:
            # The heads that share a key take the place of query positions: no key is repeated.
            grouped = queries.reshape(rows, self._groups, -1, self._width)
            return scaled_dot_product_attention(grouped, *seen, attn_mask=mask).reshape(rows, 1, -1)
        attended = scaled_dot_product_attention(
            queries.transpose(1, 2),
            *seen,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self._heads != self._groups,
        )
        return attended.transpose(1, 2).reshape(rows, length, -1)


def _roomier(cache: Tensor, room: int) -> Tensor:
    """A copy with `room` more columns, their content undefined."""
    rows, groups, length, width = cache.shape
    larger = cache.new_empty(rows, groups, length + room, width)
    larger[:, :, :length] = cache
    return larger


def _rotate(x_BTHE: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding (https://arxiv.org/abs/2104.09864), rotating halves as Llama's weights expect."""
    half = x_BTHE.shape[-1] // 2
    swapped = torch.cat((x_BTHE[..., half:], x_BTHE[..., :half]), -1)
    return x_BTHE * cos + swapped * signed_sin


def _stack(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    stacked = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
    return _Layer(
        layer.input_layernorm.weight.detach(),
        stacked.detach(),
        attention.o_proj.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach(),
        mlp.down_proj.weight.detach(),
    )
