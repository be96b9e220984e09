"""What cannot work is said in one sentence, with what to do next, and the exit code that is documented."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nous_node.node.cli_exit import Exit
from nous_node.node.create import DEFAULT_MODEL


def ends(node: Any, code: Exit, *words: str) -> None:
    """It ends with this code and one line that has these words; no traceback, no crash file."""
    assert node.exit_code() == code, node.told()
    sentence = node.sentence()
    assert len(sentence.splitlines()) == 1, sentence
    assert sentence.endswith((".", "!")) or "`" in sentence, sentence
    for word in words:
        assert word in sentence
    assert "Traceback" not in sentence


@pytest.fixture(scope="module")
def made(make_village: Any, make_run: Any) -> Iterator[Any]:
    """A village with a run in the home `trainer`, which nobody trains yet."""
    with make_village() as village:
        make_run(village.home("trainer"))
        yield village


@pytest.fixture
def spoilt(made: Any, tmp_path: Path) -> Any:
    """Another home with the same run, to be damaged."""
    home = made.home(f"spoilt-{tmp_path.name}")
    shutil.copytree(made.home("trainer"), home)
    return home


def flip(file: Path, place: int = -100) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("invite", "words"),
    [
        ("https://example.org/run", "begins with 'nous1'"),
        ("nous1", "part of it is missing"),
        ("nous1" + "A" * 3000, "at most"),
        ("nous1gqlhZGRyZXNzZXOR", "part of it is missing"),
    ],
)
def test_bad_invite(made, invite: str, words: str) -> None:
    ends(made.join("anybody", invite), Exit.INPUT, "invite", words, "Copy the whole string again")


def test_last_run_that_is_no_invite(made) -> None:
    made.home("forgetful").mkdir()
    (made.home("forgetful") / "last_run").write_text("nous1???\n")
    ends(made.join("forgetful"), Exit.INPUT, "invite")


@pytest.mark.parametrize("device", ["mps", "cuda:999"])
def test_device_that_is_not_there(made, device: str) -> None:
    words = (f"The device {device} is missing", "--device cpu", "nous-node doctor")
    ends(made.start("trainer", "train", "run", "--device", device), Exit.INPUT, *words)


def test_port_in_use(made) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        ends(made.train(port=port), Exit.NETWORK, f"/tcp/{port}", "in use", "another port")


def test_run_that_does_not_exist(made) -> None:
    ends(made.train("nope"), Exit.INPUT, "There is no run", "nous-node init nope")


def test_run_of_another_identity(made, spoilt) -> None:
    (spoilt / "identity.pem").unlink()
    ends(made.train(name=spoilt.name), Exit.INPUT, "identity", "nous-node identity import")


def test_unknown_environment(made) -> None:
    ends(made.start("maker", "init", "new", "--env", "chess"), Exit.INPUT, "'chess'", "sort-digits")


def test_model_folder_without_tokenizer(made, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, model, ignore=shutil.ignore_patterns("tokenizer*"))
    node = made.start("maker", "init", "new", "--model", str(model))
    ends(node, Exit.INPUT, str(model), "tokenizer")
    assert not (made.home("maker") / "runs" / "new" / "run.envelope").exists()


def test_damaged_manifest(made, spoilt) -> None:
    flip(spoilt / "runs" / "run" / "run.envelope")
    ends(made.train(name=spoilt.name), Exit.STORAGE, "run.envelope", "damaged", "backup")


def test_damaged_journal(made, spoilt) -> None:
    journal = spoilt / "runs" / "run" / "journal.sqlite"
    journal.write_bytes(b"SQLite format 3\0" + bytes(5_000))
    ends(made.train(name=spoilt.name), Exit.STORAGE, "journal.sqlite", "backup")
    assert journal.stat().st_size == 5_016


def test_damaged_learning_settings(made, spoilt) -> None:
    (spoilt / "runs" / "run" / "learning.toml").write_text("rate = 'fast'\n")
    ends(made.train(name=spoilt.name), Exit.INPUT, "learning.toml", "rate")


def test_damaged_identity(made, spoilt) -> None:
    (spoilt / "identity.pem").write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n")
    ends(made.train(name=spoilt.name), Exit.STORAGE, "identity.pem", "damaged", "nous-node identity import")


def test_damaged_base_checkpoint(made, spoilt) -> None:
    flip(spoilt / "runs" / "run" / "checkpoints" / "000000" / "model.safetensors")
    ends(made.train(name=spoilt.name), Exit.STORAGE, "base checkpoint", "backup")


def test_two_nodes_on_one_home(made) -> None:
    first = made.train()
    invite = first.invite()
    for second in (made.train(), made.join("trainer", invite)):
        ends(second, Exit.STORAGE, "in use", str(first.process.pid), "--home")
    first.interrupt()
    assert first.exit_code() == Exit.OK
