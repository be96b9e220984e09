"""Ops of what a node does on its own machine: announcing a run, hearing of one, showing a stranger's text,
counting sampled tokens. [DSC-1] [DSC-2] [CNV-1] [SMP-4]"""

from __future__ import annotations

from typing import Final

from nous_node.protocol.sampling import uniforms

from .adapter_question import Answer, Ask, BadQuestion, Ops, Raw
from .discovery import Found, heard, label, others_reach, record
from .wording import printable

MAX_TURN: Final = 1 << 20
"""Tokens of a trajectory at most. [ROL-4]"""


class Announced(Ask, frozen=True):
    run: Raw
    addresses: list[str]


def announced(ask: Announced) -> Answer:
    """The record of a node that listens there; null where it stays silent."""
    reached = others_reach(ask.addresses)
    if not reached:
        return {"instance": None, "record": None}
    found = record(ask.run, reached)
    texts = {name.decode(): value.decode() for name, value in found.items()}
    return {"instance": label(ask.run, reached), "record": texts}


class Heard(Ask, frozen=True):
    properties: dict[str, Raw | None]


def taken(ask: Heard) -> Answer:
    """What a TXT record proposes; null where it is passed over."""
    match heard({name.encode(): value for name, value in ask.properties.items()}):
        case Found(run, addresses):
            return {"run": run.hex(), "addresses": list(addresses)}
    return {"run": None, "addresses": None}


class Text(Ask, frozen=True):
    text: str


def shown(ask: Text) -> Answer:
    """Places of the characters that are not passed on as they are."""
    return {"held": [place for place, one in enumerate(ask.text) if printable(one) != one]}


class Turns(Ask, frozen=True):
    key: Raw
    turns: list[tuple[int, bool]]
    """Tokens of a segment, and whether they are sampled."""


def turns(ask: Turns) -> Answer:
    """The uniforms of each turn, in order."""
    if sum(length for length, _ in ask.turns) > MAX_TURN or any(length < 0 for length, _ in ask.turns):
        raise BadQuestion("The question's `turns` are none of a trajectory.")
    found, start = [], 0
    for length, sampled in ask.turns:
        if sampled:
            found.append(uniforms(ask.key, start, length))
            start += length
    return {"uniforms": found}


OPS: Final[Ops] = {
    "announcements": announced,
    "announcements-heard": taken,
    "display": shown,
    "turns": turns,
}
