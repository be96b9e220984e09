"""Mutations of all positive vectors, asked of two adapters: both take a question, or both refuse it.

Which of two broken rules a reader names is free (chapter 00), so codes are not compared; what was taken is,
field by field. Case N of a seed is always the same one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Final, TypeAlias, cast

import msgspec

from nous_node.protocol.errors import Code, NousError
from nous_node.protocol.identity import Identity

from .conformance_cases import Case, Json
from .conformance_compare import Kind, difference, kind_of, raw, shown
from .conformance_layers import INPUTS, Chain, Scene
from .conformance_mutations import mutated
from .conformance_process import Fault
from .conformance_table import Outcome, Row

BATCH: Final = 256
"""Questions under way at a time."""
BATCH_BYTES: Final = 1 << 20
SMALL: Final = 8_192
"""Bytes of an input that comes as often as any other; larger ones take their time, and come less often."""
OPENED: Final = 4
"""How much more often an input that is opened comes."""
MOST_OF_OP: Final = 8.0
"""Weight of an op of which there are many inputs: more of them bring no more rules."""
RICH: Final = {"encoding": 2.0, "runs": 2.0, "rollouts": 2.0, "checkpoints": 2.0}
"""How much more often ops come whose structures have the most rules."""
KIN: Final = 0.7
"""How often an input is spliced with one of the same op."""
MAX_ROWS: Final = 100
"""Rows of questions that were answered differently; the rest is counted."""
US: Final = "this node"
THE_OTHER: Final = "the other adapter"
"""Whose answers those of the client are compared with."""
SHOWN_QUESTION: Final = 1_200
"""Characters of a question in a row; `--fuzz-case` shows all of it."""

Ask: TypeAlias = Callable[[Sequence[bytes]], "list[Json | Fault]"]
"""Asks an adapter a batch."""


Mutate: TypeAlias = Callable[[bytes, Random, Sequence[bytes]], bytes]


@dataclass(frozen=True, slots=True)
class Input:
    """Bytes of a positive vector, opened as deep as a chain goes."""

    case: Case
    path: tuple[str | int, ...]
    """Where they stand in the question."""
    layers: tuple[bytes, ...]
    """From the outermost to what is mutated."""
    chain: Chain
    identities: dict[bytes, Identity]

    @property
    def name(self) -> str:
        place = ".".join(map(str, (*self.path, *(layer.name for layer in self.chain))))
        return f"{self.case.op.name}: {self.case.op.file}-{self.case.number} {place}"

    @property
    def weight(self) -> float:
        """What is opened comes more often: from outside a mutation hardly gets anywhere."""
        return min(1.0, SMALL / (1 + len(self.layers[0]))) ** 2 * (OPENED if self.chain else 1)

    def question(self, entropy: Random, others: Sequence[bytes], mutate: Mutate = mutated) -> dict[str, Json]:
        """A mutation, closed again as far as that goes."""
        scene = Scene(self.case.question(), self.identities)
        data = mutate(self.layers[-1], entropy, others)
        for layer, outer in zip(reversed(self.chain), reversed(self.layers[:-1]), strict=True):
            try:
                data = layer.close(scene, outer, data)
            except NousError:  # what it became does not fit in: it goes as it is
                break
        _put(scene.question, self.path, data)
        return scene.question


def _put(question: dict[str, Json], path: Sequence[str | int], data: bytes) -> None:
    """Sets the place; the lists and maps on the way are copied, for they are the vector's."""
    text = data.decode("latin-1") if path == ("text",) else data.hex()
    place = cast("dict[str | int, Json]", question)
    for name in path[:-1]:
        inner = cast("dict[str | int, Json]", place[name]).copy()
        place[name] = cast(Json, inner)
        place = inner
    place[path[-1]] = text


def inputs_of(cases: Sequence[Case]) -> list[Input]:
    """All bytes of the positive vectors among these."""
    found: list[Input] = []
    for case in cases:
        for path, chains in INPUTS.get(case.op.name, {}).items():
            if not case.refused:
                found += _inputs(case, path, chains)
    return found


def _inputs(case: Case, path: str, chains: Sequence[Chain]) -> Iterator[Input]:
    seeds = cast("dict[str, str]", case.shared["seeds"])
    identities = {one.key: one for one in map(Identity.from_seed, map(bytes.fromhex, seeds.values()))}
    for place, value in _values(case.question(), path):
        data = value.encode() if place == ("text",) and isinstance(value, str) else raw(value)
        for chain in chains if data else ():
            try:
                layers = tuple(accumulate((layer.open for layer in chain), _opened, initial=data or b""))
            except (NousError, KeyError, ValueError):  # this one has no such inside
                continue
            yield Input(case, place, layers, chain, identities)


def _opened(data: bytes, opens: Callable[[bytes], bytes]) -> bytes:
    return opens(data)


def _values(question: dict[str, Json], path: str) -> Iterator[tuple[tuple[str | int, ...], Json]]:
    """Each value at a path: one, one of each element of a list, or each element of a list of bytes."""
    name, _, inner = path.partition(".")
    value = question.get(name)
    if inner:
        for index, element in enumerate(cast("list[dict[str, Json]]", value)):
            yield (name, index, inner), element[inner]
    elif isinstance(value, list) and raw(value) is None:
        yield from (((name, index), one) for index, one in enumerate(value))
    elif value is not None:
        yield (name,), value


@dataclass(slots=True)
class Mutations:
    """All mutations of one seed."""

    inputs: Sequence[Input]
    seed: int
    by_op: dict[str, list[Input]] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    """Of the ops: those with more vectors come more often, but not by as much."""
    others: list[bytes] = field(default_factory=list)
    kin: dict[str, list[bytes]] = field(default_factory=dict)
    """Inputs of the same op, which fit together more often."""

    def __post_init__(self) -> None:
        for one in self.inputs:
            self.by_op.setdefault(one.case.op.name, []).append(one)
            own = self.kin.setdefault(one.case.op.name, [])
            if len(one.layers[-1]) <= SMALL:
                self.others.append(one.layers[-1])
                own.append(one.layers[-1])
        self.weights = [
            min(MOST_OF_OP, math.sqrt(len(group))) * RICH.get(name, 1.0) for name, group in self.by_op.items()
        ]

    def make(self, number: int) -> tuple[Input, dict[str, Json]]:
        """Case `number`."""
        entropy = Random(f"{self.seed}:{number}")
        (name,) = entropy.choices(list(self.by_op), self.weights)
        group = self.by_op[name]
        (chosen,) = entropy.choices(group, [one.weight for one in group])
        others = self.kin[name] if entropy.random() < KIN else self.others
        return chosen, chosen.question(entropy, others or self.others)


@dataclass(frozen=True, slots=True)
class Asked:
    """A mutation on its way."""

    number: int
    input: Input
    line: bytes


def supported(inputs: Sequence[Input], asks: Sequence[Ask]) -> list[Input]:
    """Those of ops that all adapters have."""
    first = {one.case.op.name: one.case for one in inputs}
    lines = [encoded(case.question()) for case in first.values()]
    missing = set()
    for ask in asks:
        answers = zip(first, ask(lines), strict=True)
        missing |= {name for name, answer in answers if _kind(answer) is Kind.UNSUPPORTED}
    return [one for one in inputs if one.case.op.name not in missing]


def encoded(question: dict[str, Json]) -> bytes:
    """A question's line."""
    return msgspec.json.encode(question) + b"\n"


def _kind(answer: Json | Fault) -> Kind:
    return Kind.BROKEN if isinstance(answer, Fault) else kind_of(answer)


def batches(mutations: Mutations, numbers: Sequence[int]) -> Iterator[list[Asked]]:
    """Bounded by their number and by their bytes."""
    batch: list[Asked] = []
    room = BATCH_BYTES
    for number in numbers:
        chosen, question = mutations.make(number)
        batch.append(Asked(number, chosen, encoded(question)))
        room -= len(batch[-1].line)
        if len(batch) == BATCH or room <= 0:
            yield batch
            batch, room = [], BATCH_BYTES
    if batch:
        yield batch


def fuzz_rows(
    mutations: Mutations,
    numbers: Sequence[int],
    ours: Ask,
    theirs: Ask,
    step: Callable[[int], None],
    us: str = US,
) -> Iterator[Row]:
    """A row a disagreement, then a row an op with its figures. `us`: what `ours` is called."""
    tallies: dict[str, Counter[str]] = {name: Counter() for name in mutations.by_op}
    differences = 0
    for batch in batches(mutations, numbers):
        lines = [asked.line for asked in batch]
        for asked, own, other in zip(batch, ours(lines), theirs(lines), strict=True):
            found = disagreement(asked.input.case, own, other, us)
            tally = tallies[asked.input.case.op.name]
            tally[_kind(own).value if found is None else "differ"] += 1
            if found is not None and (differences := differences + 1) <= MAX_ROWS:
                yield _difference_row(asked, found, mutations.seed)
        step(len(batch))
    yield from (_op_row(name, tally) for name, tally in tallies.items())


def disagreement(case: Case, own: Json | Fault, other: Json | Fault, us: str = US) -> str | None:
    """None where both say the same of a question."""
    for name, answer in ((us, own), ("the client", other)):
        broken = _broken(answer)
        if broken is not None:
            return f"{name} {broken}"
    if _kind(own) is not _kind(other):
        return f"{us} {_said(own)}, the client {_said(other)}"
    if _kind(own) is Kind.ERROR:
        return None
    results = [cast("dict[str, dict[str, Json]]", answer)["ok"] for answer in (own, other)]
    tolerance = float(cast(float, case.fields.get("tolerance", 0.0)))
    for path in _compared(case, results[0]):
        try:
            found = difference(results[0].get(path), results[1].get(path), tolerance, path)
        except RecursionError:
            return f"both took it with a {path} that is nested too deep to be compared"
        if found is not None:
            return f"both took it, the results differ (expected: what {us} says): {found}"
    return None


def _compared(case: Case, results: dict[str, Json]) -> Iterator[str]:
    """Fields of the results. Which bits a number that is none has when it is packed again is free."""
    for path in dict.fromkeys(path.partition(".")[0] for path in case.op.outputs):
        if not (path == "planes" and None in cast("list[Json]", results.get("values", []))):
            yield path


def _broken(answer: Json | Fault) -> str | None:
    if isinstance(answer, Fault):
        return str(answer)
    match answer:
        case {"error": str() as code} if code not in Code._value2member_map_:
            return f"answered with an error that is no code: {shown(answer)}"
        case {"error": str()} | {"ok": dict()}:
            return None
    return f"answered {shown(answer)}"


def _said(answer: Json | Fault) -> str:
    match answer:
        case {"error": str() as code}:
            return f"refused it with {shown(code)}"
        case {"ok": dict() as results}:
            return f"took it with {shown(results)}"
    return str(answer)


def _difference_row(asked: Asked, found: str, seed: int) -> Row:
    question = shown(cast(Json, msgspec.json.decode(asked.line)), SHOWN_QUESTION)
    note = f"{found}; again: --seed {seed} --fuzz-case {asked.number}; asked: {question}"
    return Row(f"mutation {asked.number} of {asked.input.name}", (), Outcome.FAIL, note)


def _op_row(name: str, tally: Counter[str]) -> Row:
    total = tally.total()
    note = (
        f"{total:,} mutations: {tally['ok']:,} taken by both, {tally['error']:,} refused by both, "
        f"{tally['differ']:,} answered differently."
    )
    outcome = Outcome.FAIL if tally["differ"] else Outcome.PASS if total else Outcome.UNTESTED
    return Row(f"mutations of {name}", (), outcome, note)
