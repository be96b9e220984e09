"""`nous-node conformance adapter`: asks a client all vectors and tells by requirement how it answered.

One question is under way at a time. A client that breaks fails that question and is started anew for the
next; one that cannot be asked leaves the rest untested.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from nous_node.protocol.errors import LocalError

from .conformance_cases import MODEL_OPS, Case, Json, load_cases
from .conformance_client import Client, GivenUp, read_answer
from .conformance_compare import Kind, judge, kind_of
from .conformance_fuzz import THE_OTHER, US, Mutations, encoded, fuzz_rows, inputs_of, supported
from .conformance_output import Output
from .conformance_process import Fault
from .conformance_table import Outcome, Row, Sheet
from .wording import printable

SECONDS = 10.0
"""For one answer: most take less than a millisecond."""
MODEL_SECONDS = 60.0
"""For one that a policy computes: it is loaded first."""
KIND = "adapter"
START = "it starts and says who it is"
IN_STEP = "one answer to each question, in order"
END = "it ends at the end of its input, with exit code 0"


@dataclass(frozen=True, slots=True)
class Choice:
    """What the command line says."""

    command: Sequence[str]
    only: str | None = None
    vectors: Path | None = None
    seconds: float | None = None
    fuzz: int | None = None
    seed: int = 1
    fuzz_case: int | None = None
    against: str | None = None


def run_adapter(choice: Choice, json: str | None, junit: Path | None) -> int:
    """The exit code. Raises LocalError where the choice cannot be made."""
    cases = chosen(load_cases(choice.vectors), choice.only)
    with Output(json, junit) as output, Client(choice.command) as client:
        if choice.fuzz is None and choice.fuzz_case is None:
            output.expect(len(cases) + 3)
            tested = rows_of(client, cases, choice.seconds)
        else:
            tested = fuzzed_rows(client, cases, choice, output)
        rows = []
        for row in tested:
            output.tell(row)
            rows.append(row)
        return output.finish(Sheet(client.name or " ".join(choice.command), KIND, tuple(rows)))


def fuzzed_rows(client: Client, cases: Sequence[Case], choice: Choice, output: Output) -> Iterator[Row]:
    """The client's answers to mutations compared with those of `--against`, else of this node."""
    other = None if choice.against is None else Client(_command(choice.against))
    with other or nullcontext():
        for one in (client, other) if other is not None else (client,):
            started = _start_row(one)
            yield started
            if started.outcome is Outcome.FAIL:
                return
        yield from _compared(client, other, cases, choice, output)
    yield _end_row(client, choice.seconds)
    yield _step_row(client)


def _command(text: str) -> list[str]:
    """Words, as a shell takes them. Raises LocalError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LocalError(f"--against is no command ({error}). Quote it as a shell does.") from error
    if not words:
        raise LocalError("--against is empty. Give the command that starts the other adapter.")
    return words


def _compared(
    client: Client, other: Client | None, cases: Sequence[Case], choice: Choice, output: Output
) -> Iterator[Row]:
    seconds = choice.seconds or SECONDS
    theirs = partial(client.ask_all, seconds=seconds)
    ours = answers if other is None else partial(other.ask_all, seconds=seconds)
    mutations = Mutations(supported(inputs_of(cases), (ours, theirs)), choice.seed)
    if not mutations.inputs:
        raise LocalError("There is nothing to mutate: the client has none of the parts that read bytes.")
    numbers = range(choice.fuzz or 0)
    if choice.fuzz_case is not None:
        numbers = range(choice.fuzz_case, choice.fuzz_case + 1)
        output.say(encoded(mutations.make(choice.fuzz_case)[1]).decode().strip())
    output.expect(len(numbers))
    yield from fuzz_rows(mutations, numbers, ours, theirs, output.step, US if other is None else THE_OTHER)


def answers(questions: Sequence[bytes]) -> list[Json | Fault]:
    """This node's own, in this process."""
    from .adapter import answered

    return [read_answer(msgspec.json.encode(answered(question))) for question in questions]


def chosen(cases: Sequence[Case], only: str | None) -> list[Case]:
    """Those of these files, ops or requirements. Raises LocalError where a name is none of them."""
    names = {name.strip() for name in (only or "").split(",")} - {""}
    if not names:
        return list(cases)
    found = [case for case in cases if names & _names(case)]
    unknown = names - {name for case in found for name in _names(case)}
    if unknown:
        text = printable(", ".join(sorted(unknown)))
        raise LocalError(
            f"There is no vector of {text}: --only takes files such as encoding, or ids such as ENC-1."
        )
    return found


def _names(case: Case) -> set[str]:
    return {case.op.file, case.op.name, f"{case.op.file}-{case.number}", *case.requires}


def rows_of(client: Client, cases: Sequence[Case], seconds: float | None = None) -> Iterator[Row]:
    """A row a case, and three about the client itself."""
    started = _start_row(client)
    yield started
    if started.outcome is Outcome.FAIL:
        for case in cases:
            yield Row(case.name, case.requires, Outcome.UNTESTED, "The client could not be asked.")
        return
    for case in cases:
        yield _row(client, case, seconds or (MODEL_SECONDS if case.op.name in MODEL_OPS else SECONDS))
    yield _end_row(client, seconds)
    yield _step_row(client)


def _start_row(client: Client) -> Row:
    try:
        client.start()
    except Fault as fault:
        return Row(START, (), Outcome.FAIL, f"The client {fault}.")
    return Row(START, (), Outcome.PASS)


def _row(client: Client, case: Case, seconds: float) -> Row:
    """Asked again where the answer turns out to belong to another question."""
    question = encoded(case.question())
    while True:
        outcome, note = _outcome(client, case, question, seconds)
        if outcome is not Outcome.FAIL or client.check_step(seconds):
            return Row(case.name, case.requires, outcome, note)


def _outcome(client: Client, case: Case, question: bytes, seconds: float) -> tuple[Outcome, str]:
    try:
        answer = client.ask(question, seconds)
    except GivenUp as fault:
        return Outcome.UNTESTED, f"The client {fault}."
    except Fault as fault:
        return Outcome.FAIL, f"The client {fault}."
    if kind_of(answer) is Kind.UNSUPPORTED:
        return Outcome.UNTESTED, "The client has no such part."
    found = judge(case, answer)
    return (Outcome.PASS, "") if found is None else (Outcome.FAIL, found)


def _end_row(client: Client, seconds: float | None) -> Row:
    if client.given_up:
        return Row(END, (), Outcome.UNTESTED, "The client was given up before.")
    try:
        client.finish(seconds or SECONDS)
    except Fault as fault:
        return Row(END, (), Outcome.FAIL, f"The client {fault}.")
    return Row(END, (), Outcome.PASS)


def _step_row(client: Client) -> Row:
    if client.strays:
        return Row(IN_STEP, (), Outcome.FAIL, f"The client {client.strays[0]}.")
    return Row(IN_STEP, (), Outcome.PASS)
