"""Real nodes on 127.0.0.1, killed, cut off and lied to. All waiting is for events, each with a deadline."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nous_node.node.create import create_run
from nous_node.node.home import Home
from nous_node.node.plan import EnvironmentPlan, RunPlan
from nous_node.node.runfolder import RunFolder

from .processes import Village

CREATED = 1_750_000_000_000

QUICK: dict[str, bool | int | float | str] = {"groups": 24, "evaluate_every": 0, "evaluate_tasks": 1}
"""Versions of few groups, and hardly any measuring."""


@pytest.fixture(scope="session")
def make_village(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """Nodes that share a fate: all of them end with the block."""

    @contextmanager
    def make() -> Iterator[Village]:
        village = Village(tmp_path_factory.mktemp("village"))
        try:
            yield village
        finally:
            village.clean_up()

    return make


@pytest.fixture
def village(make_village: Any) -> Iterator[Village]:
    with make_village() as village:
        yield village


@pytest.fixture(scope="session")
def make_run() -> Callable[..., RunFolder]:
    """A small run in a home: groups of four, versions of few groups."""

    def make(home: Path, name: str = "run", **learning: Any) -> RunFolder:
        opened = Home.open(home)
        plan = RunPlan(
            environments={"sort-digits": EnvironmentPlan()}, group=4, learning={**QUICK, **learning}
        )
        return create_run(opened.runs / name, name, opened.identity(), plan, CREATED)

    return make


@pytest.fixture(scope="session")
def journal() -> Callable[[RunFolder], Journalled]:
    return Journalled


class Journalled:
    """What stands in a trainer's journal, while it runs or after it died."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.journal

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self._path, timeout=10)) as connection:
            return connection.execute(query).fetchall()

    @property
    def version(self) -> int:
        return int(self.rows("SELECT max(version) FROM checkpoints")[0][0])

    def groups(self) -> dict[bytes, tuple[str, int | None]]:
        """Envelope id -> state and the version that used it."""
        found = self.rows("SELECT id, state, used_version FROM groups")
        return {rollout: (state, used) for rollout, state, used in found}

    def assert_sound(self) -> None:
        """Versions without a gap, every used group in one of them."""
        groups = self.groups()  # first: the trainer goes on publishing while we look
        versions = [version for (version,) in self.rows("SELECT version FROM checkpoints ORDER BY version")]
        assert versions == list(range(len(versions)))
        for state, used in groups.values():
            assert (used in versions) if state == "used" else (used is None)
