"""What an answer says."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.envs.environment import Message, ToolCall
from nous_node.envs.tool_calls import MAX_CALLS, Grammar

TAGGED, BARE, MARKED = Grammar("tagged"), Grammar("bare"), Grammar("marked")
ADD = ToolCall("call00000", "add", '{"a": 1}')
CALL = '{"name": "add", "arguments": {"a": 1}}'


def said(content: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", content, reasoning, calls)


@pytest.mark.parametrize(
    ("grammar", "text", "message"),
    [
        (TAGGED, "It is 4.", said("It is 4.")),
        (TAGGED, "", said("")),
        (TAGGED, "<think>\nwhy\n</think>\n\nIt is 4.", said("It is 4.", "why")),
        (TAGGED, "<think>\nwhy", said("", "why")),
        (TAGGED, "<think></think>4", said("4")),
        (TAGGED, "4 <think>why</think>", said("4 <think>why</think>")),
        (TAGGED, "why</think>4", said("why</think>4")),
        (Grammar("tagged", opened=True), "why</think>\n4", said("4", "why")),
        (Grammar("tagged", opened=True), "why", said("", "why")),
        (TAGGED, f"<tool_call>{CALL}</tool_call>", said("", "", ADD)),
        (TAGGED, f"See:\n<tool_call>\n{CALL}\n</tool_call>", said("See:", "", ADD)),
        (TAGGED, f"<think>a<tool_call></think><tool_call>{CALL}</tool_call>", said("", "a<tool_call>", ADD)),
        (TAGGED, f"<tool_call>{CALL}", said(f"<tool_call>{CALL}")),
        (TAGGED, "<tool_call>{}</tool_call>", said("<tool_call>{}</tool_call>")),
        (TAGGED, f"<tool_call>[{CALL}]</tool_call>", said(f"<tool_call>[{CALL}]</tool_call>")),
        (
            TAGGED,
            f"<tool_call>{{</tool_call><tool_call>{CALL}</tool_call>",
            said("<tool_call>{</tool_call>", "", ADD),
        ),
        (
            TAGGED,
            '<tool_call>{"name": "add", "arguments": "{}", "id": "x"}</tool_call>',
            said("", "", ToolCall("x", "add", "{}")),
        ),
        (TAGGED, CALL, said(CALL)),
        (BARE, '{"name": "add", "parameters": {"a": 1}}', said("", "", ADD)),
        (BARE, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', said("", "", ADD)),
        (BARE, 'So: {"name": "add", "parameters": {}}', said('So: {"name": "add", "parameters": {}}')),
        (BARE, '{"name": 5, "parameters": {}}', said('{"name": 5, "parameters": {}}')),
        (MARKED, f"[TOOL_CALLS][{CALL}]", said("", "", ADD)),
        (MARKED, f"See. [TOOL_CALLS] [{CALL}]", said("See.", "", ADD)),
        (MARKED, f"[TOOL_CALLS][{CALL}, 5]", said(f"[TOOL_CALLS][{CALL}, 5]")),
        (MARKED, "[TOOL_CALLS][]", said("[TOOL_CALLS][]")),
        (MARKED, "[TOOL_CALLS]" + "[" * 100_000, said("[TOOL_CALLS]" + "[" * 100_000)),
    ],
)
def test_an_answer_is_taken_apart(grammar: Grammar, text: str, message: Message) -> None:
    assert grammar.parse(text) == message


def test_calls_beyond_the_limit_stay_content() -> None:
    message = TAGGED.parse(f"<tool_call>{CALL}</tool_call>" * (MAX_CALLS + 1))
    assert len(message.tool_calls) == MAX_CALLS
    assert message.content == f"<tool_call>{CALL}</tool_call>"
    assert MARKED.parse(f"[TOOL_CALLS][{CALL}" + f",{CALL}" * MAX_CALLS + "]").tool_calls == ()


WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "{",
    "}",
    "[",
    "]",
]
WORDS += ['"name"', ":", '"add"', ",", '"arguments"', '"parameters"', CALL, "é", "\n", "1e999", "\\"]


@given(st.lists(st.sampled_from(WORDS), max_size=30), st.sampled_from([TAGGED, BARE, MARKED]), st.booleans())
def test_no_answer_is_an_error(words: list[str], grammar: Grammar, opened: bool) -> None:
    assert Grammar(grammar.calls, opened).parse("".join(words)).role == "assistant"


@pytest.mark.parametrize("grammar", [TAGGED, BARE, MARKED])
@pytest.mark.parametrize("place", ["name", "id", "argument", "key", "text"])
def test_a_lone_surrogate_is_malformed_and_stays_content(place: str, grammar: Grammar) -> None:
    """JSON can spell what is no text: whoever sends it to another process would fail at it."""
    key = "parameters" if grammar is BARE else "arguments"
    odd = dict.fromkeys(("name", "id", "argument", "key", "text"), "x") | {place: "\\ud800"}
    arguments = f'{{"{odd["key"]}": "{odd["argument"]}"}}' if place != "text" else f'"{odd["text"]}"'
    body = f'{{"name": "{odd["name"]}", "id": "{odd["id"]}", "{key}": {arguments}}}'
    text = {
        TAGGED.calls: f"<tool_call>{body}</tool_call>",
        MARKED.calls: f"[TOOL_CALLS][{body}]",
        BARE.calls: body,
    }[grammar.calls]
    assert grammar.parse(text) == Message("assistant", text)
    paired = grammar.parse(text.replace("\\ud800", "\\ud83d\\ude00"))
    assert [call.name for call in paired.tool_calls] == ["😀" if place == "name" else "x"]


@pytest.mark.parametrize("word", [*WORDS, f"<tool_call>{CALL}"])
@pytest.mark.parametrize("grammar", [TAGGED, BARE, MARKED])
def test_a_long_answer_is_read_quickly(word: str, grammar: Grammar) -> None:
    text = word * (400_000 // len(word))
    began = time.process_time()
    grammar.parse("[TOOL_CALLS]" + text)
    grammar.parse(text)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("<tool_call>", "tagged"),
        ("[TOOL_CALLS]", "marked"),
        ("<|python_tag|>", "bare"),
        ('{"name": f, "parameters": p}', "bare"),
        ("{{ messages }}", "tagged"),
    ],
)
def test_a_template_tells_how_calls_are_written(source: str, calls: str) -> None:
    assert Grammar.of(source).calls == calls
