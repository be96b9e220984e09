"""Consecutive versions of a policy by real updates, as files: what `bench_deltas.py` makes deltas of.

SmolLM2 learns sums by policy gradient (4 prompts x 8 samples), the embedded default sorts digits (32 x 8, as
in `bench_loop.py`). AdamW of `trainer/optim.py` without warm-up; fp32 master weights.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from bench_loop import rollouts, tasks
from smollm2 import chat_prompts

from nous_node.trainer.checkpoint import WEIGHTS_FILE, save_checkpoint
from nous_node.trainer.generate import Request, generate
from nous_node.trainer.optim import Optimizer, OptimizerConfig
from nous_node.trainer.policy import Policy
from nous_node.trainer.step import Group, Trajectory, UpdateConfig, update

PROMPTS, SAMPLES, TOKENS = 4, 8, 24


def versions(
    policy: Policy,
    rollouts: Callable[[Policy, int], list[Group]],
    rate: float,
    count: int,
    folder: Path,
    stored: str,
) -> Iterator[Path]:
    """The weights before the first of `count` updates and after each of them, stored in that dtype. An update
    without signal is tried again with other tasks; a file is gone when the next but one comes."""
    optimizer = Optimizer(policy, OptimizerConfig(rate=rate, warmup=0))
    baselines, seed = {}, 0
    for version in range(count + 1):
        steps = optimizer.steps
        while version and optimizer.steps == steps:
            report = update(policy, optimizer, rollouts(policy, seed), UpdateConfig(), baselines)
            baselines, seed = report.baselines, seed + 1
        place = folder / f"{version % 2}"
        save_checkpoint(policy, place, stored, durable=False)
        yield place / WEIGHTS_FILE


def sums(policy: Policy, seed: int) -> list[Group]:
    """Rollouts of "Compute a+b"; the reward falls with the distance from the sum."""
    rng = random.Random(seed)
    pairs = [(rng.randint(2, 50), rng.randint(2, 50)) for _ in range(PROMPTS)]
    texts = [f"Compute {a}+{b}. Reply with only the number." for a, b in pairs]
    prompts = chat_prompts(texts)
    keys = [hashlib.sha256(f"{seed} {n}".encode()).digest() for n in range(PROMPTS * SAMPLES)]
    asked = [Request(prompts[n // SAMPLES], key, 0, TOKENS) for n, key in enumerate(keys)]
    answers = generate(policy, asked, 1.0, {policy.tokenizer.eos_id})
    groups = [Group([], [], seed) for _ in pairs]
    for n, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        tokens = np.array([*request.prompt, *answer.tokens])
        trained = np.arange(len(tokens)) >= len(request.prompt)
        group, right = groups[n // SAMPLES], sum(pairs[n // SAMPLES])
        found = [int(number) for number in re.findall(r"\d{1,4}", policy.tokenizer.decode(answer.tokens))]
        group.trajectories.append(Trajectory(tokens, trained, answer.logprobs))
        group.rewards.append(1 / (1 + abs(found[-1] - right)) if found else 0.0)
    return groups


def digits(policy: Policy, seed: int) -> list[Group]:
    return rollouts(policy, tasks(f"deltas {seed}", 32), 8, seed, f"deltas {seed}")[0]
