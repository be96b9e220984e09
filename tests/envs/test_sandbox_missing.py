"""Machines without a sandbox: what is said, and that nothing runs without one in its stead."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nous_node.envs import sandbox
from nous_node.envs.child import ChildEnded
from nous_node.envs.errors import BrokenEnvironment, CannotStart
from nous_node.envs.limits import MAX_OPEN
from nous_node.envs.seccomp import program
from nous_node.node.doctor import check_sandbox

from .captive import MEMORY, Order, captive, launch, needs_sandbox

NEW = 'case "$1" in --help) echo "--size BYTES";; --version) echo "bubblewrap 0.8.0";; '
OLD = 'case "$1" in --help) echo "--tmpfs DEST";; --version) echo "bubblewrap 0.6.1";; esac'
FORBIDDEN = NEW + '*) echo "bwrap: No permissions to create a new namespace" >&2; exit 1;; esac'
UNFILTERED = (
    NEW + '*) case "$*" in *--seccomp*) exit 1;; esac; '
    'while [ "$1" != -- ]; do shift; done; shift; exec "$@";; esac'
)

Installed = Callable[[str | None], None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Puts another program in bubblewrap's place, or none."""
    cached = (sandbox.unavailable, sandbox.unfiltered, sandbox._trials)
    others = [Path(found).parent for name in ("sh", "echo") if (found := shutil.which(name))]

    def made(script: str | None) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        if script is not None:
            (folder / "bwrap").write_text(f"#!{others[0]}/sh\n{script}\n")
            (folder / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        for one in cached:
            one.cache_clear()

    yield made
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (None, "bubblewrap is not installed; get it with `apt install bubblewrap`"),
        (OLD, "bubblewrap 0.6.1 cannot bound a folder in memory; 0.7 or newer is needed"),
        (FORBIDDEN, "bubblewrap fails here (bwrap: No permissions to create a new namespace)"),
        ("exit 1", "cannot bound a folder in memory"),
    ],
)
def test_without_a_sandbox_nothing_is_started_and_the_reason_is_told(
    installed: Installed, script: str | None, sentence: str
) -> None:
    installed(script)
    assert sentence in str(sandbox.unavailable())
    with pytest.raises(CannotStart, match="--trust-env NAME") as error:
        captive(launch())
    assert sentence in str(error.value)
    check = check_sandbox()
    assert check.state == "note"
    assert sentence in check.text
    assert "are refused unless --trust-env names them" in check.text


def test_without_a_sandbox_what_is_trusted_runs(installed: Installed) -> None:
    installed(None)
    with captive(launch(sandboxed=False)) as child:
        assert child.ask(Order("echo", "trusted"), 20).text == "trusted"


@pytest.mark.skipif(program(network=False) is None, reason="no filter is known for this machine")
def test_a_kernel_without_filters_is_told_and_used(installed: Installed) -> None:
    installed(UNFILTERED)
    assert sandbox.unavailable() is None
    assert sandbox.unfiltered() == "this kernel takes no filter of system calls"
    assert "works without seccomp: this kernel takes no filter" in check_sandbox().text


@needs_sandbox
def test_a_sandbox_that_works_is_told() -> None:
    assert check_sandbox().text.startswith("bubblewrap works")


@pytest.mark.parametrize(
    ("name", "forbidding", "command"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
    ],
)
def test_the_setting_that_forbids_is_named(tmp_path: Path, name: str, forbidding: str, command: str) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(f"{forbidding}\n")
    assert command in sandbox.advice(tmp_path)
    (tmp_path / name).write_text("5000\n")
    assert "a container may have to be started" in sandbox.advice(tmp_path)


# --- interpreters ---


@needs_sandbox
def test_an_environment_inside_a_hidden_home_is_all_that_is_seen_of_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    python = home / "envs" / "mine" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python.parent.parent)], check=True)
    (home / "identity.pem").write_text("the secret key")
    wanted = launch(python=python, readable=(tmp_path,), hidden=(home,), module="peek")
    packages = next(python.parent.parent.glob("lib/python*/site-packages"))
    (packages / "mine.py").write_text(f"home = {str(home)!r}\n")
    with captive(wanted) as child, pytest.raises(ChildEnded) as error:
        child.ask(Order("echo"), 20)
    assert "home: ['envs'] envs: ['mine'] new: read-only" in str(error.value)


@needs_sandbox
def test_of_a_project_that_is_its_own_environment_nothing_else_is_seen(tmp_path: Path) -> None:
    """As `python -m venv .` makes it: what a project keeps beside is not for packages to read."""
    project = tmp_path / "project"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(project)], check=True)
    (project / ".env").write_text("TOKEN=secret")
    packages = next(project.glob("lib/python*/site-packages"))
    (packages / "mine.py").write_text(
        f"import os\nseen = sorted(os.listdir({str(project)!r}))\nraise SystemExit(f'seen: {{seen}}')\n"
    )
    wanted = launch(python=project / "bin" / "python", module="peek")
    with captive(wanted) as child, pytest.raises(ChildEnded) as error:
        child.ask(Order("echo"), 20)
    assert "seen: ['bin', 'lib'" in str(error.value)
    assert ".env" not in str(error.value).partition("seen:")[2]


@needs_sandbox
@pytest.mark.parametrize("home", ["", "home = bin", "home = /nowhere/bin"])
def test_an_environment_without_the_interpreter_that_it_is_made_of_is_told(tmp_path: Path, home: str) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    (tmp_path / "pyvenv.cfg").write_text(f"{home}\n")
    with pytest.raises(BrokenEnvironment, match="names no interpreter that it is made of"):
        captive(launch(python=python))


IMPOSTOR = """#!{base}/bin/python3 -S
import resource, sys
limits = [resource.getrlimit(getattr(resource, f"RLIMIT_{{name}}"))[1] for name in ("AS", "NOFILE", "CORE")]
try:
    open({mark!r}, "w")
except OSError as error:
    sys.exit(f"{{limits}} {{error.strerror}}")
"""


@needs_sandbox
def test_a_program_in_the_interpreters_place_runs_in_the_sandbox_only(tmp_path: Path) -> None:
    """As a package could put there, which is installed without running anything of it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "mine")], check=True)
    mark, python = tmp_path / "mine" / "lib" / "mark", tmp_path / "mine" / "bin" / "python"
    python.unlink()
    python.write_text(IMPOSTOR.format(base=sys.base_prefix, mark=str(mark)))
    python.chmod(0o755)
    with captive(launch(python=python)) as child, pytest.raises(ChildEnded) as error:
        child.ask(Order("echo"), 20)
    assert f"[{MEMORY}, {MAX_OPEN}, 0] Read-only file system" in str(error.value)
    assert not mark.exists()


@needs_sandbox
def test_an_interpreter_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BrokenEnvironment, match="There is no interpreter"):
        captive(launch(python=tmp_path / "bin" / "python"))


def test_a_plain_interpreter_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="cannot be started: No such file"):
        captive(launch(sandboxed=False, python=tmp_path / "bin" / "python"))
