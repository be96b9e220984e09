"""The cases that a client is asked: the vectors of this release, or of a folder, each with its op.

`ops.toml` says which fields of a case are a question and which an answer (chapter 14).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeAlias, cast

import msgspec

from nous_node.protocol.errors import LocalError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Fields: TypeAlias = Mapping[str, Json]

PACKAGE = "nous_node.vectors"
OPS = "ops.toml"
MODEL_OPS = frozenset({"nous-default", "forward"})
"""Ops that compute with a policy: they may take longer."""
SAMPLES = "samples"
"""A question that no case holds: how many results are wanted. It is the length of what is expected."""
COUNTED = {"tasks": "sampler_keys"}
"""The list that `samples` counts, by op."""


@dataclass(frozen=True, slots=True)
class Op:
    """A row of `ops.toml`."""

    name: str
    file: str
    has: tuple[str, ...]
    inputs: tuple[str, ...]
    """Fields of a case; `a.b` is field b of each element of a."""
    shared: tuple[str, ...]
    """Fields of the file."""
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One vector."""

    op: Op
    number: int
    """Its place in its file, from 0."""
    fields: Fields
    shared: Fields
    """Those of the file."""

    @property
    def name(self) -> str:
        return f"{self.op.file}-{self.number} {self.fields['comment']}"

    @property
    def requires(self) -> tuple[str, ...]:
        return tuple(cast(list[str], self.fields["requires"]))

    @property
    def refused(self) -> bool:
        return "code" in self.fields or self.fields.get("refused") is True

    def question(self) -> dict[str, Json]:
        """What the adapter is asked."""
        asked: dict[str, Json] = {"op": self.op.name}
        asked |= {name: self.shared[name] for name in self.op.shared}
        asked |= projected(self.fields, self.op.inputs)
        if SAMPLES in self.op.inputs and SAMPLES not in asked:
            asked[SAMPLES] = len(cast(list[Json], self.fields[COUNTED[self.op.name]]))
        return asked

    def expected(self) -> dict[str, Json]:
        """What `ok` has to hold."""
        return projected(self.fields, self.op.outputs)


def projected(fields: Fields, paths: Sequence[str]) -> dict[str, Json]:
    """The fields at these paths, those that are there; elements keep their places."""
    found: dict[str, Json] = {}
    inner: dict[str, list[str]] = {}
    for path in paths:
        name, _, rest = path.partition(".")
        if name not in fields:
            continue
        if rest:
            inner.setdefault(name, []).append(rest)
        else:
            found[name] = fields[name]
    for name, rests in inner.items():
        elements = cast(list[dict[str, Json]], fields[name])
        found[name] = [projected(element, rests) for element in elements]
    return found


def load_cases(folder: Path | None = None) -> list[Case]:
    """All cases that have an op, file by file. Raises LocalError."""
    place: Traversable = files(PACKAGE) if folder is None else folder
    try:
        ops = _read_ops(place.joinpath(OPS).read_text(encoding="utf-8"))
        names = dict.fromkeys(op.file for op in ops)
        return [case for name in names for case in _read_cases(place, name, ops)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LocalError(f"The vectors cannot be read: {type(error).__name__}: {error}.") from error


def _read_ops(text: str) -> list[Op]:
    rows = tomllib.loads(text)
    return [
        Op(
            name,
            row.get("file", name),
            tuple(row.get("has", ())),
            tuple(row.get("in", ())),
            tuple(row.get("also", ())),
            tuple(row.get("out", ())),
        )
        for name, row in rows.items()
    ]


def _read_cases(place: Traversable, name: str, ops: Sequence[Op]) -> list[Case]:
    content = cast(dict[str, Json], msgspec.json.decode(place.joinpath(f"{name}.json").read_bytes()))
    cases = cast(list[dict[str, Json]], content["cases"])
    shared = {key: value for key, value in content.items() if key != "cases"}
    own = [op for op in ops if op.file == name]
    return [Case(_op_of(fields, own), number, fields, shared) for number, fields in enumerate(cases)]


def _op_of(fields: Fields, ops: Sequence[Op]) -> Op:
    for op in ops:
        if all(field in fields for field in op.has):
            return op
    raise ValueError(f"no op of {OPS} takes a case with the fields {', '.join(fields)}")
