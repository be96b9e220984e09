"""Ecosystems in virtual environments of their own: real pip, on packages made here."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from nous_node.envs.recipes import RECIPES, Recipe
from nous_node.node import pip_run
from nous_node.node.cli import main
from nous_node.node.cli_exit import Exit
from nous_node.node.env_install import (
    Installed,
    builds_code,
    code_notice,
    install,
    interpreter,
    remove,
)
from nous_node.node.home import DiskFullError, HomeBusyError
from nous_node.node.network_errors import UnreachableError
from nous_node.node.pip_run import InstallError

BACKEND = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "extra-2.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("extra.py", "VALUE = 7\\n")
        info = "extra-2.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: extra\\nVersion: 2.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def write_wheel(folder: Path, name: str, version: str, asks: tuple[str, ...] = ()) -> Path:
    """A wheel with a module and a script."""
    requires = "".join(f"Requires-Dist: {one}\n" for one in asks)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = '{version}'\ndef told():\n    print(VERSION)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-told = {name}:told\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        rows = []
        for place, text in files.items():
            wheel.writestr(place, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{place},sha256={digest},{len(text)}")
        wheel.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,\n"]))
    return path


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of two releases of tiny, and the recipe's pins."""
    folder = tmp_path_factory.mktemp("shelf")
    for version in ("1.0", "2.0"):
        write_wheel(folder, "tiny", version)
    (folder / "tiny.txt").write_text("tiny==1.0\n")
    return folder


@pytest.fixture(autouse=True)
def no_index(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(shelf)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)


@pytest.fixture
def tiny(shelf: Path) -> Recipe:
    return Recipe("tiny", ("tiny",), ("tiny",), "A test.", needs=(), folder=shelf)


def said(python: Path, script: str) -> str:
    done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `nous-node env`."""
    monkeypatch.setattr(sys, "argv", ["nous-node", "env", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def quiet(text: str) -> None:
    """Hears of steps."""


def test_a_recipe_is_installed_in_its_release_and_added_to(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    litter = home / "envs" / ".tiny.part"
    litter.mkdir(parents=True)  # of an install that was killed
    (litter / "half").write_text("")
    heard: list[str] = []

    first = install(home, tiny, heard.append)
    place = home / "envs" / "tiny"
    assert first.changed
    assert first.folder == str(place)
    assert any("tiny-1.0" in step for step in heard)
    assert said(interpreter(place), "import tiny; print(tiny.VERSION)") == "1.0"  # the pinned one of two
    told = subprocess.run([place / "bin" / "tiny-told"], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "1.0"  # a script works at the place to which it was moved
    assert not litter.exists()

    monkeypatch.setattr("nous_node.node.env_install.RECIPES", {"tiny": tiny})
    assert command(["install", "tiny", "--json", "--home", str(home)], monkeypatch) == Exit.OK
    again = msgspec.json.decode(capsys.readouterr().out, type=Installed)
    assert not again.changed
    assert "already" in again.text

    project = tmp_path / "extra"
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "backend.py").write_text(BACKEND)
    with pytest.raises(InstallError, match="--allow-build"):
        install(home, tiny, quiet, extra=[str(project)])
    more = install(home, tiny, quiet, extra=[str(project)], builds=True)
    assert more.extra == ["extra 2.0"]
    assert said(interpreter(place), "import extra, tiny; print(extra.VALUE)") == "7"

    with pytest.raises(InstallError, match="no-such-package"):
        install(home, tiny, quiet, extra=["no-such-package"], builds=True)
    assert said(interpreter(place), "import extra, tiny; print(extra.VALUE)") == "7"
    assert sorted(path.name for path in place.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_what_a_bare_package_asks_for_stays_away(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf, "bulky", "1.0", ("no-such-package",))
    write_wheel(shelf, "games", "1.0", ("bulky>=1", "tiny", 'another ; extra == "dev"'))
    recipe = Recipe("tiny", (), ("bulky",), "A test.", bare=("bulky==1.0",), needs=(), folder=shelf)
    made = install(tmp_path, recipe, quiet, extra=["games"])
    assert made.extra == ["games 1.0"]
    script = "import bulky, games, tiny; print(tiny.VERSION)"  # what games needs is there, in pinned releases
    assert said(interpreter(Path(made.folder)), script) == "1.0"


def test_an_interrupted_install_leaves_nothing(tiny: Recipe, tmp_path: Path) -> None:
    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(tmp_path, tiny, interrupted)
    assert [path.name for path in (tmp_path / "envs").iterdir()] == [".tiny.lock"]


def test_two_installs_of_one_recipe_do_not_meet(tiny: Recipe, tmp_path: Path) -> None:
    inner: list[type[BaseException]] = []

    def meanwhile(text: str) -> None:
        with pytest.raises(HomeBusyError) as second:
            install(tmp_path, tiny, quiet)
        inner.append(second.type)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(tmp_path, tiny, meanwhile)
    assert inner == [HomeBusyError]


def test_removing_deletes_what_was_installed(tmp_path: Path) -> None:
    place = tmp_path / "envs" / "gymnasium"
    (place / "bin").mkdir(parents=True)
    assert remove(tmp_path, "gymnasium") == place
    assert not place.exists()
    with pytest.raises(InstallError, match="Nothing named"):
        remove(tmp_path, "gymnasium")


@pytest.mark.parametrize("name", ["../runs", "", ".", "tiny"])
def test_only_recipes_are_removed(name: str, tmp_path: Path) -> None:
    (tmp_path / "envs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    with pytest.raises(InstallError, match="Nothing named"):
        remove(tmp_path, name)
    assert (tmp_path / "runs").exists()
    assert (tmp_path / "envs" / "tiny").exists()


@pytest.mark.parametrize(
    ("requirement", "runs_code"),
    [
        ("primes==1.0", False),
        ("primes[all]>=1", False),
        ("./primes-1.0-py3-none-any.whl", False),
        ("https://example.org/primes-1.0-py3-none-any.whl#sha256=00", False),
        ("./primes", True),
        (".", True),
        ("primes-1.0.tar.gz", True),
        ("git+https://example.org/primes", True),
        ("primes @ https://example.org/primes.zip", True),
    ],
)
def test_what_runs_code_while_it_is_installed(requirement: str, runs_code: bool) -> None:
    assert builds_code(requirement) is runs_code


@pytest.mark.parametrize("requirement", ["--index-url=http://example.org", " -r x", "", "./not/there"])
def test_with_takes_requirements_and_nothing_else(requirement: str, tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="--with"):
        install(tmp_path, tiny, quiet, extra=[requirement])


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true"])
def test_an_interpreter_that_is_none_is_refused(python: str, tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="--python"):
        install(tmp_path, tiny, quiet, python=Path(python))


RETRIED = "WARNING: Retrying after NewConnectionError('<pip>: Failed to establish a new connection')"
CLASH = "ERROR: Cannot install a and b"


@pytest.mark.parametrize(
    ("code", "tail", "error", "words"),
    [
        (1, [RETRIED, "ERROR: No matching distribution"], UnreachableError, "index"),
        (1, ["ERROR: [Errno 28] No space left on device"], DiskFullError, "Make room"),
        (1, ["x", CLASH, "", "[notice] new pip"], InstallError, "pip says: Cannot install a and b"),
        (2, ["something else"], InstallError, "something else"),
        (2, [], InstallError, "nothing"),
        (-signal.SIGKILL, [], InstallError, "ended from outside"),
        (1, ["No module named ensurepip"], InstallError, "python3-venv"),
    ],
)  # fmt: skip
def test_what_pip_says_becomes_a_sentence(
    code: int, tail: list[str], error: type[Exception], words: str
) -> None:
    said = pip_run.failure(code, tail)
    assert type(said) is error
    assert words in str(said)


def test_what_a_package_prints_cannot_reach_the_terminal() -> None:
    heard: list[str] = []
    script = "print('Collecting \\x1b[2Jx'); print('ERROR: \\x1b]0;evil\\x07'); raise SystemExit(1)"
    with pytest.raises(InstallError) as failed:
        pip_run.run([sys.executable, "-c", script], heard.append)
    assert "\x1b" not in heard[0] + str(failed.value)
    assert "evil" in str(failed.value)


def test_a_hanging_install_is_ended() -> None:
    with pytest.raises(InstallError, match="ended from outside"):
        pip_run.run([sys.executable, "-c", "import signal; signal.pause()"], quiet, limit=0.5)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_every_recipe_pins_all_that_it_asks_for(recipe: Recipe) -> None:
    pins = dict(line.lower().split("==") for line in recipe.pins.read_text().split())
    canonical = {name.replace("_", "-").replace(".", "-"): version for name, version in pins.items()}
    for wanted in (*recipe.bare, *recipe.requirements):
        name, _, version = wanted.partition("==")
        assert canonical[name] == version
    assert set(recipe.needs) | set(recipe.sources) <= set(canonical)
    assert all(name in code_notice(recipe, builds=False) for name in recipe.sources)


def test_commands_say_what_cannot_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, answer in (
        (["install", "nethack"], "There is no recipe"),
        (["remove", "atropos"], "Nothing named"),
        (["install", "atropos", "--with", "./nowhere"], "There is no"),
    ):
        assert command([*words, "--home", str(tmp_path)], monkeypatch) == Exit.INPUT
        assert answer in capsys.readouterr().err
