"""Model folders with a chat template of our own each, and a tokenizer of bytes or one with merges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nous_node.envs.chat import ModelChat

TEMPLATES = Path(__file__).parent / "templates"
CREATED = 1_790_000_000_000
"""21 September 2026."""

Kind = Literal["bytes", "merges"]

LEARNED = (
    "The cat sat on the mat and said hello to the dog.\n\nuser assistant system model tool: What is 2 + 2?\n"
)


@dataclass(frozen=True)
class Style:
    """A template and the control tokens that it needs."""

    name: str
    begin: str
    end: str
    others: tuple[str, ...]
    plain: frozenset[str] = frozenset()
    """Those that the tokenizer does not mark as special."""

    @property
    def controls(self) -> list[str]:
        return list(dict.fromkeys([one for one in (self.begin, self.end, *self.others) if one]))

    @property
    def source(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text()


_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
_PARTS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end")
_DEEPSEEK = tuple(f"<｜tool▁{part}｜>" for part in (*_PARTS, "output▁begin", "output▁end"))
_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")

STYLES = {
    style.name: style
    for style in (
        Style("chatml", "", "<|im_end|>", ("<|im_start|>",)),
        Style(
            "llama3",
            "<|begin_of_text|>",
            "<|eot_id|>",
            ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        ),
        Style("mistral", "<s>", "</s>", (*_MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]")),
        Style("gemma", "<bos>", "<end_of_turn>", ("<start_of_turn>", "<eos>")),
        Style("qwen3", "", "<|im_end|>", ("<|im_start|>", *_THINK, *_CALL), frozenset({*_THINK, *_CALL})),
        Style(
            "deepseek",
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            ("<｜User｜>", "<｜Assistant｜>", *_THINK, *_DEEPSEEK),
            frozenset({*_THINK, "<｜User｜>", "<｜Assistant｜>"}),
        ),
    )
}


def tokenizer(kind: Kind, style: Style) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "bytes":
        made = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    else:
        made = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator([LEARNED * 20], trainer)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(
        [AddedToken(one, special=one not in style.plain, normalized=False) for one in style.controls]
    )
    return made


def spaced(scheme: str, style: Style) -> Tokenizer:
    """A tokenizer that writes spaces as letters, as SentencePiece does; `scheme` says where it adds one."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if scheme == "prepended":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "replaced":
        made.normalizer = normalizers.Replace(" ", "▁")
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        [LEARNED * 20], trainers.BpeTrainer(vocab_size=600, special_tokens=letters, show_progress=False)
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_tokens(
        [AddedToken(one, special=one not in style.plain, normalized=False) for one in style.controls]
    )
    return made


class Spoken:
    """The tokenizer of a run with a conversation format; what closes an answer ends it."""

    def __init__(self, chat: ModelChat) -> None:
        self._vocabulary = chat.vocabulary
        self.eos_id = chat.close

    def encode(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, start=True)

    def decode(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids)


def write_folder(folder: Path, kind: Kind, style: Style, source: str | None = None) -> Path:
    """A model folder as far as conversations need it."""
    folder.mkdir(parents=True)
    tokenizer(kind, style).save(str(folder / "tokenizer.json"))
    names = {"bos_token": style.begin or None, "eos_token": style.end}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(style.source if source is None else source)
    return folder
