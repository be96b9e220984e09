"""Ops of chapters 06 and 07: tasks, sampling, holes, arrays, rollout groups and references to them."""

from __future__ import annotations

import hashlib
import math
import sqlite3
from contextlib import closing
from typing import Final, Literal

from nous_node.protocol import sampling, tasks
from nous_node.protocol.checkpoints import check_chunk
from nous_node.protocol.constants import DOMAIN_DRAW
from nous_node.protocol.encoding import decode
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.references import chunks, cut, open_group, read_reference, unpack
from nous_node.protocol.rollouts import (
    RolloutGroup,
    pack_floats,
    pack_tokens,
    unpack_floats,
    unpack_tokens,
)
from nous_node.protocol.structure import check_structure

from .adapter_question import ROOM, Answer, Ask, BadQuestion, Ops, Raw, Refused, run_manifest, tagged
from .journal_counters import Counters, withheld
from .journal_keys import Ledger
from .journal_tables import SCHEMA

STREAM_BYTES: Final = 72
"""Of the stream that a task is drawn from. [TSK-2]"""

MAX_SAMPLES: Final = 1 << 16
"""Sampler keys that a question may ask for, and uniforms: more than a group has."""


class Task(Ask, frozen=True):
    run: Raw
    checkpoint: Raw
    beacon: Raw
    key: Raw
    counter: int
    weights: list[int]
    samples: int


def task(ask: Task) -> Answer:
    seed = tasks.task_seed(ask.run, ask.checkpoint, ask.beacon, ask.key, ask.counter)
    _bounded(ask.samples)
    assignment = tasks.assign(seed, ask.weights, ask.samples)
    return {
        "seed": seed.hex(),
        "stream": hashlib.shake_256(DOMAIN_DRAW + seed).hexdigest(STREAM_BYTES),
        "environment": assignment.environment,
        "task_seed": assignment.task_seed.hex(),
        "sampler_keys": [assignment.sampler_key(number).hex() for number in range(ask.samples)],
    }


class Uniforms(Ask, frozen=True):
    key: Raw
    start: int
    count: int


def uniforms(ask: Uniforms) -> Answer:
    _bounded(ask.count)
    keystream = sampling.keystream(ask.key, ask.start, ask.count)
    return {"keystream": keystream.hex(), "uniforms": sampling.uniforms(ask.key, ask.start, ask.count)}


def _bounded(count: int) -> None:
    if not 0 <= count <= MAX_SAMPLES:
        raise BadQuestion(f"The question asks for {count} of them; at most {MAX_SAMPLES} are made.")


class Choice(Ask, frozen=True):
    logits: list[float | None]
    temperature: float
    uniform: float

    @property
    def numbers(self) -> list[float]:
        """Null is minus infinity."""
        return [-math.inf if logit is None else logit for logit in self.logits]


def choice(ask: Choice) -> Answer:
    return {"token": sampling.choose(ask.numbers, ask.temperature, ask.uniform)}


class Distance(Choice, frozen=True, kw_only=True):
    token: int


def distance(ask: Distance) -> Answer:
    return {"distance": sampling.distance(ask.numbers, ask.temperature, ask.token, ask.uniform)}


class Counter(Ask, frozen=True):
    counter: int


class Holes(Ask, frozen=True):
    environments: list[int]
    accepted: int
    credit: int
    steps: list[Counter]


def holes(ask: Holes) -> Answer:
    weights = tuple(1 for _ in set(ask.environments))
    counters, steps = Counters(), []
    for step in ask.steps:
        counters.take(step.counter, ask.environments.__getitem__, weights)
        steps.append({"holes": counters.holes, "waits": counters.held_up})
    answer = {"steps": steps, "debit": _debited(counters.holes, ask.accepted, ask.credit)}
    if steps and counters.held_up:
        raise Refused(answer, withheld(counters, counters.holes))
    return answer


def _debited(count: int, accepted: int, credit: int) -> int:
    """What a key owes for so many holes."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA.tables)
        connection.execute(
            "INSERT INTO keys(key, heard_ms, heard_version, seen_ms, agent, accepted, credit) "
            "VALUES(x'00', 0, 0, 0, '', ?, ?)",
            (accepted, credit),
        )
        ledger = Ledger(connection, 0)
        ledger.owe(b"\0", count)
        record = ledger.record(b"\0")
        return 0 if record is None else record.debit


class Planes(Ask, frozen=True):
    form: Literal["u32", "f32", "f16"]
    planes: Raw


def array(ask: Planes) -> Answer:
    if ask.form == "u32":
        tokens = unpack_tokens(ask.planes)
        return {"values": tokens, "planes": pack_tokens(tokens).hex()}
    values = unpack_floats(ask.planes, ask.form)
    return {"values": values, "planes": pack_floats(values, ask.form).hex()}


class Body(Ask, frozen=True):
    manifest: Raw
    body: Raw


def rollout(ask: Body) -> Answer:
    group = RolloutGroup.from_bytes(ask.body)
    check_structure(group, run_manifest(ask.manifest))
    return {"value": tagged(decode(ask.body, ROOM))}


def reference(ask: Body) -> Answer:
    read_reference(ask.body, run_manifest(ask.manifest).referenced_limit)
    return {"value": tagged(decode(ask.body, ROOM))}


class Fetched(Body, frozen=True, kw_only=True):
    frame: Raw


def fetched(ask: Fetched) -> Answer:
    found = read_reference(ask.body, run_manifest(ask.manifest).referenced_limit)
    if len(ask.frame) == found.packed:  # chunk by chunk, as they come
        for (digest, length), (_, piece) in zip(chunks(found), cut(found, ask.frame), strict=True):
            if len(piece) != length:
                raise RemoteError(Code.SIZE_MISMATCH, f"A chunk has {len(piece)} bytes, not {length}.")
            check_chunk(piece, digest)
    group = unpack(found, ask.frame)
    open_group(found, group)
    return {"value": tagged(decode(ask.body, ROOM)), "group": group.hex()}


OPS: Final[Ops] = {
    "tasks": task,
    "uniforms": uniforms,
    "choices": choice,
    "distances": distance,
    "holes": holes,
    "arrays": array,
    "rollouts": rollout,
    "references": reference,
    "references-fetched": fetched,
}
