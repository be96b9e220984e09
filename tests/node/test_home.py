"""The folder with a node's identity and state."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nous_node.node import home as home_module
from nous_node.node.home import (
    DamagedError,
    DiskFullError,
    Home,
    HomeBusyError,
    StorageError,
    default_home,
    disk_errors,
    write_atomic,
)
from nous_node.protocol.identity import Identity


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_home_is_private(home: Home) -> None:
    assert mode(home.path) == 0o700


def test_the_first_start_makes_an_identity_that_stays(home: Home) -> None:
    identity = home.identity()
    assert mode(home.identity_file) == 0o600
    assert Home.open(home.path).identity().key == identity.key
    assert [path.name for path in home.path.iterdir()] == ["identity.pem"]


def test_of_two_processes_that_make_an_identity_the_first_wins(home: Home) -> None:
    first = home.identity()
    home._make_identity()
    assert home.identity().key == first.key


def test_a_file_system_without_hard_links_gets_an_identity_too(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert home.identity().key == home.identity().key


def test_another_identity_can_be_put_in_its_place(home: Home) -> None:
    home.identity()
    other = Identity.from_seed(bytes(32))
    home.replace_identity(other)
    assert home.identity().key == other.key
    assert mode(home.identity_file) == 0o600


@pytest.mark.parametrize("content", [b"", b"not a key", b"\xff" * 10_000])
def test_a_damaged_identity_is_told_with_what_to_do(home: Home, content: bytes) -> None:
    write_atomic(home.identity_file, content)
    with pytest.raises(DamagedError, match=r"identity\.pem is damaged.*identity import"):
        home.identity()
    assert home.identity_file.read_bytes() == content


def test_an_identity_that_others_can_read_is_refused(home: Home) -> None:
    home.identity()
    home.identity_file.chmod(0o644)
    with pytest.raises(StorageError, match="chmod 600"):
        home.identity()


def test_a_home_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--home"):
        Home.open(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="permissions"):
        Home.open(tmp_path / "home")


def test_two_processes_of_one_home_refuse_each_other(home: Home) -> None:
    program = (
        "import sys; from pathlib import Path; from nous_node.node.home import Home, HomeBusyError\n"
        "try:\n"
        "    with Home.open(Path(sys.argv[1])).lock(): pass\n"
        "except HomeBusyError as error: print(error)\n"
    )

    def other() -> str:
        command = [sys.executable, "-c", program, str(home.path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    with home.lock():
        assert f"in use by process {os.getpid()}" in other()
    assert other() == ""


def test_a_lock_is_refused_within_one_process_too(home: Home) -> None:
    with home.lock(), pytest.raises(HomeBusyError), home.lock():
        pass


def test_the_last_run_is_remembered(home: Home) -> None:
    assert home.last_run() is None
    home.remember_run("nous1abc")
    assert home.last_run() == "nous1abc"


def test_a_failed_write_leaves_the_old_content_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(home_module.os, "fsync", full)
    with pytest.raises(DiskFullError, match="disk is full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_an_atomic_write_replaces_content_and_sets_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old", 0o644)
    assert (path.read_bytes(), mode(path)) == (b"old", 0o644)
    write_atomic(path, b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", 0o600)


def test_disk_errors_keep_their_cause(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught, disk_errors(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system", "/x")
    assert isinstance(caught.value.__cause__, OSError)
    assert "/x cannot be used: Read-only file system" in str(caught.value)


def test_the_default_home_follows_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_home({"NOUS_NODE_HOME": str(tmp_path)}) == tmp_path
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_home({}) == tmp_path / ".nous-node"
