"""Environments that fail on this machine again and again: they are left for a while, and the others go on.

    plays --FAILURES in a row--> paused for PAUSE_SECONDS --one more--> paused for twice as long
      ^                                   |
      +------------ a group ------ tried again when the time is over

Tasks of a paused environment are passed over like those of one that is not played here at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import Receipt

from .events import Note, Report
from .outbox import Outbox
from .outbox_tables import Failing
from .wording import duration, printable

FAILURES: Final = 3
"""In a row before an environment is paused: one task may be what its code cannot do, three are no chance."""

PAUSE_SECONDS: Final = 600.0
"""Of the first pause: a server may be started, or a package mended, in the meantime."""

MAX_PAUSE_SECONDS: Final = 86_400.0

MAX_WHY: Final = 500
"""Characters of a reason that are kept; it may hold text of an environment."""

MAX_SENT: Final = 4_096
"""Groups whose environments are remembered until their receipts come: more than a trainer lets wait."""

REPLAY_CODES: Final = frozenset(
    {Code.PROMPT_MISMATCH, Code.SEGMENTS, Code.GROUP_SIZE, Code.REWARD_MISMATCH, Code.ADVANTAGES}
)
"""Refusals that mean that an environment does something else at the trainer."""


@dataclass(slots=True)
class _Course:
    """How it goes with one environment."""

    row: int = 0
    """Failures since its last group."""
    failures: int = 0
    """In this session."""
    pauses: int = 0
    """Since its last group."""
    until: float = 0.0
    """Clock time until which it is paused."""


class Pauses:
    """Says of each environment whether it is played now: `name in pauses`. `clock`: Unix seconds."""

    def __init__(
        self, environments: Collection[str], outbox: Outbox, clock: Callable[[], float], report: Report
    ) -> None:
        self._courses = {name: _Course() for name in environments}
        self._outbox, self._clock, self._report = outbox, clock, report
        self._sent: dict[bytes, str] = {}
        outbox.note_failing([])

    def __contains__(self, name: object) -> bool:
        course = self._courses.get(name) if isinstance(name, str) else None
        return course is not None and course.until <= self._clock()

    def failed(self, name: str, why: str) -> None:
        """A group of it was given up for this reason; empty: no environment is to blame."""
        if not name:
            return
        course = self._courses.setdefault(name, _Course())
        course.row += 1
        course.failures += 1
        if course.row >= (FAILURES if not course.pauses else 1) and name in self:
            self._pause(name, course, why)
        self._outbox.note_failing([self._failing(name, why)])

    def sent(self, rollout: bytes, name: str) -> None:
        """A group of it was handed out, in the envelope of this id."""
        self._sent[rollout] = name
        if len(self._sent) > MAX_SENT:
            del self._sent[next(iter(self._sent))]

    def answered(self, receipt: Receipt) -> None:
        """What a trainer made of a group. Other prompts or rewards over there are a fault of the key, so one
        is enough."""
        name = self._sent.pop(receipt.rollout, "")
        if receipt.code not in REPLAY_CODES or name not in self:
            return
        course = self._courses[name]
        course.failures += 1
        why = f"a trainer's own play of a group gave something else and refused it with {receipt.code}"
        self._pause(name, course, why)
        self._outbox.note_failing([self._failing(name, why)])

    def made(self, name: str) -> None:
        """It made a group."""
        course = self._courses.get(name) if name in self else None  # one of the batch that paused it is none
        if course is not None and (course.row or course.pauses):
            course.row = course.pauses = 0
            self._outbox.note_failing([self._failing(name, "")])

    def _pause(self, name: str, course: _Course, why: str) -> None:
        seconds = min(MAX_PAUSE_SECONDS, PAUSE_SECONDS * 2**course.pauses)
        course.row, course.pauses, course.until = 0, course.pauses + 1, self._clock() + seconds
        others = "; the others go on" if any(other in self for other in self._courses) else ""
        told = (
            f"The environment {printable(name)} keeps failing here and is paused for {duration(seconds)}"
            f"{others}. Look at it with `nous-node env check {printable(name)}`. The last time: "
            f"{printable(why, MAX_WHY)}"
        )
        self._report(Note(told, "warning"))

    def _failing(self, name: str, why: str) -> Failing:
        course = self._courses[name]
        until = course.until if course.until > self._clock() else 0.0
        return Failing(name, course.failures, round(1000 * until), why[:MAX_WHY])
