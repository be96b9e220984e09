"""`nous-node eval`: how well a model does on held-out tasks, with how sure that is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from nous_node.envs import registry
from nous_node.envs.access import Access

from .env_config import read_config
from .env_policy import trial
from .evaluation import GREEDY_TEMPERATURE, play
from .wording import duration, printable

Z: Final = 1.959964
"""Of the normal distribution: 95 % lie within."""

MAX_CAUSE: Final = 400
"""Characters of a failure."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What the command line says."""

    model: str
    environments: list[str]
    config: list[str]
    tasks: int
    temperature: float | None
    """None: greedy."""
    max_tokens: int | None


class Evaluated(msgspec.Struct, frozen=True):
    """One environment. With `--json` these are the keys."""

    environment: str
    version: str
    model: str
    temperature: float
    tasks: int
    right: int
    """Tasks with a full score."""
    share: float
    low: float
    high: float
    """95 % interval of the share (Wilson)."""
    reward: float | None
    """Mean over all answers; None where there is none."""
    tokens: float | None
    """Sampled ones an answer."""
    failed: int
    failure: str
    """The first one."""
    seconds: float


def evaluate(options: EvalOptions, access: Access, told: Callable[[str], None]) -> list[Evaluated]:
    """One after the other. `told` hears how far it is. Raises LocalError, ModelError, an EnvError."""
    config = read_config(options.config)
    made = [(name, registry.make(name, config, access)) for name in options.environments]
    tried = trial(options.model, 1, options.max_tokens)
    told("The weights are read")
    policy = tried.policy()
    temperature = GREEDY_TEMPERATURE if options.temperature is None else options.temperature
    scores = []
    for name, environment in made:
        began = time.monotonic()
        told(f"{options.tasks:,} tasks of {name} are played")
        played = play(policy, environment, tried.settings, options.tasks, temperature)
        low, high = wilson(played.right, played.asked)
        answers = len(played.rewards)
        scores.append(
            Evaluated(
                name,
                registry.version(name, config, access),
                options.model,
                0.0 if options.temperature is None else temperature,
                played.asked,
                played.right,
                played.right / max(played.asked, 1),
                low,
                high,
                math.fsum(played.rewards) / answers if answers else None,
                played.sampled / answers if answers else None,
                len(played.failed),
                played.failed[0] if played.failed else "",
                time.monotonic() - began,
            )
        )
    return scores


def wilson(right: int, asked: int) -> tuple[float, float]:
    """Where a share lies with 95 %, after so many right ones (https://doi.org/10.2307/2276774)."""
    if not asked:
        return 0.0, 1.0
    share, square = right / asked, Z * Z / asked
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / asked + square / (4 * asked)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def score_lines(scores: Sequence[Evaluated]) -> list[str]:
    """For a person."""
    return [line for one in scores for line in _lines(one)]


def _lines(one: Evaluated) -> list[str]:
    how = "greedy" if one.temperature == 0 else f"temperature {one.temperature:g}"
    told = [
        f"{printable(one.environment)} {printable(one.version)}: {one.right:,} of {one.tasks:,} right, "
        f"{100 * one.share:.1f} % (95 %: {100 * one.low:.1f} to {100 * one.high:.1f} %)",
    ]
    if one.reward is not None and one.tokens is not None:
        told.append(
            f"  mean reward {one.reward:.3f}, {one.tokens:.1f} tokens an answer, {how}, "
            f"{duration(one.seconds)}"
        )
    if one.failed:
        told.append(f"  {one.failed:,} failed, the first so: {printable(one.failure, MAX_CAUSE)}")
    return told
