"""Children that try to use this machine up, or to outlive their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from nous_node.envs.child import ChildEnded
from nous_node.envs.limits import MAX_FILE, MAX_TASKS
from nous_node.envs.mounts import SHM_BYTES, TMP_BYTES
from nous_node.envs.sandbox import unfiltered

from .captive import (
    MEMORY,
    PAYLOADS,
    Captive,
    Order,
    captive,
    family,
    launch,
    needs_sandbox,
    survivors,
)

pytestmark = needs_sandbox

ANSWER_S = 30.0
"""For what ends by itself, on a busy machine."""
MEBIBYTE = 1 << 20


@pytest.fixture
def child() -> Iterator[Captive]:
    with captive() as started:
        yield started


@pytest.fixture(scope="module")
def greedy() -> Iterator[Captive]:
    """One that takes what it gets, and gives it back."""
    with captive() as started:
        yield started


def ended(child: Captive, name: str, argument: str = "", seconds: float = ANSWER_S) -> str:
    with pytest.raises(ChildEnded) as error:
        child.ask(Order(name, argument), seconds)
    assert not child.alive
    return str(error.value)


# --- using the machine up ---


@pytest.mark.parametrize("how", ["at once", "slowly", "shared"])
def test_memory_ends_at_the_limit(greedy: Captive, how: str) -> None:
    assert int(greedy.ask(Order("memory", how), ANSWER_S).text) < MEMORY // MEBIBYTE


def test_memory_of_many_threads_is_counted_together(greedy: Captive) -> None:
    assert int(greedy.ask(Order("memory_of_threads"), ANSWER_S).text) < MEMORY // MEBIBYTE


def test_a_child_out_of_memory_is_told_as_such(child: Captive) -> None:
    assert "ran out of memory: it may use 512 MiB" in ended(child, "uncaught_memory")


@pytest.mark.parametrize(("place", "size"), [("/tmp", TMP_BYTES), ("/dev/shm", SHM_BYTES)])
def test_a_disk_bomb_fills_only_its_own_folder(greedy: Captive, place: str, size: int) -> None:
    assert int(greedy.ask(Order("disk", place), ANSWER_S).text) <= size // MEBIBYTE


def test_a_file_is_no_longer_than_its_limit(greedy: Captive) -> None:
    assert MAX_FILE < 1 << 40
    assert "Errno 27" in greedy.ask(Order("large_file", "/tmp"), ANSWER_S).text


def test_a_thread_bomb_is_ended_or_stopped_by_the_kernel() -> None:
    with captive(launch(memory=16 << 30)) as child:  # room for thousands
        if os.getuid() == 0:  # whose tasks the kernel does not limit
            assert f"started more than {MAX_TASKS} threads" in ended(child, "threads", "100000")
        else:
            assert int(child.ask(Order("threads", "100000"), ANSWER_S).text) <= MAX_TASKS


# --- deadlines ---


@pytest.mark.parametrize("name", ["loop", "power", "deaf", "idle"])
def test_a_child_that_does_not_answer_is_killed_at_its_deadline(child: Captive, name: str) -> None:
    child.ask(Order("echo"), ANSWER_S)
    processes = family(child)
    began = time.monotonic()
    assert "did not answer within 0." in ended(child, name, seconds=0.2)
    assert time.monotonic() - began < 5
    assert survivors(processes) == []


def test_a_child_that_stops_itself_is_killed_all_the_same(child: Captive) -> None:
    child.ask(Order("echo"), ANSWER_S)
    processes = family(child)
    assert "did not answer" in ended(child, "die", str(int(signal.SIGSTOP)), seconds=0.3)
    assert survivors(processes) == []


# --- ends ---


@pytest.mark.parametrize(
    ("name", "argument", "sentence"),
    [
        ("leave", "0", "ended with exit code 0"),
        ("leave", "7", "ended with exit code 7"),
        ("fail", "no such file", "ended with exit code 1. Its last words: no such file"),
        ("die", "9", "was killed (signal 9): most likely the machine ran out of memory"),
        ("die", "11", "ended with signal 11"),
        ("die", "6", "ended with signal 6"),
    ],
)
def test_how_a_child_ended_is_told_in_words(child: Captive, name: str, argument: str, sentence: str) -> None:
    assert sentence in ended(child, name, argument)


@pytest.mark.skipif(os.uname().machine != "x86_64" or unfiltered() is not None, reason="needs its filter")
def test_a_call_by_another_interface_kills(child: Captive) -> None:
    assert "it made a system call that the sandbox forbids" in ended(child, "call", str(0x40000000 + 39))


PARENT = """
import sys
from pathlib import Path
from nous_node.envs.child import Child
from nous_node.envs.sandbox import Launch
folder = Path({payloads!r})
children = [
    Child(Launch(Path(sys.executable), "babble", (folder,), (folder,), sandboxed, False, 1 << 29, ()), str)
    for sandboxed in (True, False)
]
for child in children:
    child.ask("", 20)
print(*[child.pid for child in children], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_a_parent_that_is_gone_leaves_nobody_behind(end: str) -> None:
    command = [sys.executable, "-c", PARENT.format(payloads=str(PAYLOADS))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        firsts = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        processes = [*firsts, *[one for first in firsts for one in first.children(recursive=True)]]
        assert len(processes) == 4
        if end == "killed":
            parent.kill()
        parent.stdin.close()
        parent.wait(20)
    assert survivors(processes) == []


@pytest.mark.parametrize("sandboxed", [True, False])
def test_a_child_outlives_the_thread_that_started_it(sandboxed: bool) -> None:
    started: list[Captive] = []
    thread = threading.Thread(target=lambda: started.append(captive(launch(sandboxed=sandboxed))))
    thread.start()
    thread.join()
    with started[0] as child:
        assert child.ask(Order("echo", "alive"), ANSWER_S).text == "alive"


def test_a_child_that_nobody_holds_is_ended() -> None:
    child = captive()
    child.ask(Order("echo"), ANSWER_S)
    processes = family(child)
    del child
    assert survivors(processes) == []
