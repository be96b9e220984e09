"""Pickers, sets of chunks and records to try them with."""

from __future__ import annotations

import random

from nous_node.node.picker import Ask, Picker
from nous_node.node.records import Records

MIB = 1 << 20


def picker(chunks: int, records: Records | None = None, size: int = MIB, seed: int = 0) -> Picker:
    return Picker(dict.fromkeys(range(chunks), size), records or Records(), random.Random(seed), "us")


def bits(*chunks: int) -> int:
    return sum(1 << chunk for chunk in chunks)


def asks(picker: Picker, now: float = 0.0) -> list[Ask]:
    found: list[Ask] = []
    while (ask := picker.next(now)) is not None:
        found.append(ask)
    return found


def records(**rates: float) -> Records:
    found = Records()
    for name, rate in rates.items():
        found.of(name, 0.0).rate = rate
    return found
