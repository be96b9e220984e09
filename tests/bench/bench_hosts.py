"""What a group costs in a host process beside one in the node's own; a JSON line for each environment.

    python tests/bench/bench_hosts.py [--groups 128]

Toy environments (one turn, three turns, two players with a request each) with an engine that takes no time;
all groups of 8 at once, the best of seven batches: microseconds a group on the clock, and of this process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nous_node.envs import registry, sandbox
from nous_node.envs.access import Access
from nous_node.envs.batcher import Batcher, EngineRequest, Job
from nous_node.envs.environment import Completion, Environment, PolicySettings
from nous_node.protocol.tasks import assign

BATCHES = 7
EOS = 258
TOYS = {"toy-bad": "Bad", "toy-guess": "Guess", "toy-duel": "Duel"}


class ByteTokenizer:
    """Ids 0..255 are bytes."""

    eos_id = EOS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one for one in ids if one < 256).decode("utf-8", "replace")


def digits(requests: Sequence[EngineRequest]) -> list[Completion]:
    """Four tokens for each request."""
    return [Completion([48 + one.key[0] % 10, 49, 50, EOS], [-0.5] * 4, "stop") for one in requests]


def measured(environment: Environment, groups: int) -> dict[str, int]:
    settings = PolicySettings(ByteTokenizer(), 8, 64, 1_024, frozenset([EOS]))
    task = environment.task(bytes(32), 0)
    jobs = [Job(environment, task, assign(number.to_bytes(32, "little"), [1])) for number in range(groups)]
    clock, own = [], []
    for _ in range(BATCHES):
        with Batcher(settings, digits, linger=1) as batcher:
            began, used = time.perf_counter(), time.process_time()
            outcomes = batcher.run(jobs)
            clock.append(time.perf_counter() - began)
            own.append(time.process_time() - used)
        assert all(isinstance(one, list) for one in outcomes), outcomes[0]
    return {"clock": round(min(clock) / groups * 1e6), "here": round(min(own) / groups * 1e6)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=128)
    groups = parser.parse_args().groups
    sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module("foreign").install_worlds(Path(folder))
        sys.path.insert(0, folder)
        worlds = importlib.import_module("toy_worlds")
        for name, kind in TOYS.items():
            figures = {"own process": measured(getattr(worlds, kind)({}), groups)}
            figures["host"] = measured(registry.make(name, {}, Access(trusted=(name,))), groups)
            if sandbox.unavailable() is None:
                figures["host in the sandbox"] = measured(registry.make(name, {}), groups)
            print(json.dumps({"environment": name, "groups": groups, "microseconds": figures}))


if __name__ == "__main__":
    main()
