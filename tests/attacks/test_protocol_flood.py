"""Keys cost nothing: many of them, over one line, against a run that goes on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nous_node.protocol.errors import Code
from nous_node.protocol.identity import Identity

from .forger import Forger

WAVES, KEYS = 5, 10
"""Fifty keys, ten at a time."""

HELLOS, GROUPS = 8, 6
"""Of one key: twice as many hellos as it may send at once."""


@pytest.fixture(scope="module")
def town(make_arena: Any) -> Iterator[Any]:
    """A trainer that looks for newcomers all the time, and paces their beacons."""
    with make_arena({"groups": 1000}, pause=600.0) as arena:
        yield arena


def fresh(town: Any, topic: str, policy: Any) -> Iterator[Forger]:
    """Keys of one shard that nobody has heard of."""
    for number in itertools.count():
        identity = Identity.from_seed(hashlib.sha256(f"flood {number}".encode()).digest())
        forger = Forger(identity, town.folder, policy)
        if forger.topic == topic:
            yield forger


@pytest.mark.attack("flood by fifty fresh keys", "rate")
def test_honest_groups_are_taken_and_versions_stay_while_fresh_keys_flood(town: Any) -> None:
    honest = town.known("honest")  # the first beacon comes at once
    begin = town.head.version
    group = honest.group(town.head, 0)
    flooders = fresh(town, honest.topic, honest.policy)
    for _ in range(WAVES):
        wave = list(itertools.islice(flooders, KEYS))
        hellos = [forger.hello() for forger in wave for _ in range(HELLOS)]
        groups = [
            forger.seal(msgspec.structs.replace(group, counter=counter).to_bytes())
            for forger in wave
            for counter in range(GROUPS)
        ]
        town.flood([*hellos, *groups], honest.topic)
        town.accepts_honest(honest)
        assert town.receipt(groups[-1]).code == Code.KEY_TOO_NEW
    assert town.head.version == begin
    town.until(lambda: town.status.refused.get(Code.RATE, 0) >= WAVES * KEYS * HELLOS // 2)
    assert town.status.refused[Code.KEY_TOO_NEW] == WAVES * KEYS * GROUPS
    assert town.status.volunteers == WAVES * KEYS + 1
