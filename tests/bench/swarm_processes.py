"""Processes of `bench_swarm.py`: each says a JSON line, waits for a word, and says the next.

ready {...}  <-  started            go  ->  it fetches          {...}  <-  done
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

HERE = Path(__file__).parent
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


def race(sources: Sequence[Child], fetching: Sequence[Child]) -> dict:
    """Says go to all that fetch; seconds until the last is done, and CPU seconds of both sides."""
    before = [child.cpu() for child in (*sources, *fetching)]
    started = time.monotonic()
    for child in fetching:
        child.say("go")
    for child in fetching:
        child.hear()
    seconds = time.monotonic() - started
    after = [child.cpu() for child in (*sources, *fetching)]
    spent = [late - early for late, early in zip(after, before, strict=True)]
    return {
        "seconds": round(seconds, 2),
        "cpu_sources": round(sum(spent[: len(sources)]), 2),
        "cpu_fetching": round(sum(spent[len(sources) :]), 2),
    }
