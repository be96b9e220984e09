"""`env list`, `info`, `try` and `eval`: what they show, and that nothing hostile gets through them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from nous_node.envs import registry, sandbox
from nous_node.envs.access import NONE
from nous_node.node.cli import main
from nous_node.node.cli_exit import Exit
from nous_node.node.env_colours import lines
from nous_node.node.env_config import read_config
from nous_node.node.env_page import page
from nous_node.node.env_policy import trial
from nous_node.node.env_try import Part, Sample, Token, Tried, task_seed, try_once
from nous_node.node.env_views import Listed, list_lines, listed
from nous_node.node.eval_model import wilson
from nous_node.node.plan import DEFAULT_MODEL
from nous_node.protocol.errors import LocalError

HOSTILE = "<script>alert(1)</script>\x1b]0;owned\x07\x1b[2J\u202e&'\"\nline two\r\x00\x9b31m</pre>"
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def run(arguments: Sequence[str], home: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["nous-node", *arguments, "--home", str(home)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def hostile() -> Tried:
    """A group in which every text is hostile."""
    asked = Part(HOSTILE, False, None, HOSTILE, [Token([1, 2], HOSTILE, [], [])])
    said = Part("assistant", True, -1, HOSTILE, [Token([3], HOSTILE, [-0.5], [-1.0])])
    sample = Sample(HOSTILE, 1.0, {HOSTILE: 1.0}, 0.5, True, HOSTILE, 1, 3, [asked, said])
    other = msgspec.structs.replace(sample, advantage=None, parts=[asked, said, asked])
    return Tried(HOSTILE, HOSTILE, HOSTILE, 0, 0, 2, 1.0, HOSTILE, True, [sample, other])


class Tags(HTMLParser):
    """All tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)


def test_a_page_escapes_whatever_stands_in_it() -> None:
    made = page(hostile())
    read = Tags()
    read.feed(made)
    assert not read.tags & {"script", "img", "a", "link", "iframe"}
    assert read.attributes <= {"lang", "charset", "http-equiv", "content", "class", "title"}
    assert not CONTROLS.search(made)
    assert "&lt;script&gt;" in made
    assert "default-src &#x27;none&#x27;" in made


@pytest.mark.parametrize("tokens", [False, True])
def test_no_control_character_reaches_the_terminal(tokens: bool) -> None:
    shown = "\n".join(line.plain for line in lines(hostile(), tokens=tokens))
    assert not CONTROLS.search(shown)
    assert "\\x1b" in shown


def test_no_control_character_of_a_listed_environment_does() -> None:
    rows = [
        Listed(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "1", "1", HOSTILE, HOSTILE),
        Listed("x", problem=HOSTILE),
    ]
    told = "".join(list_lines(rows, described=True))
    assert not CONTROLS.search(told)


def test_a_group_is_shown_with_all_that_is_learnt_from_it() -> None:
    tried = try_once(trial(None, 8), registry.make("sort-digits", {}, NONE), "1", 0, 0, 1.0)
    assert len(tried.samples) == 8
    assert abs(sum(sample.advantage or 0.0 for sample in tried.samples)) < 1e-4
    for sample in tried.samples:
        asked, said = sample.parts
        assert (asked.role, asked.trained, said.role, said.trained) == ("raw", False, "assistant", True)
        assert asked.text.startswith("sort ")
        assert "".join(token.text for token in said.tokens) == said.text
        assert [len(token.logprobs) for token in said.tokens] == [len(token.ids) for token in said.tokens]
        assert all(value <= 0 for token in said.tokens for value in token.logprobs)
        assert sample.sampled == sum(len(token.ids) for token in said.tokens)
    told = "\n".join(line.plain for line in lines(tried, tokens=False))
    assert told.count("sort ") == 1, "the prompt that all share is shown once"


def test_the_same_seed_is_the_same_group_and_another_is_not() -> None:
    environment, tried_with = registry.make("sort-digits", {}, NONE), trial(None, 2)
    first = try_once(tried_with, environment, "1", 5, 0, 1.0)
    assert try_once(tried_with, environment, "1", 5, 0, 1.0) == first
    assert try_once(tried_with, environment, "1", 6, 0, 1.0).samples != first.samples
    assert task_seed(5) != task_seed(6)


def test_equal_rewards_are_said_to_teach_nothing() -> None:
    environment, tried_with = registry.make("sort-digits", {}, NONE), trial(None, 2)
    tried = try_once(tried_with, environment, "1", 5, 0, 1e-6)
    told = "\n".join(line.plain for line in lines(tried, tokens=False))
    assert not tried.learns
    assert "It learns nothing here" in told
    assert "learns nothing from this group" in page(tried)


def test_answers_that_run_into_their_limit_are_told() -> None:
    tried = try_once(trial(None, 2, 1), registry.make("sort-digits", {}, NONE), "1", 0, 0, 1.0)
    assert [sample.finish for sample in tried.samples] == ["length"] * 2
    assert "2 of 2 ran into the limit" in "\n".join(line.plain for line in lines(tried, tokens=False))


def test_try_writes_a_page_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "group.html"
    arguments = ["env", "try", "sort-digits", "--group", "2", "--config", "length=2", "--level", "3"]
    assert run([*arguments, "--html", str(html), "--json"], tmp_path / "home", monkeypatch) == Exit.OK
    said = json.loads(capsys.readouterr().out)
    assert (said["environment"], said["level"], len(said["samples"])) == ("sort-digits", 3, 2)
    assert html.read_text().startswith("<!doctype html>")
    assert run([*arguments, "--tokens"], tmp_path / "home", monkeypatch) == Exit.OK
    assert re.search(r"┃ +\d+ +-\d+\.\d{4} +[+-]\d\.\d\d  '", capsys.readouterr().out)


def test_list_has_every_environment_and_its_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["env", "list"], tmp_path, monkeypatch) == Exit.OK
    told = capsys.readouterr().out
    assert all(name in told for name in registry.entries())
    assert re.search(r"sort-digits +1 +exact +pure +1 +1 +this process\n", told)
    assert run(["env", "list", "reasoning-gym", "--json"], tmp_path, monkeypatch) == Exit.OK
    rows = {row["id"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["reasoning-gym/chain_sum"]["reproducible"] == "exact"
    assert "nan" in rows["reasoning-gym/complex_arithmetic"]["problem"]
    assert len(rows) == 105


def test_what_is_not_installed_says_how_to_install_it() -> None:
    rows = {row.id: row for row in listed("", NONE)}
    assert rows["atropos/..."].runs == "not installed: nous-node env install atropos"
    assert rows["atropos/..."].members == 0


def test_info_says_what_a_run_would_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["env", "info", "sort-digits"], tmp_path, monkeypatch) == Exit.OK
    told = capsys.readouterr().out
    for words in ("it takes `length` only", "levels 0 to 8", "init NAME --env sort-digits", "this process"):
        assert words in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["env", "list", "chess"], "There is no environment 'chess' here"),
        (["env", "info", "textarena"], "`nous-node env list textarena` shows all"),
        (["env", "info", "reasoning-gym/coin_flip"], "is not offered"),
        (["env", "try", "atropos/a:B"], "nous-node env install atropos"),
        (["env", "try", "sort-digits", "--level", "9"], "--level is from 0 to 8"),
        (["env", "try", "sort-digits", "--seed", "-1"], "--seed is a whole number"),
        (["env", "try", "sort-digits", "--config", "=3"], "write KEY=VALUE"),
        (["env", "try", "sort-digits", "--config", "width=3"], "it takes `length` only"),
        (["env", "try", "sort-digits", "--max-tokens", "9999"], "the model's context of 1,024"),
        (["eval", "/nowhere", "--env", "sort-digits"], "no model folder"),
        (["eval", str(DEFAULT_MODEL)], "Missing option '--env'"),
        (["eval", str(DEFAULT_MODEL), "--env", "sort-digits", "--greedy", "--temperature", "1"], "exclude"),
    ],
)
def test_bad_input_is_one_sentence_with_the_next_step(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(arguments, tmp_path, monkeypatch) == Exit.INPUT
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ([], {}),
        (["a=1", "b=0.5", "c=true", 'd="x=y"', "e=plain text", "f=[1, 2]", "g="],
         {"a": 1, "b": 0.5, "c": True, "d": "x=y", "e": "plain text", "f": [1, 2], "g": ""}),
        (["a=2026-01-01"], {"a": "2026-01-01"}),
        (["a=1\nb = 2"], {"a": "1\nb = 2"}),
    ],
)  # fmt: skip
def test_settings_are_read_as_in_toml(flags: list[str], config: dict[str, object]) -> None:
    assert read_config(flags) == config


@pytest.mark.parametrize("flags", [["a"], ["=1"], [" = 1"], ["a=1", "a=2"]])
def test_what_is_no_setting_is_refused(flags: list[str]) -> None:
    with pytest.raises(LocalError, match="KEY=VALUE"):
        read_config(flags)


def test_eval_scores_each_environment_with_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(DEFAULT_MODEL), "--env", "sort-digits", "--tasks", "32"]
    assert run([*arguments, "--json"], tmp_path, monkeypatch) == Exit.OK
    said = json.loads(capsys.readouterr().out)
    assert said["tasks"] == 32
    assert said["share"] == said["right"] / 32
    assert said["low"] < said["share"] < said["high"]
    assert 4 <= said["tokens"] <= 6
    assert run([*arguments, "--temperature", "1"], tmp_path, monkeypatch) == Exit.OK
    assert "temperature 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval_is_wilsons(right: int, asked: int, low: float, high: float) -> None:
    assert wilson(right, asked) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@pytest.mark.skipif(sandbox.unavailable() is not None, reason=str(sandbox.unavailable()))
def test_a_group_that_fails_ends_with_1_and_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("textarena", reason="the extra `envs` is not installed")
    arguments = ["env", "try", "textarena/KuhnPoker-v0-raw", "--config", "players=7"]
    assert run(arguments, tmp_path, monkeypatch) == Exit.INPUT
    assert "is played by 2 players" in capsys.readouterr().err
