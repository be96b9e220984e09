"""kill -9 at each step of coming to a new version: the next start goes on, and nothing verified comes twice.

A copy of the disk is made at every request, at every delta that is applied, and whenever a file or folder is
renamed or deleted: what a process that dies there would have left. Nodes are started from all of them.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nous_node.node.following import Head
from nous_node.node.picker_source import MAX_WINDOW
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import FULL
from nous_node.protocol.identity import Identity

from .lineage import Lineage, Node


@pytest.fixture
def line(tmp_path: Path, base_run: RunFolder, root: Identity) -> Lineage:
    return Lineage(tmp_path, base_run, root)


@dataclass
class Left:
    """What a process that died left."""

    home: Path
    delivered: Counter[bytes]
    """Blobs that it had been given."""


class Crashes:
    """Copies a node's home at each step from now on."""

    def __init__(self, line: Lineage, node: Node, patch: pytest.MonkeyPatch) -> None:
        self.left: list[Left] = []
        self._line, self._home = line, line.path / "node"
        self._folder = str(node.folder.path)
        line.net.before = lambda digest: self._copy()
        self._copying = threading.Lock()
        line.net.asked.clear()
        for owner, name in (
            (Path, "rename"),
            (Path, "replace"),
            (os, "replace"),
            (os, "link"),
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, self._before(getattr(owner, name)))
        for place in ("nous_node.node.making.apply_delta",):
            patch.setattr(place, self._around())

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def copied(*arguments: Any, **options: Any) -> Any:
            if any(self._folder in str(argument) for argument in arguments):
                self._copy()
            return call(*arguments, **options)

        return copied

    def _around(self) -> Callable[..., None]:
        from nous_node.node.delta_files import apply_delta

        def applied(old: Path, delta: Path, out: Path, tensors: dict[str, bytes]) -> None:
            apply_delta(old, delta, out, tensors)
            whole = out.read_bytes()
            out.write_bytes(whole[: len(whole) // 2])  # while it was written
            self._copy()
            out.write_bytes(whole)
            self._copy()

        return applied

    def _copy(self) -> None:
        with self._copying:  # files are renamed by several threads
            home = self._line.path / f"{self._line.heads[-1].version}-{len(self.left)}"
            copy_tree(self._home, home)
            self.left.append(Left(home, Counter(self._line.net.asked)))


def copy_tree(source: Path, target: Path) -> None:
    """With hard links where the source has some: a damage of one name would show in the other."""
    links: dict[int, Path] = {}
    for folder, _, names in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir()
        for name in names:
            file = Path(folder) / name
            inode = file.stat().st_ino
            if inode in links:
                os.link(links[inode], there / name)
            else:
                shutil.copy2(file, there / name)
                links[inode] = there / name


async def survives(line: Lineage, before: list[Head], after: Head, monkeypatch: pytest.MonkeyPatch) -> int:
    """Follows `before`, then dies in many ways on the way to `after`; how many they were."""
    node = line.node()
    await node.follows(*before)
    with monkeypatch.context() as patch:
        crashes = Crashes(line, node, patch)
        await node.follows(after)
    needed = set(line.net.asked)
    line.net.before = lambda digest: None
    for left in crashes.left:
        line.net.asked.clear()
        again = line.node(left.home.name)
        await again.follows(after)
        twice = sum((left.delivered + line.net.asked).values()) - len(needed)
        assert twice <= MAX_WINDOW, "more was fetched again than was under way when it died"
        assert set(line.net.asked) <= needed, again.notes()
        assert again.notes() == []
        following = line.node(left.home.name)
        await following.follows(after)
    return len(crashes.left)


async def test_full_checkpoint(line: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = line.full(), line.full()
    assert await survives(line, [first], second, monkeypatch) > 10


async def test_delta(line: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = line.full(), line.delta(config=b'{"another": 1}')
    assert await survives(line, [first], second, monkeypatch) > 8


async def test_several_deltas(line: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = line.full()
    later = [line.delta() for _ in range(3)]
    assert await survives(line, [first], later[-1], monkeypatch) > 15


async def test_renewal(line: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = line.full()
    assert await survives(line, [first], line.renewal(), monkeypatch) > 4
    second = line.renewal(FULL)
    assert await survives(line, [], second, monkeypatch) > 10


async def test_joiner(line: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    line.full()
    later = [line.delta() for _ in range(2)]
    assert await survives(line, [], later[-1], monkeypatch) > 20
