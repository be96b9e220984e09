"""Ops of chapters 08 and 10: limits, figures, copies, repetition, ends, drift, evidence, states of keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from nous_node.protocol.errors import RemoteError
from nous_node.protocol.runs import Bound, Thresholds

from .adapter_question import Answer, Ask, Ops, Raw, Refused, figure, run_manifest
from .copies import Copies
from .reputation import Reputation
from .statistics import Drift, Evidence, Figures, check_figures
from .token_checks import check_ends, check_repetition

Numbers = list[float | None]
"""Null: no number."""

MAX_TIMES: Final = 100_000
"""Verdicts of one step that are counted; more change nothing."""


def _doubles(values: Numbers) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _singles(values: Numbers) -> NDArray[np.float32]:
    return np.array(_doubles(values), dtype=np.float32)


class Limit(Ask, frozen=True):
    mean: float
    limit: float
    tokens: float
    reference: int


def limit(ask: Limit) -> Answer:
    return {"at": Bound(ask.mean, 1.0, ask.limit).at(ask.tokens, ask.reference)}


class Sampled(Ask, frozen=True):
    reported: Numbers
    recomputed: Numbers
    distances: Numbers | None = None


class Group(Ask, frozen=True):
    manifest: Raw
    trajectories: list[Sampled]


def verification(ask: Group) -> Answer:
    thresholds = run_manifest(ask.manifest).thresholds
    pieces = [_figures(piece) for piece in ask.trajectories]
    whole = Figures.together(pieces)
    found = {
        "mad": figure(whole.logprob),
        "distance": figure(whole.distance),
        "largest": figure(whole.largest),
    }
    try:
        check_figures(whole, thresholds, "group")
        for piece in pieces:
            check_figures(piece, thresholds, "trajectory")
    except RemoteError as error:
        raise Refused(found, error) from error
    return found


def _figures(piece: Sampled) -> Figures:
    distances = None if piece.distances is None else np.array(_doubles(piece.distances))
    return Figures.of(_singles(piece.reported), _singles(piece.recomputed), distances)


class Tokens(Ask, frozen=True):
    tokens: list[int]
    logprobs: Numbers


class Owned(Ask, frozen=True):
    key: Raw
    checkpoint: Raw
    counter: int
    refused: bool
    trajectories: list[Tokens]


class Groups(Ask, frozen=True):
    groups: list[Owned]
    mode: Literal["seeded", "free"] = "seeded"


def copies(ask: Groups) -> Answer:
    known = Copies(free=ask.mode == "free")
    for group in ask.groups:
        owner = (group.key, group.checkpoint, group.counter)
        tokens = [np.array(one.tokens, np.int64) for one in group.trajectories]
        logprobs = [_singles(one.logprobs) for one in group.trajectories]
        known.check(owner, list(zip(tokens, logprobs, strict=True)))
        if not group.refused:
            known.add(owner, tokens)
    return {}


class Repetition(Ask, frozen=True):
    tokens: list[int]
    stop: list[int]


def repetition(ask: Repetition) -> Answer:
    check_repetition(np.array(ask.tokens, np.int64), ask.stop)
    return {}


class Ends(Ask, frozen=True):
    tokens: list[int]
    recomputed: Numbers
    stop: list[int]
    stop_probability: float


def ends(ask: Ends) -> Answer:
    tokens, recomputed = np.array(ask.tokens, np.int64), _singles(ask.recomputed)
    check_ends(tokens, recomputed, ask.stop, ask.stop_probability)
    return {}


class Measured(Ask, frozen=True):
    tokens: float
    mad: float
    distance: float


class Drifting(Ask, frozen=True):
    manifest: Raw
    groups: list[Measured]


def drift(ask: Drifting) -> Answer:
    def after(total: Drift, group: Measured, thresholds: Thresholds) -> tuple[Drift, Sums]:
        figures = Figures(group.tokens, group.mad, group.distance, 0.0)
        total = total.after(figures, None, thresholds)
        return total, {"sums": [total.logprob, total.distance]}

    return _summed(ask.manifest, ask.groups, after)


Sums = dict[str, object]
"""What is told after a group."""
G = TypeVar("G")


def _summed(
    manifest: Raw, groups: Sequence[G], after: Callable[[Drift, G, Thresholds], tuple[Drift, Sums]]
) -> Answer:
    """A key's sums, looked at before each group and after the last."""
    thresholds = run_manifest(manifest).thresholds
    told: list[Sums] = []
    total = Drift()
    try:
        for group in groups:
            total.check(thresholds)
            total, sums = after(total, group, thresholds)
            told.append(sums)
        total.check(thresholds)
    except RemoteError as error:
        raise Refused({"groups": told}, error) from error
    return {"groups": told}


class Explained(Ask, frozen=True):
    reported: Numbers
    named: Numbers
    other: Numbers


class Explaining(Ask, frozen=True):
    manifest: Raw
    groups: list[Explained]


USUAL: Final = Figures(40, 0.0, 0.0, 0.0)
"""Of a group that adds nothing to the other sums."""


def evidence(ask: Explaining) -> Answer:
    def after(total: Drift, group: Explained, thresholds: Thresholds) -> tuple[Drift, Sums]:
        told = Evidence.of(_singles(group.reported), _singles(group.named), _singles(group.other))
        total = total.after(USUAL, told, thresholds)
        return total, {"ratio": figure(told.ratio), "sum": total.previous}

    return _summed(ask.manifest, ask.groups, after)


class Verdict(Ask, frozen=True):
    now: int
    times: int
    verdict: str
    version: int = 0
    code: str = ""
    measured: float | None = None
    threshold: float | None = None


class Verdicts(Ask, frozen=True):
    steps: list[Verdict]


def states(ask: Verdicts) -> Answer:
    key, found = Reputation(), []
    for step in ask.steps:
        key = _after(key.at(step.now), step)
        found.append({"state": key.state, "until": key.until_ms, "score": key.score})
    return {"steps": found}


def _after(key: Reputation, step: Verdict) -> Reputation:
    for _ in range(min(step.times, MAX_TIMES)):
        match step.verdict:
            case "accepted":
                key = key.accepted(step.version, step.now)
            case "refused":
                key = key.refused(step.code, step.measured, step.threshold, step.now)
    return key


OPS: Final[Ops] = {
    "limits": limit,
    "verification": verification,
    "copies": copies,
    "repetition": repetition,
    "ends": ends,
    "drift": drift,
    "evidence": evidence,
    "states": states,
}
