"""Workers that crash, hang, grow, or say what makes no sense: the node is told, and has another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from nous_node.node.child_log import KEPT_BYTES
from nous_node.node.engine import Engine, UnfitEngineError, WorkerError
from nous_node.node.worker_messages import Checked, Group, Load, Loaded, Order

MEMORY = 300 << 20
SILENCE = 1.0

PLAYER = """
import os, signal, struct, subprocess, sys, time
from nous_node.node.pipe import ParentPipe
from nous_node.node.worker_messages import *

mode = os.environ["PLAYED"]
if mode == "never starts":
    raise ImportError("no torch")
pipe = ParentPipe.take_over(ToWorker)
while (message := pipe.receive()) is not None:
    if isinstance(message, Load):
        pipe.send(Loaded("player", "1", "float32", message.device))
        continue
    print("an environment prints", flush=True)  # must not end up in a frame
    input_left = sys.stdin.read()
    pipe.send(Progress(7))
    if mode == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "exits":
        sys.exit(3)
    if mode == "hangs":
        time.sleep(1000)
    if mode == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "grows":
        hoard = [os.urandom(1 << 20) for _ in range(400)]
        time.sleep(1000)
    if mode == "has a child that grows":
        hoarder = "import os, time; hoard = os.urandom(400 << 20); time.sleep(1000)"
        child = subprocess.Popen([sys.executable, "-c", hoarder])
        print("child", child.pid, flush=True)
        time.sleep(1000)
    if mode == "garbage":
        pipe._writer.write(struct.pack(">I", 5) + b"\\xc1abcd")
    if mode == "huge frame":
        pipe._writer.write(struct.pack(">I", 0xFFFFFFFF))
    if mode == "half a frame":
        pipe._writer.write(struct.pack(">I", 100) + b"half")
        sys.exit(0)
    if mode == "other message":
        pipe.send(Loaded("again", "1", "float32", "cpu"))
    if mode in ("checks", "unfit"):
        pipe.send(Checking())
        time.sleep(1.5)  # longer than the silence that is allowed otherwise
        pipe.send(Checked("All is well.", True) if mode == "checks" else Unfit("The dtype is another."))
    if mode == "cannot":
        pipe.send(Failed("The policy is not a distribution."))
    pipe.send(Made([Group(order.counter, b"body", 7) for order in message.orders]))
"""

LOAD = Load("folder", bytes(32), "cpu", 1, b"manifest")
ORDERS = [Order(3, bytes(32), {}), Order(4, bytes(32), {})]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Engine]:
    """An engine whose workers play a part; `monkeypatch` may change it for the next one."""
    (tmp_path / "played_worker.py").write_text(PLAYER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def engine(mode: str, silence: float = SILENCE) -> Engine:
        monkeypatch.setenv("PLAYED", mode)
        return Engine(
            memory=MEMORY,
            nice=0,
            threads=1,
            log=tmp_path / "worker.log",
            module="played_worker",
            silence=silence,
        )

    return engine


async def generate(engine: Engine) -> tuple[list[Group], list[int]]:
    told: list[int] = []
    return await engine.generate(ORDERS, told.append), told


async def test_good_worker_is_kept_and_its_prints_go_to_the_log(played: Any, tmp_path: Path) -> None:
    engine = played("works")
    assert await engine.load(LOAD) == Loaded("player", "1", "float32", "cpu")
    first = engine.pid
    for _ in range(2):
        groups, told = await generate(engine)
        assert [group.counter for group in groups] == [3, 4]
        assert told == [7]
    assert engine.pid == first
    await engine.close()
    assert engine.pid is None
    assert not psutil.pid_exists(first)
    assert (tmp_path / "worker.log").read_text().count("an environment prints") == 2


FAULTS = {
    "crashes": "signal 11",
    "is killed": "killed (signal 9)",
    "exits": "exit code 3",
    "half a frame": "exit code 0",
    "hangs": "no sign of life for 1 s",
    "stops": "no sign of life for 1 s",
    "garbage": "no message",
    "huge frame": "4294967295 bytes",
    "other message": "Loaded, which was not asked for",
    "cannot": "The policy is not a distribution.",
}


@pytest.mark.parametrize("mode", FAULTS)
async def test_fault_is_told_and_another_worker_takes_over(
    mode: str, played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = played(mode)
    await engine.load(LOAD)
    gone = engine.pid
    with pytest.raises(WorkerError) as error:
        await generate(engine)
    assert FAULTS[mode] in str(error.value)
    assert engine.pid is None
    assert not psutil.pid_exists(gone)
    monkeypatch.setenv("PLAYED", "works")
    await engine.load(LOAD)
    groups, _ = await generate(engine)
    assert len(groups) == 2
    await engine.close()


async def test_worker_that_verifies_its_first_groups_may_take_its_time(played: Any) -> None:
    engine = played("checks")
    await engine.load(LOAD)
    told: list[Checked] = []
    groups = await engine.generate(ORDERS, lambda tokens: None, told.append)
    assert len(groups) == 2
    assert told == [Checked("All is well.", True)]
    await engine.close()


async def test_worker_whose_groups_would_be_refused_gives_none_and_is_not_tried_again(played: Any) -> None:
    engine = played("unfit")
    await engine.load(LOAD)
    with pytest.raises(UnfitEngineError, match="The dtype is another") as error:
        await generate(engine)
    assert not isinstance(error.value, WorkerError)
    assert engine.pid is None


async def test_worker_that_cannot_start_is_told_with_where_to_look(played: Any, tmp_path: Path) -> None:
    engine = played("never starts")
    with pytest.raises(WorkerError, match="exit code 1") as error:
        await engine.load(LOAD)
    assert str(tmp_path / "worker.log") in str(error.value)
    assert "no torch" in (tmp_path / "worker.log").read_text()


async def test_worker_that_grows_beyond_its_memory_is_ended_with_both_figures(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nous_node.node.engine.MEMORY_CHECK_SECONDS", 0.05)
    engine = played("grows", silence=30.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.watch_memory)
        await engine.load(LOAD)
        with pytest.raises(WorkerError, match=r"used 0\.[3-9] GiB of memory; 0\.3 GiB are allowed") as error:
            await generate(engine)
        assert "--memory" in str(error.value)
        monkeypatch.setenv("PLAYED", "works")
        await engine.load(LOAD)
        assert len((await generate(engine))[0]) == 2
        nursery.cancel_scope.cancel()
    await engine.close()


async def test_what_a_worker_started_counts_and_ends_with_it(
    played: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nous_node.node.engine.MEMORY_CHECK_SECONDS", 0.05)
    engine = played("has a child that grows", silence=30.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.watch_memory)
        await engine.load(LOAD)
        with pytest.raises(WorkerError, match=r"GiB of memory; 0\.3 GiB are allowed"):
            await generate(engine)
        nursery.cancel_scope.cancel()
    await engine.close()
    (line,) = [line for line in (tmp_path / "worker.log").read_text().splitlines() if "child" in line]
    with trio.fail_after(5):
        while psutil.pid_exists(int(line.split()[1])):  # until init has reaped it
            if psutil.Process(int(line.split()[1])).status() == psutil.STATUS_ZOMBIE:
                break
            await trio.sleep(0.02)


async def test_the_log_of_earlier_workers_is_cut_to_its_end(played: Any, tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_bytes(b"x" * 99 + b"\n" + b"line\n" * 300_000 + b"the last words\n")
    engine = played("works")
    await engine.load(LOAD)
    await generate(engine)
    await engine.close()
    kept = log.read_bytes()
    assert kept.startswith(b"line\n")
    assert b"the last words\nan environment prints\n" in kept
    assert len(kept) < KEPT_BYTES + 1000


async def test_cancelled_conversation_ends_the_worker(played: Any) -> None:
    """Nobody knows what it would say next."""
    engine = played("hangs")
    await engine.load(LOAD)
    gone = engine.pid
    with trio.move_on_after(0.1):
        await generate(engine)
    assert engine.pid is None
    assert not psutil.pid_exists(gone)
