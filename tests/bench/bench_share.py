"""Share of its wall time that a volunteer generates, once warm, and where the rest goes; one JSON line.

    python tests/bench/bench_share.py [--seconds 90] [--seed 0]
    python tests/bench/bench_share.py --model PATH [--tries 3]

The first runs `nous-node demo` with a trainer and two volunteers and takes what each volunteer says at the
end of its time: `share` (its engine made groups or verified its own first ones), `loading` a version,
`waiting` for receipts, `sending`; the rest is between them. With them go what the demo learnt, how old its
groups were, and the load of the machine before it began: on two cores the demo takes both. The second loads
a model into a worker, as a version that was prepared while it worked and as one that was not: seconds of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from nous_node.node.engine import Engine
from nous_node.node.worker_messages import Load, Prepare
from nous_node.protocol.identity import Identity

MEMORY = 8 << 30


def demo(seconds: int, seed: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    command = [sys.executable, "-P", "-m", "nous_node.node.cli", "demo", "--json"]
    command += ["--seconds", str(seconds), "--seed", str(seed)]
    volunteers: dict[str, dict[str, Any]] = {}
    trainer: dict[str, Any] = {}
    report: dict[str, Any] = {}
    lines = subprocess.run(command, check=False, capture_output=True, text=True).stdout.splitlines()
    for event in map(json.loads, lines):
        match event["event"]:
            case "volunteer" if event["doing"] != "finishing":
                volunteers[event["source"]] = event
            case "trainer":
                trainer = event
            case "demo":
                report = event
    phases = ("loading", "waiting", "sending")
    return {
        "share": [round(one["generating_share"], 3) for one in volunteers.values()],
        **{
            phase: [round(one["spent"].get(phase, 0.0), 3) for one in volunteers.values()] for phase in phases
        },
        "versions": trainer["version"],
        "staleness": trainer["staleness"],
        "accepted": trainer["accepted"],
        "refused": trainer["refused"],
        "greedy": report.get("greedy"),
        "load_before": round(load, 1),
    }


async def swaps(model: Path, tries: int) -> dict[str, float]:
    """Median seconds from the order to load a version until the worker can generate with it."""
    from nous_node.node.create import create_run
    from nous_node.node.plan import EnvironmentPlan, RunPlan
    from nous_node.trainer.checkpoint import tensor_hashes
    from nous_node.trainer.model_folder import weight_files

    took: dict[str, list[float]] = {"prepared": [], "loaded": []}
    with tempfile.TemporaryDirectory() as place:
        plan = RunPlan(model=str(model), environments={"sort-digits": EnvironmentPlan()})
        run = create_run(Path(place) / "run", "bench", Identity.from_seed(bytes(32)), plan, 1)
        folder = run.checkpoint(0)
        tensors = {
            name: digest for file in weight_files(folder) for name, digest in tensor_hashes(file).items()
        }
        engine = Engine(memory=MEMORY, nice=0, threads=1, log=Path(place) / "worker.log")
        try:
            for number in range(2 * tries + 1):
                checkpoint = number.to_bytes(32)
                if number % 2:
                    await engine.prepare(Prepare(str(folder), checkpoint, tensors))
                    await trio.sleep(3.0)  # a batch of a model of this size takes longer
                load = Load(str(folder), checkpoint, "cpu", 1, run.manifest.to_bytes(), MEMORY, None, tensors)
                started = time.perf_counter()
                loaded = await engine.load(load)
                if number:
                    took["prepared" if loaded.prepared else "loaded"].append(time.perf_counter() - started)
        finally:
            await engine.close()
    return {name: round(statistics.median(seconds), 4) for name, seconds in took.items() if seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tries", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.model is not None:
        figures: dict[str, Any] = trio.run(swaps, arguments.model, arguments.tries)
    else:
        figures = demo(arguments.seconds, arguments.seed)
    print(json.dumps({"bench": "share", **figures}))


if __name__ == "__main__":
    main()
