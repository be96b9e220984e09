"""A policy: a causal language model and its tokenizer, loaded from a plain folder and nothing else.

Tensors are named as in the folder's safetensors files; weights that the model ties appear once.
Shape suffixes: V vocabulary, D hidden, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from .batch import PAIR_COST, MicroBatch
from .errors import ModelError, RequestError, TensorError
from .model_folder import check_folder, model_facts, read_config
from .tokenizer import Tokenizer, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

DEFAULT_FOLDER = Path(__file__).parent / "default"
"""The embedded default policy: a 148 k parameter byte-level model, warm-started on sorting digits."""

# Architectures whose attention takes any mask and any positions.
TREE_ATTENTION = frozenset({"llama", "qwen2", "qwen3"})

# The weight loader's progress bar would interleave with our own output.
transformers_logging.disable_progress_bar()


class Policy:
    """`folder` is where it came from; `context` the most positions a sequence may have."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, folder: Path, context: int) -> None:
        self.model: Any = model  # a transformers model: untyped
        self.tokenizer = tokenizer
        self.folder = folder
        self.context = context

    @classmethod
    def load(
        cls, folder: Path | str, dtype: str = "float32", device: str = "cpu", threads: int | None = None
    ) -> Policy:
        """The policy in `folder`, computing in `dtype` ("float32" or "bfloat16") on `device`.

        `threads`, if given, becomes this process's number of torch threads. No network, no code from the
        folder, no pickle. Raises ModelError saying what to do about the folder.
        """
        folder = Path(folder)
        if dtype not in DTYPES:
            raise ModelError(f"A policy computes in {' or '.join(DTYPES)}, not in {dtype}.")
        check_folder(folder)
        facts = model_facts(folder)
        if threads is not None:
            torch.set_num_threads(threads)
        tokenizer = load_tokenizer(folder, read_config(folder))
        model = _load_model(folder, DTYPES[dtype]).to(device)
        return cls(model, tokenizer, folder, facts.context)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trained weights, tied ones once."""
        parameters: Iterator[nn.Parameter] = self.model.parameters()
        return parameters

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token of one sequence leaves behind in all layers."""
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * width * self.dtype.itemsize)

    def tensors(self) -> dict[str, Tensor]:
        """name -> the live weight (not a copy), tied ones once, in the order of the model."""
        return {name: weight.detach() for name, weight in self.model.named_parameters()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the weights in place. `tensors`: exactly the names and shapes of `tensors()`.

        Stored dtypes other than the computing one are converted (bf16 files, fp32 computation); anything
        but a floating type is refused. Raises TensorError before the first weight is touched.
        """
        own = self.tensors()
        _check_tensors(own, tensors)
        for name, weight in own.items():
            weight.copy_(tensors[name])

    def swap_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes these the weights, without a copy: `tensors` have the names, shapes, dtype and device of
        `tensors()`. What holds the weights from before goes on seeing those. Raises TensorError before the
        first weight is touched."""
        own = dict(self.model.named_parameters())
        _check_tensors(own, tensors)
        for name, weight in own.items():
            weight.data = tensors[name]

    def check_tokens(self, lowest: int, highest: int, positions: int) -> None:
        """Raises RequestError for ids outside the vocabulary or more positions than the context has."""
        if lowest < 0 or highest >= self.tokenizer.vocab_size:
            raise RequestError(
                f"Token id {lowest if lowest < 0 else highest} is outside the vocabulary of "
                f"{self.tokenizer.vocab_size}; encode the text with this policy's tokenizer."
            )
        if positions > self.context:
            raise RequestError(
                f"{positions} tokens do not fit the model's context of {self.context}; "
                "shorten the prompt or lower the token limit."
            )

    @property
    def shares_prompts(self) -> bool:
        """Whether rows of several answers to one prompt compute what single rows do (see `batch.py`): known
        for plain causal attention over positions, not for windows, recurrent states or the like."""
        config = self.model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        return config.model_type in TREE_ATTENTION and set(kinds) == {"full_attention"}

    @property
    def pair_cost(self) -> float:
        """What attention pays for a pair of columns where a mask lets it skip none, as a share of all else
        that a layer does for a token. By the multiplications that is twice the hidden width to the weights of
        a layer; the layer has more to do than these, and half of it is what was measured. Of a model whose
        layers are not known by name: PAIR_COST."""
        layers: Any = getattr(self.model.base_model, "layers", None)
        if not layers:
            return PAIR_COST
        weights = sum(weight.numel() for weight in layers[0].parameters())
        return float(self.model.config.hidden_size / weights)

    def logits(self, batch: MicroBatch) -> Tensor:
        """Logits [N, V] that predict the trained tokens of `batch`, in the computing dtype."""
        output = self.model.base_model(
            input_ids=batch.tokens_BL,
            attention_mask=None if batch.mask_B1LL is None else _added(batch.mask_B1LL, self.dtype),
            position_ids=batch.positions_BL,
            use_cache=False,
        )
        hidden_ND = output.last_hidden_state[batch.rows_N, batch.columns_N]
        logits: Tensor = self.model.get_output_embeddings()(hidden_ND)
        return logits


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of bools as what is added to scores. Attention would make the same of it in each layer, and
    keep that of each layer for the gradient."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            output_loading_info=True,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
        )
    except Exception as error:  # transformers raises every kind
        raise ModelError(
            f"The model in {folder} cannot be loaded ({_first_line(error)}); "
            "use a causal language model that this transformers release knows, saved with save_pretrained."
        ) from error
    # transformers fills what is missing with random numbers and only warns.
    for lack in ("missing_keys", "mismatched_keys"):
        if found[lack]:
            raise ModelError(
                f"The weights in {folder} do not fit its config.json ({lack.replace('_', ' ')}: "
                f"{sorted(map(str, found[lack]))[0]}); copy the folder again from its source."
            )
    return model.eval()


def _check_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing, extra = own.keys() - given.keys(), given.keys() - own.keys()
    if missing or extra:
        name = min(missing or extra)
        raise TensorError(
            f"The weights {'lack' if missing else 'have an unknown'} tensor {name!r}; "
            "they belong to another model than the one loaded."
        )
    for name, weight in own.items():
        tensor = given[name]
        if tensor.shape != weight.shape:
            raise TensorError(
                f"Tensor {name!r} has shape {list(tensor.shape)} where the model has {list(weight.shape)}; "
                "the weights belong to another model."
            )
        if not tensor.dtype.is_floating_point:
            raise TensorError(f"Tensor {name!r} is {tensor.dtype}, not a floating type; it is no weight.")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
