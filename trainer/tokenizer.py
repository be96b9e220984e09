"""The tokenizer of a policy: text to ids and back. Plain text can never become a control token.

Only `tokenizer.json` is read (a fast tokenizer: data, no code). Conversations are the matter of `envs.chat`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend

from .errors import ModelError

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Encodes without special tokens and decodes with them.

    `eos_id` ends a sample; `pad_id` fills batches and means nothing (equal to `eos_id` where the model has
    none of its own); `vocab_size` is that of the model's output, which may exceed the tokenizer's own.
    """

    def __init__(self, folder: Path, eos_id: int, pad_id: int, vocab_size: int) -> None:
        try:
            self._backend = Backend.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # the Rust side raises bare Exception
            raise ModelError(
                f"The tokenizer of {folder} cannot be read ({error}); copy the folder again from its source."
            ) from error
        # Text of a task that spells a control token stays text: it must not end a turn.
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        self.eos_id, self.pad_id, self.vocab_size = eos_id, pad_id, vocab_size

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens, whatever the text spells."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(folder: Path, config: dict[str, object]) -> Tokenizer:
    """The tokenizer of a model folder; `config` is its config.json. ModelError if there is none."""
    if not (folder / TOKENIZER_FILE).is_file():
        raise ModelError(
            f"The model folder {folder} has no {TOKENIZER_FILE}; save a fast tokenizer into it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    eos = _first_id(config.get("eos_token_id"))
    if eos is None:
        eos = _first_id(_generation_config(folder).get("eos_token_id"))
    if eos is None:
        raise ModelError(f"The model in {folder} names no eos_token_id; add it to its config.json.")
    pad = _first_id(config.get("pad_token_id"))
    vocab = config.get("vocab_size")
    if not isinstance(vocab, int):
        raise ModelError(f"The config.json of {folder} has no vocab_size; copy the folder again.")
    return Tokenizer(folder, eos, eos if pad is None else pad, vocab)


def _first_id(value: object) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) and value >= 0 else None


def _generation_config(folder: Path) -> dict[str, object]:
    path = folder / "generation_config.json"
    loaded = json.loads(path.read_bytes()) if path.is_file() else {}
    return loaded if isinstance(loaded, dict) else {}
