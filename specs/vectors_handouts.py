"""Vectors of chapter 13: what an environment may ask of a policy, and what may come back."""

from __future__ import annotations

from typing import Any

import msgspec
from vectors_world import case

from nous_node.protocol.rollouts import Role, Segment, Trajectory, pack_floats, pack_tokens

GROUP, MAX_TOKENS, CONTEXT = 2, 4, 12
PROMPT, ANSWER, FINAL = [10, 11], [20, 21], [30, 2]
HINT = [12]
STOPPED = {"tokens": FINAL, "logprobs": [-0.5, -0.25], "finish": "stop"}


def ask(trajectory: int, tokens: list[int], start: int, limit: int) -> dict[str, Any]:
    return {"trajectory": trajectory, "tokens": tokens, "start": start, "max_tokens": limit}


FIRST = {**ask(0, PROMPT, 0, 2), "answer": {"tokens": ANSWER, "logprobs": [-1.0, -2.0], "finish": "length"}}
SECOND = {**ask(0, [*PROMPT, *ANSWER, *HINT], 2, 2), "answer": STOPPED}
OTHER = {**ask(1, PROMPT, 0, 4), "answer": STOPPED}

SEGMENTS = [
    Segment(2, Role.USER, False),
    Segment(2, Role.ASSISTANT, True),
    Segment(1, Role.TOOL, False),
    Segment(2, Role.ASSISTANT, True),
]
LONG = Trajectory(
    pack_tokens([*PROMPT, *ANSWER, *HINT, *FINAL]),
    SEGMENTS,
    pack_floats([-1.0, -2.0, -0.5, -0.25]),
    1.0,
    "stop",
    {"correct": 1.0},
)
SHORT = Trajectory(
    pack_tokens([*PROMPT, *FINAL]),
    [Segment(2, Role.USER, False), Segment(2, Role.ASSISTANT, True)],
    pack_floats([-0.5, -0.25]),
    -1.0,
    "stop",
)
TREE_ASKS = [FIRST, {**ask(0, [*PROMPT, *HINT], 2, 2), "answer": STOPPED}, OTHER]
TREE = msgspec.structs.replace(LONG, parents=[-1, 0, 0, 2])


def handouts() -> list[dict[str, Any]]:
    return [*_asked(), *_returned()]


def _asked() -> list[dict[str, Any]]:
    rows: list[tuple[str, list[dict[str, Any]], bool]] = [
        ("two turns and another trajectory", [FIRST, SECOND, OTHER], False),
        ("the last trajectory there may be", [ask(31, PROMPT, 0, 4)], False),
        ("a trajectory too many", [ask(32, PROMPT, 0, 4)], True),
        ("more tokens than a trajectory may have", [ask(0, PROMPT, 0, 5)], True),
        ("more than what is left of them", [FIRST, ask(0, [*PROMPT, *ANSWER], 2, 3)], True),
        ("what is left of the context", [ask(0, [7] * 11, 0, 1)], False),
        ("more than the context holds", [ask(0, [7] * 11, 0, 2)], True),
        ("a full context", [ask(0, [7] * 12, 0, 1)], True),
        ("no tokens asked for", [ask(0, PROMPT, 0, 0)], True),
        ("no prompt", [ask(0, [], 0, 1)], True),
        ("a start behind what was sampled", [FIRST, ask(0, [*PROMPT, *ANSWER], 1, 1)], True),
        ("a start beyond what was sampled", [ask(0, PROMPT, 1, 1)], True),
        ("the same once more", [FIRST, FIRST], True),
        ("a token of more than 32 bits", [ask(0, [1 << 32], 0, 1)], True),
        ("a token below 0", [ask(0, [-1], 0, 1)], True),
    ]
    return [_case(comment, "EVM-7 EVM-11", asks, None, refused) for comment, asks, refused in rows]


def _returned() -> list[dict[str, Any]]:
    change = msgspec.structs.replace
    both = [FIRST, SECOND, OTHER]
    rows: list[tuple[str, list[dict[str, Any]], list[Trajectory], bool]] = [
        ("what was handed out", both, [LONG, SHORT], False),
        ("two branches behind one prompt", TREE_ASKS, [TREE, SHORT], False),
        ("the same as one history", TREE_ASKS, [LONG, SHORT], True),
        ("branches that the policy did not see", both, [TREE, SHORT], True),
        ("no trajectory", both, [], True),
        ("an answer that is left out", both, [LONG], True),
        ("in another order", both, [SHORT, LONG], True),
        (
            "another token in an answer",
            both,
            [change(LONG, tokens=pack_tokens([10, 11, 20, 22, 12, 30, 2])), SHORT],
            True,
        ),
        (
            "another token before an answer",
            both,
            [change(LONG, tokens=pack_tokens([10, 13, 20, 21, 12, 30, 2])), SHORT],
            True,
        ),
        (
            "two answers as one segment",
            [FIRST, {**ask(0, [*PROMPT, *ANSWER], 2, 2), "answer": STOPPED}, OTHER],
            [
                change(
                    LONG,
                    tokens=pack_tokens([*PROMPT, *ANSWER, *FINAL]),
                    segments=[SEGMENTS[0], Segment(4, Role.ASSISTANT, True)],
                ),
                SHORT,
            ],
            True,
        ),
        (
            "a hint that is trained on",
            both,
            [change(LONG, segments=[*SEGMENTS[:2], Segment(1, Role.TOOL, True), SEGMENTS[3]]), SHORT],
            True,
        ),
        (
            "an answer that is not trained on",
            both,
            [change(LONG, segments=[SEGMENTS[0], Segment(2, Role.ASSISTANT, False), *SEGMENTS[2:]]), SHORT],
            True,
        ),
        (
            "other log-probs",
            both,
            [change(LONG, logprobs=pack_floats([-1.0, -2.0, -0.5, -0.5])), SHORT],
            True,
        ),
        ("log-probs in another format", both, [change(LONG, logprobs=bytes(8)), SHORT], True),
        ("another finish", both, [change(LONG, finish="length"), SHORT], True),
        ("a reward out of range", both, [change(LONG, reward=2e6), SHORT], True),
        ("a reward that is no number", both, [change(LONG, reward=float("nan")), SHORT], True),
        ("a component that is no number", both, [change(LONG, components={"a": float("inf")}), SHORT], True),
        (
            "an advantage for each sampled token",
            both,
            [change(LONG, advantages=pack_floats([1.0] * 4)), SHORT],
            False,
        ),
        ("an advantage too few", both, [change(LONG, advantages=pack_floats([1.0] * 3)), SHORT], True),
        ("an advantage that is no number", both, [change(LONG, advantage=float("nan")), SHORT], True),
        ("segments that do not add up", both, [change(LONG, segments=SEGMENTS[:3]), SHORT], True),
        ("parents behind their children", both, [change(LONG, parents=[-1, 2, 0, 2]), SHORT], True),
        ("parents of some segments only", both, [change(LONG, parents=[-1, 0]), SHORT], True),
        (
            "more tokens than the context holds",
            both,
            [
                change(
                    LONG,
                    tokens=pack_tokens([*PROMPT, *ANSWER, *HINT, *FINAL, *[9] * 6]),
                    segments=[*SEGMENTS, Segment(6, Role.TOOL, False)],
                ),
                SHORT,
            ],
            True,
        ),
        ("a trajectory in which nothing was sampled", both, [LONG, SHORT, _unsampled()], False),
    ]
    return [_case(comment, "EVM-8", asks, made, refused) for comment, asks, made, refused in rows]


def _unsampled() -> Trajectory:
    return Trajectory(pack_tokens(PROMPT), [Segment(2, Role.USER, False)], b"", 0.0, "length")


def _case(
    comment: str, ids: str, asks: list[dict[str, Any]], made: list[Trajectory] | None, refused: bool
) -> dict[str, Any]:
    returned: dict[str, Any] = {"refused": True} if refused else {}
    if made is not None:
        returned["trajectories"] = msgspec.msgpack.encode(made).hex()
    return case(
        comment,
        ids,
        "hostile" if refused else "valid",
        group=GROUP,
        players=1,
        max_tokens=MAX_TOKENS,
        context=CONTEXT,
        asks=asks,
        **returned,
    )
