"""A swarm over narrow lines, in virtual time: the trainer's uplink is used about once however many fetch, and
no peer that is slow, busy, gone or lies holds up the others for long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from nous_node.node.blobs import FetchError
from nous_node.node.records import Records
from nous_node.node.swarm_download import STARVED_S
from nous_node.protocol.encoding import encode
from nous_node.protocol.streams import HaveReply, blob_reply, busy_reply

from .shaped import CHUNK, MB, Fabric, Node, inline

Make = Callable[[int, float], Fabric]


@pytest.fixture
def fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(trio.to_thread, "run_sync", inline)
    return lambda chunks, uplink: Fabric(tmp_path, chunks, uplink)


async def test_six_volunteers_need_hardly_more_than_one_upload(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(48, 5 * MB)
    volunteers = [net.add(f"volunteer {number}", 20 * MB) for number in range(6)]
    seconds = await net.fetch_all(volunteers)
    assert max(seconds) <= 1.6 * net.size / (5 * MB)
    assert net.trainer.sent <= 1.5 * net.size


async def test_four_on_fast_lines_take_less_than_two_uploads(fabric: Make, autojump_clock: MockClock) -> None:
    net = fabric(48, 100 * MB)
    await net.fetch_all([net.add(f"volunteer {number}", 100 * MB) for number in range(4)])
    assert net.trainer.sent <= 2 * net.size


async def test_one_alone_fetches_as_fast_as_the_line_goes(fabric: Make, autojump_clock: MockClock) -> None:
    net = fabric(24, 10 * MB)
    (seconds,) = await net.fetch_all([net.add("volunteer", MB)])
    assert seconds <= 1.2 * net.size / (10 * MB)
    assert net.trainer.sent <= 1.01 * net.size


async def test_who_comes_later_fetches_from_all(fabric: Make, autojump_clock: MockClock) -> None:
    net = fabric(24, 2 * MB)
    early = [net.add(f"early {number}", 20 * MB) for number in range(3)]
    await net.fetch_all(early)
    sent = net.trainer.sent
    (seconds,) = await net.fetch_all([net.add("late", MB)])
    assert seconds <= net.size / (20 * MB)
    assert net.trainer.sent - sent <= 0.25 * net.size


async def test_lines_of_volunteers_that_are_slower_than_the_trainers_are_used_as_well(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(24, 5 * MB)
    volunteers = [net.add(f"volunteer {number}", MB) for number in range(4)]
    seconds = await net.fetch_all(volunteers)
    assert max(seconds) <= 1.4 * 4 * net.size / (9 * MB)


async def test_when_the_trainer_dies_the_others_complete_it_among_themselves(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(24, 5 * MB)
    volunteers = [net.add(f"volunteer {number}", 20 * MB) for number in range(4)]
    digests = set(net.manifest.files[0].hashes())

    async def die_when_all_is_out() -> None:
        while not all(any(node.index.place(digest) for node in volunteers) for digest in digests):  # noqa: ASYNC110
            await trio.sleep(0.05)
        net.trainer.gone = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(die_when_all_is_out)
        seconds = await net.fetch_all(volunteers)
    assert max(seconds) <= 1.6 * net.size / (5 * MB)


async def test_what_falls_to_a_peer_that_is_gone_is_fetched_by_the_others(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(24, 5 * MB)
    volunteers = [net.add(f"volunteer {number}", 20 * MB) for number in range(3)]
    gone = net.add("gone", MB)

    async def go() -> None:
        with trio.move_on_after(1.0):
            await net.fetch(gone)
        gone.gone = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go)
        seconds = await net.fetch_all(volunteers)
    assert max(seconds) <= 1.6 * net.size / (5 * MB) + 2


async def test_a_connection_that_ends_and_comes_back_costs_its_peer_nothing(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(24, 5 * MB)
    volunteers = [net.add(f"volunteer {number}", 20 * MB) for number in range(2)]

    async def flap() -> None:
        await trio.sleep(2)
        net.trainer.gone = True
        await trio.sleep(1)
        net.trainer.gone = False

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flap)
        seconds = await net.fetch_all(volunteers)
    assert max(seconds) <= 1.6 * net.size / (5 * MB) + 3


async def test_small_versions_are_asked_of_those_who_had_the_one_before(
    fabric: Make, autojump_clock: MockClock, tmp_path: Path
) -> None:
    asked: list[list[str]] = []
    records: dict[str, Records] = {}
    for version in range(2):
        (tmp_path / str(version)).mkdir()
        net = Fabric(tmp_path / str(version), 1, 5 * MB)
        volunteers = [net.add(f"volunteer {number}", 5 * MB) for number in range(8)]
        requests: list[str] = []
        for node in volunteers:
            node.swarm._records = records.setdefault(node.name, node.swarm._records)
            node.note = requests.append
        await net.fetch_all(volunteers)
        asked.append(requests)
    assert len(asked[1]) <= 2 * len(volunteers) < len(asked[0])


# --- peers that do not behave --------------------------------------------------------------------


class Hostile(Node):
    """Announces that it has everything."""

    reply = blob_reply(None)
    seconds = 0.0

    async def serve(self) -> bytes:
        """What it answers to a request for a chunk."""
        await trio.sleep(self.seconds)
        return self.reply


class Stalling(Hostile):
    seconds = 600.0


class Busy(Hostile):
    reply = busy_reply()


class Lying(Hostile):
    reply = blob_reply(bytes(CHUNK))


class Babbling(Hostile):
    reply = b"\xc1"


class Breaking(Hostile):
    async def serve(self) -> bytes:
        from nous_node.node.network_errors import RequestFailedError

        await trio.sleep(0.3)
        raise RequestFailedError(self.name, "it ended the stream before a complete answer")


HOSTILE = [Hostile, Stalling, Busy, Lying, Babbling, Breaking]


def add_hostile(net: Fabric, kind: type[Hostile]) -> Hostile:
    node = kind(net, "hostile", MB)
    net.nodes["hostile"] = node
    node.swarm.hold(b"c" * 32, net.manifest)
    node.answers = node.serve
    return node


@pytest.mark.parametrize("kind", HOSTILE)
async def test_one_hostile_source_among_others_hardly_costs_time(
    fabric: Make, autojump_clock: MockClock, kind: type[Hostile]
) -> None:
    net = fabric(24, 10 * MB)
    add_hostile(net, kind)
    (seconds,) = await net.fetch_all([net.add("volunteer", MB)])
    assert seconds <= 1.5 * net.size / (10 * MB) + 1


@pytest.mark.parametrize("kind", [Hostile, Lying, Babbling, Breaking])
async def test_with_hostile_sources_only_it_ends_and_is_said(
    fabric: Make, autojump_clock: MockClock, kind: type[Hostile]
) -> None:
    net = fabric(24, 10 * MB)
    add_hostile(net, kind)
    net.trainer.gone = True
    volunteer = net.add("volunteer", MB)
    with pytest.raises(FetchError, match="No connected peer delivers a chunk of the checkpoint"):
        await net.fetch(volunteer)
    assert not volunteer.index.places


async def test_a_source_that_only_stalls_is_given_up_in_a_bounded_time(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(24, 10 * MB)
    add_hostile(net, Stalling)
    net.trainer.gone = True
    with trio.fail_after(200), pytest.raises(FetchError):
        await net.fetch(net.add("volunteer", MB))


async def test_a_source_that_is_only_busy_is_waited_for_in_a_bounded_time(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(24, 10 * MB)
    add_hostile(net, Busy)
    net.trainer.gone = True
    with trio.fail_after(70), pytest.raises(FetchError):
        await net.fetch(net.add("volunteer", MB))


async def test_a_liar_is_refused_and_not_asked_again_for_this_checkpoint(
    fabric: Make, autojump_clock: MockClock
) -> None:
    net = fabric(24, 10 * MB)
    add_hostile(net, Lying)
    volunteer = net.add("volunteer", MB)
    await net.fetch(volunteer)
    assert volunteer.refused == ["hostile"]
    volunteer.refused.clear()  # it comes back
    share = volunteer.swarm._shares[b"c" * 32]
    assert share.due(["hostile"], trio.current_time(), curious=True) == []
    refused = await volunteer.swarm.answer("hostile", _have_request(net))
    assert refused == encode(HaveReply(error="unknown-checkpoint"))


def _have_request(net: Fabric) -> bytes:
    from nous_node.protocol.streams import HaveRequest

    return encode(HaveRequest(bytes(32), b"c" * 32))


async def test_those_who_still_download_are_waited_for_in_a_bounded_time(
    fabric: Make, autojump_clock: MockClock
) -> None:
    """Two that lack the same chunks and have nobody to get them from."""
    net = fabric(24, 10 * MB)
    volunteers = [net.add(f"volunteer {number}", MB) for number in range(2)]
    failed: list[float] = []

    async def fail(node: Node) -> None:
        with pytest.raises(FetchError):
            await net.fetch(node)
        failed.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for node in volunteers:
            nursery.start_soon(fail, node)
        await trio.sleep(1)
        net.trainer.gone = True
        gone_at = trio.current_time()
    assert all(STARVED_S <= moment - gone_at <= 2 * STARVED_S + 2 for moment in failed)
