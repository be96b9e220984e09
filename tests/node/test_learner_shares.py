"""Which groups a learner takes from which keys, and from which it takes none any more. [VER-14]"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nous_node.node.curriculum import Curriculum
from nous_node.node.learner import Learner
from nous_node.node.learner_messages import Candidate, Open, Proceed, Rested, Updated, Verify
from nous_node.node.runfolder import RunFolder

UPDATE = 4
KEYS = [bytes([letter]) * 32 for letter in b"vwxyz"]


@pytest.fixture
def folder(make_folder: Any) -> RunFolder:
    run: RunFolder = make_folder(groups=UPDATE)
    return run


@pytest.fixture(scope="module")
def honest(base_run: RunFolder, volunteers: Any) -> list[Candidate]:
    """Groups of version 0."""
    groups: list[Candidate] = volunteers.candidates(base_run, 4 * UPDATE)
    return groups


def opening(folder: RunFolder, version: int = 0, **changes: Any) -> Open:
    place = str(folder.checkpoint(version))
    message = Open(str(folder.path), version, place, {version: place}, {}, "cpu", 1)
    return msgspec.structs.replace(message, **changes)


@pytest.fixture(scope="module")
def several(base_run: RunFolder, volunteers: Any, honest: list[Candidate]) -> list[list[Candidate]]:
    """Groups of version 0 by each of KEYS: many of the first, two of each other."""
    return [honest, *(volunteers.candidates(base_run, 2, key=key) for key in KEYS[1:])]


def ids(candidates: list[Candidate]) -> list[bytes]:
    return [candidate.id for candidate in candidates]


def test_a_key_that_floods_gets_its_share_while_others_bring_theirs(make_folder, several) -> None:
    """What is too much is reported as done."""
    flood, *others = several
    distinct = [
        [msgspec.structs.replace(one, id=one.id[:-2] + bytes([number, 1])) for one in groups]
        for number, groups in enumerate(others)
    ]
    firsts, seconds = ([groups[turn] for groups in distinct] for turn in (0, 1))
    learner = Learner.open(opening(make_folder(groups=UPDATE, peer_share=0.6)))  # two groups
    learner.verify([*flood[:6], *firsts])
    one, two = learner.step(), learner.step()
    assert one is not None
    assert two is not None
    assert one.used == ids([*flood[:2], *firsts[:2]])
    assert two.used == ids([*flood[2:4], *firsts[2:]])
    assert learner.step() is None
    learner.verify([seconds[0], *flood[6:8]])
    assert learner.step() is None
    assert len(learner.held) == UPDATE  # the trainer goes on reading
    assert learner.aged == ids(flood[4:5])
    learner.verify(seconds[1:2])
    three = learner.step()
    assert three is not None
    assert three.used == ids([flood[5], seconds[0], flood[6], seconds[1], flood[4]])
    assert three.aged == 1
    learner.verify(flood[8:12])
    four = learner.step()
    assert four is not None  # as nobody else brings anything
    assert four.used == ids(flood[7:11])


def test_one_key_alone_is_learnt_from_at_once(folder, honest) -> None:
    learner = Learner.open(opening(folder))
    learner.verify(honest[: 2 * UPDATE])
    assert [bool(learner.step()) for _ in range(3)] == [True, True, False]


def test_keys_on_probation_wait_for_active_ones(make_folder, several) -> None:
    active, strange, *_ = several
    strange = [msgspec.structs.replace(one, id=one.id[:-2] + b"ss") for one in strange]
    learner = Learner.open(opening(make_folder(groups=UPDATE, probation_share=0.3)))  # one group
    learner.verify([*strange, *(msgspec.structs.replace(one, state="active") for one in active[:2])])
    assert learner.step() is None
    learner.verify([msgspec.structs.replace(active[2], state="active")])
    updated = learner.step()
    assert updated is not None
    assert updated.used[:UPDATE] == ids([strange[0], *active[:3]])


# --- keys that are not trusted any more ----------------------------------------------------------


def test_groups_of_a_distrusted_key_are_dropped_and_reported_as_done(folder, honest, several, taught) -> None:
    other = [msgspec.structs.replace(one, id=one.id[:-2] + b"oo") for one in several[1]]
    said = taught(
        opening(folder),
        Verify([honest[0], *other]),
        Proceed(),
        Verify(honest[1:3]),
        Proceed([KEYS[0]]),
        Verify(honest[3:5]),
        Proceed([KEYS[1]]),
        Verify(honest[5:7]),
        Proceed(),
    )
    (updated,) = [one for one in said if isinstance(one, Updated)]
    assert updated.used == ids([*honest[3:7], *honest[:3], *other])
    assert updated.aged == 5
    assert [one.held for one in said if isinstance(one, Rested)] == [3, 2, 2, 0]


def test_nothing_is_learnt_before_the_trainer_has_said_whose_groups_are_out(folder, honest, taught) -> None:
    """The verdicts of a batch may put a key into quarantine whose groups would fill an update. [REP-2]"""
    said = taught(opening(folder), Verify(honest[: UPDATE + 1]), Proceed([KEYS[0]]), Verify([]), Proceed())
    assert not [one for one in said if isinstance(one, Updated)]
    assert [one.held for one in said if isinstance(one, Rested)] == [0, 0]


def test_only_audited_groups_raise_the_level(folder, honest, monkeypatch) -> None:
    """No share of an update bounds what they say to the curriculum."""
    learner = Learner.open(opening(folder))
    noted: list[float] = []
    monkeypatch.setattr(Curriculum, "note", lambda _, environment, level, reward: noted.append(reward))
    active = [msgspec.structs.replace(one, state="active") for one in honest[:3]]
    learner.verify([active[0], msgspec.structs.replace(active[1], audit=False), active[2]])
    assert len(learner.held) == 3
    assert len(noted) == 2


@pytest.mark.parametrize("state", ["quarantine", "banned"])
def test_groups_accepted_before_their_key_was_put_out_are_not_learnt_from(folder, honest, state) -> None:
    learner = Learner.open(opening(folder))
    learner.verify(honest[:2])
    last = msgspec.structs.replace(honest[2], accepted=True, state=state)
    (one,) = learner.verify([last])
    assert one.receipt.verdict == "accepted"
    assert (learner.held, learner.aged) == ([], ids(honest[:3]))
