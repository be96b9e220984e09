"""Formats of the library renderers, behind the same interface and the same promises."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nous_node.envs.chat import ModelChat, load_chat, recommend
from nous_node.envs.environment import Message, Tool, ToolCall
from nous_node.envs.errors import BadChat
from nous_node.protocol.rollouts import Role

from .chat_worlds import CREATED, Style, write_folder

pytest.importorskip("renderers")
HERE = version("renderers")

THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
QWEN = Style("qwen3", "", "<|im_end|>", ("<|im_start|>", "<|endoftext|>", *THINK), frozenset(THINK))
LLAMA = Style(
    "llama3",
    "<|begin_of_text|>",
    "<|eot_id|>",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"),
)
FAMILIES = {"qwen3": QWEN, "llama-3": LLAMA}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("renderers") / family, "merges", FAMILIES[family])


@pytest.fixture(scope="module")
def chat(folder: Path, family: str) -> ModelChat:
    loaded = load_chat(folder, f"renderers/{HERE}/{family}", CREATED)
    assert isinstance(loaded, ModelChat)
    return loaded


@pytest.fixture(scope="module")
def backend(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def controls(backend: Tokenizer, family: str, tokens: list[int]) -> list[int]:
    ids = {backend.token_to_id(one) for one in FAMILIES[family].controls}
    return [one for one in tokens if one in ids]


def test_contents_never_become_control_tokens(chat: ModelChat, backend: Tokenizer, family: str) -> None:
    random = Random(family)
    words = [*FAMILIES[family].controls, "hello", "\n", '"', "{}", " "]
    harmless = chat.prompt([Message("system", "x"), Message("user", "x")])[0].tokens
    later = chat.extend([1], [Message("user", "x")])[1].tokens
    for _ in range(100):
        text = "x" + "".join(random.choice(words) for _ in range(6)) + "x"
        ((role, tokens),) = chat.prompt([Message("system", text), Message("user", text)])
        assert role is Role.USER
        assert controls(backend, family, tokens) == controls(backend, family, harmless)
        assert backend.decode(tokens, skip_special_tokens=False).count(text) == 2
        (_, (_, added)) = chat.extend(tokens, [Message("user", text)])
        assert controls(backend, family, added) == controls(backend, family, later)
        assert text in backend.decode(added, skip_special_tokens=False)


def test_an_extension_is_what_a_whole_rendering_has_there(chat: ModelChat, backend: Tokenizer) -> None:
    asked = [Message("user", "hello"), Message("assistant", "the cat"), Message("user", "What is 2 + 2?")]
    ((_, tokens),) = chat.prompt(asked[:1])
    tokens = [*tokens, *backend.encode("the cat", add_special_tokens=False).ids]
    for _, added in chat.extend(tokens, asked[2:]):
        tokens += added
    assert tokens == chat.prompt(asked)[0].tokens


def test_answers_of_tools_and_calls_are_written(chat: ModelChat, backend: Tokenizer) -> None:
    tool = Tool("look", "Looks.", '{"type": "object", "properties": {}}')
    call = ToolCall("call00000", "look", '{"at": "a\\"b"}')
    asked = [
        Message("user", "hello"),
        Message("assistant", tool_calls=(call,)),
        Message("tool", "found", name="look"),
    ]
    shown = backend.decode(chat.prompt(asked, [tool])[0].tokens, skip_special_tokens=False)
    assert all(one in shown for one in ("Looks.", '{"at": "a\\"b"}', "found"))
    ((role, tokens),) = chat.extend([chat.close], asked[2:], [tool])
    assert role is Role.TOOL
    assert "found" in backend.decode(tokens, skip_special_tokens=False)


@given(st.lists(st.integers(-5, 500), max_size=40))
def test_any_ids_are_read(chat: ModelChat, tokens: list[int]) -> None:
    assert chat.parse(tokens).role == "assistant"


def test_the_date_is_the_run_s(folder: Path, family: str, backend: Tokenizer, chat: ModelChat) -> None:
    shown = backend.decode(chat.prompt([Message("user", "hi")])[0].tokens, skip_special_tokens=False)
    assert ("21 Sep 2026" in shown) == (family == "llama-3")


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ("renderers/0.0.1/qwen3", "need renderers 0.0.1"),
        (f"renderers/{HERE}/nobody", "No renderer config registered"),
        (f"renderers/{HERE}/default", "knows no family 'default'"),
        (f"renderers/{HERE}/auto", "knows no family 'auto'"),
        (f"renderers/{HERE}/glm-4.5", "does not fit this model"),
        ("renderers", "no conversation format"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(form: str, sentence: str, folder: Path) -> None:
    with pytest.raises(BadChat, match=sentence):
        load_chat(folder, form, CREATED)


def test_the_model_s_own_template_is_recommended_where_it_can_be_extended(tmp_path: Path) -> None:
    good = write_folder(tmp_path / "good", "bytes", QWEN)
    assert recommend(good, CREATED)[0] == "template"
    bad = write_folder(tmp_path / "bad", "bytes", QWEN, "{{ messages[0].content }}")
    assert recommend(bad, CREATED)[0] == ""
    (bad / "config.json").write_text('{"_name_or_path": "Qwen/Qwen3-0.6B"}')
    assert recommend(bad, CREATED)[0] == f"renderers/{HERE}/qwen3"
