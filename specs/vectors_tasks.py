"""Vectors of chapter 06 and of the environment sort-digits: tasks, uniforms, choices, distances."""

from __future__ import annotations

import math
from typing import Any

from vectors_world import ALICE, BEACON, BOB, RUN, case

from nous_node.envs.sort_digits import SortDigits
from nous_node.protocol.sampling import choose, distance, keystream, uniforms
from nous_node.protocol.tasks import assign, task_seed

CHECKPOINT = bytes([0xC0]) * 32


def tasks() -> list[dict[str, Any]]:
    rows = [
        ("the first task", ALICE.key, 0, [3, 1], 2),
        ("the second task", ALICE.key, 1, [3, 1], 2),
        ("another node", BOB.key, 0, [3, 1], 2),
        ("a counter of more than 32 bits is not reached", ALICE.key, (1 << 32) - 1, [3, 1], 1),
        ("one environment", ALICE.key, 7, [1], 4),
        ("many environments", ALICE.key, 8, [1, 1_000_000, 5, 999_999], 1),
    ]
    return [_task(*row) for row in rows] + [
        _task(f"counter {counter}: the weights 2, 3, 5 share the tasks", ALICE.key, counter, [2, 3, 5], 1)
        for counter in range(10, 26)
    ]


def _task(comment: str, key: bytes, counter: int, weights: list[int], trajectories: int) -> dict[str, Any]:
    seed = task_seed(RUN, CHECKPOINT, BEACON, key, counter)
    assignment = assign(seed, weights, trajectories)
    return case(
        comment,
        "TSK-1 TSK-2 TSK-3 TSK-4",
        "valid",
        run=RUN.hex(),
        checkpoint=CHECKPOINT.hex(),
        beacon=BEACON.hex(),
        key=key.hex(),
        counter=counter,
        weights=weights,
        samples=trajectories,
        seed=seed.hex(),
        stream=assignment.stream[:72].hex(),
        environment=assignment.environment,
        task_seed=assignment.task_seed.hex(),
        sampler_keys=[assignment.sampler_key(number).hex() for number in range(trajectories)],
    )


def streams() -> list[dict[str, Any]]:
    rfc = bytes.fromhex("0000000000000000000000000000000000000000000000000000000000000001")
    rows = [
        ("RFC 8439 appendix A.1, tests 1 and 2: the zero key, blocks 0 and 1", bytes(32), 0, 16),
        ("RFC 8439 appendix A.1, test 3: block 1", rfc, 8, 8),
        ("from within a block into the next", bytes(range(32)), 5, 8),
        ("the second block alone", bytes(range(32)), 8, 8),
        ("far into a trajectory", bytes(range(32)), 4093, 6),
        ("the last tokens of the longest trajectory", bytes(range(32)), 1_048_574, 2),
        ("no token", bytes(32), 3, 0),
    ]
    return [
        case(
            comment,
            "SMP-1 SMP-2",
            "valid",
            key=key.hex(),
            start=start,
            count=count,
            keystream=keystream(key, start, count).hex(),
            uniforms=uniforms(key, start, count),
        )
        for comment, key, start, count in rows
    ]


MOST = (1 - 2.0**-53,)
LOGITS: list[tuple[str, list[float], float, list[float]]] = [
    ("four equal tokens: each interval is a quarter, its lower end included", [0.0] * 4, 1.0,
     [0.0, 0.2499999, 0.25, 0.5, 0.75, 0.9999, *MOST]),
    ("one token", [3.5], 1.0, [0.0, 0.5, *MOST]),
    ("tokens of probability zero are never drawn", [-math.inf, 0.0, -math.inf, 0.0, -math.inf], 1.0,
     [0.0, 0.49, 0.5, 0.51, *MOST]),
    ("logits far above what exp() takes", [1000.0, 999.0, 998.0], 1.0, [0.0, 0.6, 0.7, 0.95, *MOST]),
    ("logits far below it", [-1000.0, -1001.0, -5000.0], 1.0, [0.0, 0.7, 0.74, *MOST]),
    ("a low temperature sharpens", [1.0, 2.0, 3.0], 0.25, [0.0, 0.01, 0.02, 0.5, *MOST]),
    ("a high temperature flattens", [1.0, 2.0, 3.0], 4.0, [0.0, 0.25, 0.26, 0.6, *MOST]),
    ("float32 logits of a small vocabulary", [-1.4375, 0.8125, 2.265625, -0.34375, 1.109375, 0.0, -3.5], 0.7,
     [0.001, 0.1, 0.3, 0.77, 0.9, 0.97, *MOST]),
    ("a thousand tokens", [((number * 7919) % 1000) / 125 for number in range(1000)], 1.0,
     [0.0, 0.123456789, 0.5, 0.875, *MOST]),
]  # fmt: skip
"""Uniforms keep clear of the ends of intervals wherever rounding decides, so that every `exp` will do."""


def choices() -> list[dict[str, Any]]:
    return [
        case(
            comment,
            "SMP-3",
            "valid",
            logits=[None if logit == -math.inf else logit for logit in logits],
            temperature=temperature,
            uniform=uniform,
            token=choose(logits, temperature, uniform),
        )
        for comment, logits, temperature, draws in LOGITS
        for uniform in draws
    ]


def distances() -> list[dict[str, Any]]:
    rows = []
    for comment, logits, temperature, draws in LOGITS[:-1]:
        for uniform in draws[:3]:
            for token in range(len(logits)):
                rows.append((comment, logits, temperature, uniform, token))
    return [
        case(
            comment,
            "SMP-5",
            "valid" if distance(logits, temperature, token, uniform) == 0 else "valid off",
            logits=[None if logit == -math.inf else logit for logit in logits],
            temperature=temperature,
            uniform=uniform,
            token=token,
            distance=distance(logits, temperature, token, uniform),
            tolerance=1e-12,
        )
        for comment, logits, temperature, uniform, token in rows
    ]


def sort_digits() -> list[dict[str, Any]]:
    rows = [
        (bytes([number]) * 32, level, length)
        for number in range(8)
        for level, length in ((0, 4), (3, 4), (9, 2))
    ]
    return [*[_sort_task(*row) for row in rows], *_sort_scores(), *_sort_texts()]


def _sort_task(seed: bytes, level: int, length: int) -> dict[str, Any]:
    environment = SortDigits({"length": length})
    prompt = environment.prompt(environment.task(seed, level))
    digits = prompt.removeprefix("sort ").removesuffix("=")
    return case(
        f"{length} digits at level 0, level {level}",
        "SRT-1 SRT-2",
        "valid task",
        seed=seed.hex(),
        level=level,
        length=length,
        prompt=prompt,
        tokens=list(prompt.encode()),
        solution="".join(sorted(digits)),
    )


def _sort_scores() -> list[dict[str, Any]]:
    environment, seed = SortDigits({}), bytes(32)
    task = environment.task(seed, 0)
    solution = "".join(sorted(environment.prompt(task)[5:-1]))
    answers = [
        ("right", solution, True),
        ("right, without a stop token", solution, False),
        ("empty", "", True),
        ("one digit too many", solution + "9", True),
        ("one digit too few", solution[:-1], True),
        ("far too long", solution * 4, True),
        ("reversed", solution[::-1], True),
        ("a letter in front", "x" + solution[1:], True),
        ("a space in front shifts all", " " + solution, True),
    ]
    return [
        case(
            comment,
            "SRT-3",
            "valid score",
            seed=seed.hex(),
            level=0,
            length=4,
            answer=answer,
            ended=ended,
            reward=environment.score(task, answer, ended).reward,
        )
        for comment, answer, ended in answers
    ]


def text_of(tokens: list[int]) -> str:
    """The rule of SRT-4: bytes are bytes, control tokens are their names, the whole is read as UTF-8."""
    names = {256: b"<pad>", 257: b"<bos>", 258: b"<eos>"}
    return b"".join(names.get(token) or bytes([token]) for token in tokens).decode("utf-8", "replace")


def _sort_texts() -> list[dict[str, Any]]:
    rows = [
        ("digits", [50, 51, 53, 56]),
        ("nothing", []),
        ("white space is text", [32, 50, 10, 0]),
        ("a control token is spelled out", [50, 257, 51]),
        ("padding is spelled out", [256]),
        ("a byte order mark is a character", [0xEF, 0xBB, 0xBF, 50]),
        ("four bytes, one character", [0xF0, 0x9F, 0x98, 0x80]),
        ("a byte that is no UTF-8", [0xFF, 50]),
        ("a character cut short is one replacement", [0xE2, 0x82, 50]),
        ("an overlong form is one replacement a byte", [0xC0, 0x80]),
        ("a surrogate is one replacement a byte", [0xED, 0xA0, 0x80]),
        ("a control token within a character", [0xE2, 257, 0x82]),
    ]
    return [
        case(comment, "SRT-4", "valid text", tokens=tokens, text=text_of(tokens)) for comment, tokens in rows
    ]
