"""GRPO on sorting four digits in one process: what the trainer's parts learn without a network between.

    python tests/bench/bench_loop.py --seeds 0,1,2 --seconds 45

CPU-seconds are those of this process on one thread, generation and verification included. `--lag` trains on
groups that are that many versions old, as a network does; `--toll` adds a cost in milliseconds a group, as
the network has, to the clock. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections import deque

import numpy as np
import torch

from nous_node.trainer.advantage import AdvantageKind
from nous_node.trainer.generate import Completion, Request, generate, uniforms
from nous_node.trainer.loss import Aggregation, Anchor, ClipRange
from nous_node.trainer.optim import Optimizer, OptimizerConfig
from nous_node.trainer.policy import DEFAULT_FOLDER, Policy
from nous_node.trainer.prefill import Recorded, prefill
from nous_node.trainer.step import Group, Trajectory, UpdateConfig, update

MAX_TOKENS = 8


def tasks(seed: str, count: int, digits: int = 4) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice("0123456789") for _ in range(digits)) for _ in range(count)]


def reward(task: str, completion: Completion) -> float:
    """The share of right positions, if the answer ended itself."""
    if completion.finish != "stop":
        return 0.0
    answer, right = bytes(min(t, 255) for t in completion.tokens[:-1]), "".join(sorted(task)).encode()
    return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(right), len(answer))


def rollouts(
    policy: Policy, work: list[str], size: int, version: int, salt: str
) -> tuple[list[Group], list[Recorded]]:
    prompts = [policy.tokenizer.encode(f"sort {task}=") for task in work]
    keys = [hashlib.sha256(f"{salt} {n}".encode()).digest() for n in range(len(work) * size)]
    asked = [Request(prompts[n // size], key, 0, MAX_TOKENS) for n, key in enumerate(keys)]
    answers = generate(policy, asked, 1.0, {policy.tokenizer.eos_id})
    records, groups = [], []
    for n, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        tokens = np.array([*request.prompt, *answer.tokens])
        trained = np.arange(len(tokens)) >= len(request.prompt)
        records.append(Recorded(tokens, trained, uniforms(request.key, 0, len(answer.tokens))))
        if n % size == 0:
            groups.append(Group([], [], version))
        groups[-1].trajectories.append(Trajectory(tokens, trained, answer.logprobs))
        groups[-1].rewards.append(reward(work[n // size], answer))
    return groups, records


def greedy(policy: Policy, seed: int) -> float:
    work = tasks(f"held-out {seed}", 256)
    asked = [Request(policy.tokenizer.encode(f"sort {t}="), bytes(32), 0, MAX_TOKENS) for t in work]
    answers = generate(policy, asked, 1e-4, {policy.tokenizer.eos_id})
    return float(np.mean([reward(t, a) == 1.0 for t, a in zip(work, answers, strict=True)]))


def run(seed: int, arguments: argparse.Namespace, config: UpdateConfig) -> dict[str, object]:
    policy, volunteer = Policy.load(arguments.model), Policy.load(arguments.model)
    optimizer = Optimizer(policy, config.optimizer)
    baselines, before = {}, greedy(policy, seed)
    past = deque([{n: t.clone() for n, t in policy.tensors().items()}], maxlen=arguments.lag + 1)
    spent, steps, curve, flat = 0.0, 0, {}, 0
    marks = iter(arguments.marks)
    mark = next(marks)
    limit = arguments.steps or 10**9
    while steps < limit and (arguments.steps or spent < arguments.seconds):
        start = time.process_time()
        volunteer.load_tensors(past[0])
        work = tasks(f"{seed} {steps}", arguments.prompts)
        groups, records = rollouts(volunteer, work, arguments.samples, steps, f"{seed} {steps}")
        if not arguments.unverified:
            prefill(volunteer, records, 1.0)
        report = update(policy, optimizer, groups, config, baselines)
        baselines, flat = report.baselines, flat + report.zero_variance
        past.append({n: t.clone() for n, t in policy.tensors().items()})
        steps += 1
        spent += time.process_time() - start + arguments.toll * arguments.prompts / 1e3
        if mark is not None and (steps if arguments.steps else spent) >= mark:
            curve[mark] = round(greedy(policy, seed), 3)
            mark = next(marks, None)
    return {
        "seed": seed,
        "before": round(before, 3),
        "after": round(greedy(policy, seed), 3),
        "steps": steps,
        "seconds": round(spent, 1),
        "reward": round(report.reward, 3),
        "flat": round(flat / steps / arguments.prompts, 2),
        "entropy": round(report.entropy, 3),
        "curve": curve,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_FOLDER)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--steps", type=int, default=0, help="stop after these instead; marks count them too")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--toll", type=float, default=0.0)
    parser.add_argument("--unverified", action="store_true")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--hold", type=int, default=50)
    parser.add_argument("--clip-low", type=float, default=0.2)
    parser.add_argument("--clip-high", type=float, default=0.28)
    parser.add_argument("--anchor", default="behaviour")
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--advantage", default="grpo")
    parser.add_argument("--aggregation", default="token")
    parser.add_argument("--count-flat", action="store_true")
    parser.add_argument("--marks", type=lambda text: [float(m) for m in text.split(",")], default="15,30")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    config = UpdateConfig(
        advantage=AdvantageKind(arguments.advantage),
        aggregation=Aggregation(arguments.aggregation),
        optimizer=OptimizerConfig(
            rate=arguments.rate, hold=arguments.hold, betas=(arguments.beta1, arguments.beta2)
        ),
        minibatches=arguments.minibatches,
        epochs=arguments.epochs,
        fixed_length=MAX_TOKENS,
        count_flat=arguments.count_flat,
        anchor=Anchor(arguments.anchor),
        clip=ClipRange(low=arguments.clip_low, high=arguments.clip_high),
    )
    results = [run(int(seed), arguments, config) for seed in arguments.seeds.split(",")]
    print(json.dumps({"bench": "loop", "cpu_seconds": arguments.seconds, "runs": results}))


if __name__ == "__main__":
    main()
