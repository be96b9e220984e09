"""The op of what trainers answer to hellos: from when on a key counts. [HEL-2] [TSK-6]"""

from __future__ import annotations

from typing import Final

from .adapter_question import Answer, Ask, Ops, Raw
from .hellos import Counting


class Step(Ask, frozen=True):
    """An answer, with the newest version that the client knows when it comes."""

    trainer: Raw
    newest: int
    version: int | None = None
    """Of an element of `known`; without it the step is a `key-too-new` receipt."""
    threshold: float | None = None


class Scene(Ask, frozen=True):
    steps: list[Step]
    kept: int | None = None


def greeting(ask: Scene) -> Answer:
    counting = Counting(ask.kept)
    found = []
    for step in ask.steps:
        if step.version is None:
            counting.too_new(step.trainer, step.threshold, step.newest)
        else:
            counting.answered(step.trainer, step.version, step.newest)
        found.append({"h": counting.known_from})
    return {"steps": found}


OPS: Final[Ops] = {"greetings": greeting}
