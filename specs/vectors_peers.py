"""Vectors of chapters 06, 08 and 10 about what a trainer keeps of a key: sums, evidence, holes, states."""

from __future__ import annotations

import math
from typing import Any

from vectors_verification import f32
from vectors_world import MANIFEST, case

THRESHOLDS = MANIFEST.thresholds
MOST, EVIDENCE, FLOOR = 4.0, 20.0, 1e-14


def drift() -> list[dict[str, Any]]:
    """Groups of (mad, mean distance, tokens) in their order."""
    honest = (1e-5, 1e-6, 40)
    worse, worst = (4e-5, 1e-6, 40), (9e-5, 9e-6, 40)
    rows: list[tuple[str, list[tuple[float, float, int]]]] = [
        ("a group at the honest mean: 0", [honest]),
        ("groups better than honest do not bring credit", [(0.0, 0.0, 40)] * 3 + [worse]),
        ("a little above the slack adds up", [worse] * 5),
        ("and falls with honest groups", [worse] * 5 + [honest] * 3),
        ("one group adds 4 deviations at most", [worst]),
        ("few tokens: deviations are wider", [(4e-5, 1e-6, 10)] * 3),
        ("many tokens: deviations are as calibrated", [(4e-5, 1e-6, 4_000)] * 3),
        ("a hundred honest groups", [(1e-5 * (1 + number % 3), 1e-6, 40) for number in range(100)]),
    ]
    alarms: list[tuple[str, list[tuple[float, float, int]]]] = [
        ("a little above, group after group", [worse] * 21),
        ("far above: the tenth is just at the limit, the eleventh beyond it", [worst] * 11),
        ("distances alone", [(1e-5, 4e-6, 40)] * 21),
        ("honest groups in between only delay it", ([worse] * 4 + [honest]) * 11),
        ("one large lie among honest groups is no drift, many are", [honest] * 20 + [worst] * 11),
    ]
    return [_drift(*row, alarm=False) for row in rows] + [_drift(*row, alarm=True) for row in alarms]


def _drift(comment: str, groups: list[tuple[float, float, int]], alarm: bool) -> dict[str, Any]:
    sums, seen = (0.0, 0.0), []
    for mad, distance, tokens in groups:
        wider = math.sqrt(max(1.0, THRESHOLDS.tokens / tokens))
        deviations = [
            (value - bound.mean) / (bound.deviation * wider)
            for value, bound in ((mad, THRESHOLDS.logprobs), (distance, THRESHOLDS.distances))
        ]
        kept = [
            max(0.0, total + min(z, MOST) - THRESHOLDS.drift_slack)
            for total, z in zip(sums, deviations, strict=True)
        ]
        sums = kept[0], kept[1]
        seen.append({"mad": mad, "distance": distance, "tokens": tokens, "sums": list(sums)})
        if max(sums) > THRESHOLDS.drift_limit:
            assert alarm, comment
            break
    assert alarm == (max(sums) > THRESHOLDS.drift_limit), comment
    verdict = {"code": "drift", "measured": max(sums), "threshold": THRESHOLDS.drift_limit} if alarm else {}
    return case(comment, "VER-11", "invalid" if alarm else "valid", groups=seen, **verdict, tolerance=1e-9)


def evidence() -> list[dict[str, Any]]:
    """Reported log-probs, those under the named version and under the one before it."""
    named = [f32(-0.25 - (5 * number % 17) / 4) for number in range(24)]
    other = [f32(value + (1 if number % 3 else -1) * 2e-3) for number, value in enumerate(named)]
    close = [f32(value + (1 if number % 3 else -1) * 2e-5) for number, value in enumerate(named)]

    alike = [f32(value + (1 if number % 3 else -1) * 5e-6) for number, value in enumerate(named)]

    def noisy(values: list[float], noise: float) -> list[float]:
        return [f32(value + noise * (number * 11 % 7 - 3) / 3) for number, value in enumerate(values)]

    group = list[list[list[float]]]
    rows: list[tuple[str, group]] = [
        ("sampled with the named version", [[noisy(named, 1e-4), named, other]]),
        ("the same numbers to the last bit: the variance has a floor", [[named, named, other]]),
        ("evidence against it does not go below 0", [[noisy(named, 1e-4), named, other]] * 3),
        ("two versions of the same weights tell nothing", [[noisy(named, 1e-4), named, named]]),
        ("versions that are closer than the noise tell little", [[noisy(close, 1e-3), named, close]] * 4),
        ("versions that differ by less than honest groups do add nothing", [[alike, named, alike]] * 12),
        ("one group of the other version is within the limit", [[noisy(other, 5e-3), named, other]]),
        ("no tokens", [[[], [], []]]),
    ]
    alarms: list[tuple[str, group]] = [
        ("sampled with the version before", [[noisy(other, 1e-4), named, other]] * 4),
        ("with more noise it takes longer", [[noisy(other, 5e-3), named, other]] * 12),
        ("honest groups take back what was counted, then it begins again",
         [[noisy(other, 5e-3), named, other], [noisy(named, 1e-4), named, other]] + [[noisy(other, 5e-3), named, other]] * 12),
    ]  # fmt: skip
    return [_evidence(*row, alarm=False) for row in rows] + [_evidence(*row, alarm=True) for row in alarms]


def _evidence(comment: str, groups: list[list[list[float]]], alarm: bool) -> dict[str, Any]:
    total, seen = 0.0, []
    for reported, named, other in groups:
        r = [p - q for p, q in zip(reported, named, strict=True)]
        e = [o - q for o, q in zip(other, named, strict=True)]
        toward = math.fsum(x * y for x, y in zip(r, e, strict=True))
        apart = math.fsum(y * y for y in e)
        spread = [
            math.fsum((z * y) ** 2 for z, y in zip(each, e, strict=True))
            for each in (r, [x - y for x, y in zip(r, e, strict=True)])
        ]
        noise = max(min(spread), FLOOR * apart)
        gain = (toward - apart / 2) * apart / noise if apart else 0.0
        tells = e and math.fsum(map(abs, e)) / len(e) >= THRESHOLDS.logprobs.mean
        total = max(0.0, total + (gain if tells else 0.0))
        seen.append({"reported": reported, "named": named, "other": other, "ratio": gain, "sum": total})
        if total > EVIDENCE:
            assert alarm, comment
            break
    assert alarm == (total > EVIDENCE), comment
    verdict = {"code": "wrong-checkpoint", "measured": total, "threshold": EVIDENCE} if alarm else {}
    largest = max(abs(one["ratio"]) for one in seen)
    return case(
        comment,
        "VER-12",
        "invalid" if alarm else "valid",
        groups=seen,
        **verdict,
        tolerance=max(largest, 1.0) * 1e-9,
    )


def holes() -> list[dict[str, Any]]:
    """Counters of a key and checkpoint in the order in which a trainer takes them."""
    one, mixed = [0] * 200, [0, 1] * 100
    rows: list[tuple[str, list[int], list[int], bool]] = [
        ("one after the other", one, list(range(12)), False),
        ("in any order", one, [1, 0, 3, 2, 5, 4], False),
        ("two may be missing", one, [2, 3, 4], False),
        ("three of seven", one, [0, 1, 2, 6], True),
        ("three of eight", one, [0, 1, 2, 3, 7], False),
        ("four of nine", one, [0, 1, 2, 3, 8], True),
        ("one in eight and two more", one, [number for number in range(80) if number % 8 != 3], False),
        ("a late one lets those go that wait", one, [0, 5, 6, 7, 1, 2, 3], False),
        ("the last hole that is allowed may stay", one, [0, 1, 5, 6, 4], False),
        (
            "tasks of an environment that the client cannot run are no holes",
            mixed,
            [0, 2, 4, 6, 8, 10],
            False,
        ),
        ("they are from the first of its groups on", mixed, [0, 2, 4, 6, 8, 10, 1], True),
        ("and filled one by one", mixed, [0, 2, 4, 6, 8, 10, 1, 3, 5, 7], False),
        ("only the lucky half", one, list(range(0, 40, 2)), True),
        ("only the lucky half of what seldom comes up", list(range(9)) * 20, list(range(0, 170, 18)), True),
        ("only the lucky tenth", one, list(range(0, 200, 10)), True),
        ("a jump over fifty", one, [*range(10), 60, 61, 62], True),
        ("the first nine never came", one, [9, 10, 11, 12], True),
        ("filled in part", one, [0, 10, 11, 1, 2, 3], True),
        ("honest at first, choosing later", one, [*range(40), *range(41, 80, 2)], True),
    ]
    return [_holes(*row) for row in rows]


def _holes(comment: str, environments: list[int], counters: list[int], withheld: bool) -> dict[str, Any]:
    taken: set[int] = set()
    steps, waiting, missing, allowed = [], False, 0, 2.0
    for counter in counters:
        taken.add(counter)
        played = {environments[one] for one in taken}
        number = max(taken) + 1
        missing = sum(environments[one] in played for one in set(range(number)) - taken)
        allowed = 2 + (missing + len(taken)) / 8
        waiting = missing > allowed
        steps.append({"counter": counter, "holes": missing, "waits": waiting})
    assert waiting == withheld, comment
    accepted, credit = 7, 1000
    verdict = {"code": "withheld", "measured": missing, "threshold": allowed} if withheld else {}
    return case(
        comment,
        "TSK-7",
        "invalid" if withheld else "valid",
        environments=environments[: max(counters) + 1],
        steps=steps,
        accepted=accepted,
        credit=credit,
        debit=missing * credit // accepted,
        **verdict,
        tolerance=0,
    )
