"""Vectors of chapter 08 about sampled tokens: copies, repetition, ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vectors_verification import f32
from vectors_world import ALICE, BOB, case

SURPRISAL = 40.0


@dataclass
class Session:
    """Groups in the order in which a trainer took them."""

    comment: str
    groups: list[dict[str, Any]] = field(default_factory=list)

    def takes(
        self,
        *tokens: list[int],
        sender: bytes = ALICE.key,
        checkpoint: int = 1,
        counter: int | None = None,
        nats: float = 2.0,
        refused: bool = False,
    ) -> Session:
        """A group of trajectories; each of its tokens has the surprisal `nats`. Counters run on."""
        self.groups.append(
            {
                "key": sender.hex(),
                "checkpoint": (bytes([checkpoint]) * 32).hex(),
                "counter": len(self.groups) if counter is None else counter,
                "refused": refused,
                "trajectories": [{"tokens": one, "logprobs": [f32(-nats)] * len(one)} for one in tokens],
            }
        )
        return self

    def passes(self) -> dict[str, Any]:
        return case(self.comment, "VER-7", "valid", groups=self.groups, tolerance=1e-9)

    def fails(self, measured: float | None, **mode: str) -> dict[str, Any]:
        figures = {} if measured is None else {"measured": measured, "threshold": SURPRISAL}
        verdict = {**mode, "code": "copied", **figures}
        return case(self.comment, "VER-7", "invalid", groups=self.groups, **verdict, tolerance=1e-9)


def text(start: int, count: int) -> list[int]:
    """Tokens that no other `start` has in a row."""
    return [(start * 7919 + number * 104_729) % 50_021 for number in range(count)]


A, B, C, D = (text(start, 64) for start in range(4))


def of_bob(comment: str, *earlier: Sequence[list[int]]) -> Session:
    session = Session(comment)
    for tokens in earlier:
        session.takes(*tokens, sender=BOB.key)
    return session


def copies() -> list[dict[str, Any]]:
    short = text(9, 5)
    return [
        of_bob("nothing in common", [A, B]).takes(C, D).passes(),
        of_bob("16 tokens of 2 nats in common: 32 nats may be chance", [A]).takes(A[:31] + B[:33]).passes(),
        of_bob("a likely text that two may sample", [A]).takes(A, nats=0.6).passes(),
        of_bob("exactly 40 nats", [A]).takes(A[:32] + B[:32], nats=1.25).passes(),
        of_bob("the same tokens later in the trajectory are no prefix", [A]).takes([7, *A[:63]]).passes(),
        of_bob("the first token differs", [A]).takes([7, *A[1:]]).passes(),
        of_bob("7 tokens in common are not compared", [A]).takes(A[:7] + B, nats=10.0).passes(),
        of_bob("between the lengths that are compared", [A]).takes(A[:15] + B, nats=4.0).passes(),
        of_bob("a whole trajectory that is the beginning of another", [A]).takes(A[:31], nats=2.0).passes(),
        Session("like one that was refused").takes(A, sender=BOB.key, refused=True).takes(A).passes(),
        Session("the group itself again").takes(A, counter=5).takes(A, counter=5).passes(),
        of_bob("no sampled tokens", [[]]).takes([], []).passes(),
        of_bob("a copy of a whole trajectory", [A, B]).takes(C, B).fails(64.0),
        of_bob("32 tokens of 2 nats in common", [A]).takes(A[:32] + B[:32]).fails(64.0),
        of_bob("8 unlikely tokens are enough", [A]).takes(A[:8] + B, nats=5.125).fails(41.0),
        of_bob("16 of them where 8 are not", [A]).takes(A[:16] + B, nats=2.75).fails(44.0),
        of_bob("the whole of a short one", [short]).takes(short, nats=9.0).fails(45.0),
        of_bob("a whole one that is as long as a prefix", [A]).takes(A[:32], nats=2.0).fails(64.0),
        of_bob("whole ones of 21 tokens", [A[:21]]).takes(A[:21]).fails(42.0),
        Session("a copy of one's own, with another counter").takes(A, counter=0).takes(A, counter=1).fails(64.0),
        Session("a copy of one's own, of an older checkpoint")
        .takes(A, counter=3)
        .takes(A, counter=3, checkpoint=2)
        .fails(64.0),
        Session("two trajectories of one group").takes(A, B, A).fails(64.0),
        of_bob("of another key where nothing shows who drew it", [A]).takes(A).fails(None, mode="free"),
        Session("a copy of one's own in such a run").takes(A).takes(A).fails(64.0, mode="free"),
        Session("two trajectories of one group in such a run").takes(A, B, A).fails(64.0, mode="free"),
        of_bob("of one that came long before", [A], [B], [C], [D]).takes(text(8, 64), A).fails(64.0),
        Session("a copy of a copy that was refused is one of the first")
        .takes(A, sender=BOB.key)
        .takes(B, refused=True)
        .takes(A)
        .fails(64.0),
    ]  # fmt: skip


STOP = 258


def repetition() -> list[dict[str, Any]]:
    """Sampled tokens of one trajectory of a run with free sampling."""
    word = [11, 12, 13]
    rows: list[tuple[str, list[int], int]] = [
        ("text", text(1, 500), 0),
        ("nothing", [], 0),
        ("one token", [7], 0),
        ("63 times the same", [7] * 63, 0),
        ("64 at the end that are less than half", text(1, 65) + [7] * 64, 0),
        ("64 in the middle", [*text(1, 40), *[7] * 64, 8, 9], 0),
        ("a period of 17", text(1, 17) * 10, 0),
        ("numbers that count", list(range(200)), 0),
        ("63 and a stop token", [*[7] * 63, STOP], 0),
        ("a stop token within is text like any other", [*[7] * 40, STOP, *[7] * 40], 0),
        ("64 times the same", [7] * 64, 64),
        ("half of it", text(1, 64) + [7] * 64, 64),
        ("a thousand times the same", [7] * 1000, 1000),
        ("a word of three", text(1, 30) + word * 30, 90),
        ("a last word that is cut short", word * 30 + word[:2], 92),
        ("a period of 16", text(1, 16) * 5, 80),
        ("the stop token at the end does not count", [*text(1, 20), *[7] * 70, STOP], 70),
        ("not even where it makes the half", [*text(1, 64), *[7] * 64, STOP], 64),
        ("behind an answer", text(5, 10) + word * 40, 120),
    ]
    return [_repetition(*row) for row in rows]


def _repetition(comment: str, tokens: list[int], repeated: int) -> dict[str, Any]:
    verdict = {"code": "repetition", "measured": repeated, "threshold": 64} if repeated else {}
    valid = "invalid" if repeated else "valid"
    return case(comment, "VER-9", valid, tokens=tokens, stop=[STOP], **verdict, tolerance=0)


def ends() -> list[dict[str, Any]]:
    """Sampled tokens of one trajectory with their recomputed log-probs, and the run's stop tokens."""
    rows: list[tuple[str, list[int], list[float | None], float, bool]] = [
        ("a likely end", [5, 6, STOP], [-1.0, -2.0, -0.5], 1e-9, False),
        ("an end of one in a million", [5, 6, STOP], [-1.0, -2.0, -13.75], 1e-9, False),
        ("just above", [STOP], [-20.625], 1e-9, False),
        ("other tokens may be as unlikely as they like", [5, 6, STOP], [-30.0, -40.0, -1.0], 1e-9, False),
        ("no stop token", [5, 6, 7], [-1.0, -1.0, -30.0], 1e-9, False),
        ("another stop token of the run", [5, 257], [-1.0, -3.0], 1e-9, False),
        ("a probability of 0 asks for nothing", [5, STOP], [-1.0, -90.0], 0.0, False),
        ("a forged end", [5, 6, STOP], [-1.0, -2.0, -25.0], 1e-9, True),
        ("just below", [STOP], [-20.75], 1e-9, True),
        ("another stop token, forged", [5, 257], [-1.0, -24.0], 1e-9, True),
        ("a forged end of an earlier turn", [5, STOP, 6, STOP], [-1.0, -24.0, -1.0, -0.5], 1e-9, True),
        ("under a stricter run", [5, STOP], [-1.0, -6.0], 1e-2, True),
        ("no number", [5, STOP], [-1.0, None], 1e-9, True),
    ]
    return [_end(*row) for row in rows]


def _end(
    comment: str, tokens: list[int], logprobs: list[float | None], least: float, forged: bool
) -> dict[str, Any]:
    given = {"tokens": tokens, "recomputed": logprobs, "stop": [STOP, 257], "stop_probability": least}
    if not forged:
        return case(comment, "VER-8", "valid", **given, tolerance=0)
    low = next(one for token, one in zip(tokens, logprobs, strict=True) if token in (STOP, 257))
    measured = None if low is None else math.exp(low)
    verdict = {"code": "finish", "measured": measured, "threshold": least, "tolerance": least * 1e-9}
    return case(comment, "VER-8", "invalid", **given, **verdict)
