"""Templates within bounds: what a stranger's template can do, and what it cannot."""

from __future__ import annotations

import datetime
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.envs.errors import BadChat
from nous_node.envs.template_functions import TemplateRefused, strftime
from nous_node.envs.templates import Template

MESSAGES: list[dict[str, object]] = [
    {"role": "user", "content": " hi "},
    {"role": "assistant", "content": "ho"},
]
GROW = (
    "{% set n = namespace(x=START) %}{% for i in range(100) %}{% set n.x = STEP %}{% endfor %}{{ n.x SHOW }}"
)


def grown(start: str, step: str, show: str = "") -> str:
    return GROW.replace("START", start).replace("STEP", step).replace("SHOW", show)


def rendered(source: str) -> str:
    return Template(source, {"bos_token": "<s>"}, 1_790_000_000_000).render(MESSAGES, None, True)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "<s>[hi][ho]"),
        ("{% for m in messages %}{{ loop.index }}{{ ',' if not loop.last }}{% endfor %}", "1,2"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
            "assistant",
        ),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(f(1)) }}", "<<1>>"),
        ("{% set x %}a{{ messages | length }}{% endset %}{{ x ~ x }}", "a2a2"),
        (
            "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
            "3",
        ),
        ("{{ {'b': [1, 'é\"'], 'a': None} | tojson }}", '{"b": [1, "é\\""], "a": null}'),
        ("{{ messages | map(attribute='role') | join('-') }}", "user-assistant"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages[0].content.strip().split('i')[0] }}{{ missing }}{{ none }}", "hNone"),
        ("{{ (messages | last).get('role') }}{{ 'x' if tools is none }}", "assistantx"),
        ("{% for k, v in messages[0] | dictsort %}{{ k }}{% endfor %}", "contentrole"),
        ("{{ 'a' * 3 + 'b' }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 3 }}{{ [1] + [2] }}", "aaab338[1, 2]"),
        ("{% filter upper %}a{{ 1 }}b{% endfilter %}", "A1B"),
        ("{{ strftime_now('%d %b %Y') }}", "21 Sep 2026"),
        ("a\n{% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"),
    ],
)
def test_what_templates_use_works(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(300) %}{% for j in range(300) %}{% for k in range(300) %}" + "{% endfor %}" * 3,
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ range(100000) | join('x' * 1000) }}",
        "{{ ('x' * 1000).join('a' * 100000) }}",
        "{{ ','.join(range(10 ** 7) | map('string')) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{% set x %}{{ 'a' * 500000 }}{{ 'a' * 500000 }}{% endset %}{{ x }}{{ x }}",
        "{% call(y) f() %}{% endcall %}",
        grown("'aa'", "n.x ~ n.x"),
        grown("'aa'", "n.x + n.x"),
        grown("'aa'", "[n.x, n.x] | join"),
        grown("[1]", "[n.x, n.x]"),
        grown("[1]", "[n.x, n.x]", "| tojson"),
        grown("[1]", "[n.x, n.x]", "== n.x"),
        grown("[1]", "[n.x, n.x]", "in [[n.x]]"),
        grown("[1]", "[n.x, n.x]", "is eq(n.x)"),
        grown("[1]", "[n.x, n.x]", "| string"),
        grown("[1]", "n.x + n.x"),
        grown("{'a': 1}", "{'a': n.x, 'b': n.x}"),
        grown("3", "n.x * n.x"),
        "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1" + " + 1" * 20_000 + " }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
        "{{ 9" + "9" * 5000 + " }}",
        "{{ ('9' * 5000) | int }}{{ raise_exception('x') }}",
    ],
)
def test_a_template_that_takes_too_much_ends_soon(source: str) -> None:
    began = time.process_time()
    with pytest.raises((BadChat, TemplateRefused)):
        rendered(source)
    assert time.process_time() - began < 10.0


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ namespace.__init__.__globals__['json'] }}",
        "{{ strftime_now.__globals__.x }}",
        "{{ range.__self__.meter }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(_a=1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages[0].pop('role') }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{% block a %}{% endblock %}{{ self.a() }}",
        "{{ lipsum() }}",
        "{{ cycler(1) }}",
        "{{ messages | random }}",
        "{{ now() }}",
        "{{ strftime_now('%s') }}",
        "{{ range }}",
        "{{ messages[0].items }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_reaches_nothing_outside(source: str) -> None:
    with pytest.raises((BadChat, TemplateRefused)):
        rendered(source)
    assert MESSAGES[0] == {"role": "user", "content": " hi "}


@given(st.text(max_size=60))
def test_any_text_is_a_template_or_refused(source: str) -> None:
    with suppress(BadChat, TemplateRefused):
        assert isinstance(rendered("{{" + source + "}}" + source), str)


@given(st.integers(0, 4_000_000_000_000))
def test_a_time_is_written_as_python_writes_it(created: int) -> None:
    then = datetime.datetime.fromtimestamp(created // 1000, datetime.UTC)
    form = "%a %A %b %B %d %-d %e %H %I %j %m %-m %M %p %S %y %Y %Z %z %%"
    assert strftime(form, created) == then.strftime(form)
