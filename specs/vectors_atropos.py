"""Vectors of Atropos environments: scored groups as rewards and advantages of trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vectors_world import case

from nous_node.envs.atropos_labels import Line, worths
from nous_node.envs.errors import EnvironmentFailed

M = -100
FIRST: dict[str, Any] = {"tokens": [1, 2, 3, 65, 66, 9], "spans": [[3, 6]], "logprobs": [-0.5, -0.25, -1.0]}
SECOND: dict[str, Any] = {"tokens": [1, 2, 3, 67, 9], "spans": [[3, 5]], "logprobs": [-2.0, -0.125]}
TURNS: dict[str, Any] = {
    "tokens": [1, 2, 65, 9, 5, 66, 67, 9],
    "spans": [[2, 4], [5, 8]],
    "logprobs": [-1.0, -2.0, -3.0, -4.0, -5.0],
}
THIRD: dict[str, Any] = {"tokens": [1, 2, 3, 70, 9], "spans": [[3, 5]], "logprobs": [-1.0, -1.0]}
LABELS = [[M, M, M, 65, 66, 9], [M, M, M, 67, 9]]
PAIR: dict[str, Any] = {"tokens": [FIRST["tokens"], SECOND["tokens"]], "masks": LABELS, "scores": [1.0, -1.0]}
LOGPROBS = [[1.0, 1.0, 1.0, -0.5, -0.25, -1.0], [1.0, 1.0, 1.0, -2.0, -0.125]]
ZERO = {"set_advantage_to_zero": True}


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(67 if token == 68 else token) for token in tokens)


def lines(told: Sequence[dict[str, Any]]) -> list[Line]:
    return [Line(one["tokens"], [(a, b) for a, b in one["spans"]], one["logprobs"]) for one in told]


def written(told: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "reward": one.reward,
            "advantages": one.advantages,
            "advantage": one.advantage,
            "components": dict(one.components or {}),
        }
        for one in worths(groups, lines(told), decode)
    ]


def single(tokens: list[int], masks: list[int], **more: Any) -> dict[str, Any]:
    return {"tokens": [tokens], "masks": [masks], "scores": [1.0], **more}


def atropos() -> list[dict[str, Any]]:
    return [*_accepted(), *_refused()]


def _accepted() -> list[dict[str, Any]]:
    both, one, many = [FIRST, SECOND], [SECOND], [TURNS, SECOND]
    last = {"tokens": [TURNS["tokens"], SECOND["tokens"]], "scores": [1.0, 0.0]}
    advantages = [[0.0, 0.0, 0.0, 1.0, 2.0, 3.0], [7.0, 7.0, 7.0, -1.0, -2.0]]
    other = {"tokens": [THIRD["tokens"]], "masks": [[M, M, M, 70, 9]], "scores": [5.0]}
    rows: list[tuple[str, str, list[dict[str, Any]], list[dict[str, Any]]]] = [
        ("two sequences", "ATR-6", both, [PAIR]),
        ("in another order than the lines", "ATR-4", both, [{key: rows[::-1] for key, rows in PAIR.items()}]),
        ("log-probs with the mark", "ATR-5", both, [{**PAIR, "inference_logprobs": LOGPROBS}]),
        ("advantages", "ATR-6", both, [{**PAIR, "advantages": advantages}]),
        ("an override of a sequence", "ATR-6", both, [{**PAIR, "overrides": [{}, ZERO]}]),
        ("an override of the group", "ATR-6", both, [{**PAIR, "group_overrides": ZERO}]),
        ("all answers trained", "ATR-6", many, [{**last, "masks": [[M, M, 65, 9, M, 66, 67, 9], LABELS[1]]}]),
        ("the last answer trained", "ATR-6", many, [{**last, "masks": [[M] * 5 + [66, 67, 9], LABELS[1]]}]),
        ("nothing trained", "ATR-6", [FIRST], [single(FIRST["tokens"], [M] * 6)]),
        ("more behind the answer", "ATR-4", one, [single([1, 2, 3, 67, 9, 5], [M, M, M, 67, 9, M])]),
        ("without the stop token", "ATR-4", one, [single([1, 2, 3, 67], [M, M, M, 67])]),
        ("the same text in other tokens", "ATR-4", one, [single([1, 2, 3, 68, 9], [M, M, M, 68, 9])]),
        ("a sample left out", "ATR-6", both, [{key: rows[:1] for key, rows in PAIR.items()}]),
        ("given up", "ATR-6", both, []),
        ("two scored groups", "ATR-6", [FIRST, SECOND, THIRD], [PAIR, other]),
    ]
    return [
        case(comment, rule, "valid worths", lines=told, groups=groups, worths=written(told, groups))
        for comment, rule, told, groups in rows
    ]


def _refused() -> list[dict[str, Any]]:
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("a label before the answer", "ATR-5", {"masks": [[M, M, 3, 65, 66, 9], LABELS[1]]}),
        ("a label that is another token", "ATR-5", {"masks": [[M, M, M, 65, 67, 9], LABELS[1]]}),
        ("zeros and ones", "ATR-5", {"masks": [[0, 0, 0, 1, 1, 1], LABELS[1]]}),
        ("the mark at a trained token", "ATR-5", {"inference_logprobs": [[1.0] * 6, LOGPROBS[1]]}),
        (
            "another log-prob",
            "ATR-5",
            {"inference_logprobs": [[1.0, 1.0, 1.0, -0.6, -0.25, -1.0], LOGPROBS[1]]},
        ),
        ("words that nobody said", "ATR-4", {"tokens": [[1, 2, 3, 65, 88, 9], SECOND["tokens"]]}),
        ("one answer twice", "ATR-4", {"tokens": [FIRST["tokens"]] * 2, "masks": [LABELS[0]] * 2}),
        ("fewer masks than tokens", "ATR-5", {"masks": [[M] * 5, LABELS[1]]}),
        ("fewer scores than sequences", "ATR-5", {"scores": [1.0]}),
        ("one list of advantages for two", "ATR-5", {"advantages": [[1.0] * 6]}),
    ]
    made = []
    for comment, rule, wrong in rows:
        groups = [{**PAIR, **wrong}]
        try:
            worths(groups, lines([FIRST, SECOND]), decode)
        except EnvironmentFailed:
            made.append(case(comment, rule, "refused", lines=[FIRST, SECOND], groups=groups, refused=True))
    assert len(made) == len(rows)
    return made
