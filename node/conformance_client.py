"""A client that is asked through its adapter: one answer a question, started anew when it broke.

One question is under way at a time, or a batch; after a batch that went wrong its questions are asked one by
one, so that a fault is told of the question that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

import msgspec

from .conformance_cases import Json
from .conformance_compare import shown
from .conformance_process import Fault, Hung, Process, Stray, shown_line
from .conformance_table import MAX_NAME
from .wording import plural

MAX_STARTS = 64
"""Of one client. The faults of some dozens of questions tell enough."""
MAX_HANGS = 8
"""Each takes a whole deadline."""
MAX_STRAYS = 3
"""Lines nobody asked for, after which a client is given up: nothing can be told of its answers."""
START_S = 60.0
"""For a client's first answer: interpreters and models are loaded meanwhile."""
FIRST = b'{"op":"client"}\n'


class GivenUp(Fault):
    """It broke too often: nothing is asked any more."""


@dataclass(slots=True)
class Client:
    """Entered to be started; its process group is gone when it is left."""

    command: Sequence[str]
    start_seconds: float = START_S
    name: str = ""
    """What it calls itself, once it was started."""
    strays: list[Stray] = field(default_factory=list)
    _process: Process | None = None
    _first: Json = None
    """Its first answer: given again, it shows that questions and answers are in step."""
    given_up: bool = False
    """Whether nothing is asked any more."""
    _starts: int = 0
    _hangs: int = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    def start(self) -> Json:
        """Its answer to who it is. Raises Fault."""
        self._start()
        return self._first

    def ask(self, question: bytes, seconds: float) -> Json:
        """Its answer. Raises Fault."""
        while True:
            with suppress(Stray):  # what it wrote belongs to no question: this one is asked again
                return self._asked(question, seconds)

    def ask_all(self, questions: Sequence[bytes], seconds: float) -> list[Json | Fault]:
        """An answer or a fault each."""
        try:
            answers: list[Json | Fault] = [read_answer(line) for line in self._exchange(questions, seconds)]
            if self.check_step(seconds):
                return answers
        except Fault:
            pass
        return [self._answer(question, seconds) for question in questions]

    def check_step(self, seconds: float) -> bool:
        """Whether it still answers what it is asked. If not, it is started anew at the next question."""
        if self._process is None:
            return True
        try:
            line = self._exchange([FIRST], seconds)[0]
            in_step = _same(read_answer(line), self._first)
        except Fault:
            return False
        if not in_step:
            self._stray(Stray("gave an answer to another question than it was asked"))
        return in_step

    def finish(self, seconds: float) -> None:
        """Raises Fault unless it ends well at the end of its input."""
        process = self._process or self._start()
        try:
            process.finish(seconds)
        finally:
            self._drop()

    def _answer(self, question: bytes, seconds: float) -> Json | Fault:
        try:
            return self.ask(question, seconds)
        except Fault as fault:
            return fault

    def _asked(self, question: bytes, seconds: float) -> Json:
        return read_answer(self._exchange([question], seconds)[0])

    def _exchange(self, lines: Sequence[bytes], seconds: float) -> list[bytes]:
        process = self._process or self._start()
        try:
            return process.exchange(lines, seconds)
        except Stray as stray:
            self._stray(stray)
            raise
        except Fault as fault:
            self._hangs += isinstance(fault, Hung)
            self._drop()
            raise

    def _stray(self, stray: Stray) -> None:
        self.strays.append(stray)
        self._drop()

    def _start(self) -> Process:
        self._check_patience()
        self._starts += 1
        process = Process.start(self.command)
        try:
            first = read_answer(process.exchange([FIRST], self.start_seconds)[0])
            name = name_of(first)
        except Fault as fault:
            process.close()
            if self._starts > 1:
                self.given_up = True
                raise GivenUp(f"could not be started again: it {fault}") from fault
            raise
        self._process = process
        if self._starts == 1:
            self._first, self.name = first, name
        return process

    def _check_patience(self) -> None:
        spent = self._starts >= MAX_STARTS or self._hangs >= MAX_HANGS or len(self.strays) >= MAX_STRAYS
        if self.given_up or spent:
            self.given_up = True
            raise GivenUp(
                f"was given up after {plural(self._starts, 'start')}, {plural(self._hangs, 'answer')} that "
                f"never came and {plural(len(self.strays), 'line')} that nobody had asked for"
            )

    def _drop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def read_answer(line: bytes) -> Json:
    """A line as JSON. Raises Fault."""
    try:
        return cast(Json, msgspec.json.decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Fault(f"answered with a line that is no JSON: {shown_line(line)}") from error


def name_of(first: Json) -> str:
    """Name and version of a client. Raises Fault where it does not tell them."""
    match first:
        case {"ok": {"name": str() as name, "version": str() as version}} if name.strip():
            return f"{name} {version}"[:MAX_NAME]
    raise Fault(f'did not say who it is, as {{"ok": {{"name": ..., "version": ...}}}}: {shown(first)}')


def _same(one: Json, other: Json) -> bool:
    return type(one) is type(other) and one == other
