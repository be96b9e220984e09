"""Processes of `bench_swarm.py`: each says a JSON line, waits for a word, and says the next.

ready {...}  <-  started            go  ->  it fetches          {...}  <-  done
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

HERE = Path(__file__).parent
LOOK_SECONDS = 0.05
"""Between looks at how much memory there is."""
SHARDCAST = {
    "SHARDCAST_FAST_RETRY_INTERVAL": "1",
    "SHARDCAST_SLOW_RETRY_INTERVAL": "1",
    "SHARDCAST_LOG_LEVEL": "ERROR",
}
"""Its defaults are 2 and 15 s: clients of a middle node would mostly wait."""


class Child:
    """One process, in a network namespace if one is named."""

    def __init__(self, command: Sequence[str], space: str | None = None, path: Path | None = None) -> None:
        """`path`: where Python looks for modules first."""
        plain = {name: text for name, text in os.environ.items() if not name.lower().endswith("_proxy")}
        environment = plain | ({"PYTHONPATH": str(path)} if path is not None else {}) | SHARDCAST
        inside = ["ip", "netns", "exec", space] if space is not None else []
        self._process = subprocess.Popen(
            [*inside, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._watched = psutil.Process(self._process.pid)

    def hear(self) -> dict:
        """What it says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the bench ended: {self._process.args}")
        return json.loads(line)

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def cpu(self) -> float:
        """CPU seconds so far, of its children that have ended too."""
        times = self._watched.cpu_times()
        return times.user + times.system + times.children_user + times.children_system

    def resident(self) -> int:
        """Bytes of memory, without its children's; 0 where it has ended."""
        try:
            return self._watched.memory_info().rss
        except psutil.NoSuchProcess:
            return 0

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def script(name: str, plan: dict) -> list[str]:
    return [sys.executable, str(HERE / name), json.dumps(plan)]


@contextmanager
def children() -> Iterator[list[Child]]:
    """A list to put processes in; all of them end with the block."""
    started: list[Child] = []
    try:
        yield started
    finally:
        for child in started:
            child.end()


@contextmanager
def watched(children: Sequence[Child]) -> Iterator[list[int]]:
    """Bytes by which the memory of each has grown at most, when the block is left."""
    begun = [child.resident() for child in children]
    grown = [0] * len(children)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            for number, child in enumerate(children):
                grown[number] = max(grown[number], child.resident() - begun[number])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield grown
    finally:
        over.set()
        thread.join()


def race(sources: Sequence[Child], fetching: Sequence[Child]) -> dict:
    """Says go to all that fetch; seconds until the last is done, CPU seconds of both sides, and by how many
    MB the memory of one process of either side has grown at most."""
    everybody = [*sources, *fetching]
    before = [child.cpu() for child in everybody]
    with watched(everybody) as grown:
        started = time.monotonic()
        for child in fetching:
            child.say("go")
        for child in fetching:
            child.hear()
        seconds = time.monotonic() - started
    after = [child.cpu() for child in everybody]
    spent = [late - early for late, early in zip(after, before, strict=True)]
    return {
        "seconds": round(seconds, 2),
        "cpu_sources": round(sum(spent[: len(sources)]), 2),
        "cpu_fetching": round(sum(spent[len(sources) :]), 2),
        "memory_sources": round(max(grown[: len(sources)]) / 1e6, 1),
        "memory_fetching": round(max(grown[len(sources) :]) / 1e6, 1),
    }
