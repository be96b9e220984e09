"""The README's page for authors: its package is the one in the tree, and every command on it works."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nous_node.envs import registry, remote, sandbox
from nous_node.node.cli import main
from nous_node.node.cli_exit import Exit

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "envs" / "packages" / "nous_env_countdown"
PAGE = (ROOT / "README.md").read_text().split("## Write an environment\n")[1].split("\n## ")[0]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True) for kind, block in BLOCKS if not kind for line in block.splitlines()
]
LIVE = ("train", "join")
"""Run until somebody stops them: tests/e2e has them."""
HEAVY = ("install", "reasoning-gym")
"""Downloads, or minutes of work: `make test-envs` and the tests of reasoning-gym have them."""


def offline(command: list[str]) -> bool:
    return command[0] == "nous-node" and command[1] not in LIVE and not set(HEAVY) & set(command)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package, installed by pip into a folder of its own."""
    folder = tmp_path_factory.mktemp("author")
    shutil.copytree(PACKAGE, folder / "my_env", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    flags = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"]
    target = folder / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(folder / "my_env")],
        check=True,
        timeout=120,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(target)
        importlib.invalidate_caches()
        registry._installed.cache_clear()
        yield folder
        remote.close_all()
    registry._installed.cache_clear()


def test_the_page_shows_the_package_that_is_in_the_tree() -> None:
    shown = {kind: block for kind, block in BLOCKS if kind}
    assert shown["toml"] == (PACKAGE / "pyproject.toml").read_text()
    assert shown["python"] == (PACKAGE / "nous_env_countdown.py").read_text()


@pytest.mark.skipif(sandbox.unavailable() is not None, reason=str(sandbox.unavailable()))
def test_every_command_of_the_page_works(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = installed / "home"
    monkeypatch.setenv("NOUS_NODE_HOME", str(home))
    monkeypatch.chdir(installed)
    commands = [command for command in COMMANDS if offline(command)]
    assert [command[1] for command in commands] == ["env"] * 5 + ["init", "eval"]
    for command in commands:
        arguments = [part.replace("~/.nous-node", str(home)) for part in command]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert not ended.value.code, f"{command}: {told.err}"
        assert "countdown" in told.out
    assert "<span" in (installed / "group.html").read_text()


def test_the_packages_own_tests_pass(installed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "."],
        cwd=installed / "my_env",
        env={"PYTHONPATH": str(installed / "site"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


@pytest.mark.skipif(sandbox.unavailable() is not None, reason=str(sandbox.unavailable()))
def test_its_version_names_the_package_that_brings_it(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["nous-node", "env", "info", "countdown", "--json", "--home", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["distributions"] == {"nous-env-countdown": "0.1.0"}
    assert said["version"].startswith("1-")
    assert said["runs"] == "sandboxed"
    assert "`least`" in said["settings"]


def test_a_refusal_says_how_to_go_on_where_there_is_no_sandbox(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandbox, "unavailable", lambda: "bubblewrap is not installed; get it somewhere.")
    for command in ("check", "try", "info"):
        monkeypatch.setattr(sys, "argv", ["nous-node", "env", command, "countdown", "--home", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == Exit.INPUT
        told = capsys.readouterr().err
        assert "bubblewrap is not installed" in told
        assert "--trust-env countdown" in told
    monkeypatch.setattr(sys, "argv", ["nous-node", "env", "list", "--home", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "--trust-env countdown" in capsys.readouterr().out
