"""A learner process from outside: one that plays its part, and the real one once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from nous_node.node import coach as module
from nous_node.node import pipe
from nous_node.node.coach import Coach, LearnerError
from nous_node.node.home import StorageError
from nous_node.node.learner_messages import Open, Opened, Rested, Updated, Verdicts
from nous_node.node.pipe import ChildDied

PLAYER = """
import os, sys, time
from nous_node.node.learner_messages import *
from nous_node.node.pipe import ParentPipe

mode = os.environ["PLAYED"]
pipe = ParentPipe.take_over(ToLearner)
while (message := pipe.receive()) is not None:
    if mode == "dies":
        sys.exit(3)
    if mode == "is silent":
        time.sleep(1000)
    if mode == "broken":
        pipe.send(Broken("It cannot learn."))
    elif mode == "disk":
        pipe.send(Broken("The disk is full.", storage=True))
    elif mode == "confused":
        pipe.send(Rested(1))
    elif isinstance(message, Open):
        pipe.send(Opened(None, os.environ["OMP_NUM_THREADS"]))
    elif isinstance(message, Published):
        pipe.send(Rested(message.version))
"""

OPEN = Open("folder", 0, "checkpoint", {}, {}, "cpu", 2)


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Coach]:
    """A coach whose learners play a part."""
    (tmp_path / "played_learner.py").write_text(PLAYER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def other(_: str, *arguments: Any) -> Any:
        return pipe.start_child("played_learner", *arguments)

    monkeypatch.setattr(module, "start_child", other)

    def coach(mode: str) -> Coach:
        monkeypatch.setenv("PLAYED", mode)
        return Coach(threads=2, log=tmp_path / "logs" / "learner.log")

    return coach


async def test_a_learner_is_opened_talked_to_and_ended(played: Any, tmp_path: Path) -> None:
    coach = played("works")
    assert await coach.open(OPEN) == Opened(None, "2")
    await coach.published(7)
    assert await coach.receive() == Rested(7)
    pid = coach._running.process.pid
    await coach.close()
    assert not psutil.pid_exists(pid)
    assert (tmp_path / "logs" / "learner.log").exists()
    await coach.close()  # a second time does nothing


async def test_a_second_learner_ends_the_first(played: Any) -> None:
    coach = played("works")
    await coach.open(OPEN)
    first = coach._running.process.pid
    await coach.open(OPEN)
    assert not psutil.pid_exists(first)
    assert coach._running.process.pid != first
    await coach.close()


@pytest.mark.parametrize(
    ("mode", "error", "sentence"),
    [
        ("dies", ChildDied, "exit code 3"),
        ("broken", LearnerError, "It cannot learn."),
        ("disk", StorageError, "The disk is full."),
        ("confused", LearnerError, "The learner answered with a Rested."),
    ],
)
async def test_what_goes_wrong_is_told_apart(
    played: Any, mode: str, error: type[Exception], sentence: str
) -> None:
    coach = played(mode)
    with pytest.raises(error, match=sentence):
        await coach.open(OPEN)
    await coach.close()


async def test_a_learner_that_is_not_ready_in_time_is_told_with_its_log(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPEN_SECONDS", 0.05)
    coach = played("is silent")
    with pytest.raises(ChildDied, match=r"not ready after 0 s; its log is .*learner\.log"):
        await coach.open(OPEN)
    await coach.close()


async def test_a_learner_that_says_nothing_is_taken_for_dead(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    coach = played("works")
    await coach.open(OPEN)
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.05)
    with pytest.raises(ChildDied, match="said nothing"):
        await coach.receive()
    await coach.close()


async def test_without_a_learner_there_is_nobody_to_talk_to(tmp_path: Path) -> None:
    coach = Coach(threads=1, log=tmp_path / "learner.log")
    for call in (partial(coach.verify, []), coach.proceed, partial(coach.published, 1), coach.receive):
        with pytest.raises(ChildDied, match="not running"):
            await call()


async def test_the_real_learner_judges_and_makes_a_version(make_folder: Any, volunteers: Any) -> None:
    folder = make_folder(groups=2)
    place = str(folder.checkpoint(0))
    coach = Coach(threads=1, log=folder.path / "learner.log")
    with trio.fail_after(19):
        opened = await coach.open(Open(str(folder.path), 0, place, {0: place}, {}, "cpu", 1))
        assert opened == Opened(None)
        await coach.verify(volunteers.candidates(folder, 3))
        judged = await coach.receive()
        await coach.proceed()
        updated, rested = [await coach.receive() for _ in range(2)]
        await coach.close()
    assert isinstance(judged, Verdicts)
    assert [one.receipt.verdict for one in judged.groups] == ["accepted"] * 3
    assert isinstance(updated, Updated)
    assert updated.folder == str(folder.checkpoint(1))
    assert rested == Rested(1)
