"""`nous-node checkpoints export`: a model folder that transformers loads, or a mirror; never damaged ones."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.checkpoint_export import export_blobs, export_model
from nous_node.node.checkpoint_shelf import Shelf, chosen
from nous_node.node.home import DamagedError, DiskFullError
from nous_node.node.model_card import CARD_FILE, base_model, plain
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal
from nous_node.protocol.checkpoints import weights_hash
from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import Identity

from .shelves import DELTA_BYTES, WEIGHTS, beside, flip, joined, manifest_of, publish, trained


@pytest.fixture
def run(tmp_path: Path, base_run: RunFolder, other_weights: Path, root: Identity) -> RunFolder:
    return trained(tmp_path, base_run, other_weights, root)


@pytest.fixture
def shelf(run: RunFolder, tmp_path: Path) -> Shelf:
    return chosen(tmp_path, None)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_model_has_exactly_the_files_of_the_manifest_and_a_card(shelf: Shelf, tmp_path: Path) -> None:
    newest = shelf.find(None)
    done = export_model(shelf, newest, tmp_path / "out" / "model", force=False)
    written = files(tmp_path / "out" / "model")
    card = written.pop(CARD_FILE).decode()
    assert written == files(newest.folder)
    assert newest.manifest is not None
    assert (done.files, done.checkpoint) == (len(written), newest.hash)
    assert not left_over(tmp_path / "out")
    weights = weights_hash(newest.manifest.tensors).hex()
    digest = hashlib.sha256(written[WEIGHTS]).hexdigest()
    for wanted in (shelf.run.hex(), newest.hash, weights, f"{digest}  {WEIGHTS}", "sha256sum -c", "0.125"):
        assert wanted in card
    assert newest.manifest.parent is not None
    assert newest.manifest.parent.hex() in card
    mode = stat.S_IMODE((tmp_path / "out" / "model").stat().st_mode)
    assert mode == 0o755
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in (tmp_path / "out" / "model").iterdir())


def test_card_begins_with_front_matter_that_hubs_read(shelf: Shelf, tmp_path: Path) -> None:
    export_model(shelf, shelf.find("0"), tmp_path / "model", force=False)
    lines = (tmp_path / "model" / CARD_FILE).read_text().splitlines()
    assert lines[0] == "---"
    front = lines[1 : lines.index("---", 1)]
    assert "library_name: transformers" in front
    assert '- "sort-digits"' in front


def test_transformers_loads_the_exported_model(shelf: Shelf, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_model(shelf, shelf.find(None), tmp_path / "model", force=False)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokens = tokenizer("4312", return_tensors="pt")
    assert tokenizer.decode(tokens.input_ids[0]) == "4312"
    assert tokenizer.eos_token_id == model.config.eos_token_id
    with torch.no_grad():
        logits = model(**tokens).logits
    assert logits.shape == (1, 4, len(tokenizer))
    assert bool(torch.isfinite(logits).all())


def test_volunteers_checkpoint_is_exported_as_well(run: RunFolder, tmp_path: Path) -> None:
    joined(tmp_path / "volunteer", run)
    there = chosen(tmp_path / "volunteer", None)
    export_model(there, there.find(None), tmp_path / "model", force=False)
    written = files(tmp_path / "model")
    written.pop(CARD_FILE)
    assert written == files(run.checkpoint(1))


def test_base_of_a_run_that_was_never_trained_is_exported(base_run: RunFolder, tmp_path: Path) -> None:
    path = shutil.copytree(base_run.path, tmp_path / "runs" / "new")
    new = chosen(tmp_path, None)
    export_model(new, new.find(None), tmp_path / "model", force=False)
    assert WEIGHTS in files(tmp_path / "model")
    flip(path / "checkpoints" / "000000" / WEIGHTS, 200_000)
    with pytest.raises(DamagedError):
        export_model(new, new.find(None), tmp_path / "other", force=False)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_damaged_weights_are_never_exported(name: str, shelf: Shelf, tmp_path: Path) -> None:
    newest = shelf.find(None)
    flip(newest.folder / name, 50)
    (tmp_path / "out").mkdir()
    with pytest.raises(DamagedError, match="checkpoints verify"):
        export_model(shelf, newest, tmp_path / "out" / "model", force=False)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(DamagedError):
        export_blobs(shelf, newest, tmp_path / "out" / "mirror")
    for path in (tmp_path / "out" / "mirror" / "blob").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def test_weights_that_are_not_those_of_the_manifests_tensors_are_not_exported(
    run: RunFolder, root: Identity, tmp_path: Path
) -> None:
    manifest = manifest_of(run.checkpoint(1), 2, bytes(32))
    manifest.tensors[next(iter(manifest.tensors))] = bytes(32)
    shutil.copytree(run.checkpoint(1), run.checkpoint(2))
    with Journal.open(run.journal) as journal:
        publish(run, journal, root, manifest)
    shelf = chosen(tmp_path, None)
    with pytest.raises(DamagedError, match="another hash"):
        export_model(shelf, shelf.find("2"), tmp_path / "model", force=False)
    assert not (tmp_path / "model").exists()


def test_checkpoint_of_an_unknown_key_is_not_exported(run: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(run.checkpoint(1), run.checkpoint(2))
    with Journal.open(run.journal) as journal:
        publish(run, journal, Identity.from_seed(b"e" * 32), manifest_of(run.checkpoint(1), 2, bytes(32)))
    shelf = chosen(tmp_path, None)
    with pytest.raises(DamagedError, match="not what a trainer signed"):
        export_model(shelf, shelf.find("2"), tmp_path / "model", force=False)


def test_what_is_not_complete_is_not_exported(run: RunFolder, tmp_path: Path) -> None:
    volunteer = joined(tmp_path / "volunteer", run)
    newest = chosen(tmp_path / "volunteer", None).stored[1]
    newest.folder.rename(beside(volunteer, bytes.fromhex(newest.hash), "part"))
    there = chosen(tmp_path / "volunteer", None)
    assert there.find(None).version == 0
    with pytest.raises(LocalError, match="is being downloaded"):
        export_model(there, there.find("1"), tmp_path / "model", force=False)
    shutil.rmtree(run.checkpoint(0))
    here = chosen(tmp_path, None)
    with pytest.raises(LocalError, match="not on this disk any more"):
        export_model(here, here.find("0"), tmp_path / "model", force=False)


def test_version_that_a_running_node_drops_meanwhile_is_one_sentence(shelf: Shelf, tmp_path: Path) -> None:
    newest = shelf.find(None)
    (newest.folder / WEIGHTS).unlink()
    with pytest.raises(LocalError, match="Run the command again"):
        export_model(shelf, newest, tmp_path / "model", force=False)
    assert not left_over(tmp_path)


def test_folder_with_something_in_it_is_left_alone(shelf: Shelf, tmp_path: Path) -> None:
    newest, target = shelf.find(None), tmp_path / "model"
    target.mkdir()
    export_model(shelf, newest, target, force=False)  # an empty one will do
    before = files(target)
    with pytest.raises(LocalError, match="add --force"):
        export_model(shelf, shelf.find("0"), target, force=False)
    assert files(target) == before
    (target / "stale.safetensors").write_bytes(b"of another model")
    export_model(shelf, newest, target, force=True)
    assert files(target) == before
    (target / "thesis.odt").write_bytes(b"years of work")
    with pytest.raises(LocalError, match=r"thesis\.odt"):
        export_model(shelf, newest, target, force=True)
    assert files(target) == {**before, "thesis.odt": b"years of work"}
    with pytest.raises(LocalError, match="is no folder"):
        export_model(shelf, newest, target / "thesis.odt", force=True)


@pytest.mark.parametrize("lacks", ["config.json", WEIGHTS])
def test_force_replaces_models_only(shelf: Shelf, tmp_path: Path, lacks: str) -> None:
    target = tmp_path / "mine"
    (target / "letters").mkdir(parents=True)
    for name in {"config.json", WEIGHTS} - {lacks}:
        (target / name).write_bytes(b"{}")
    for name in ("diary.txt", "letters/2025.json", "README.md"):
        (target / name).write_text("mine")
    before = files(target)
    with pytest.raises(LocalError, match="no model's folder"):
        export_model(shelf, shelf.find(None), target, force=True)
    assert files(target) == before


def test_what_came_to_its_place_while_a_model_was_written_stays(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, sync = tmp_path / "model", os.fsync

    def meanwhile(handle: int) -> None:
        target.mkdir(exist_ok=True)
        (target / "diary.txt").write_text("mine")
        sync(handle)

    monkeypatch.setattr(os, "fsync", meanwhile)
    for force in (False, True):
        with pytest.raises(LocalError, match="not replaced"):
            export_model(shelf, shelf.find(None), target, force=force)
        assert files(target) == {"diary.txt": b"mine"}
        assert not left_over(tmp_path)
        shutil.rmtree(target)


def test_force_that_fails_leaves_the_model_that_was_there(shelf: Shelf, tmp_path: Path) -> None:
    export_model(shelf, shelf.find("0"), tmp_path / "model", force=False)
    before = files(tmp_path / "model")
    flip(shelf.find("1").folder / WEIGHTS, 200_000)
    with pytest.raises(DamagedError):
        export_model(shelf, shelf.find("1"), tmp_path / "model", force=True)
    assert files(tmp_path / "model") == before


def test_nothing_is_exported_over_the_nodes_own_files(shelf: Shelf, tmp_path: Path) -> None:
    before = files(tmp_path)
    for target in (shelf.path, shelf.path / "checkpoints" / "000000", tmp_path, shelf.path / "new"):
        with pytest.raises(LocalError, match="where the node itself keeps"):
            export_model(shelf, shelf.find(None), target, force=True)
        with pytest.raises(LocalError, match="where the node itself keeps"):
            export_blobs(shelf, shelf.find(None), target)
    assert files(tmp_path) == before


def test_place_that_cannot_be_written_is_one_sentence(shelf: Shelf) -> None:
    with pytest.raises(LocalError, match="name a folder where you may write"):
        export_model(shelf, shelf.find(None), Path("/proc/model"), force=False)
    with pytest.raises(LocalError, match="name a folder where you may write"):
        export_blobs(shelf, shelf.find(None), Path("/proc/mirror"))


def test_full_disk_leaves_nothing_behind(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError):
        export_model(shelf, shelf.find(None), tmp_path / "out" / "model", force=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_mirror_has_every_chunk_delta_and_manifest_under_its_hash(shelf: Shelf, tmp_path: Path) -> None:
    base, newest = shelf.stored
    done = export_blobs(shelf, newest, tmp_path / "mirror")
    blobs = files(tmp_path / "mirror")
    assert newest.manifest is not None
    entries = [*newest.manifest.files, *newest.manifest.deltas]
    wanted = {digest.hex() for entry in entries for digest in entry.hashes()} | {base.hash, newest.hash}
    assert set(blobs) == {f"blob/{digest}" for digest in wanted}
    assert all(hashlib.sha256(data).hexdigest() == name[5:] for name, data in blobs.items())
    assert blobs[f"blob/{base.hash}"] == base.content
    assert (done.files, done.missing) == (len(wanted), 0)


def test_mirror_grows_by_what_is_new_and_mends_what_is_damaged(shelf: Shelf, tmp_path: Path) -> None:
    base, newest = shelf.stored
    export_blobs(shelf, base, tmp_path / "mirror")
    before = files(tmp_path / "mirror")
    (tmp_path / "mirror" / "blob" / base.hash).write_bytes(b"half")
    assert newest.manifest is not None
    flip(tmp_path / "mirror" / "blob" / newest.manifest.files[0].hashes()[0].hex(), 5)
    export_blobs(shelf, newest, tmp_path / "mirror")
    after = files(tmp_path / "mirror")
    assert before.items() <= after.items()
    assert f"blob/{hashlib.sha256(DELTA_BYTES).hexdigest()}" in after


def test_mirror_without_its_deltas_says_so(run: RunFolder, tmp_path: Path) -> None:
    shutil.rmtree(run.path / "deltas")
    shelf = chosen(tmp_path, None)
    done = export_blobs(shelf, shelf.find(None), tmp_path / "mirror")
    assert done.missing == 1
    assert "1 blob of its deltas" in done.text


def test_export_by_the_command_line(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nous_node.node.cli import app

    def told(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            app(["checkpoints", "export", *arguments, "--home", str(tmp_path)])
        assert not ended.value.code
        return capsys.readouterr().out

    assert "AutoModelForCausalLM" in told(str(tmp_path / "a"))
    assert json.loads(told("0", str(tmp_path / "b"), "--json"))["version"] == 0
    assert json.loads(told("0", str(tmp_path / "c"), "--blobs", "--json"))["missing"] == 0
    assert files(tmp_path / "a")[WEIGHTS] != files(tmp_path / "b")[WEIGHTS]


def test_names_of_a_run_are_text_in_its_card(base_run: RunFolder, tmp_path: Path, root: Identity) -> None:
    from msgspec.structs import replace

    hostile = "x\n---\n<script>alert(1)</script> [a](http://evil) | `b`\x1b[2J"
    path = shutil.copytree(base_run.path, tmp_path / "runs" / "run")
    shelf = chosen(tmp_path, None)
    named = Shelf(path, shelf.run, replace(shelf.manifest, name=hostile), shelf.role, shelf.stored)
    export_model(named, named.find(None), tmp_path / "model", force=False)
    card = (tmp_path / "model" / CARD_FILE).read_text()
    for harm in ("<script>", "](http", "\x1b", "x\n---"):
        assert harm not in card


@given(st.text())
def test_foreign_text_never_leaves_its_place_in_a_card(text: str) -> None:
    shown = plain(text)
    assert "\n" not in shown
    bare = iter(shown)
    for character in bare:
        if character == "\\":
            next(bare)
        else:
            assert character not in "`*_[]<>|#"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"_name_or_path": "owner/model-1.5"}, "owner/model-1.5"),
        ({"_name_or_path": "/home/somebody/model"}, ""),
        ({"_name_or_path": "../model"}, ""),
        ({"_name_or_path": "a/b/c"}, ""),
        ({"_name_or_path": 'a/b"\nevil: 1'}, ""),
        ({"_name_or_path": 5}, ""),
        ({}, ""),
    ],
)
def test_base_model_is_named_only_as_hubs_name_models(config: dict[str, object], name: str) -> None:
    assert base_model(config) == name


@pytest.mark.parametrize("command", ["list", "show", "verify", "export"])
def test_neither_a_network_nor_torch_is_needed(command: str, run: RunFolder, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom nous_node.node.cli import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        "found = {'torch', 'transformers', 'libp2p', 'trio'} & set(sys.modules)\nassert not found, found\n"
    )
    folder = [str(tmp_path / "model")] if command == "export" else []
    arguments = ["checkpoints", command, *folder, "--home", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
