"""Conversation formats of model folders: what is rendered, extended and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from nous_node.envs.chat import load_chat
from nous_node.envs.environment import Chat, Message
from nous_node.envs.errors import EnvironmentFailed
from nous_node.protocol.rollouts import Role

from .chat_worlds import CREATED, STYLES, Kind, spaced, write_folder

KINDS: tuple[Kind, ...] = ("bytes", "merges")


@pytest.fixture(scope="module", params=[(name, kind) for name in STYLES for kind in KINDS], ids="-".join)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, kind = request.param
    return write_folder(tmp_path_factory.mktemp("models") / name, kind, STYLES[name])


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return load_chat(folder, "template", CREATED)


@pytest.fixture(scope="module")
def backend(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def text(backend: Tokenizer, tokens: list[int]) -> str:
    return backend.decode(tokens, skip_special_tokens=False)


def test_a_prompt_is_the_template_s_text_in_the_model_s_tokens(
    chat: Chat, backend: Tokenizer, folder: Path
) -> None:
    ((role, tokens),) = chat.prompt([Message("user", "What is 2 + 2?\nSay it.")])
    assert role is Role.USER
    assert tokens == backend.encode(text(backend, tokens), add_special_tokens=False).ids
    assert "What is 2 + 2?\nSay it." in text(backend, tokens)


def test_a_content_that_spells_a_control_token_stays_text(
    chat: Chat, backend: Tokenizer, folder: Path
) -> None:
    controls = STYLES[folder.name].controls
    ((_, tokens),) = chat.prompt([Message("user", " ".join(controls))])
    ((_, harmless),) = chat.prompt([Message("user", "harmless")])
    ids = {backend.token_to_id(one) for one in controls}
    assert [one for one in tokens if one in ids] == [one for one in harmless if one in ids]
    assert " ".join(controls) in text(backend, tokens)


def test_a_turn_that_was_cut_short_is_closed_untrained(chat: Chat, backend: Tokenizer, folder: Path) -> None:
    close = backend.token_to_id(STYLES[folder.name].end)
    cut = chat.extend([1, 2], [Message("user", "And then?")])
    assert cut[0] == (Role.ASSISTANT, [close])
    assert chat.extend([1, close], [Message("user", "And then?")]) == cut[1:]


def test_a_turn_ends_with_a_question(chat: Chat) -> None:
    with pytest.raises(EnvironmentFailed, match="answer already"):
        chat.prompt([Message("user", "hi"), Message("assistant", "ho")])


@pytest.mark.parametrize("scheme", ["first", "always", "never", "prepended", "replaced"])
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_a_stretch_is_encoded_as_in_the_middle_of_a_text(name: str, scheme: str, tmp_path: Path) -> None:
    """Tokenizers that treat the beginning of a text in a way of their own do so at its beginning alone."""
    style = STYLES[name]
    folder = write_folder(tmp_path / "model", "bytes", style)
    backend = spaced(scheme, style)
    backend.save(str(folder / "tokenizer.json"))
    chat = load_chat(folder, "template", CREATED)
    asked = [Message("user", " the cat "), Message("assistant", "sat é"), Message("user", "on\n\nthe mat")]
    (text,), _ = render_jinja_template(
        conversations=[[{"role": one.role, "content": one.content} for one in asked]],
        chat_template=style.source,
        add_generation_prompt=True,
        bos_token=style.begin,
        eos_token=style.end,
    )
    whole = backend.encode(text, add_special_tokens=False).ids
    assert chat.prompt(asked)[0].tokens == whole
    (piece,) = chat.extend([chat.extend([1], asked[2:])[0].tokens[0]], asked[2:])
    assert whole[-len(piece.tokens) :] == piece.tokens


@pytest.mark.parametrize("name", ["chatml", "mistral", "gemma"])
@pytest.mark.parametrize(("left", "right"), [(False, True), (True, True)])
def test_control_tokens_take_the_white_space_beside_them(
    name: str, left: bool, right: bool, tmp_path: Path
) -> None:
    style = STYLES[name]
    folder = write_folder(tmp_path / "model", "bytes", style)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    entries = json.loads(backend.to_str())
    for entry in entries["added_tokens"]:
        entry["lstrip"], entry["rstrip"] = left, right
    backend = Tokenizer.from_str(json.dumps(entries))
    backend.save(str(folder / "tokenizer.json"))
    chat = load_chat(folder, "template", CREATED)
    asked = [Message("user", "the cat "), Message("assistant", "sat"), Message("user", " on ")]
    (text,), _ = render_jinja_template(
        conversations=[[{"role": one.role, "content": one.content} for one in asked]],
        chat_template=style.source,
        add_generation_prompt=True,
        bos_token=style.begin,
        eos_token=style.end,
    )
    whole = backend.encode(text, add_special_tokens=False).ids
    assert chat.prompt(asked)[0].tokens == whole
    added = [token for piece in chat.extend([1], asked[2:]) for token in piece.tokens]
    assert whole[-len(added) :] == added
