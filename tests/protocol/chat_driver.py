"""How the vectors of conversations are driven: a model folder is made of each case."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nous_node.envs.chat import load_chat
from nous_node.envs.environment import Chat, Message, Tool
from nous_node.envs.errors import BadChat

Case = dict[str, Any]


def drive_chat(case: Case) -> None:
    model = (case["template"], tuple(case["controls"]), frozenset(case["special"]), case["created"])
    if "lacks" in case:
        with pytest.raises(BadChat):
            opened(*model)
        return
    chat = opened(*model)
    if "message" in case:
        assert chat.parse(case["tokens"]) == msgspec.convert(case["message"], Message)
        return
    messages = msgspec.convert(case["messages"], list[Message])
    tools = msgspec.convert(case.get("tools", []), list[Tool])
    last = case.get("last")
    pieces = chat.prompt(messages, tools) if last is None else chat.extend([last], messages, tools)
    assert [[int(role), tokens] for role, tokens in pieces] == case["pieces"]


@functools.cache
def opened(template: str, controls: tuple[str, ...], special: frozenset[str], created: int) -> Chat:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        tokenizer(controls, special).save(str(folder / "tokenizer.json"))
        names = {"eos_token": controls[0], "bos_token": controls[1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        (folder / "chat_template.jinja").write_text(template)
        return load_chat(folder, "template", created)


def tokenizer(controls: tuple[str, ...], special: frozenset[str]) -> Tokenizer:
    """Ids 0 to 255 are bytes, then come the control tokens."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    letters = [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(one, special=one in special, normalized=False) for one in controls])
    return made
