"""What a run learns with three of ten volunteers hostile, beside one with ten honest ones.

    python tests/bench/bench_hostile.py [--seeds 0,1,2] [--groups 8000] [--seconds 240]

Each run is a real `nous-node train` (embedded default, default learning) and a crowd of ten connections
(`hostile_crowd.py`). The cheats make honest groups until they are trusted, then mix all attacks of
`hostile_forgeries.py` among honest groups: one in every second group, one in every tenth, one in every
fiftieth; one whose key is in quarantine goes on with a fresh key. Held-out greedy accuracy (--tasks tasks)
is measured afterwards, of the first version by which the run had learnt from so many accepted groups. Prints
one JSON line a run, then tables in Markdown; with --results FILE those of earlier runs are in them, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from nous_node.node.create import create_run
from nous_node.node.home import Home
from nous_node.node.plan import EnvironmentPlan, RunPlan
from nous_node.node.runfolder import RunFolder

LOCAL = "/ip4/127.0.0.1/tcp/0"
KINDS = {"honest": 0, "hostile": 3}
"""Cheats among the ten."""


def train(home: Home, folder: RunFolder, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "nous_node.node.cli", "train", folder.path.name, "--json"]
    command += ["--home", str(home.path), "--listen", LOCAL, "--no-mdns", "--threads", "1"]
    log = (folder.path / "trainer.stderr").open("w")
    return subprocess.Popen([*command, "--seed", str(seed)], stdout=subprocess.PIPE, stderr=log, text=True)


def crowd(folder: RunFolder, address: str, seed: int, hostile: int) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("hostile_crowd.py")
    command = [sys.executable, str(script), str(folder.path), address, str(seed), str(hostile)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(kind: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        home = Home.open(Path(place) / "home")
        plan = RunPlan(
            environments={"sort-digits": EnvironmentPlan()}, learning={"keep_checkpoints": 1_000_000}
        )
        folder = create_run(home.runs / "bench", "bench", home.identity(), plan, time.time_ns() // 1_000_000)
        trainer = train(home, folder, seed)
        volunteers = None
        began = time.monotonic()
        versions: list[tuple[int, int]] = []
        """(version, groups that were learnt from up to it)"""
        trained = rolled_back = 0
        notes: list[str] = []
        assert trainer.stdout is not None
        try:
            for line in trainer.stdout:
                event = json.loads(line)
                match event["event"]:
                    case "run":
                        volunteers = crowd(folder, event["addresses"][0], seed, KINDS[kind])
                    case "note":
                        notes.append(event["text"])
                    case "version":
                        trained += event["groups"]
                        versions.append((event["version"], trained))
                        rolled_back += event["rolled_back"] is not None
                if trained >= arguments.groups or time.monotonic() - began > arguments.seconds:
                    break
        finally:
            report = _end(volunteers)
            trainer.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                trainer.communicate(timeout=30)
            trainer.kill()
        seconds = time.monotonic() - began
        result = summary(report, folder)
        return {
            "bench": "hostile",
            "run": kind,
            "seed": seed,
            "seconds": round(seconds),
            "groups": trained,
            "versions": len(versions),
            "rolled_back": rolled_back,
            "accuracy": accuracies(folder, versions, arguments),
            **result,
            "notes": notes[:5],
        }


def _end(volunteers: subprocess.Popen[str] | None) -> list[dict[str, Any]]:
    """What the crowd says at its end."""
    if volunteers is None:
        return []
    try:
        text, _ = volunteers.communicate("", timeout=30)
        report: list[dict[str, Any]] = json.loads(text)
        return report
    except (subprocess.TimeoutExpired, ValueError):
        return []
    finally:
        volunteers.kill()


def summary(report: list[dict[str, Any]], folder: RunFolder) -> dict[str, Any]:
    """Both kinds of volunteers in figures: what they heard, and what the journal says."""
    honest = [one for one in report if not one["hostile"]]
    hostile = [one for one in report if one["hostile"]]
    forged: dict[str, Counter[str]] = {}
    for one in hostile:
        for style, codes in one["forged_verdicts"].items():
            forged.setdefault(style, Counter()).update(codes)
    return {
        "honest_accepted": sum(one["accepted"] for one in honest),
        "honest_refused": dict(sum((Counter(one["refused"]) for one in honest), Counter())),
        "honest_lost": sum(one["lost"] for one in honest),
        "honest_unanswered": sum(one["unanswered"] for one in honest),
        "honest_states": dict(Counter(state for one in honest for state in one["states"])),
        "honest_at_end": journalled_states(folder, honest),
        "hostile_at_end": journalled_states(folder, hostile),
        "forged_accepted_in_journal": forged_accepted(folder, hostile),
        "hostile_sent": sum(one["sent"] for one in hostile),
        "hostile_accepted": sum(one["accepted"] for one in hostile),
        "hostile_refused": dict(sum((Counter(one["refused"]) for one in hostile), Counter())),
        "hostile_keys": len(hostile),
        "hostile_ways": dict(Counter(" > ".join(one["states"]) for one in hostile)),
        "forged_sent": sum(sum(one["forged"].values()) for one in hostile),
        "forged_answered": sum(codes.total() for codes in forged.values()),
        "forged_accepted": sum(one["forged_accepted"] for one in hostile),
        "forged_verdicts": {style: dict(codes) for style, codes in forged.items()},
        "held_back": sum(one["held_back"] for one in hostile),
        "debit": sum(one["debit"] or 0 for one in hostile),
    }


def journalled_states(folder: RunFolder, volunteers: list[dict[str, Any]]) -> dict[str, int]:
    """Keys by state, and how many quarantines they have behind them."""
    found: Counter[str] = Counter()
    with closing(sqlite3.connect(folder.journal)) as connection:
        for one in volunteers:
            query = "SELECT state, quarantines FROM keys WHERE key = ?"
            row = connection.execute(query, (bytes.fromhex(one["key"]),)).fetchone()
            if row is not None:
                found[row[0]] += 1
                found["quarantines"] += row[1]
    return dict(found)


def forged_accepted(folder: RunFolder, hostile: list[dict[str, Any]]) -> int:
    """Forged groups with an acceptance in the journal."""
    with closing(sqlite3.connect(folder.journal)) as connection:
        query = "SELECT count(*) FROM receipts WHERE id = ? AND verdict = 'accepted'"
        return sum(
            connection.execute(query, (bytes.fromhex(identity),)).fetchone()[0]
            for one in hostile
            for identity in one["forged_ids"]
        )


def accuracies(
    folder: RunFolder, versions: list[tuple[int, int]], arguments: argparse.Namespace
) -> dict[int, float]:
    """Held-out greedy accuracy by groups learnt from."""
    import torch

    from nous_node.envs.environment import PolicySettings
    from nous_node.envs.registry import make_entry
    from nous_node.node.evaluation import held_out_accuracy
    from nous_node.trainer.policy import Policy

    torch.set_num_threads(1)
    environments = [make_entry(entry) for entry in folder.manifest.environments]
    found: dict[int, float] = {}
    marks = [0, *range(arguments.every, arguments.groups + 1, arguments.every)]
    for mark in marks:
        version = next((version for version, groups in [(0, 0), *versions] if groups >= mark), None)
        if version is None or not folder.checkpoint(version).is_dir():
            continue
        policy = Policy.load(folder.checkpoint(version), "float32")
        accuracy = held_out_accuracy(
            policy, environments, PolicySettings.of(folder.manifest, policy.tokenizer), arguments.tasks
        )
        found[mark] = 0.0 if accuracy is None else round(accuracy.share, 4)
    return found


def curve(results: list[dict[str, Any]]) -> str:
    """Accuracy by groups learnt from: a column a run, and the means with the difference that is noise."""
    seeds = sorted({one["seed"] for one in results})
    by = {(one["run"], one["seed"]): one["accuracy"] for one in results}
    heads = [f"{kind} {seed}" for kind in KINDS for seed in seeds]
    lines = [
        f"| groups | {' | '.join(heads)} | {' | '.join(f'{kind}, mean' for kind in KINDS)} | difference |",
        "| ---: |" + " ---: |" * (len(heads) + len(KINDS) + 1),
    ]
    for mark in sorted({mark for one in results for mark in one["accuracy"]}):
        found = {
            kind: [by[kind, seed][mark] for seed in seeds if mark in by.get((kind, seed), {})]
            for kind in KINDS
        }
        cells = [_cell(by.get((kind, seed), {}).get(mark)) for kind in KINDS for seed in seeds]
        means = [_cell(statistics.mean(values) if values else None) for values in found.values()]
        lines.append(f"| {mark:,} | {' | '.join([*cells, *means])} | {_difference(*found.values())} |")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _difference(honest: list[float], hostile: list[float]) -> str:
    """Of the means, with its standard error from the runs' own spread."""
    if len(honest) < 2 or len(hostile) < 2:
        return "-"
    error = sum(statistics.variance(values) / len(values) for values in (honest, hostile)) ** 0.5
    return f"{statistics.mean(hostile) - statistics.mean(honest):+.3f} ± {error:.3f}"


def caught(results: list[dict[str, Any]]) -> str:
    """What became of forged groups, by attack, over all hostile runs."""
    found: dict[str, Counter[str]] = {}
    for one in results:
        for style, codes in one["forged_verdicts"].items():
            found.setdefault(style, Counter()).update(codes)
    lines = ["| attack | answered | accepted | codes |", "| --- | ---: | ---: | --- |"]
    for style, codes in sorted(found.items()):
        accepted = codes.pop("", 0)
        named = ", ".join(f"`{code}` {count}" for code, count in codes.most_common())
        lines.append(f"| {style} | {codes.total() + accepted} | {accepted} | {named} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--groups", type=int, default=8000)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--tasks", type=int, default=1024)
    parser.add_argument("--results", type=Path, nargs="*", default=[], help="JSON lines of earlier runs")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = [json.loads(line) for file in arguments.results for line in file.read_text().splitlines()]
    for one in results:
        one["accuracy"] = {int(mark): value for mark, value in one["accuracy"].items()}
    for seed in filter(None, arguments.seeds.split(",")):
        for kind in arguments.kinds.split(","):
            results.append(run(kind, int(seed), arguments))
            print(json.dumps(results[-1]), flush=True)
    print(curve(results), caught(results), sep="\n\n")


if __name__ == "__main__":
    main()
