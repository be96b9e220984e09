"""Files that are no outbox of ours, or not what we wrote."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from nous_node.node.home import DamagedError, StorageError
from nous_node.node.outbox import Outbox


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.sqlite"


@pytest.mark.parametrize("content", [b"not a database" * 100, bytes(range(256)) * 32])
def test_a_damaged_file_is_told_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"outbox .* is damaged .* move it"):
        Outbox.open(path)
    assert path.read_bytes() == content


def test_another_programs_database_is_told(path: Path) -> None:
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE things(a)")
    raw.close()
    with pytest.raises(DamagedError, match="another program"):
        Outbox.open(path)


def test_a_file_of_another_format_is_told(path: Path) -> None:
    Outbox.open(path).__exit__()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 9")
    raw.close()
    with pytest.raises(StorageError, match="format 9"):
        Outbox.open(path)


def test_a_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="outbox"):
        Outbox.open(tmp_path / "nowhere" / "outbox.sqlite")
