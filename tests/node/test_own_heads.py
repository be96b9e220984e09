"""A trainer whose folder is an older copy of the run notices it by what peers hold, before it signs anew."""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import trio

from nous_node.node.events import Event, Note
from nous_node.node.following import Following, Head
from nous_node.node.network_errors import NotConnectedError
from nous_node.node.own_heads import (
    GATHER_SECONDS,
    GRACE_SECONDS,
    UNTOLD_SECONDS,
    OlderCopyError,
    OwnHeads,
)
from nous_node.node.publishing import LEAP
from nous_node.protocol.checkpoints import checkpoint_hash
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.identity import Identity
from nous_node.protocol.streams import HeadReply

from .press import Press, Start


@dataclass
class Crowd:
    """Connected peers, and the newest checkpoint that each of them holds. Those without one say nothing."""

    run: bytes
    held: dict[str, bytes | None] = field(default_factory=dict)
    """None: it knows the run and no checkpoint of it."""
    silent: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    @dataclass(frozen=True)
    class Peer:
        peer_id: str

    def peers(self) -> list[Crowd.Peer]:
        return [self.Peer(name) for name in (*self.held, *self.silent)]

    async def request(self, peer: str, *_: Any, **__: Any) -> bytes:
        await trio.lowlevel.checkpoint()
        self.asked.append(peer)
        if peer not in self.held:
            raise NotConnectedError(peer)
        return encode(HeadReply(run=self.run, checkpoint=self.held[peer]))


@dataclass
class Copy:
    """A trainer that went on from an older copy of its folder."""

    press: Press
    lost: list[Head]
    """The versions after the copy."""
    crowd: Crowd
    events: list[Event] = field(default_factory=list)

    def own(self, *, rollback: bool = False) -> OwnHeads:
        publisher = self.press.publisher
        overtake = publisher.overtake if rollback else None
        return OwnHeads(
            self.crowd,
            self.press.following,
            self.press.root.key,
            "my-run",
            overtake,
            self.events.append,
            random.Random(0),
        )

    @asynccontextmanager
    async def at_work(self, own: OwnHeads) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own.run)
            yield
            nursery.cancel_scope.cancel()

    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]


@pytest.fixture
def copy(start_press: Start) -> Copy:
    """Version 1 is the newest in the copy; 2 and 3 are lost."""
    press = start_press()
    press.update()
    saved = shutil.copytree(press.folder.path, press.folder.path.with_name("saved"))
    lost = []
    for _ in range(2):
        press.update()
        lost.append(press.publisher.head)
    press.journal.__exit__()
    shutil.rmtree(press.folder.path)
    saved.rename(press.folder.path)
    again = start_press()
    return Copy(again, lost, Crowd(again.folder.run))


async def fails(copy: Copy, *, rollback: bool = False) -> str:
    own = copy.own(rollback=rollback)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with copy.at_work(own):
            await trio.sleep(200)
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, OlderCopyError)
    return str(error)


async def test_a_newer_version_of_this_key_ends_the_trainer_before_it_publishes(copy, autojump_clock) -> None:
    copy.crowd.held = {"as far": copy.press.publisher.head.envelope, "ahead": copy.lost[-1].envelope}
    begun = trio.current_time()
    text = await fails(copy)
    assert "the newest version here is 1, and a peer holds version 3 that this key has signed" in text
    assert "`nous-node train my-run --rollback` publishes version 1 again" in text
    assert trio.current_time() - begun < GRACE_SECONDS


async def test_another_content_of_the_very_version_ends_it_too(copy, autojump_clock) -> None:
    copy.press.update()
    copy.crowd.held = {"peer": copy.lost[0].envelope}
    assert "another version 2" in await fails(copy)


async def test_what_is_older_or_ours_or_of_no_trainer_ends_nothing(copy, autojump_clock) -> None:
    press = copy.press
    own = press.publisher.head.envelope
    press.update()
    content = msgspec.structs.replace(copy.lost[1].manifest, version=9).to_bytes()
    stranger = seal(Identity.from_seed(b"s" * 32), Kind.CHECKPOINT, press.folder.run, content, seq=1, ts=1)
    elsewhere = seal(press.root, Kind.CHECKPOINT, b"r" * 32, content, seq=1, ts=1)
    forged = bytearray(copy.lost[1].envelope)
    forged[-1] ^= 1
    copy.crowd.held = {
        "older": own,
        "same": press.publisher.head.envelope,
        "none": None,
        "stranger": stranger,
        "elsewhere": elsewhere,
        "forged": bytes(forged),
        "garbage": b"\xc1",
    }
    one = copy.own()
    async with copy.at_work(one):
        await trio.sleep(100)
        assert one.settled.is_set()
    assert set(copy.crowd.asked) == set(copy.crowd.held)


@pytest.mark.parametrize("known", ["nothing", "an older version", "another trainer's"])
async def test_who_knows_less_settles_nothing(copy, known: str, autojump_clock) -> None:
    """Whoever has just joined, or fell behind, cannot tell that this folder is an older copy."""
    press = copy.press
    older = press.publisher.head.envelope
    press.update()
    stranger = Identity.from_seed(b"s" * 32)
    content = msgspec.structs.replace(copy.lost[1].manifest, version=9).to_bytes()
    theirs = seal(stranger, Kind.CHECKPOINT, press.folder.run, content, seq=1, ts=1)
    held = {"nothing": None, "an older version": older, "another trainer's": theirs}[known]
    copy.crowd.held = {"peer": held}
    own = copy.own()
    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012
        async with copy.at_work(own):
            await trio.sleep(GRACE_SECONDS - 1)
            assert copy.crowd.asked
            assert not own.settled.is_set()
            copy.crowd.held["ahead"] = copy.lost[-1].envelope
            await trio.sleep(GRACE_SECONDS)
    assert caught.group_contains(OlderCopyError)
    copy.crowd.held = {"peer": held}
    own = copy.own()
    async with copy.at_work(own):
        await trio.sleep(GRACE_SECONDS + 1)
        assert own.settled.is_set()


async def test_publishing_waits_for_the_first_answer_but_not_for_ever(copy, autojump_clock) -> None:
    copy.crowd.held = {"peer": copy.press.publisher.head.envelope}
    own = copy.own()
    begun = trio.current_time()
    async with copy.at_work(own):
        await own.settled.wait()
    assert trio.current_time() - begun < 1
    copy.crowd.held, copy.crowd.silent = {}, {"mute"}
    own = copy.own()
    begun = trio.current_time()
    async with copy.at_work(own):
        await own.settled.wait()
    assert trio.current_time() - begun == GRACE_SECONDS


async def test_whoever_says_nothing_is_asked_ever_more_seldom_and_others_once(copy, autojump_clock) -> None:
    copy.crowd.held, copy.crowd.silent = {"peer": copy.press.publisher.head.envelope}, {"mute"}
    async with copy.at_work(copy.own()):
        await trio.sleep(40)
        assert copy.crowd.asked.count("peer") == 1
        assert copy.crowd.asked.count("mute") == 6  # after 0, 1, 3, 7, 15, 31 s
        copy.crowd.held = {}
        await trio.sleep(1)
        copy.crowd.held = {"peer": copy.press.publisher.head.envelope}  # it comes back
        await trio.sleep(1)
        assert copy.crowd.asked.count("peer") == 2


async def test_who_learns_of_the_newest_version_meanwhile_is_asked_again(copy, autojump_clock) -> None:
    """The trainer was killed right after it had signed it: nobody else knew it, and peers get it here."""
    copy.crowd.held = {"joins": None}
    own = copy.own()
    async with copy.at_work(own):
        await trio.sleep(1.5)
        assert not own.settled.is_set()
        copy.crowd.held = {"joins": copy.press.publisher.head.envelope}
        await trio.sleep(2)
        assert own.settled.is_set()
        asked = len(copy.crowd.asked)
        await trio.sleep(30)
        assert len(copy.crowd.asked) == asked


async def test_a_peer_that_comes_to_know_more_later_is_found_out(copy, autojump_clock) -> None:
    """Another trainer of the same key has begun meanwhile."""
    copy.crowd.held = {"peer": copy.press.publisher.head.envelope}
    own = copy.own()
    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012
        async with copy.at_work(own):
            await trio.sleep(30)
            copy.crowd.held = {"peer": copy.lost[0].envelope}
            await trio.sleep(600)
    assert caught.group_contains(OlderCopyError)


async def test_a_run_is_rolled_back_above_the_newest_that_any_peer_holds(copy, autojump_clock) -> None:
    press = copy.press
    copy.crowd.held = {"lags": copy.lost[0].envelope, "knows": copy.lost[1].envelope}
    own = copy.own(rollback=True)
    assert own.rolling_back
    begun = trio.current_time()
    async with copy.at_work(own):
        await own.settled.wait()
        head = press.publisher.head
        assert (head.version, head.manifest.parent) == (3 + LEAP, copy.lost[1].hash)
        assert head.manifest.files == press.publisher.heads[head.hash].manifest.files
        await trio.sleep(300)  # what peers still hold is below it
    assert trio.current_time() - begun >= GATHER_SECONDS
    assert copy.notes() == [
        f"The run is rolled back from version 3 to version 1, published again as version {3 + LEAP}."
    ]
    assert checkpoint_hash(head.content) == head.hash


@pytest.mark.parametrize("knows", [True, False])
async def test_a_rollback_leaps_also_where_nobody_tells_of_what_is_lost(
    copy, knows: bool, autojump_clock
) -> None:
    """Whoever holds the lost versions may be away, and comes back later to a run that goes on above them."""
    press = copy.press
    mine = press.publisher.head
    own = copy.own(rollback=True)
    async with copy.at_work(own):
        await trio.sleep(1000)
        assert not own.settled.is_set()  # nobody was there to be asked
        copy.crowd.held = {"peer": mine.envelope if knows else None}
        begun = trio.current_time()
        await own.settled.wait()
        passed = trio.current_time() - begun
        assert passed >= (GATHER_SECONDS if knows else UNTOLD_SECONDS)
        assert passed < (UNTOLD_SECONDS if knows else UNTOLD_SECONDS + 1)
        head = press.publisher.head
        assert (head.version, head.manifest.parent) == (1 + LEAP, mine.hash)
        copy.crowd.held = {"back": copy.lost[-1].envelope}
        await trio.sleep(100)
    press.update()
    volunteer = Following.of(press.folder.run, press.folder.envelope)
    for known in (*copy.lost, head, press.publisher.head):
        volunteer.offer(known.envelope)
    assert volunteer.conflict is None
    assert volunteer.version == 2 + LEAP
    (note,) = copy.notes()
    assert f"is rolled back to version 1, published again as version {1 + LEAP}" in note


async def test_a_rollback_waits_a_while_for_somebody_who_knows_as_much(copy, autojump_clock) -> None:
    copy.crowd.held = {"newcomer": None}
    own = copy.own(rollback=True)
    async with copy.at_work(own):
        await trio.sleep(UNTOLD_SECONDS - GATHER_SECONDS - 1)
        copy.crowd.held["knows"] = copy.lost[-1].envelope
        await own.settled.wait()
    assert copy.press.publisher.head.version == 3 + LEAP


async def test_what_appears_after_a_rollback_ends_the_trainer(copy, autojump_clock) -> None:
    copy.crowd.held = {"peer": copy.lost[0].envelope}
    press, own = copy.press, copy.own(rollback=True)
    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012
        async with copy.at_work(own):
            await own.settled.wait()
            later = msgspec.structs.replace(copy.lost[1].manifest, version=press.publisher.head.version + 1)
            other = seal(press.root, Kind.CHECKPOINT, press.folder.run, later.to_bytes(), seq=9, ts=1)
            copy.crowd.held = {"second": other}
            await trio.sleep(10)
    assert caught.group_contains(OlderCopyError)
