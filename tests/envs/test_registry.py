"""Finding environments by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from nous_node.envs import registry
from nous_node.envs.errors import BadConfig, BrokenEnvironment, UnknownEnvironment
from nous_node.envs.registry import facts, find, make, make_entry, names
from nous_node.envs.sort_digits import SortDigits
from nous_node.protocol.runs import EnvironmentEntry


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Pretends that packages offer these (name, value) pairs."""

    def pretend(*points: tuple[str, str]) -> None:
        found = EntryPoints(EntryPoint(name, value, registry.GROUP) for name, value in points)
        monkeypatch.setattr(registry, "entry_points", lambda group: found)
        registry._installed.cache_clear()

    yield pretend
    registry._installed.cache_clear()


def test_the_embedded_environment_is_installed() -> None:
    assert "sort-digits" in names()
    assert find("sort-digits") is SortDigits
    assert facts("sort-digits").verifiable
    assert make("sort-digits", {"length": 3}).task(bytes(32), 0).level == 0


def test_an_unknown_name_is_told_with_what_there_is() -> None:
    with pytest.raises(UnknownEnvironment, match=r"'sudoku'.*sort-digits"):
        find("sudoku")


def test_another_version_than_the_runs_is_refused() -> None:
    with pytest.raises(UnknownEnvironment, match="sort-digits 7; version 1 is installed"):
        make_entry(EnvironmentEntry("sort-digits", "7", 1))
    assert make_entry(EnvironmentEntry("sort-digits", "1", 1, {"length": 3})).levels > 0


def test_a_bad_config_keeps_its_own_sentence() -> None:
    with pytest.raises(BadConfig, match="length"):
        make("sort-digits", {"size": 3})


def test_a_plugin_that_cannot_be_imported_harms_no_other(install) -> None:
    install(
        ("broken", "no_such_module_anywhere:Thing"), ("sort-digits", "nous_node.envs.sort_digits:SortDigits")
    )
    assert names() == ["broken", "sort-digits"]
    with pytest.raises(BrokenEnvironment, match=r"'broken' \(no_such_module_anywhere:Thing\)"):
        find("broken")
    assert find("sort-digits") is SortDigits


@pytest.mark.parametrize("value", ["json:dumps", "nous_node.envs.errors:BadConfig"])
def test_a_plugin_that_is_no_environment_is_named(install, value: str) -> None:
    install(("odd", value))
    with pytest.raises(BrokenEnvironment, match="no environment"):
        find("odd")


def test_a_plugin_under_a_foreign_name_is_refused(install) -> None:
    install(("sort", "nous_node.envs.sort_digits:SortDigits"))
    with pytest.raises(BrokenEnvironment, match="'sort-digits'"):
        find("sort")


def test_two_packages_of_one_name_are_told_apart(install) -> None:
    install(("sort-digits", "nous_node.envs.sort_digits:SortDigits"), ("sort-digits", "other:Sort"))
    with pytest.raises(BrokenEnvironment, match="Two packages"):
        find("sort-digits")


def test_nothing_heavy_is_imported_to_make_the_embedded_environment() -> None:
    program = (
        "import sys; from nous_node.envs.registry import make; make('sort-digits', {});"
        "heavy = {'torch', 'numpy', 'trio', 'transformers', 'asyncio'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
