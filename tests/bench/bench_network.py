"""How much of a single process's learning rate the network keeps, on this machine; prints one JSON line.

    python tests/bench/bench_network.py [--seconds 150] [--seed 0]

First `bench_loop.py` (one process, one thread, generation and verification included, lag 2) for 20
CPU-seconds, then `nous-node demo` with two volunteers for `--seconds`. `rate_kept` is the demo's versions a
second (between its first and its last version, without start-up) over the loop's steps a CPU-second; both
learn from 32 groups of 8 a step. `to_80`: seconds from the start of all processes, imports included, until
held-out greedy accuracy first was .80.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

LOOP_SECONDS = 20


def loop(seed: int) -> float:
    """Steps a CPU-second of the single process."""
    script = Path(__file__).with_name("bench_loop.py")
    command = [
        sys.executable,
        str(script),
        "--seeds",
        str(seed),
        "--seconds",
        str(LOOP_SECONDS),
        "--lag",
        "2",
    ]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (result,) = json.loads(line)["runs"]
    return result["steps"] / result["seconds"]


def demo(seed: int, seconds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "nous_node.node.cli", "demo", "--seed", str(seed)]
        command += ["--seconds", str(seconds), "--report", str(report), "--home", str(Path(folder) / "home")]
        subprocess.run(command, check=False, capture_output=True)
        return json.loads(report.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    steps = loop(arguments.seed)
    report = demo(arguments.seed, arguments.seconds)
    versions = report["versions"]
    first, last = versions[0], versions[-1]
    rate = (last["version"] - first["version"]) / (last["seconds"] - first["seconds"])
    measured = [version for version in versions if version["greedy"] is not None]
    print(
        json.dumps(
            {
                "bench": "network",
                "seed": arguments.seed,
                "rate_kept": round(rate / steps, 2),
                "versions_per_second": round(rate, 2),
                "loop_steps_per_cpu_second": round(steps, 2),
                "greedy_before": report["greedy_before"],
                "greedy_after": report["greedy_after"],
                "to_80": next((round(v["seconds"]) for v in measured if v["greedy"] >= 0.8), None),
                "groups_accepted": report["groups_accepted"],
                "groups_refused": report["groups_refused"],
                "bytes_per_trained_token": report["bytes_per_trained_token"],
                "generated_tokens_per_second": report["generated_tokens_per_second"],
            }
        )
    )


if __name__ == "__main__":
    main()
