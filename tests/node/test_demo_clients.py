"""Other implementations' volunteers in a demo: their command lines, and the table of all keys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nous_node.node.children import Family
from nous_node.node.cli_exit import Exit
from nous_node.node.demo import DemoOptions, run_demo
from nous_node.node.demo_clients import ClientFigures, read_command, table
from nous_node.protocol.errors import LocalError

PLAYER = """
import sys, time
from nous_node.node.events import *
print(to_line(RunReady("ab", "demo", "nous1fake", [])), flush=True)
time.sleep(60)
"""


def test_words_of_a_command_get_invite_and_home(tmp_path: Path) -> None:
    words = read_command("node 'my client.js' {invite} --home={home}/x {invite}", "nous1abc", tmp_path)
    assert words == ["node", "my client.js", "nous1abc", f"--home={tmp_path}/x", "nous1abc"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("node 'volunteer.js {invite}", "no command line"), ("", "no {invite}"), ("node it.js", "no {invite}")],
)
def test_command_that_cannot_be_used_is_told_before_the_demo_begins(
    text: str, said: str, tmp_path: Path
) -> None:
    family = Family(program=("/does/not/exist",))
    with pytest.raises(LocalError) as caught:
        run_demo(DemoOptions(home=tmp_path / "home", clients=(text,)), family)
    assert said in str(caught.value)
    assert family.children == []


def test_demo_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="--client"):
        run_demo(DemoOptions(home=tmp_path, volunteers=0))


def test_client_that_cannot_be_started_ends_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = Family(program=(sys.executable, "-P", "-c", PLAYER))
    options = DemoOptions(volunteers=0, home=tmp_path, clients=("/no/such/client {invite}",))
    assert run_demo(options, family) == Exit.INPUT
    assert "/no/such/client cannot be started" in capsys.readouterr().out
    assert all(child.poll() is not None for child in family.children)


def test_table_shows_names_of_strangers_escaped() -> None:
    figures = ClientFigures(
        peer="12D3KooWabcdefgh",
        agent="js\x1b[31m",
        accepted=1200,
        refused={"sampling-mismatch": 2},
        versions=5,
        measured=1100,
        logprob=4e-7,
        distance=1.5e-9,
        largest=2e-5,
    )
    (_, line) = table([figures])
    assert "\x1b" not in line
    assert "1,200 accepted, 2 refused (sampling-mismatch 2); 5 versions" in line
    assert "mean d 1.5e-09, largest d 2.0e-05 (1,100 groups)" in line
    assert table([]) == []
