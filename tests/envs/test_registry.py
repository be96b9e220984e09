"""Finding environments by name, and which version of each is here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, PathDistribution
from pathlib import Path

import msgspec
import pytest

from nous_node.envs import distributions, registry, remote, sandbox
from nous_node.envs.access import Access
from nous_node.envs.environment import EnvironmentInfo
from nous_node.envs.errors import BadConfig, BrokenEnvironment, UnknownEnvironment
from nous_node.envs.recipes import RECIPES
from nous_node.envs.registry import check_entry, entries, facts, make, make_entry, names, pinned, version
from nous_node.envs.remote import RemoteEnvironment
from nous_node.envs.sort_digits import SortDigits
from nous_node.protocol.runs import EnvironmentEntry

from .foreign import install_worlds

REASONING_GYM = ("reasoning-gym", "nous_node.envs.reasoning_gym:ReasoningGym")

TRUSTED = Access(trusted=("toy-guess", "toy-duel", "toy-pair", "toy-far", "toy-missing"))
"""Without the sandbox, which has tests of its own."""


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Pretends that packages offer these (name, value) pairs."""

    def pretend(*points: tuple[str, str]) -> None:
        found = EntryPoints(EntryPoint(name, value, registry.GROUP) for name, value in points)
        monkeypatch.setattr(registry, "entry_points", lambda group: found)
        registry._installed.cache_clear()

    yield pretend
    registry._installed.cache_clear()
    remote.close_all()


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "unavailable", lambda: "bubblewrap is not installed.")


def test_the_embedded_environment_is_installed_and_runs_here() -> None:
    assert "sort-digits" in entries()
    assert "sort-digits" in names()
    assert facts("sort-digits").verifiable
    assert isinstance(make("sort-digits", {"length": 3}), SortDigits)
    assert version("sort-digits", {"length": 3}) == "1"


@pytest.mark.parametrize("name", ["sudoku", "sudoku/easy", "sort-digits/9", ""])
def test_an_unknown_name_is_told_with_what_there_is(name: str, offer) -> None:
    offer(("sort-digits", "nous_node.envs.sort_digits:SortDigits"))
    with pytest.raises(UnknownEnvironment, match=rf"'{name}'.*Installed: sort-digits\."):
        facts(name)


def test_another_version_than_the_runs_is_refused() -> None:
    with pytest.raises(UnknownEnvironment, match="sort-digits 7; version 1 is installed"):
        make_entry(EnvironmentEntry("sort-digits", "7", 1))
    assert make_entry(EnvironmentEntry("sort-digits", "1", 1, {"length": 3})).levels > 0


def test_a_bad_config_keeps_its_own_sentence() -> None:
    with pytest.raises(BadConfig, match="length"):
        make("sort-digits", {"size": 3})


def test_a_run_cannot_name_a_server() -> None:
    with pytest.raises(BadConfig, match="--env-server"):
        make("sort-digits", {"server": "http://127.0.0.1:1"})


def test_a_plugin_that_cannot_be_imported_harms_no_other(offer) -> None:
    offer(("broken", "no_such_module:Thing"), ("sort-digits", "nous_node.envs.sort_digits:SortDigits"))
    assert entries() == ["broken", "sort-digits"]
    access = Access(trusted=("broken",))
    assert names(access) == ["sort-digits"]
    with pytest.raises(BrokenEnvironment, match=r"no_such_module:Thing cannot be used.*No module named"):
        facts("broken", access)
    assert facts("sort-digits").id == "sort-digits"


def test_two_packages_of_one_name_are_told_apart(offer) -> None:
    offer(("sort-digits", "nous_node.envs.sort_digits:SortDigits"), ("sort-digits", "other:Sort"))
    with pytest.raises(BrokenEnvironment, match="Two packages"):
        facts("sort-digits")


@pytest.mark.parametrize("trusted", [(), ("reasoning-gym",)])
def test_a_package_takes_the_place_of_no_member_of_a_family(trusted: tuple[str, ...], offer) -> None:
    """Nor what the owner of the machine allows this family."""
    offer(REASONING_GYM, ("reasoning-gym/leg_counting", "other:Legs"))
    for use in (facts, registry.ids, registry.place, pinned):
        with pytest.raises(BrokenEnvironment, match=r"Two packages offer.*other:Legs"):
            use("reasoning-gym/leg_counting", Access(trusted=trusted))


def test_what_others_answer_for_runs_in_processes_of_its_own(offer) -> None:
    """Code in a process can change what other code in it does: a package the rewards of a family of ours."""
    packages = ("verifiers-v0", "nous_node.envs.verifiers_v0:VerifiersV0")
    offer(("one", "one:One"), ("other", "other:Other"), REASONING_GYM, packages)
    names = ("one", "other", "reasoning-gym/leg_counting", "verifiers-v0/sums", "verifiers-v0/words")
    found = [registry._find(name) for name in names]
    launches = {
        registry._of(each, Path(sys.executable), Access(), sandboxed=True, network=False) for each in found
    }
    assert len(launches) == len(found)


def test_classes_of_one_package_share_a_process(offer) -> None:
    """Else a run could have any number of them started."""
    offer(("atropos", "nous_node.envs.atropos:Atropos"))
    names = ("atropos/maths:One", "atropos/maths.more:Other", "atropos/words:One")
    assert [registry._whose(registry._find(name)) for name in names] == [
        "atropos/maths",
        "atropos/maths",
        "atropos/words",
    ]


def test_nothing_heavy_is_imported_to_make_the_embedded_environment() -> None:
    program = (
        "import sys; from nous_node.envs.registry import make; make('sort-digits', {});"
        "heavy = {'torch', 'numpy', 'trio', 'transformers'} & set(sys.modules);"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- third parties ---------------------------------------------------------------------------------


def test_a_third_partys_module_is_never_imported_here(foreign: Path) -> None:
    assert facts("toy-guess", TRUSTED).max_turns == 3
    assert isinstance(make("toy-guess", {}, TRUSTED), RemoteEnvironment)
    assert "toy_worlds" not in sys.modules


def test_a_family_has_its_members_and_no_others(foreign: Path) -> None:
    assert {"toy-pair/one", "toy-pair/two", "toy-duel"} <= set(names(TRUSTED))
    assert facts("toy-pair/two", TRUSTED).id == "toy-pair/two"
    assert make("toy-pair/one", {}, TRUSTED).info.id == "toy-pair/one"
    with pytest.raises(UnknownEnvironment, match="toy-pair has no 'three'"):
        facts("toy-pair/three", TRUSTED)


def test_the_release_of_a_third_partys_distribution_and_the_config_are_part_of_the_version(
    foreign: Path, tmp_path: Path
) -> None:
    assert pinned("toy-guess", TRUSTED) == {"toy-worlds": "1.2"}
    ours = version("toy-guess", {}, TRUSTED)
    assert ours.startswith("3-")
    assert len(ours) == len("3-") + 16
    others = {version("toy-guess", {"bias": 1}, TRUSTED), version("toy-pair/one", {}, TRUSTED)}
    (foreign / "toy_worlds-1.2.dist-info").rename(foreign / "gone")
    install_worlds(foreign, "1.3")
    registry._installed.cache_clear()
    others.add(version("toy-guess", {}, TRUSTED))
    assert len(others - {ours}) == 3


def test_another_release_than_the_runs_is_refused_with_what_is_here(foreign: Path) -> None:
    entry = EnvironmentEntry("toy-guess", "3-0123456789abcdef", 1)
    with pytest.raises(UnknownEnvironment, match=r"3-0123456789abcdef; version 3-.* \(toy-worlds 1\.2\)"):
        check_entry(entry, TRUSTED)
    same = msgspec.structs.replace(entry, version=version("toy-guess", {}, TRUSTED))
    assert make_entry(same, TRUSTED).levels == 4


def test_what_talks_to_a_server_needs_one_that_the_owner_named(foreign: Path) -> None:
    only_described = Access(trusted=("toy-guess",))
    assert facts("toy-far", TRUSTED).network
    with pytest.raises(UnknownEnvironment, match=r"--env-server toy-far=URL"):
        make("toy-far", {}, only_described)
    with pytest.raises(BadConfig, match="only setting"):  # it was told of the server, and takes none
        make("toy-far", {}, Access(trusted=("toy-far",), servers={"toy-far": "http://127.0.0.1:9"}))


def test_without_a_sandbox_a_third_party_is_run_only_where_it_is_trusted(foreign: Path, no_sandbox) -> None:
    with pytest.raises(UnknownEnvironment, match=r"no sandbox here: bubblewrap.*--trust-env toy-guess"):
        make("toy-guess", {})
    assert make("toy-guess", {}, Access(trusted=("toy-guess",))).levels == 4


# --- our families ----------------------------------------------------------------------------------


def test_a_family_whose_library_is_missing_says_how_to_install_it(offer, monkeypatch, tmp_path: Path) -> None:
    offer(REASONING_GYM)
    recipe = type(RECIPES["reasoning-gym"])("reasoning-gym", ("reasoning-gym==0.0.0",), ("nowhere",), "")
    monkeypatch.setattr(registry, "RECIPES", {"reasoning-gym": recipe})
    with pytest.raises(UnknownEnvironment, match="`nous-node env install reasoning-gym`"):
        version("reasoning-gym/leg_counting", {}, Access(folder=str(tmp_path)))


def test_without_a_sandbox_ours_run_unless_they_execute_what_the_policy_wrote(offer, no_sandbox) -> None:
    pytest.importorskip("reasoning_gym")
    offer(REASONING_GYM)
    assert make("reasoning-gym/leg_counting", {}).levels >= 0
    remote.close_all()
    with pytest.raises(UnknownEnvironment, match="executes what the policy wrote"):
        make("reasoning-gym/n_queens", {})


@pytest.mark.parametrize(
    ("name", "spelled"), [("Toy_Worlds", "toy-worlds"), ("a.b__c--d", "a-b-c-d"), ("numpy", "numpy")]
)
def test_a_distribution_has_one_name(name: str, spelled: str) -> None:
    assert distributions.normal(name) == spelled


@pytest.mark.parametrize(
    ("said", "editable"),
    [
        ('{"url": "file://HERE/my%20coins", "dir_info": {"editable": true}}', True),
        ('{"url": "file://HERE/my%20coins", "dir_info": {}}', False),
        ('{"url": "https://example.org/coins.whl"}', False),
        ('{"url": 1, "dir_info": {"editable": true}}', False),
        ("[]", False),
        ("no json", False),
        (None, False),
    ],
)
def test_a_host_sees_where_an_editable_install_was_made_from(
    said: str | None, editable: bool, tmp_path: Path
) -> None:
    checkout = tmp_path / "my coins"
    checkout.mkdir()
    (checkout / "pyproject.toml").write_text('[project]\nname = "The_Coins"')
    found = distributions.places(installed(tmp_path, said))
    assert found == (tmp_path, *([checkout] if editable else []))


def installed(folder: Path, said: str | None) -> PathDistribution:
    """A distribution `the-coins` and its `direct_url.json`, with HERE for the folder."""
    facts = folder / "the_coins-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: the-coins\nVersion: 1\n")
    if said is not None:
        (facts / "direct_url.json").write_text(said.replace("HERE", str(folder)))
    return PathDistribution(facts)


@pytest.mark.parametrize(
    ("file", "text", "shown"),
    [
        ("pyproject.toml", '[project]\nname = "the-coins"', True),
        ("pyproject.toml", '[tool.poetry]\nname = "The.Coins"', True),
        ("the_coins.egg-info/PKG-INFO", "", True),
        ("src/the_coins.egg-info/PKG-INFO", "", True),
        (".ssh/id_ed25519", "a key", False),
        ("pyproject.toml", '[project]\nname = "another-project"', False),
        ("pyproject.toml", "no toml", False),
        ("pyproject.toml", "tool = 1\nproject = [1]", False),
        ("pyproject.toml", "[project]\nname = 1", False),
        ("another.egg-info/PKG-INFO", "", False),
    ],
)
def test_a_package_shows_its_host_no_folder_that_is_not_its_own_project(
    file: str, text: str, shown: bool, tmp_path: Path
) -> None:
    """Who writes the package can put a `direct_url.json` into it that names the home of whoever installs
    it."""
    home = tmp_path / "home"
    (home / file).parent.mkdir(parents=True)
    (home / file).write_text(text)
    found = distributions.places(
        installed(tmp_path, '{"url": "file://HERE/home", "dir_info": {"editable": true}}')
    )
    assert (home in found) is shown


def test_a_version_without_distributions_is_the_environments_own() -> None:
    info = EnvironmentInfo("x", "9", "exact", "pure", False, 1, 1)
    assert registry.version_of(info, {"a": 1}, {}) == "9"
