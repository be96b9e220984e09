"""Vectors of chapter 10: what a client makes of trainers' answers to its hellos."""

from __future__ import annotations

from typing import Any

from vectors_world import ROOT, TRAINER, case

FIRST, SECOND = TRAINER.key.hex(), ROOT.key.hex()


def known(version: int, newest: int, h: int | None, trainer: str = FIRST) -> dict[str, Any]:
    return {"trainer": trainer, "newest": newest, "version": version, "h": h}


def too_new(threshold: float | None, newest: int, h: int | None, trainer: str = FIRST) -> dict[str, Any]:
    return {"trainer": trainer, "newest": newest, "threshold": threshold, "h": h}


def greetings() -> list[dict[str, Any]]:
    rows: list[tuple[str, int | None, list[dict[str, Any]]]] = [
        ("an answer", None, [known(3, 5, 3)]),
        ("heard before the first version", None, [known(-1, 0, -1)]),
        ("the answer crosses a version", None, [known(6, 5, 6)]),
        ("as far ahead as an answer may be", None, [known(21, 5, 21)]),
        ("one that is further ahead is none", None, [known(22, 5, None)]),
        ("it changes nothing of what is known either", None, [known(3, 5, 3), known(99, 5, 3)]),
        ("a later answer of a trainer replaces an earlier one", None, [known(3, 5, 3), known(5, 5, 5), known(4, 6, 4)]),
        ("of several trainers the latest holds", None, [known(3, 5, 3), known(5, 5, 5, SECOND), known(4, 5, 5), known(2, 5, 4, SECOND)]),
        ("what was kept holds beside what is answered", 4, [known(2, 6, 4), known(5, 6, 5)]),
        ("what was kept is dropped where there is no such version", 9, [known(1, 2, 1)]),
        ("nothing is dropped before there is an answer", 9, [known(30, 2, 9), known(2, 2, 2)]),
        ("a receipt says the same", None, [too_new(4.0, 5, 3)]),
        ("and so it does with a threshold of 0", None, [too_new(0, 5, -1)]),
        ("a threshold that is not whole is none", None, [too_new(4.5, 5, None)]),
        ("a negative threshold is none", None, [too_new(-1.0, 5, None)]),
        ("a threshold far ahead is none", None, [too_new(23.0, 5, None), too_new(22.0, 5, 21)]),
        ("no threshold: the key was never heard of, and says hello again", None, [known(3, 5, 3), too_new(None, 5, None), known(5, 5, 5)]),
        ("that takes back what other trainers said, too", None, [known(3, 5, 3), known(4, 5, 4, SECOND), too_new(None, 5, None), known(1, 5, 1)]),
        ("and what was kept", 4, [too_new(None, 5, None)]),
    ]  # fmt: skip
    return [
        case(comment, "HEL-2 TSK-6" if any("threshold" in step for step in steps) else "HEL-2", "", kept=kept, steps=steps)
        for comment, kept, steps in rows
    ]  # fmt: skip
