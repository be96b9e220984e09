"""`env check`: what it says of environments that are broken in each way, and the code it ends with."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nous_node.envs import registry, remote, sandbox
from nous_node.envs.access import NONE
from nous_node.node.cli import main
from nous_node.node.cli_exit import Exit
from nous_node.node.env_check import CONTEXT, GROUP, ROWS, TURN_TOKENS
from nous_node.node.env_hosts import Hosts
from nous_node.node.env_policy import trial
from nous_node.node.env_survey import Survey

from .broken_worlds import NAMES, VERDICTS, install_broken

pytestmark = pytest.mark.skipif(sandbox.unavailable() is not None, reason=str(sandbox.unavailable()))

DEADLINE = 1.0


@pytest.fixture(scope="module", autouse=True)
def _broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("broken") / "packages"
    install_broken(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        registry._installed.cache_clear()
        yield
        remote.close_all()
    registry._installed.cache_clear()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(DEADLINE) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def survey() -> Survey:
    settings = replace(trial(None, GROUP).settings, max_tokens=TURN_TOKENS, context=CONTEXT)
    return Survey(NONE, {}, settings, 2, DEADLINE)


def run(arguments: Sequence[str], home: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["nous-node", *arguments, "--home", str(home)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def test_every_broken_environment_has_a_verdict() -> None:
    assert set(VERDICTS) == {name.lower() for name in NAMES}


@pytest.mark.parametrize("name", VERDICTS)
def test_what_is_wrong_is_said_in_its_row(name: str, hosts: Hosts, survey: Survey) -> None:
    row, verdict, words = VERDICTS[name]
    checked = survey.check_in(hosts, survey.place(f"broken-{name}"))
    found = {one.name: one for one in checked.rows}
    assert list(found) == list(ROWS)
    assert found[row].verdict == verdict, checked
    assert words in found[row].text
    assert checked.verdict == ("FAILED" if verdict == "FAILED" else checked.verdict)
    if verdict == "FAILED":
        assert checked.exact is (row not in ("runs", "tasks"))


def test_a_table_names_each_row_and_a_failed_one_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["env", "check", "broken-generous", "--tasks", "2"], tmp_path, monkeypatch) == Exit.FAILED
    told = capsys.readouterr().out
    assert all(row in told for row in ROWS)
    assert "FAILED" in told
    assert run(["env", "check", "broken-prints", "--tasks", "2"], tmp_path, monkeypatch) == Exit.OK
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "loud" in told


def test_who_is_trusted_runs_without_the_sandbox_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["env", "check", "broken-forks", "--trust-env", "broken-forks", "--tasks", "2"]
    assert run(arguments, tmp_path, monkeypatch) == Exit.OK
    told = capsys.readouterr().out
    assert "without the sandbox, with all that you can read" in told
    assert "it left 1 process running (sleep)" in told


def test_json_has_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["env", "check", "sort-digits", "--tasks", "3", "--json"]
    assert run(arguments, tmp_path, monkeypatch) == Exit.OK
    said = json.loads(capsys.readouterr().out)
    assert said["exact"] is True
    assert [row["name"] for row in said["rows"]] == list(ROWS)


def test_settings_that_it_does_not_take_are_a_failed_row(hosts: Hosts, survey: Survey) -> None:
    checked = replace(survey, config={"length": 0}).check_in(hosts, survey.place("sort-digits"))
    assert (checked.rows[0].verdict, checked.rows[1].verdict) == ("FAILED", "skipped")
    assert "`length`" in checked.rows[0].text


def test_a_family_is_checked_member_by_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["env", "check", "broken-pair", "--tasks", "2"], tmp_path, monkeypatch) == Exit.FAILED
    told = capsys.readouterr().out
    assert "broken-pair/good  ok" in told
    assert "broken-pair/bad   FAILED" in told
    assert "broken-pair: 2 of 2 are exact; 1 ok, 0 with warnings, 1 failed, 0 not offered." in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["env", "check", "chess"], "There is no environment 'chess' here"),
        (["env", "check", "verifiers"], "check one by name, as verifiers/NAME"),
        (["env", "check", "sort-digits", "--config", "length"], "write KEY=VALUE"),
        (["env", "check", "sort-digits", "--model", "/nowhere"], "no model folder"),
    ],
)
def test_bad_input_is_one_sentence_with_the_next_step(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(arguments, tmp_path, monkeypatch) == Exit.INPUT
    assert sentence in capsys.readouterr().err
