"""Vectors of the chapter on conversations: prompts, extensions, refused templates, answers."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from vectors_world import case

from nous_node.envs.chat import ModelChat, load_chat
from nous_node.envs.environment import Message, Tool, ToolCall
from nous_node.envs.errors import BadChat

CREATED = 1_790_000_000_000
TEMPLATES = Path(__file__).parents[1] / "tests" / "envs" / "templates"

THINK = ["<think>", "</think>"]
CALL = ["<tool_call>", "</tool_call>"]
PARTS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end")
MISTRAL = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
CONTROLS: dict[str, list[str]] = {
    "chatml": ["<|im_end|>", "<|im_start|>"],
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "mistral": ["</s>", "<s>", *MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "gemma": ["<end_of_turn>", "<bos>", "<start_of_turn>"],
    "qwen3": ["<|im_end|>", "<|im_start|>", *THINK, *CALL],
    "deepseek": [
        *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *THINK),
        *(f"<｜tool▁{part}｜>" for part in (*PARTS, "output▁begin", "output▁end")),
    ],
}
"""Control tokens by template: the close, the beginning where there is one, others."""
PLAIN = {*THINK, *CALL, "<｜User｜>", "<｜Assistant｜>"}

TURN = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
FOOT = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
HEAD = "{%- for message in messages %}"
REFUSED = {
    "history": HEAD + "{{- '<|im_start|>' ~ loop.index ~ message.content + '<|im_end|>' }}" + FOOT,
    "clock": HEAD + "{{- strftime_now('%H:%M') }}" + TURN + FOOT,
    "order": "{%- for message in messages[::-1] %}" + TURN + FOOT,
    "last message": "{%- for message in messages[:-1] %}" + TURN + FOOT,
    "close": HEAD + "{{- message.role + ': ' + message.content + '\\n' }}" + FOOT,
    "contents": HEAD + "{{- '<|im_start|>' + message.content | upper + '<|im_end|>' }}" + FOOT,
    "kept": HEAD + "{{- '<|im_start|>' ~ loop.revindex ~ message.content + '<|im_end|>' }}" + FOOT,
    "steps": "{% for i in range(10 ** 9) %}{% endfor %}" + HEAD + TURN + FOOT,
    "characters": "{{- 'a' * 10 ** 9 }}" + HEAD + TURN + FOOT,
    "random": HEAD + TURN + "{{- ['a', 'b'] | random }}" + FOOT,
}

LOOK = Tool("look", "Looks something up.", '{"type": "object", "properties": {"at": {"type": "string"}}}')
TOLD = Message("tool", 'It is "here".', tool_call_id="call00000", name="look")


def write_model(folder: Path, template: str, controls: list[str], special: list[str]) -> Path:
    """A model folder as far as conversations need it: one id a byte, then `controls`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_characters())}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(one, special=one in special, normalized=False) for one in controls])
    made.save(str(folder / "tokenizer.json"))
    names = {"eos_token": controls[0], "bos_token": controls[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def _characters() -> list[str]:
    """The characters by which byte-level tokenizers write bytes."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def loaded(
    template: str, controls: list[str], special: list[str], created: int = CREATED, form: str = "template"
) -> ModelChat:
    with tempfile.TemporaryDirectory() as where:
        chat = load_chat(write_model(Path(where), template, controls, special), form, created)
    assert isinstance(chat, ModelChat)
    return chat


def chat() -> list[dict[str, Any]]:
    made = []
    for name, controls in CONTROLS.items():
        model, format_ = model_of(name), _format(name)
        made += [_prompted(name, model, format_, *one) for one in _conversations(name, controls)]
        made += [_extended(name, model, format_, *one) for one in _news(name, controls)]
    made += [_refused(lacks, template) for lacks, template in REFUSED.items()]
    return made + _answers() + _rendered()


def model_of(name: str) -> dict[str, Any]:
    controls = CONTROLS[name]
    return {
        "template": (TEMPLATES / f"{name}.jinja").read_text(),
        "controls": controls,
        "special": [one for one in controls if one not in PLAIN],
        "created": CREATED,
    }


@functools.cache
def _format(name: str) -> ModelChat:
    return loaded(**model_of(name))


def _conversations(name: str, controls: list[str]) -> list[tuple[str, list[Message], list[Tool]]]:
    asked = Message("user", " 2 + 2?\n")
    spelled = Message("user", "".join(controls[:4]))
    found = [("a question", [asked], []), ("a content that spells control tokens", [spelled], [])]
    if name != "gemma":
        found.append(("rules and a question", [Message("system", "Be brief."), asked], []))
        call = ToolCall("call00000", "look", '{"at": "a \\"b\\""}')
        history = [asked, Message("assistant", "", "Why?", (call,)), TOLD]
        found.append(("thinking, a call, and its answer", history, [LOOK]))
    return found


def _news(name: str, controls: list[str]) -> list[tuple[str, int, list[Message]]]:
    asked = Message("user", "And 3 + 3?")
    found = [("behind a closed turn", 256, [asked]), ("behind a turn that was cut short", 65, [asked])]
    if name != "gemma":
        found.append(("an answer of a tool", 256, [TOLD]))
    return found


def _prompted(
    name: str,
    model: dict[str, Any],
    format_: ModelChat,
    what: str,
    messages: list[Message],
    tools: list[Tool],
) -> dict[str, Any]:
    pieces = format_.prompt(messages, tools)
    told = {"messages": msgspec.to_builtins(messages), "tools": msgspec.to_builtins(tools)}
    return case(f"{name}: {what}", "CHT-3", "prompt", **model, **told, pieces=_written(pieces))


def _extended(
    name: str, model: dict[str, Any], format_: ModelChat, what: str, last: int, messages: list[Message]
) -> dict[str, Any]:
    pieces = format_.extend([last], messages)
    told = {"messages": msgspec.to_builtins(messages), "last": last}
    return case(f"{name}: {what}", "CHT-1 CHT-4", "extend", **model, **told, pieces=_written(pieces))


def _written(pieces: list[Any]) -> list[list[Any]]:
    return [[int(role), tokens] for role, tokens in pieces]


def _refused(lacks: str, template: str) -> dict[str, Any]:
    controls = CONTROLS["chatml"]
    model: dict[str, Any] = {
        "template": template,
        "controls": controls,
        "special": controls,
        "created": CREATED,
    }
    try:
        loaded(**model)
    except BadChat:
        rules = "CHT-6" if lacks in ("steps", "characters", "random") else "CHT-5"
        return case(f"refused: {lacks}", f"CHT-2 {rules}", "refused", **model, refused=True)
    raise AssertionError(f"the template without {lacks} was accepted")


SAID = (
    ("qwen3", "plain", "It is 4."),
    ("qwen3", "thinking", "<think>\nTwo and two.\n</think>\n\nIt is 4."),
    ("qwen3", "thinking that does not end", "<think>\nTwo and"),
    ("qwen3", "a call", 'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'),
    (
        "qwen3",
        "two calls, one malformed",
        '<tool_call>{</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
    ),
    ("qwen3", "a call that does not end", '<tool_call>{"name": "look", "arguments": {}}'),
    ("llama3", "a call", '{"name": "look", "parameters": {"at": 1}}'),
    ("llama3", "no call", '{"name": "look"}'),
    (
        "mistral",
        "calls",
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
    ),
    ("mistral", "no list", "[TOOL_CALLS]{}"),
    ("deepseek", "thinking that the prompt began", "Two and two.</think>4"),
)


def _answers() -> list[dict[str, Any]]:
    made = []
    for name, what, text in SAID:
        model, format_ = model_of(name), _format(name)
        for ended in (True, False):
            tokens = [*text.encode(), *([256] if ended else [])]
            message = msgspec.to_builtins(format_.parse(tokens))
            comment = f"{name}: {what}" + ("" if ended else ", cut short")
            made.append(case(comment, "CHT-10", "answer", **model, tokens=tokens, message=message))
    return made


RENDERERS = {"renderers": "0.1.12"}
TOOLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
FAMILIES: dict[str, list[str]] = {
    "qwen3": ["<|im_end|>", "<|im_start|>", "<|endoftext|>", *THINK, *TOOLS],
    "llama-3": [*CONTROLS["llama3"], "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"],
}
"""Families of the library renderers, with the control tokens that their models have."""


def _rendered() -> list[dict[str, Any]]:
    made = []
    for family, controls in FAMILIES.items():
        model = _family(family, controls)
        format_ = loaded(**{name: value for name, value in model.items() if name != "releases"})
        made += [
            _library(_prompted(family, model, format_, *one)) for one in _conversations(family, controls)
        ]
        made += [_library(_extended(family, model, format_, *one)) for one in _news(family, controls)]
    qwen = FAMILIES["qwen3"]
    wrong = [
        ("a family that the library does not know", _family("nobody", qwen)),
        ("a family that would be guessed", _family("auto", qwen)),
        ("another tokenizer than the family has", _family("glm-4.5", qwen)),
    ]
    return made + [_family_refused(*row) for row in wrong]


def _family(family: str, controls: list[str]) -> dict[str, Any]:
    special = [one for one in controls if one not in {*THINK, *TOOLS}]
    form = f"renderers/{RENDERERS['renderers']}/{family}"
    model = {"template": "", "controls": controls, "special": special, "created": CREATED}
    return {**model, "form": form, "releases": RENDERERS}


def _library(made: dict[str, Any]) -> dict[str, Any]:
    return {**made, "requires": ["CHT-7"], "flags": ["renderers"]}


def _family_refused(comment: str, model: dict[str, Any]) -> dict[str, Any]:
    try:
        loaded(**{name: value for name, value in model.items() if name != "releases"})
    except BadChat:
        return case(comment, "CHT-2 CHT-7", "renderers", **model, refused=True)
    raise AssertionError(f"{comment}: it was accepted")
