"""What goes into a checkpoint while somebody cheats: honest groups, each once, and nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from nous_node.node.following import Head
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import Code
from nous_node.protocol.rollouts import RolloutGroup

from .cheats import CHEATS, Engine
from .edits import EDITS, telling
from .forger import Forger

UPDATE = 3
"""Groups of one update."""

PLAIN = (
    "edited token with recomputed log-probs",
    "reward by exploiting a scorer",
    "best of N",
    "int8 weights",
)
"""Cheats that change every group."""


Lie = Callable[[Head, Forger], RolloutGroup]


def edit_of(edit: Callable[[RolloutGroup], RolloutGroup]) -> Lie:
    return lambda head, forger: edit(telling(head, forger))


def group_of(engine: Engine) -> Lie:
    return lambda head, forger: forger.group(head, None, lambda requests: engine(forger, requests))


LIES: list[tuple[Code, Lie]] = [
    *((code, edit_of(edit)) for code, edit in EDITS.values()),
    *((code, group_of(CHEATS[name][1])) for name, (code, _) in CHEATS.items() if name in PLAIN),
]


@pytest.fixture(scope="module")
def school(make_arena: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A trainer that makes a version of every UPDATE groups, and large steps."""
    with make_arena({"groups": UPDATE, "rate": 0.003, "warmup": 0, "keep_checkpoints": 20}) as arena:
        yield arena


@pytest.fixture(scope="module")
def pupil(school: Any) -> Any:
    return school.known("pupil")


def teach(school: Any, pupil: Any) -> list[bytes]:
    """Honest groups until there is another version; the envelopes."""
    before, sent = school.head.version, []
    pupil.policy = school.policy(school.head)
    while len(sent) < UPDATE:
        sent.append(pupil.seal(pupil.group(school.head).to_bytes()))
        school.send(sent[-1], pupil.topic)
        assert school.receipt(sent[-1]).verdict == "accepted"
        if school.head.version > before:
            break
    school.until(lambda: school.head.version > before)
    pupil.policy = school.policy(school.head)
    return sent


def used(school: Any) -> dict[bytes, int]:
    """Envelope id -> version, of all groups that a checkpoint was made of."""
    with closing(sqlite3.connect(school.folder.journal)) as connection:
        return dict(connection.execute("SELECT id, used_version FROM groups WHERE state = 'used'").fetchall())


def test_checkpoints_are_made_of_honest_groups_only(school, pupil) -> None:
    """Everything that edits and cheats make of a group, between honest ones: first, while the policy is as it
    was and gives answers of several tokens."""
    pupil.policy = school.policy(school.head)
    before = used(school)
    forged = []
    for liar, (code, make) in zip(school.crowd(len(LIES)), LIES, strict=True):
        liar.policy = school.policy(school.head)
        forged.append(liar.seal(make(school.head, liar).to_bytes()))
        school.say(forged[-1:], liar.topic)
        assert school.receipt(forged[-1]).code == code
    honest = teach(school, pupil) + teach(school, pupil)
    fresh = used(school).keys() - before.keys()
    assert {unseal(data).id for data in honest} & fresh
    assert not {unseal(data).id for data in forged} & fresh
    for data in forged:
        assert school.state(data) == ("refused", None)


@pytest.mark.attack("previous checkpoint", "logprob-mismatch")
def test_rollouts_of_the_weights_before_are_refused(school, pupil) -> None:
    old = school.policy(school.head)
    teach(school, pupil)
    pupil.policy = old
    data = pupil.seal(pupil.group(school.head).to_bytes())
    school.send(data, pupil.topic)
    receipt = school.receipt(data)
    assert receipt.code == Code.LOGPROB_MISMATCH
    assert receipt.measured > receipt.threshold
    pupil.policy = school.policy(school.head)
    school.accepts_honest(pupil)


@pytest.mark.attack("group kept back until it is old", "stale")
def test_honest_group_that_comes_too_late_is_stale_and_its_sender_goes_on(school, pupil) -> None:
    pupil.policy = school.policy(school.head)
    first = school.head.version
    late = pupil.seal(pupil.group(school.head).to_bytes())
    staleness = school.folder.manifest.staleness
    while school.head.version <= first + staleness:
        teach(school, pupil)
    school.send(late, pupil.topic)
    receipt = school.receipt(late)
    assert (receipt.verdict, receipt.code) == ("refused", Code.STALE)
    assert (receipt.measured, receipt.threshold) == (school.head.version - first, staleness)
    assert school.state(late) is None
    school.accepts_honest(pupil)


def test_group_that_is_old_and_not_too_old_is_learnt_from(school, pupil) -> None:
    pupil.policy = school.policy(school.head)
    old = pupil.seal(pupil.group(school.head).to_bytes())
    teach(school, pupil)
    school.send(old, pupil.topic)
    assert school.receipt(old).verdict == "accepted"
    teach(school, pupil)
    school.until(lambda: school.state(old)[0] == "used")


@pytest.mark.attack("replay after the seen cache forgot", "")
def test_replay_after_a_restart_is_answered_and_used_no_second_time(school, pupil) -> None:
    sent = teach(school, pupil)
    replayed = next(data for data in sent if school.state(data)[0] == "used")
    receipt, state = school.receipt(replayed), school.state(replayed)
    rows, version = school.journalled(), school.head.version
    school.stop()
    school.start()
    assert school.head.version >= version
    school.send(replayed, pupil.topic)
    assert school.receipt(replayed, 2) == receipt
    assert (school.state(replayed), school.journalled()) == (state, rows)
    pupil.policy = school.policy(school.head)
    school.accepts_honest(pupil)
