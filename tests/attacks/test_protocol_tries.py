"""How many of many tries are caught, each on the first group of a key of its own. `make attacks` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nous_node.node.following import Head
from nous_node.protocol.errors import Code
from nous_node.protocol.rollouts import RolloutGroup

from .cheats import CHEATS, DRAW, LOGPROBS, SUBTLE, cheating
from .edits import EDITS, attacks, telling
from .forger import Forger

TRIES = 60
"""With none of them through, at most 5 % get through at a confidence of 95 %."""

MOST = TRIES // 2
"""Of tries that a limit may just miss."""

UPDATE = 32
"""Groups of one update of the embedded default."""

pytestmark = pytest.mark.slow

Craft = Callable[[Head, Forger], RolloutGroup | None]


@pytest.fixture(scope="module")
def academy(make_arena: Any) -> Iterator[Any]:
    """A trainer that learns as the embedded default does by default."""
    with make_arena({}) as arena:
        yield arena


def tries(arena: Any, craft: Craft, record_property: Any, least: int = TRIES) -> list[Any]:
    """The refusals of TRIES groups, `least` at least, each of a key that sent nothing before. All are sent
    before the first is answered. A `craft` that returns None for a key finds nothing to change there."""
    sent: list[bytes] = []
    while len(sent) < TRIES:
        for forger in arena.crowd(TRIES):
            group = craft(arena.head, forger)
            if group is not None and len(sent) < TRIES:
                sent.append(forger.seal(group.to_bytes()))
    arena.say(sent, forger.topic)
    receipts = [arena.receipt(data) for data in sent]
    refused = [receipt for receipt in receipts if receipt.verdict == "refused"]
    record_property("caught", (len(refused), TRIES))
    assert len(refused) >= least
    states = [arena.state(data) for data in sent]
    assert states.count(("refused", None)) + states.count(None) == len(refused)
    return refused


@pytest.mark.parametrize("name", attacks(EDITS))
def test_edits_are_refused_on_the_first_group(arena: Any, name: str, record_property: Any) -> None:
    code, edit = EDITS[name]
    refused = tries(arena, lambda head, forger: edit(telling(head, forger)), record_property)
    assert {receipt.code for receipt in refused} == {code}


@pytest.mark.parametrize("name", attacks(CHEATS))
def test_cheats_are_refused_on_the_first_group(arena: Any, name: str, record_property: Any) -> None:
    code, engine = CHEATS[name]
    refused = tries(arena, lambda head, forger: cheating(head, forger, engine), record_property)
    assert code in {receipt.code for receipt in refused} <= {LOGPROBS, DRAW, Code.FINISH}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.attack(name, DRAW.value)) for name in SUBTLE]
)
def test_draws_of_rounded_weights_are_refused_where_they_differ(
    arena: Any, name: str, record_property: Any
) -> None:
    """Nearly all: a uniform may lie closer to the border of two tokens than rounding moves it in honesty."""
    refused = tries(
        arena, lambda head, forger: cheating(head, forger, SUBTLE[name]), record_property, least=MOST
    )
    assert {receipt.code for receipt in refused} == {DRAW}


@pytest.mark.attack("previous checkpoint", "logprob-mismatch")
def test_previous_checkpoint_is_refused_on_the_first_group(academy: Any, record_property: Any) -> None:
    """Two versions of ordinary learning, one after the other."""
    old = academy.policy(academy.head)
    teach(academy)

    def before(forger: Forger, requests: Any) -> Any:
        return forger.sample(requests, policy=old)

    refused = tries(academy, lambda head, forger: cheating(head, forger, before), record_property)
    assert {receipt.code for receipt in refused} == {LOGPROBS}


def teach(academy: Any) -> None:
    """One update."""
    teachers = academy.crowd(UPDATE)
    version = academy.head.version
    groups = [teacher.seal(teacher.group(academy.head).to_bytes()) for teacher in teachers]
    academy.say(groups, teachers[0].topic)
    academy.until(lambda: academy.head.version > version)
