"""`nous-node checkpoints list`, `show` and `verify`: what they say of a trainer's and of a volunteer's
disk."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nous_node.node.checkpoint_check import Outcome, check
from nous_node.node.checkpoint_shelf import CHAIN, GOOD, IN_USE, NEWEST, chosen, shelves
from nous_node.node.cli import main
from nous_node.node.cli_exit import Exit
from nous_node.node.create import folder_entries
from nous_node.node.outbox import Outbox
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal
from nous_node.protocol.checkpoints import checkpoint_hash
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import Identity

from .shelves import DELTA_BYTES, MIRROR, WEIGHTS, beside, flip, joined, manifest_of, publish, trained

Tell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, base_run: RunFolder, other_weights: Path, root: Identity) -> RunFolder:
    return trained(tmp_path, base_run, other_weights, root)


@pytest.fixture
def volunteer(tmp_path: Path, run: RunFolder) -> Any:
    """A home that has joined what `run` trains, and its folder."""
    return joined(tmp_path / "volunteer", run)


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tell:
    """Exit code, stdout and stderr of `nous-node checkpoints ...`."""

    def told(home: Path, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(
            sys, "argv", ["nous-node", "checkpoints", arguments[0], "--home", str(home), *arguments[1:]]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return told


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_list_shows_each_version_with_what_is_here_and_what_it_is(
    run: RunFolder, tmp_path: Path, tell: Tell
) -> None:
    code, text, _ = tell(tmp_path, "list")
    head, titles, base, newest = text.splitlines()
    assert code == Exit.OK
    assert (run.run.hex()[:16] in head, "trained" in head) == (True, True)
    assert titles.split()[:3] == ["version", "hash", "kind"]
    assert "full" in base
    assert base.endswith(CHAIN)
    for wanted in ("delta", f"{len(DELTA_BYTES)} B", "complete", "50 %", NEWEST):
        assert wanted in newest
    told = events(tell(tmp_path, "list", "run", "--json")[1])
    assert [(one["version"], one["kind"], one["state"]) for one in told] == [
        (0, "full", "complete"),
        (1, "delta", "complete"),
    ]
    assert told[1]["flags"] == [NEWEST]
    assert len(told[1]["hash"]) == 64


def test_list_of_a_volunteer_names_what_is_in_use_and_how_much_of_a_download_is_here(
    volunteer: Any, run: RunFolder, root: Identity, tell: Tell, tmp_path: Path
) -> None:
    home = tmp_path / "volunteer"
    base, newest = (one for one in chosen(home, None).stored)
    with Outbox.open(volunteer.outbox) as outbox:
        group = seal(root, Kind.ROLLOUT, run.run, b"group", seq=1, ts=1_750_000_000_000)
        outbox.put(group, checkpoint=bytes.fromhex(base.hash), version=0, counter=0)
    newest.folder.rename(beside(volunteer, bytes.fromhex(newest.hash), "part"))
    part = beside(volunteer, bytes.fromhex(newest.hash), "part")
    (part / "tokenizer.json").unlink()
    told = events(tell(home, "list", "--json")[1])
    assert told[0]["flags"] == [NEWEST, IN_USE]
    assert (told[1]["state"], told[1]["of"] - told[1]["chunks"]) == ("partial", 1)
    assert f"{told[1]['chunks']} of {told[1]['of']} chunks" in tell(home, "list")[1]


def test_untouched_part_of_a_download_is_not_counted(volunteer: Any, tmp_path: Path) -> None:
    newest = chosen(tmp_path / "volunteer", None).stored[-1]
    part = beside(volunteer, bytes.fromhex(newest.hash), "part")
    newest.folder.rename(part)
    with (part / WEIGHTS).open("wb") as file:
        file.truncate(298_016)  # laid out, and nothing fetched
    shelf = chosen(tmp_path / "volunteer", None)
    checked = check(shelf, shelf.stored[-1])
    assert checked.outcome is Outcome.PARTIAL
    assert checked.of - checked.chunks == 1
    assert not checked.problems


def test_version_that_the_trainer_may_go_back_to_is_marked(run: RunFolder, tmp_path: Path) -> None:
    for version in (0, 1):
        run.optimizer(version).mkdir(parents=True)
    assert GOOD in chosen(tmp_path, "run").stored[0].flags
    shutil.rmtree(run.optimizer(0))
    assert GOOD not in chosen(tmp_path, "run").stored[0].flags


def test_show_prints_the_manifest_with_everything_foreign_escaped(
    run: RunFolder, tmp_path: Path, tell: Tell
) -> None:
    code, text, _ = tell(tmp_path, "show", "1")
    manifest = chosen(tmp_path, None).find("1").manifest
    assert manifest is not None
    assert manifest.parent is not None
    assert code == Exit.OK
    for wanted in (
        WEIGHTS,
        "deltas",
        manifest.parent.hex(),
        manifest.beacon.hex(),
        MIRROR,
        "evil\\x1b[2J 0.25",
        "reward",
    ):
        assert wanted in text
    assert "\x1b" not in text
    (told,) = events(tell(tmp_path, "show", "--json")[1])
    assert told["tensors"] == {name: digest.hex() for name, digest in manifest.tensors.items()}
    assert [one["path"] for one in told["files"]] == [entry.path for entry in manifest.files]
    assert told["chain"] == [manifest.parent.hex()]
    assert told["signed_by"] == Identity.from_seed(b"r" * 32).key.hex()


def test_checkpoint_is_found_by_version_by_hash_and_as_the_newest(run: RunFolder, tmp_path: Path) -> None:
    shelf = chosen(tmp_path, run.run.hex()[:8])
    base, newest = shelf.stored
    assert shelf.find(None) is newest
    assert shelf.find("0") is base
    assert shelf.find(newest.hash[:8].upper()) is newest


@pytest.mark.parametrize("wanted", ["7", "\u00b2", "", "zz", "ffffffff00", "-1", "9" * 5000, "\x1b[2J"])
def test_checkpoint_that_is_not_here_is_told_with_those_that_are(
    wanted: str, run: RunFolder, tmp_path: Path, tell: Tell
) -> None:
    code, _, text = tell(tmp_path, "show", "--", wanted) if wanted else (Exit.INPUT, "", "versions 0 to 1")
    assert code == Exit.INPUT
    assert "versions 0 to 1" in text
    assert "\x1b" not in text
    with pytest.raises(LocalError):
        chosen(tmp_path, None).find(wanted)


def test_whole_checkpoints_are_verified_to_the_last_tensor(
    run: RunFolder, volunteer: Any, tmp_path: Path, tell: Tell
) -> None:
    code, text, _ = tell(tmp_path, "verify", "all")
    assert code == Exit.OK
    assert [line.split(":")[1].strip() for line in text.splitlines()] == ["whole", "whole"]
    assert "signed by" in text
    told = events(tell(tmp_path / "volunteer", "verify", "all", "--json")[1])
    manifest = chosen(tmp_path, None).stored[1].manifest
    assert manifest is not None
    assert [(one["outcome"], one["tensors"]) for one in told] == [("whole", len(manifest.tensors))] * 2
    assert told[1]["chunks"] == told[1]["of"] == len(manifest.files) + 1
    assert told[1]["signed_by"] == ""
    (volunteer.path / "head.envelope").write_bytes(chosen(tmp_path, None).stored[1].envelope)
    told = events(tell(tmp_path / "volunteer", "verify", "all", "--json")[1])
    assert [one["signed_by"] for one in told] == ["", Identity.from_seed(b"r" * 32).key.hex()]
    (volunteer.path / "head.envelope").write_bytes(b"\xc1")
    assert tell(tmp_path / "volunteer", "verify", "all")[0] == Exit.OK


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: flip(folder / WEIGHTS, 200_000), f"{WEIGHTS} is damaged in 1 chunk (0)"),
        (lambda folder: flip(folder / "config.json", 3), "config.json is damaged"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), "has 0 bytes instead of"),
        (lambda folder: (folder / WEIGHTS).write_bytes(bytes(400_000)), "has 400,000 bytes instead of"),
    ],
)
def test_damage_is_named_with_the_next_step(
    damage: Callable[[Path], Any], problem: str, run: RunFolder, volunteer: Any, tmp_path: Path, tell: Tell
) -> None:
    for home, step in ((tmp_path, "from a backup"), (tmp_path / "volunteer", "join the run again")):
        damage(chosen(home, None).stored[1].folder)
        code, text, _ = tell(home, "verify")
        assert code == Exit.FAILED
        assert f"damaged: {problem}" in text or problem in text
        assert step in text
        assert tell(home, "verify", "0")[0] == Exit.OK


def test_damaged_delta_is_found(run: RunFolder, tmp_path: Path, tell: Tell) -> None:
    flip(run.path / "deltas" / "000001" / WEIGHTS, 0)
    assert tell(tmp_path, "verify")[0] == Exit.FAILED
    shutil.rmtree(run.path / "deltas")
    code, text, _ = tell(tmp_path, "verify")
    assert (code, "1 of its deltas" in text) == (Exit.OK, True)


def test_tensors_other_than_the_manifest_says_are_found(
    run: RunFolder, tmp_path: Path, root: Identity, tell: Tell
) -> None:
    manifest = manifest_of(run.checkpoint(1), 2, bytes(32))
    name = next(iter(manifest.tensors))
    manifest.tensors[name] = bytes(32)
    manifest.tensors["imagined"] = bytes(32)
    shutil.copytree(run.checkpoint(1), run.checkpoint(2))
    with Journal.open(run.journal) as journal:
        publish(run, journal, root, manifest)
    code, text, _ = tell(tmp_path, "verify", "2")
    assert code == Exit.FAILED
    assert f"1 tensor with another hash than the manifest's ({name})" in text
    assert "1 tensor missing (imagined)" in text


def test_manifest_of_a_key_that_may_not_publish_is_found(run: RunFolder, tmp_path: Path, tell: Tell) -> None:
    manifest = manifest_of(run.checkpoint(1), 2, bytes(32))
    shutil.copytree(run.checkpoint(1), run.checkpoint(2))
    with Journal.open(run.journal) as journal:
        publish(run, journal, Identity.from_seed(b"e" * 32), manifest)
    code, text, _ = tell(tmp_path, "verify", "2")
    assert code == Exit.FAILED
    assert "not what a trainer signed" in text
    assert "NOT A TRAINER" in tell(tmp_path, "show", "2")[1]


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x00" * 100, None])
def test_volunteers_checkpoint_without_its_manifest_is_unknown_and_not_hidden(
    content: bytes | None, volunteer: Any, tmp_path: Path, tell: Tell
) -> None:
    home = tmp_path / "volunteer"
    newest = chosen(home, None).stored[1]
    file = beside(volunteer, bytes.fromhex(newest.hash), "manifest")
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    assert [one["state"] for one in events(tell(home, "list", "--json")[1])] == ["unknown", "complete"]
    code, text, _ = tell(home, "verify", "all")
    assert code == Exit.FAILED
    assert "unknown" in text.splitlines()[0]


def test_run_that_was_never_trained_has_its_base(base_run: RunFolder, tmp_path: Path, tell: Tell) -> None:
    shutil.copytree(base_run.path, tmp_path / "runs" / "new")
    assert "complete" in tell(tmp_path, "list")[1]
    assert tell(tmp_path, "verify")[0] == Exit.OK
    flip(tmp_path / "runs" / "new" / "checkpoints" / "000000" / WEIGHTS, 200_000)
    assert tell(tmp_path, "verify")[0] == Exit.FAILED


def test_version_whose_manifest_the_journal_has_forgotten_is_no_fault(
    run: RunFolder, tmp_path: Path, tell: Tell
) -> None:
    with closing(sqlite3.connect(run.journal)) as connection, connection:
        connection.execute("UPDATE checkpoints SET envelope = x''")
    code, text, _ = tell(tmp_path, "verify", "all")
    assert (code, [line.split(": ")[1] for line in text.splitlines()]) == (Exit.OK, ["whole", "forgotten"])
    assert [one["state"] for one in events(tell(tmp_path, "list", "--json")[1])] == ["complete", "unknown"]
    assert "cannot be verified" in tell(tmp_path, "export", "1", str(tmp_path / "model"))[2]
    assert tell(tmp_path, "export", "0", str(tmp_path / "model"))[0] == Exit.OK


def test_old_version_of_which_only_figures_are_left_is_not_listed(
    run: RunFolder, tmp_path: Path, tell: Tell
) -> None:
    shutil.rmtree(run.checkpoint(0))
    told = events(tell(tmp_path, "list", "--json")[1])
    assert [one["version"] for one in told] == [1]
    code, text, _ = tell(tmp_path, "verify", "0")
    assert (code, "only its manifest is here" in text) == (Exit.OK, True)


def test_journal_that_names_a_folder_outside_of_the_run_is_damaged(
    run: RunFolder, tmp_path: Path, root: Identity, tell: Tell
) -> None:
    with closing(sqlite3.connect(run.journal)) as connection, connection:
        connection.execute("UPDATE checkpoints SET folder = '../../../etc' WHERE version = 1")
    code, _, text = tell(tmp_path, "list")
    assert (code, "outside of the run's folder" in text) == (Exit.STORAGE, True)


def test_damaged_run_does_not_hide_the_others(
    run: RunFolder, volunteer: Any, tmp_path: Path, tell: Tell
) -> None:
    home = tmp_path / "both"
    shutil.copytree(run.path, home / "runs" / "run")
    shutil.copytree(volunteer.path, home / "joined" / "x")
    (home / "joined" / "x" / "run.envelope").write_bytes(b"\xc1")
    code, text, error = tell(home, "list")
    assert (code, "version" in text, "join the run again" in error) == (Exit.STORAGE, True, True)
    assert [type(one).__name__ for one in shelves(home)] == ["Shelf", "DamagedError"]


def test_run_has_to_be_named_where_there_are_several(
    run: RunFolder, base_run: RunFolder, tmp_path: Path, tell: Tell
) -> None:
    from nous_node.node.create import create_run
    from nous_node.node.plan import EnvironmentPlan, RunPlan

    plan = RunPlan(environments={"sort-digits": EnvironmentPlan()}, group=4)
    create_run(tmp_path / "runs" / "second", "second", Identity.from_seed(b"s" * 32), plan, 1_750_000_000_000)
    code, _, text = tell(tmp_path, "show")
    assert (code, "--run" in text, "second" in text) == (Exit.INPUT, True, True)
    assert tell(tmp_path, "show", "--run", "second")[0] == Exit.OK
    assert "is called third" in tell(tmp_path, "show", "--run", "third")[2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["show"], "There are no runs in"), (["list"], "No runs in"), (["verify", "all"], "There are no runs")],
)
def test_home_without_runs_says_how_to_get_one(
    arguments: list[str], sentence: str, tmp_path: Path, tell: Tell
) -> None:
    _, text, error = tell(tmp_path / "none", *arguments)
    assert sentence in text + error
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("")
    assert "is no folder" in tell(tmp_path / "file", *arguments)[2]


def test_hash_of_a_volunteers_manifest_has_to_be_the_one_its_folder_is_named_for(
    volunteer: Any, tmp_path: Path
) -> None:
    base, newest = chosen(tmp_path / "volunteer", None).stored
    shutil.copy(
        beside(volunteer, bytes.fromhex(base.hash), "manifest"),
        beside(volunteer, bytes.fromhex(newest.hash), "manifest"),
    )
    assert [one.version for one in chosen(tmp_path / "volunteer", None).stored] == [None, 0]
    assert checkpoint_hash(base.content).hex() == base.hash


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b'""',
        (6).to_bytes(8, "little") + b'{"a":1',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (20).to_bytes(8, "little") + b'{"a":{"data_offsets"',
    ],
)
def test_file_that_the_trainer_signed_and_that_holds_no_tensors_is_told(
    content: bytes, run: RunFolder, tmp_path: Path, root: Identity, tell: Tell
) -> None:
    manifest = manifest_of(run.checkpoint(1), 2, bytes(32))
    shutil.copytree(run.checkpoint(1), run.checkpoint(2))
    (run.checkpoint(2) / WEIGHTS).write_bytes(content)
    with Journal.open(run.journal) as journal:
        publish(
            run, journal, root, msgspec.structs.replace(manifest, files=folder_entries(run.checkpoint(2)))
        )
    code, text, _ = tell(tmp_path, "verify", "2")
    assert (code, "cannot be read" in text) == (Exit.FAILED, True)
    assert tell(tmp_path, "export", "2", str(tmp_path / "model"))[0] == Exit.STORAGE
    assert not (tmp_path / "model").exists()
