"""The command line: what it imports, what it says to bad input, and the code it ends with."""

from __future__ import annotations

import errno
import json
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nous_node.node.cli import app, main
from nous_node.node.cli_commands import choose_run
from nous_node.node.cli_exit import Exit, verdict, write_crash
from nous_node.node.discovery import Found
from nous_node.node.home import DiskFullError, Home
from nous_node.node.network_errors import ListenError, UnreachableError
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import Invite
from nous_node.trainer.errors import CheckpointError, ModelError

COMMANDS = [
    "init",
    "train",
    "join",
    "relay",
    "demo",
    "status",
    "doctor",
    "calibrate",
    "peers",
    "audit",
    "eval",
]
GROUPS = ["identity", "receipts", "checkpoints", "env", "model", "conformance"]


def run(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["nous-node", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS + GROUPS)]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom nous_node.node.cli import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'libp2p', 'trio', 'numpy', 'cryptography', 'msgspec', 'asyncio'}\n"
        "found = heavy & set(sys.modules)\nassert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_command_documents_the_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for arguments in (["--help"], *([name, "--help"] for name in COMMANDS)):
        assert run(arguments, monkeypatch) == 0
        text = " ".join(capsys.readouterr().out.split())
        for code in Exit:
            assert f" {code.value} " in text


def test_join_help_says_what_is_shared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["join", "--help"], monkeypatch) == 0
    text = capsys.readouterr().out
    for shared in ("address", "public key", "rollouts", "--memory", "--upload", "--minutes"):
        assert shared in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["init"],
        ["init", "a", "--group", "many"],
        ["join", "--threads", "0"],
        ["join", "--nice", "20"],
        ["join", "--minutes", "0"],
        ["demo", "--volunteers", "0"],
        ["--nonsense"],
    ],
)
def test_wrong_flags_are_input_errors(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(arguments, monkeypatch) == Exit.INPUT


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["init", "../a"], "cannot be called"),
        (["init", "a", "--env", "chess"], "no environment 'chess' here. Installed: "),
        (["init", "a", "--env", "sort-digits=0"], "whole number"),
        (["init", "a", "--group", "1"], "See `nous-node init --help`"),
        (["init", "a", "--group", "0"], "--group cannot be 0: it takes a whole number from 2 to 1,024."),
        (["init", "a", "--max-tokens", "0"], "--max-tokens cannot be 0"),
        (["init", "a", "--temperature", "11"], "--temperature cannot be 11.0"),
        (["init", "a", "--staleness", "9"], "--staleness cannot be 9"),
        (["init", "a", "--dtype", "int8"], "--dtype cannot be int8: it takes float32 or bfloat16."),
        (["calibrate", "--dtype", "int8"], "--dtype is float32 or bfloat16"),
        (["peers"], "No run is trained in"),
        (["peers", "missing"], "`nous-node status --home "),
        (["receipts", "export", "proof"], "takes part in no run"),
        (["identity", "import", "/nowhere/key.pem"], "/nowhere/key.pem cannot be read (No such file"),
        (["identity", "export", "/nowhere/key.pem"], "written to /nowhere/key.pem (No such file"),
        (["identity", "export", "/dev", "--force"], "written to /dev ("),
        (["init", "a", "--model", "/nowhere"], "no model folder"),
        (["init", "a", "--config", "/"], "cannot be read"),
        (["join", "nous1", "--upload", "fast"], "a rate such as"),
        (["join", "--config", "/nowhere.toml"], "does not exist"),
        (["train", "missing"], "no run in"),
        (["train", "missing"], "`nous-node init missing --home "),
        (["train", ""], "cannot be called ''"),
        (["train", "../x"], "cannot be called '../x'"),
        (["join"], "INVITE --home "),
        (["join", "nous1garbage"], "no valid invite"),
        (["join", "hello"], "begins with 'nous1'"),
        (["relay", "hello"], "no valid invite"),
        (["join"], "trainer prints, then run `nous-node join INVITE"),
    ],
)
def test_bad_input_is_one_sentence_with_the_next_step(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("nous_node.node.cli_commands.found_nearby", lambda: None)
    assert run([*arguments, "--home", str(tmp_path / "home")], monkeypatch) == Exit.INPUT
    told = capsys.readouterr()
    assert sentence in told.err
    assert "Traceback" not in told.err


def nearby(monkeypatch: pytest.MonkeyPatch, *found: Found) -> None:
    async def discover(deadline: float) -> list[Found]:
        return list(found)

    monkeypatch.setattr("nous_node.node.discovery.discover", discover)


def test_join_takes_the_invite_then_the_last_run_then_one_nearby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home.open(tmp_path)
    peer = Identity.from_seed(bytes(32)).peer_id
    a, b, c = (f"/ip4/192.0.2.{number}/tcp/4001/p2p/{peer}" for number in (1, 2, 3))
    given, last = Invite(b"g" * 32, [a]), Invite(b"l" * 32, [b])
    nearby(monkeypatch, Found(b"n" * 32, (a, b)), Found(b"n" * 32, (b, c)))
    assert choose_run(home, None, nearby=True) == Invite(b"n" * 32, [a, b, c])
    home.remember_run(last.to_text())
    assert choose_run(home, None) == last
    assert choose_run(home, None, nearby=True) == Invite(b"n" * 32, [a, b, c])
    assert choose_run(home, given.to_text()) == given


def test_run_nearby_is_named_and_joined_only_if_somebody_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Identity.from_seed(bytes(32)).peer_id
    address = f"/ip4/192.0.2.7/tcp/4001/p2p/{peer}"
    nearby(monkeypatch, Found(b"n" * 32, (address,)))
    with pytest.raises(LocalError) as error:
        choose_run(Home.open(tmp_path), None, " --home x")
    for wanted in (b"n".hex() * 8, address, "`nous-node join --nearby --home x`"):
        assert wanted in str(error.value)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    for answer in (True, False):
        monkeypatch.setattr("typer.confirm", lambda text, answer=answer: answer)
        if answer:
            assert choose_run(Home.open(tmp_path), None).addresses == [address]
        else:
            with pytest.raises(LocalError, match="Nothing was joined"):
                choose_run(Home.open(tmp_path), None)


def test_several_runs_nearby_are_for_a_person_to_choose_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearby(monkeypatch, Found(b"a" * 32, ("/a",)), Found(b"b" * 32, ("/b",)))
    with pytest.raises(LocalError, match="Several runs answer"):
        choose_run(Home.open(tmp_path), None)


def test_nonsense_nearby_is_as_good_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nearby(monkeypatch, Found(b"n" * 32, ("/no address\x1b",)))
    with pytest.raises(LocalError, match="no run to join"):
        choose_run(Home.open(tmp_path), None)


def test_init_makes_a_run_and_says_how_to_train_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = str(tmp_path / "home")
    arguments = ["init", "first", "--home", home, "--group", "4", "--env", "sort-digits=3"]
    assert run(arguments, monkeypatch) == Exit.OK
    assert f"nous-node train first --home {home}" in capsys.readouterr().out
    assert run(arguments, monkeypatch) == Exit.INPUT
    assert "already holds a run" in capsys.readouterr().err


def test_identity_is_exported_privately_and_imported_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, file = str(tmp_path / "a"), str(tmp_path / "b"), tmp_path / "key.pem"
    assert run(["identity", "show", "--home", first, "--json"], monkeypatch) == Exit.OK
    shown = json.loads(capsys.readouterr().out)
    assert run(["identity", "export", str(file), "--home", first], monkeypatch) == Exit.OK
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "signs its rollouts" in capsys.readouterr().out
    assert run(["identity", "import", str(file), "--home", second], monkeypatch) == Exit.OK
    assert Home.open(tmp_path / "b").identity().key.hex() == shown["key"]


def test_what_was_made_is_told_to_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, file = ["--home", str(tmp_path / "home"), "--json"], str(tmp_path / "key.pem")
    assert run(["init", "first", *home], monkeypatch) == Exit.OK
    made = json.loads(capsys.readouterr().out)
    assert (made["name"], len(made["run"]), Path(made["folder"]).is_dir()) == ("first", 64, True)
    told = []
    for arguments in (["export", file], ["import", file, "--force"], ["show"]):
        assert run(["identity", *arguments, *home], monkeypatch) == Exit.OK
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == {**told[2], "file": file}
    assert told[1] == told[2]


def test_identity_is_never_replaced_without_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, file = Home.open(tmp_path / "home"), tmp_path / "key.pem"
    before = home.identity()
    file.write_bytes(Identity.from_seed(bytes(32)).pem())
    arguments = ["identity", "import", str(file), "--home", str(home.path)]
    assert run(arguments, monkeypatch) == Exit.INPUT
    assert "add --force" in capsys.readouterr().err
    assert home.identity().key == before.key
    assert run(["identity", "export", str(file), "--home", str(home.path)], monkeypatch) == Exit.INPUT
    assert Identity.from_pem(file.read_bytes()).key == Identity.from_seed(bytes(32)).key
    assert run([*arguments, "--force"], monkeypatch) == Exit.OK
    assert home.identity().key == Identity.from_seed(bytes(32)).key


@pytest.mark.parametrize("content", [b"", b"no key", b"x" * 10_000])
def test_file_that_is_no_key_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key.pem").write_bytes(content)
    arguments = ["identity", "import", str(tmp_path / "key.pem"), "--home", str(tmp_path / "home")]
    assert run(arguments, monkeypatch) == Exit.INPUT
    assert not (tmp_path / "home" / "identity.pem").exists()


def test_home_that_is_in_use_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home.open(tmp_path / "home")
    assert run(["init", "a", "--home", str(home.path)], monkeypatch) == Exit.OK
    with home.lock():
        assert run(["train", "a", "--home", str(home.path)], monkeypatch) == Exit.STORAGE
    assert "Stop that node first" in capsys.readouterr().err


def test_home_that_is_a_file_has_no_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(["status", "--home", str(tmp_path / "file")], monkeypatch) == Exit.INPUT
    assert "is no folder" in capsys.readouterr().err
    assert run(["status", "--home", str(tmp_path / "none")], monkeypatch) == Exit.OK
    assert f"`nous-node init NAME --home {tmp_path / 'none'}`" in capsys.readouterr().out


def test_home_that_cannot_be_made_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert run(["identity", "show", "--home", str(tmp_path / "file" / "home")], monkeypatch) == Exit.STORAGE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LocalError("x"), Exit.INPUT),
        (ModelError("x"), Exit.INPUT),
        (RemoteError(Code.INVITE, "x"), Exit.INPUT),
        (RemoteError(Code.UNSUPPORTED_VERSION, "x"), Exit.NETWORK),
        (ListenError("/ip4/127.0.0.1/tcp/1", "x"), Exit.NETWORK),
        (UnreachableError("/ip4/127.0.0.1/tcp/1", "x"), Exit.NETWORK),
        (OSError(errno.EADDRINUSE, "x"), Exit.NETWORK),
        (DiskFullError("x"), Exit.STORAGE),
        (CheckpointError("x"), Exit.STORAGE),
        (OSError(errno.ENOSPC, "x", "file"), Exit.STORAGE),
        (sqlite3.DatabaseError("x"), Exit.STORAGE),
        (ValueError("x"), Exit.INTERNAL),
        (ExceptionGroup("g", [ExceptionGroup("h", [DiskFullError("x")])]), Exit.STORAGE),
        (ExceptionGroup("g", [LocalError("x"), ZeroDivisionError("y")]), Exit.INTERNAL),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), Exit.INTERRUPTED),
    ],
)
def test_each_error_has_its_exit_code(error: BaseException, code: Exit) -> None:
    assert verdict(error)[0] is code
    assert verdict(error)[1]


def test_unexpected_error_is_one_sentence_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, as_json: bool) -> str:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("nous_node.node.cli_init.make_run", broken)
    monkeypatch.setenv("NOUS_NODE_HOME", str(tmp_path))
    assert run(["init", "a"], monkeypatch) == Exit.INTERNAL
    told = capsys.readouterr().err
    (file,) = (tmp_path / "crashes").iterdir()
    assert str(file) in told
    assert "Traceback" not in told
    assert "of all things" in file.read_text()


def test_what_a_peer_wrote_does_not_reach_the_terminal_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hostile(*_: object, as_json: bool) -> str:
        raise LocalError("This run has \x1b]0;owned\x07\x1b[2J only.")

    monkeypatch.setattr("nous_node.node.cli_init.make_run", hostile)
    assert run(["init", "a"], monkeypatch) == Exit.INPUT
    assert capsys.readouterr().err == "This run has \\x1b]0;owned\\x07\\x1b[2J only.\n"


def test_crash_without_a_place_to_write_is_told_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert write_crash(tmp_path / "file", ValueError("x")) is None


def test_app_is_what_the_console_script_runs() -> None:
    assert app.info.name == "nous-node"
