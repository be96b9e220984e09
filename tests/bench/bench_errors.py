"""Error rates of verification: honest rollouts and attacks, raw numbers first, then the table.

python tests/bench/bench_errors.py collect --model embedded --root DIR    a minute
python tests/bench/bench_errors.py collect --model smollm2 --root DIR     hours; goes on where it was
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from errors_jobs import MODELS, Job, run
from errors_report import print_table

TRUE_AND_NODE = ("base", "node")
SMOLLM2_JOBS = [
    Job("calibration", 0, 8, checks=TRUE_AND_NODE, hidden=True, varied=True),
    Job("calibration", 8, 10, checks=("base", "next"), varied=True),
    Job("T 0.9", 0, 3, sampler="T 0.9", hidden=True),
    Job("int8", 0, 3, weights="int8", checks=TRUE_AND_NODE, hidden=True),
    Job("top-p 0.9", 0, 3, sampler="top-p 0.9", hidden=True),
    Job("evaluation", 0, 3, checks=("base", "node", "next"), hidden=True, varied=True),
    Job("edited", 0, 3, source="evaluation", checks=TRUE_AND_NODE, hidden=True),
    Job("T 1.1", 0, 3, sampler="T 1.1", hidden=True),
    Job("int4", 0, 1, weights="int4", checks=("base", "node", "int4"), hidden=True),
    Job("greedy", 0, 1, sampler="greedy", hidden=True),
    Job("other prompt", 0, 1, source="evaluation", checks=TRUE_AND_NODE, hidden=True),
    Job("int8", 0, 1, checks=("int8",), hidden=True),
    *(Job(name, 0, 1, checks=("node",), hidden=True) for name in ("T 0.9", "T 1.1", "top-p 0.9", "greedy")),
    Job("calibration", 1, 6, checks=("next",)),
    Job("evaluation", 3, 32, varied=True),
    Job("evaluation", 3, 8, checks=("next",)),
    Job("calibration", 10, 16, varied=True),
    *(Job(name, 3, 8, sampler=name) for name in ("T 0.9", "top-p 0.9", "T 1.1")),
    Job("int8", 3, 8, weights="int8", checks=TRUE_AND_NODE),
    Job("edited", 3, 8, source="evaluation"),
    Job("calibration", 2, 4, checks=("single",)),
    *(Job(name, 8, 13, sampler=name) for name in ("T 0.9", "top-p 0.9", "T 1.1")),
    Job("other prompt", 1, 13, source="evaluation"),
    Job("edited", 8, 13, source="evaluation"),
    Job("int8", 8, 13, weights="int8", checks=TRUE_AND_NODE),
    Job("int4", 1, 13, weights="int4", checks=TRUE_AND_NODE),
    Job("greedy", 1, 13, sampler="greedy"),
]
"""A little of everything first; the rest widens the sets."""

CHUNKS = 12
"""Of the embedded default, 64 groups each: every batch size under each kind of vector instructions."""
LANES = (("avx512", 1), ("avx2", 2), ("default", 1))
"""ATEN_CPU_CAPABILITY and threads of the processes that share the embedded default's work."""


def embedded_jobs(lane: int, first: bool) -> list[Job]:
    """What one process checks (and makes, `first` only: the others' chunks have to be there then)."""
    capability = LANES[lane][0]
    honest = () if first else (f"base {capability}", *(("base", "single") if lane == 0 else ()))
    jobs = [Job(name, 0, CHUNKS, checks=honest, varied=True) for name in ("calibration", "evaluation")]
    if first or lane:
        return jobs
    jobs += [Job(name, 0, 4, sampler=name) for name in ("T 0.9", "T 1.1", "top-p 0.9", "greedy")]
    jobs += [Job(name, 0, 4, weights=name, checks=("base", "node")) for name in ("int8", "int4")]
    jobs += [Job(name, 0, 4, source="evaluation") for name in ("edited", "other prompt")]
    return [
        *jobs,
        Job("evaluation", 0, CHUNKS, checks=("next",)),
        Job("calibration", 1, CHUNKS, checks=("next",)),
    ]


def collect_embedded(root: Path) -> None:
    """Each lane makes its chunks, then each checks all of them."""
    for stage in ("make", "check"):
        for lane, (capability, threads) in enumerate(LANES):
            environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(threads)}
            command = [sys.executable, __file__, "lane", "--root", str(root), stage, str(lane)]
            subprocess.run(command, env=environment, check=True, stdout=sys.stderr)


def run_lane(root: Path, lane: int, *, first: bool) -> None:
    """One process of the embedded default's; the honest chunks are shared, the first makes the attacks."""
    run(
        MODELS["embedded"],
        root,
        embedded_jobs(lane, first),
        lambda chunk: chunk // 4 == lane if first else lane == 0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    collect, lane, table = (commands.add_parser(name) for name in ("collect", "lane", "table"))
    for command in (collect, lane, table):
        command.add_argument("--root", type=Path, required=True)
    collect.add_argument("--model", choices=sorted(MODELS), required=True)
    lane.add_argument("stage", choices=("make", "check"))
    lane.add_argument("lane", type=int, choices=range(len(LANES)))
    options = parser.parse_args()
    if options.command is None:
        with tempfile.TemporaryDirectory() as folder:
            collect_embedded(Path(folder))
            print_table(Path(folder))
    elif options.command == "table":
        print_table(options.root)
    elif options.command == "lane":
        run_lane(options.root, options.lane, first=options.stage == "make")
    elif options.model == "embedded":
        collect_embedded(options.root)
    else:
        run(MODELS["smollm2"], options.root, SMOLLM2_JOBS)


if __name__ == "__main__":
    main()
