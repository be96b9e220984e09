"""Faults of the transport: counted by peer id, kept, and taken up again; nothing of content is among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.peer.id import ID
from trio.testing import MockClock, wait_all_tasks_blocked

from nous_node.node import journal_trim
from nous_node.node.network import NetworkConfig, open_network
from nous_node.node.network_errors import UnreachableError
from nous_node.node.network_stats import NetworkStats, Offender
from nous_node.node.offences import MAX_NOTED, MAX_OFFENCES, REFUSE_S, Offences
from nous_node.node.store import Journal
from nous_node.protocol.identity import Identity

NOW = 1_800_000_000_000
BAD, WORSE = (Identity.from_seed(seed * 32).peer_id for seed in (b"b", b"w"))


@dataclass
class Swarm:
    refused_peers: dict[Any, float] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)

    async def close_peer(self, peer: Any) -> None:
        self.closed.append(str(peer))


class Node:
    """Offences of a node that has a swarm of memory and a clock of its own."""

    def __init__(self) -> None:
        self.swarm, self.now = Swarm(), NOW
        self.offences = Offences(self.swarm, NetworkStats(), lambda: self.now)

    def offend(self, peer: str, times: int = 1) -> None:
        for _ in range(times):
            self.offences.add(ID.from_base58(peer), "gossip-rejected")

    def refused(self) -> dict[str, float]:
        return {str(peer): until for peer, until in self.swarm.refused_peers.items()}


async def test_too_many_offences_get_a_peer_refused_and_others_not(autojump_clock: MockClock) -> None:
    node = Node()
    node.offend(WORSE, MAX_OFFENCES)
    node.offend(BAD, MAX_OFFENCES - 1)
    assert node.refused() == {WORSE: trio.current_time() + REFUSE_S}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.offences.run)
        await wait_all_tasks_blocked()
        assert node.swarm.closed == [WORSE]
        await trio.sleep(2 * REFUSE_S)
        assert node.refused() == {}
        nursery.cancel_scope.cancel()


async def test_what_was_done_is_handed_out_once(autojump_clock: MockClock) -> None:
    node = Node()
    node.offend(BAD, 2)
    node.offend(WORSE, MAX_OFFENCES + 1)
    until = NOW + int(1000 * REFUSE_S)
    assert node.offences.take() == [Offender(BAD, 2), Offender(WORSE, MAX_OFFENCES + 1, until)]
    assert node.offences.take() == []


async def test_who_asks_for_nothing_keeps_not_more_than_some(autojump_clock: MockClock) -> None:
    node = Node()
    for number in range(MAX_NOTED + 10):
        node.offences.add(ID(number.to_bytes(38)), "gossip-rejected")
    assert len(node.offences.take()) == MAX_NOTED


async def test_a_refusal_goes_on_after_a_restart_and_ends_when_it_was_to(autojump_clock: MockClock) -> None:
    node = Node()
    node.now = NOW + 100_000
    node.offences.resume([Offender(WORSE, 20, NOW + 300_000), Offender(BAD, 20, NOW + 99_000)])
    assert node.refused() == {WORSE: trio.current_time() + 200}
    node.now = NOW - 10**9  # the clock was set back
    node.offences.resume([Offender(BAD, 20, NOW)])
    assert node.refused()[BAD] == trio.current_time() + REFUSE_S


async def test_a_peer_that_was_refused_before_a_restart_cannot_connect() -> None:
    local = ("/ip4/127.0.0.1/tcp/0",)
    forever = Offender(BAD, 20, 1 << 62)
    async with (
        open_network(b"n" * 32, NetworkConfig(listen=local), [forever]) as node,
        open_network(b"b" * 32, NetworkConfig(listen=())) as peer,
        open_network(b"h" * 32, NetworkConfig(listen=())) as honest,
    ):
        assert peer.peer_id == BAD
        try:
            await peer.connect(node.addresses[0])
            await peer.wait_lost(node.peer_id)
        except UnreachableError:
            pass
        await honest.connect(node.addresses[0])
        assert [one.peer_id for one in node.peers()] == [honest.peer_id]
        assert node.offenders() == []


def test_the_journal_adds_up_faults_and_keeps_the_latest_refusal(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal.sqlite") as journal:
        journal.offended([Offender(BAD, 2), Offender(WORSE, 20, NOW + 5)], NOW)
        journal.offended([Offender(WORSE, 1)], NOW + 1)
    with Journal.open(tmp_path / "journal.sqlite") as journal:
        assert journal.offenders() == sorted(
            [Offender(BAD, 2), Offender(WORSE, 21, NOW + 5)], key=lambda one: one.peer
        )
        assert journal.key(b"b" * 32) is None  # no key's reputation


def test_the_journal_forgets_peers_that_were_never_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_trim, "KEPT_PEERS", 2)
    with Journal.open(tmp_path / "journal.sqlite") as journal:
        journal.offended([Offender("refused", 20, NOW)], NOW)
        journal.offended([Offender("early", 3)], NOW + 1)
        journal.offended([Offender("late", 1)], NOW + 2)  # however long until the next publication
        assert [one.peer for one in journal.offenders()] == ["late", "refused"]


async def test_what_no_honest_peer_does_gets_one_refused_at_once(autojump_clock: MockClock) -> None:
    node = Node()
    node.offend(WORSE, 3)
    node.offences.refuse(ID.from_base58(WORSE), "bad-chunk")
    assert node.refused() == {WORSE: trio.current_time() + REFUSE_S}
    assert node.offences.take() == [Offender(WORSE, 4, NOW + int(1000 * REFUSE_S))]
    node.offend(WORSE)
    assert node.offences.take() == [Offender(WORSE, 1, 0)]
