"""A model folder's tokenizer for conversations: control tokens come from templates, never from contents.

    vocabulary = Vocabulary(folder)
    parts = vocabulary.split("<|im_start|>user\\n")   control tokens by id, and the text between them
    ids = vocabulary.encode("user\\nhello", start=False)

A stretch of text between two control tokens is encoded as a whole, template and contents together, as
tokenizers do it that read a whole conversation. Inside a stretch nothing becomes a control token. [CHT-3]
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from .errors import BadChat

MAX_CONFIG: Final = 1 << 24
"""Bytes of tokenizer_config.json: some list a quarter of a million added tokens."""

MAX_TOKENIZER: Final = 1 << 27
"""Bytes of tokenizer.json: four times the largest vocabularies."""

_MAX_ID: Final = 1 << 32


class Control(NamedTuple):
    """A control token in a template's text, and whether it takes the white space beside it."""

    id: int
    takes_left: bool
    takes_right: bool


class Vocabulary:
    """The tokenizer of a model folder.

    A control token is an added token that the tokenizer marks as special, or one that `spelled` contains,
    that is, which the template writes, or any where that is not known; white space alone never is one. Raises
    BadChat.
    """

    def __init__(self, folder: Path, spelled: str | None) -> None:
        loaded = _json(folder / "tokenizer.json", MAX_TOKENIZER)
        controls: dict[str, Control] = {}
        try:
            for entry in _added(loaded):
                text = str(entry["content"])
                if text.strip() and (spelled is None or entry["special"] or text in spelled):
                    entry["special"] = True  # so that the backend can be told to overlook it
                    controls[text] = Control(
                        int(str(entry["id"])), bool(entry["lstrip"]), bool(entry["rstrip"])
                    )
            backend = Backend.from_str(json.dumps(loaded))
        except Exception as error:  # the Rust side raises bare Exception
            raise BadChat(
                f"The tokenizer of {folder} cannot be read ({error}); copy the folder again from its source."
            ) from error
        backend.no_padding()
        backend.no_truncation()
        # Stands where a stretch follows something, since some tokenizers treat the beginning of a text in a
        # way of their own. Nobody can guess it, and its id goes no further than `encode`.
        self._border = f"\ue105{secrets.token_hex(16)}\ue105"
        backend.add_tokens([AddedToken(self._border, special=False, normalized=False)])
        backend.encode_special_tokens = True
        self._backend = backend
        self.controls: Mapping[str, Control] = controls
        self._pattern = _pattern(controls)

    def split(self, text: str) -> list[str | Control]:
        """The control tokens in a template's text, longest first, and what stands between them."""
        if self._pattern is None:
            return [text] if text else []
        parts = (self.controls.get(part, part) for part in self._pattern.split(text))
        return [part for part in parts if part]

    def behind(self, text: str, token: int) -> tuple[str, str] | None:
        """What stands before and behind the first control token `token` in a template's text."""
        for match in self._pattern.finditer(text) if self._pattern else ():
            if self.controls[match[0]].id == token:
                return text[: match.start()], text[match.end() :]
        return None

    def spells_control(self, text: str) -> str | None:
        """A control token that stands in `text`."""
        found = self._pattern.search(text) if self._pattern else None
        return found[0] if found else None

    def encode(self, text: str, start: bool) -> list[int]:
        """The ids of a stretch without control tokens; `start`: nothing stands before it."""
        if not text:
            return []
        if start:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self._backend.encode(self._border + text, add_special_tokens=False).ids)[1:]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of any numbers: control tokens spelled out, ids that mean nothing left out."""
        known = [one for one in ids if 0 <= one < _MAX_ID]
        return str(self._backend.decode(known, skip_special_tokens=False))

    def knows(self, token: int) -> bool:
        """Whether an id stands for something."""
        return 0 <= token < _MAX_ID and self._backend.id_to_token(token) is not None

    def id_of(self, token: str) -> int | None:
        """The id of an entry of the vocabulary."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)


def _added(tokenizer: dict[str, object]) -> list[dict[str, object]]:
    entries = tokenizer.get("added_tokens") or []
    if not isinstance(entries, list):
        raise TypeError("added_tokens is no list")
    return entries


def _pattern(controls: Mapping[str, Control]) -> re.Pattern[str] | None:
    longest_first = sorted(controls, key=lambda text: (-len(text), text))
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if controls else None


def _json(path: Path, limit: int) -> dict[str, object]:
    """A JSON object, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > limit:
        raise BadChat(f"{path} has more than {limit} bytes; take another model.")
    try:
        loaded = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadChat(f"{path} is no JSON ({error}); copy the folder again from its source.") from error
    return loaded if isinstance(loaded, dict) else {}


def token_names(folder: Path) -> dict[str, str]:
    """The names under which a template of this folder sees control tokens: `bos_token` and the like."""
    return _names(_json(folder / "tokenizer_config.json", MAX_CONFIG))


def model_names(folder: Path) -> list[str]:
    """What a model calls itself in its configs."""
    found = (
        _json(folder / file, MAX_CONFIG).get(key)
        for file, key in (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path"))
    )
    return [one for one in found if isinstance(one, str)]


def template_source(folder: Path) -> str:
    """The chat template of a model folder; empty where it has none. Raises BadChat."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_CONFIG:
            raise BadChat(f"{path} has more than {MAX_CONFIG} bytes; take another model.")
        return path.read_text("utf-8", "replace")
    found = _json(folder / "tokenizer_config.json", MAX_CONFIG).get("chat_template")
    if isinstance(found, list):  # several by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def end_ids(folder: Path, vocabulary: Vocabulary) -> frozenset[int]:
    """The tokens that end an answer, as the folder's configs name them."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _json(folder / name, MAX_CONFIG).get("eos_token_id")
        found.update(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))
    eos = vocabulary.id_of(token_names(folder).get("eos_token", ""))
    return frozenset(found if eos is None else {*found, eos})


def _names(config: Mapping[str, object]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found
