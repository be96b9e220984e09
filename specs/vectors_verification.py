"""Vectors of chapter 08: limits, and the verdict on a group whose log-probs and distances are given."""

from __future__ import annotations

import math
import struct
from typing import Any

from vectors_world import MANIFEST, case

TOKENS = MANIFEST.thresholds.tokens
SURE = 0.9
LOGPROBS, DISTANCES = MANIFEST.thresholds.logprobs, MANIFEST.thresholds.distances
LARGEST = MANIFEST.thresholds.distance_max
NAN = math.nan


def limits() -> list[dict[str, Any]]:
    """The formula of VER-10, written down once more."""
    rows = [
        ("as many tokens as calibrated", 1e-5, 1e-4, 512, 512),
        ("more tokens: no lower limit", 1e-5, 1e-4, 512, 100_000),
        ("a quarter of the tokens: twice the way from the mean", 1e-5, 1e-4, 512, 128),
        ("one token less", 1e-5, 1e-4, 512, 511),
        ("a single token", 2e-3, 4e-2, 512, 1),
        ("weights are no whole numbers", 1e-5, 1e-4, 512, 127.25),
        ("a weight below 1 counts as 1", 2e-3, 4e-2, 512, 0.1),
        ("calibrated for a single token", 2e-3, 4e-2, 1, 1),
        ("a limit at the mean", 2e-3, 2e-3, 512, 3),
        ("the limit of a group of millions of tokens", 1e-6, 3e-6, 40, 67_108_864),
    ]
    return [
        case(
            comment,
            "VER-10",
            "valid",
            mean=mean,
            limit=limit,
            reference=reference,
            tokens=tokens,
            at=(at := mean + (limit - mean) * math.sqrt(max(1.0, reference / max(1.0, tokens)))),
            tolerance=at * 1e-12,
        )
        for comment, mean, limit, reference, tokens in rows
    ]


def f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def weight(recomputed: float) -> float:
    return 1 - SURE * math.exp(recomputed)


def trajectory(
    tokens: int, off: float = 0.0, distance: float = 0.0, seeded: bool = True, **odd: float
) -> dict[str, Any]:
    """Tokens whose reported log-probs are `off` and whose distances are `distance` times their weight;
    `reported`, `recomputed` and `far` replace that of the last token."""
    recomputed = [f32(-((7 * number) % 31) / 8 - 0.125) for number in range(tokens)]
    signs = [1 if number % 2 else -1 for number in range(tokens)]
    reported = [
        f32(value + sign * off * weight(value)) for value, sign in zip(recomputed, signs, strict=True)
    ]
    distances = [distance * weight(value) for value in recomputed]
    for name, values in (("reported", reported), ("recomputed", recomputed), ("far", distances)):
        if name in odd:
            values[-1] = odd[name]
    shown = {"reported": reported, "recomputed": recomputed, **({"distances": distances} if seeded else {})}
    return {name: [None if value != value else value for value in values] for name, values in shown.items()}


Pieces = list[dict[str, Any]]
HONEST = trajectory(20, 1e-5, 1e-6)


def verification() -> list[dict[str, Any]]:
    return [*_taken(), *_refused()]


def _taken() -> list[dict[str, Any]]:
    rows: list[tuple[str, str, Pieces]] = [
        ("an honest group", "VER-4 VER-5", [HONEST, HONEST]),
        ("the very same figures", "VER-4 VER-5", [trajectory(20), trajectory(20)]),
        ("just within both limits", "VER-4 VER-5", [trajectory(60, 9.9e-5, 9.9e-6)]),
        ("few tokens may differ more", "VER-4 VER-5 VER-10", [trajectory(10, 1.8e-4, 1.8e-5)]),
        ("a single token", "VER-4 VER-5 VER-10", [trajectory(1, 5.5e-4, 5.5e-5)]),
        ("one far token within the largest", "VER-5", [trajectory(200, 1e-5, 0.0, far=9.9e-4)]),
        ("a trajectory without trained tokens beside one with some", "VER-4", [HONEST, trajectory(0)]),
        (
            "sure tokens count a tenth",
            "VER-4 VER-10",
            [trajectory(30, 9e-5), trajectory(30, 9e-5, recomputed=0.0, reported=f32(-8e-6))],
        ),
        ("free sampling has no distances", "VER-4", [trajectory(40, 5e-5, seeded=False)]),
        ("differences of both signs do not cancel", "VER-4", [trajectory(40, 9e-5)]),
    ]
    return [
        case(comment, requires, "valid", trajectories=pieces, **_shown(pieces))
        for comment, requires, pieces in rows
    ]


def _refused() -> list[dict[str, Any]]:
    half = trajectory(80, 1.5e-4)
    rows: list[tuple[str, str, Pieces, str, str]] = [
        ("another model", "VER-4", [trajectory(40, 0.02), trajectory(40, 0.02)], "mad", "group"),
        ("just beyond the limit", "VER-4", [trajectory(60, 1.01e-4)], "mad", "group"),
        ("few tokens, and too far all the same", "VER-4 VER-10", [trajectory(10, 2.5e-4)], "mad", "group"),
        ("many tokens have no lower limit, and no higher", "VER-10", [trajectory(400, 1.01e-4)], "mad", "group"),
        ("one trajectory of another model in an honest group", "VER-4", [half, trajectory(240)], "mad", "0"),
        ("the last trajectory, a short one", "VER-4", [trajectory(390), trajectory(10, 1e-3)], "mad", "1"),
        ("a reported log-prob that is no number", "VER-4", [trajectory(40, reported=NAN)], "mad", "group"),
        ("a recomputed log-prob that is no number", "VER-4", [trajectory(40, recomputed=NAN)], "mad", "group"),
        ("one no-number among many tokens", "VER-4", [HONEST, trajectory(400, recomputed=NAN)], "mad", "group"),
        ("a sure token that differs weighs as much as ten", "VER-4 VER-10", [trajectory(1, recomputed=0.0, reported=f32(-7e-4))], "mad", "group"),
        ("free sampling, another model", "VER-4", [trajectory(40, 0.02, seeded=False)], "mad", "group"),
        ("another sampler key", "VER-5", [trajectory(40, 1e-5, 0.19)], "distance", "group"),
        ("just beyond the mean distance", "VER-5", [trajectory(60, 1e-5, 1.01e-5)], "distance", "group"),
        ("few tokens, and too far from their draws", "VER-5 VER-10", [trajectory(10, 0.0, 2.5e-5)], "distance", "group"),
        ("one token of another draw among many", "VER-5", [trajectory(400, 0.0, 0.0, far=1.1e-3)], "largest", "group"),
        ("a distance that is no number", "VER-5", [trajectory(40, 0.0, 0.0, far=NAN)], "distance", "group"),
        ("one trajectory of another draw in an honest group", "VER-5", [trajectory(40, 0.0, 1.5e-5), trajectory(200)], "distance", "0"),
        ("distances of a trajectory come before log-probs of the next", "VER-4 VER-5", [trajectory(40, 0.0, 1.5e-5), half, trajectory(600)], "distance", "0"),
        ("log-probs of a trajectory come before its distances", "VER-4 VER-5", [trajectory(80, 1.5e-4, 1.5e-5), trajectory(600)], "mad", "0"),
    ]  # fmt: skip
    return [_refusal(*row) for row in rows]


def _refusal(comment: str, requires: str, pieces: Pieces, what: str, where: str) -> dict[str, Any]:
    """`where`: `group`, or which trajectory alone fails."""
    figures = _figures(pieces if where == "group" else [pieces[int(where)]])
    measured = figures[what]
    bound = LOGPROBS if what == "mad" else DISTANCES
    limit = bound.mean + (bound.limit - bound.mean) * math.sqrt(
        max(1.0, TOKENS / max(1.0, figures["weight"]))
    )
    return case(
        comment,
        requires,
        "invalid",
        trajectories=pieces,
        code="logprob-mismatch" if what == "mad" else "sampling-mismatch",
        measured=measured,
        threshold=LARGEST if what == "largest" else limit,
        tolerance=max(measured or 0.0, limit) * 1e-9,
    )


def _shown(pieces: Pieces) -> dict[str, Any]:
    return {name: value for name, value in _figures(pieces).items() if name != "weight"}


def _figures(pieces: Pieces) -> dict[str, Any]:
    """Over all tokens; None where a value is no number."""

    numbers = [
        (NAN if p is None else p, NAN if q is None else q)
        for piece in pieces
        for p, q in zip(piece["reported"], piece["recomputed"], strict=True)
    ]
    total = math.fsum(1.0 if q != q else weight(q) for _, q in numbers)
    distances = [NAN if d is None else d for piece in pieces for d in piece.get("distances", [])]

    def over(values: list[float]) -> float | None:
        return None if any(value != value for value in values) else math.fsum(values) / total

    mad = over([abs(p - q) for p, q in numbers])
    distance = over(distances) if distances else 0.0
    largest = max(distances) if distances else 0.0
    figures = {"mad": mad, "distance": distance, "largest": largest}
    return {**figures, "weight": total, "tolerance": max(mad or 0.0, distance or 0.0) * 1e-9}
