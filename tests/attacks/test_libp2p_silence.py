"""Peers that look connected and are not."""

from __future__ import annotations

import pytest
import trio


@pytest.mark.attack("silent connection", "")
async def test_a_connection_without_an_answer_to_pings_is_closed(victim, raw_yamux) -> None:
    async with victim(ping_interval=0.1, ping_deadline=0.2) as node:
        async with raw_yamux(node.address):  # reads nothing, answers nothing, keeps the socket open
            await node.fault("peer-silent")
            await node.alone()
        await node.still_serves()


async def test_a_peer_that_answers_pings_stays(victim, stock_peer) -> None:
    async with victim(ping_interval=0.05, ping_deadline=5.0) as node, stock_peer(node.address):
        await trio.sleep(0.5)
        assert len(node.network.peers()) == 1
        assert not node.faults["peer-silent"]
