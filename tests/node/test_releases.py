"""What becomes of a version on its way out: it waits, is told, is announced, and old ones make room."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node.events import Event, Note, VersionReport
from nous_node.node.network_errors import NoSubscribersError
from nous_node.node.publishing import LEAP
from nous_node.node.releases import Releases
from nous_node.node.renewals import Renewals
from nous_node.node.training import Training
from nous_node.protocol.constants import MAX_ENVELOPE

from .press import WEIGHTS, Press, Start

AMPLE = 1 << 40
VOLUNTEER = b"v" * 32


@dataclass
class Outside:
    """Network, swarm, own heads and lessons as far as releases use them, and what came there."""

    rolling_back: bool = False
    settled: trio.Event = field(default_factory=trio.Event)
    turn: trio.Lock = field(default_factory=trio.Lock)
    sent: list[bytes] = field(default_factory=list)
    alone: bool = False
    held: dict[bytes, tuple[bool, bool]] = field(default_factory=dict)
    learner_told: list[int] = field(default_factory=list)
    taught: bool = False

    async def publish(self, topic: str, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self.alone:
            raise NoSubscribersError(topic)
        self.sent.append(data)

    def hold(self, checkpoint: bytes, manifest: Any, *, files: bool, deltas: bool) -> None:
        self.held[checkpoint] = files, deltas

    def release(self, checkpoint: bytes) -> None:
        self.held.pop(checkpoint, None)

    @property
    def coach(self) -> Outside.Coach:
        return self.Coach(self.learner_told)

    @dataclass
    class Coach:
        told: list[int]

        async def published(self, version: int) -> None:
            self.told.append(version)

    async def loop(self) -> None:
        self.taught = True
        await trio.sleep_forever()


@dataclass
class Stand:
    press: Press
    outside: Outside
    events: list[Event]
    releases: Releases

    def version_of(self, digest: bytes) -> int:
        return {head.hash: head.version for head in self.press.publisher._links.values()}[digest]

    def held(self) -> dict[int, tuple[bool, bool]]:
        return {self.version_of(digest): what for digest, what in self.outside.held.items()}

    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    async def update(self, delta: int | None = None, **changes: Any) -> None:
        made = self.press.made(self.press.publisher.head.version + 1, [], delta)
        for name, value in changes.items():
            setattr(made, name, value)
        lessons: Any = self.outside
        async with self.outside.turn:
            await self.releases.updated(made, lessons)


@pytest.fixture
def stand(start_press: Start) -> Stand:
    return made(start_press(), keep=2)


def made(press: Press, *, keep: int, room: int = AMPLE) -> Stand:
    outside: Any = Outside()
    events: list[Event] = []
    training = Training(press.following, press.journal)
    releases = Releases(
        press.publisher,
        press.following,
        outside,
        outside,
        outside,
        Renewals(),
        press.journal,
        training,
        events.append,
        keep=keep,
        room=room,
    )
    return Stand(press, outside, events, releases)


async def test_nothing_is_published_before_it_is_known_to_be_safe(stand: Stand) -> None:
    stand.press.journal.hear(VOLUNTEER, "test", 0, 0)
    lessons: Any = stand.outside
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.releases.run, lessons)
        nursery.start_soon(stand.update)
        await wait_all_tasks_blocked()
        assert stand.outside.taught
        assert stand.press.publisher.head.version == 0
        assert stand.outside.sent == []
        stand.outside.settled.set()
        while not stand.outside.sent:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert stand.press.publisher.head.version == 1
    assert stand.outside.sent == [stand.press.publisher.head.envelope]


async def test_a_new_version_is_reported_announced_and_told_to_the_learner(stand: Stand) -> None:
    stand.outside.settled.set()
    await stand.update(delta=100, note="Its delta was hard.")
    head = stand.press.publisher.head
    assert [event.version for event in stand.events if isinstance(event, VersionReport)] == [1]
    assert stand.notes() == ["Its delta was hard."]
    assert stand.outside.sent == [head.envelope]
    assert stand.outside.learner_told == [1]
    assert stand.held() == {0: (True, False), 1: (True, True)}


async def test_a_version_without_listeners_or_too_large_for_gossip_waits_to_be_asked_for(
    stand: Stand,
) -> None:
    stand.outside.settled.set()
    stand.outside.alone = True
    await stand.update()
    stand.outside.alone = False
    hashes = random.Random(0)
    await stand.update(tensors={str(number): hashes.randbytes(32) for number in range(MAX_ENVELOPE // 32)})
    assert len(stand.press.publisher.head.envelope) > MAX_ENVELOPE
    assert stand.outside.sent == []
    assert stand.press.following.version == 2


async def test_who_waits_for_a_beacon_gets_one_between_lessons(stand: Stand, autojump_clock) -> None:
    stand.outside.settled.set()
    stand.press.journal.hear(VOLUNTEER, "test", 0, 0)
    lessons: Any = stand.outside
    async with trio.open_nursery() as nursery:
        async with stand.outside.turn:
            nursery.start_soon(stand.releases.run, lessons)
            await trio.sleep(100)
            assert stand.press.publisher.head.version == 0
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert stand.press.publisher.head.version == 1
    assert stand.outside.learner_told == [1]
    assert stand.outside.sent == [stand.press.publisher.head.envelope]


async def test_who_waits_for_a_beacon_gets_one_from_a_trainer_that_is_never_idle(
    stand: Stand, autojump_clock
) -> None:
    stand.outside.settled.set()
    stand.press.journal.hear(VOLUNTEER, "test", 0, 0)
    lessons: Any = stand.outside

    async def teach() -> None:
        while True:
            async with stand.outside.turn:
                await trio.sleep(7)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(teach)
        nursery.start_soon(stand.releases.run, lessons)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert stand.press.publisher.head.version == 1


async def test_lessons_begin_after_a_rollback_and_its_version_is_announced(stand: Stand) -> None:
    stand.outside.rolling_back = True
    lessons: Any = stand.outside
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.releases.run, lessons)
        await wait_all_tasks_blocked()
        assert not stand.outside.taught
        head = stand.press.publisher.overtake(stand.press.publisher.head)
        stand.outside.settled.set()
        await wait_all_tasks_blocked()
        assert stand.outside.taught
        nursery.cancel_scope.cancel()
    assert head.version == LEAP
    assert stand.outside.sent == [head.envelope]


async def test_a_damaged_newest_version_is_mended_before_lessons_begin(start_press: Start) -> None:
    press = start_press()
    press.update()
    press.harm(1)
    stand = made(start_press(mend=False), keep=2)
    lessons: Any = stand.outside
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.releases.run, lessons)
        await wait_all_tasks_blocked()
        assert (stand.outside.taught, stand.press.publisher.head.version) == (False, 1)
        stand.outside.settled.set()
        await wait_all_tasks_blocked()
        assert stand.outside.taught
        nursery.cancel_scope.cancel()
    assert stand.press.publisher.head.version == 2
    assert stand.outside.sent == [stand.press.publisher.head.envelope]


async def test_others_are_told_what_leads_to_the_newest_and_what_is_gone(stand: Stand) -> None:
    stand.outside.settled.set()
    last = stand.press.folder.manifest.staleness + 4
    for _ in range(last):
        await stand.update(delta=10)
    deltas = dict.fromkeys((1, 2), (False, True))
    window = dict.fromkeys(range(3, last + 1), (True, True))
    assert stand.held() == {0: (True, False), **deltas, **window}
    stand.press.publisher.damaged(stand.press.folder.deltas(2) / WEIGHTS)
    stand.press.publisher.damaged(stand.press.folder.deltas(3) / WEIGHTS)
    stand.releases.hold()
    assert 2 not in stand.held()
    assert stand.held()[3] == (True, False)


async def test_a_person_is_told_once_that_what_is_needed_takes_more_than_is_allowed(
    start_press: Start,
) -> None:
    stand = made(start_press(), keep=9, room=1_000_000)
    stand.outside.settled.set()
    for _ in range(9):
        await stand.update()
    assert len(stand.press.folders()) == 1 + stand.press.folder.manifest.staleness + 2
    (note,) = stand.notes()
    assert note.endswith(
        "and --disk allows 0.0 GB: none is kept beside them. Allow more with --disk if there is room."
    )


async def test_versions_are_kept_beside_those_needed_while_there_is_room(stand: Stand) -> None:
    stand = made(stand.press, keep=8)
    stand.outside.settled.set()
    for _ in range(12):
        await stand.update()
    assert numbers(stand.press.folders()) == [0, *range(5, 13)]
    assert stand.notes() == []


def numbers(names: Sequence[str]) -> list[int]:
    return [int(name) for name in names]
