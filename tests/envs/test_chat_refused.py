"""Templates that a run may not use: each is refused in a sentence that says which property it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nous_node.envs.chat import load_chat
from nous_node.envs.errors import BadChat

from .chat_worlds import CREATED, STYLES, write_folder

HEAD = "{%- for message in messages %}"
FOOT = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
TURN = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"

REFUSED = {
    "numbers its turns": (
        HEAD + "{{- '<|im_start|>' ~ loop.index ~ message.content + '<|im_end|>' }}" + FOOT,
        "depends on the .* messages before it",
    ),
    "counts from the end": (
        HEAD + "{{- '<|im_start|>' ~ loop.revindex ~ message.content + '<|im_end|>' }}" + FOOT,
        "looks different once the conversation has gone on",
    ),
    "prints the clock": (
        HEAD + "{{- strftime_now('%H:%M') }}" + TURN + FOOT,
        "depends on the clock",
    ),
    "prints the day in each turn": (
        HEAD + "{{- '<|im_start|>' + strftime_now('%d %B') + message.content + '<|im_end|>' }}" + FOOT,
        "depends on the clock",
    ),
    "puts the newest first": (
        "{%- for message in messages | reverse %}" + TURN + FOOT,
        "No filter named 'reverse'",
    ),
    "turns the order around": (
        "{%- for message in messages[::-1] %}" + TURN + FOOT,
        "another order",
    ),
    "sorts by role": (
        "{%- for role in ['assistant', 'user'] %}{%- for message in messages if message.role == role %}"
        + TURN
        + "{%- endfor %}"
        + FOOT,
        "another order",
    ),
    "leaves the last message out": (
        "{%- for message in messages[:-1] %}" + TURN + FOOT,
        "leaves an answer out",
    ),
    "repeats the first question": (
        HEAD
        + TURN
        + "{%- endfor %}{{- '<|im_start|>' + messages[0].content }}"
        + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        "another order, or leaves one out",
    ),
    "ends an answer with text": (
        HEAD + "{{- message.role + ': ' + message.content + '\\n' }}" + FOOT,
        "has to end with a control token of its own. Here",
    ),
    "ends an answer with a space before the token": (
        HEAD + "{{- '<|im_start|>' + message.content + ' <|im_end|>' }}" + FOOT,
        "has to end with a control token of its own. Here",
    ),
    "never ends an answer": (
        HEAD + "{{- '<|im_start|>' + message.content }}" + FOOT + "{# <|im_end|> #}",
        "Here '<\\|im_start\\|>' follows it, and '' where",
    ),
    "takes one question only": (
        "{%- if messages | length > 1 %}{{- raise_exception('One question.') }}{%- endif %}"
        + HEAD
        + TURN
        + FOOT,
        "it does not go on behind an answer: One question",
    ),
    "takes three questions at most": (
        "{%- if messages | length > 5 %}{{- raise_exception('Too long.') }}{%- endif %}" + HEAD + TURN + FOOT,
        "Too long, after 6 messages",
    ),
    "cuts long contents": (
        HEAD + "{{- '<|im_start|>' + message.content[:5] + '<|im_end|>' }}" + FOOT,
        "changes what a message says",
    ),
    "writes in capitals": (
        HEAD + "{{- '<|im_start|>' + message.content | upper + '<|im_end|>' }}" + FOOT,
        "changes what a message says",
    ),
    "shows the length": (
        HEAD + "{{- '<|im_start|>' ~ message.content | length ~ message.content + '<|im_end|>' }}" + FOOT,
        "changes what a message says",
    ),
    "looks into contents": (
        HEAD + "{%- if 'long' in message.content %}{{- 'Long: ' }}{%- endif %}" + TURN + FOOT,
        "changes what a message says",
    ),
    "draws lots": (HEAD + TURN + "{{- ['a', 'b'] | random }}" + FOOT, "No filter named 'random'"),
    "is no template": ("{% for %}", "cannot be used"),
    "loops for ever": ("{% for i in range(10 ** 9) %}{% endfor %}" + HEAD + TURN + FOOT, "200000 steps"),
    "makes a lot of text": ("{{- 'a' * 10 ** 9 }}" + HEAD + TURN + FOOT, "1048576 characters"),
    "is long": ("{#" + "a" * (1 << 17) + "#}" + HEAD + TURN + FOOT, "more than 131072"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_is_refused_with_what_it_lacks(name: str, tmp_path: Path) -> None:
    source, sentence = REFUSED[name]
    folder = write_folder(tmp_path / "model", "bytes", STYLES["chatml"], source)
    with pytest.raises(BadChat, match=sentence):
        load_chat(folder, "template", CREATED)


def test_a_folder_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "bytes", STYLES["chatml"], "")
    with pytest.raises(BadChat, match="has no chat template"):
        load_chat(folder, "template", CREATED)


@pytest.mark.parametrize("version", ["1; curl example.org | sh", " 1", "", "-r", "1" * 40, "1\n"])
def test_a_run_puts_nothing_but_a_version_into_a_command(version: str, tmp_path: Path) -> None:
    """The refusal tells which release of the library to install."""
    folder = write_folder(tmp_path / "model", "bytes", STYLES["chatml"])
    with pytest.raises(BadChat, match="is no version of the library renderers"):
        load_chat(folder, f"renderers/{version}/qwen3", CREATED)


def test_a_form_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "bytes", STYLES["chatml"])
    with pytest.raises(BadChat, match="no conversation format 'carrier-pigeon'"):
        load_chat(folder, "carrier-pigeon", CREATED)


@pytest.mark.parametrize(
    "content", ["[", "{}", '{"added_tokens": 5}', '{"added_tokens": [{}]}', "[" * 100_000]
)
def test_a_tokenizer_that_cannot_be_read_is_refused(content: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "bytes", STYLES["chatml"])
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(BadChat, match="copy the folder again"):
        load_chat(folder, "template", CREATED)


def test_a_template_among_several_by_name_is_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "bytes", STYLES["chatml"])
    (folder / "chat_template.jinja").unlink()
    source = STYLES["chatml"].source
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_chat(folder, "template", CREATED) is not None
