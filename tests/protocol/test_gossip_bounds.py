"""What a view of gossip remembers, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from nous_node.protocol import buckets
from nous_node.protocol.constants import MAX_LIFETIME_MS
from nous_node.protocol.envelope import Kind
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.gossip import (
    GossipView,
)
from nous_node.protocol.receipts import Hello
from nous_node.protocol.rollouts import Engine

KNOWN = bytes([9]) * 32


@pytest.fixture
def view(world: Any) -> GossipView:
    view = GossipView(world.run, world.manifest)
    view.learn(KNOWN, 0)
    return view


@pytest.fixture
def hello(world: Any) -> bytes:
    return Hello("test/1", Engine("test", "1", "float32", "cpu")).to_bytes()


@pytest.mark.parametrize(
    ("rate", "burst"), [(0.01, 1.0), (0.05, 3.0), (20.0, 1200.0), (1000.0, 4096.0), (1e9, 4096.0)]
)
def test_a_burst_is_a_minute_of_the_rate_within_bounds(rate: float, burst: float) -> None:
    assert buckets.Rate.of_groups(rate).burst == burst


def test_a_share_of_the_memory_comes_back_with_expiry(view: GossipView, world: Any, hello: bytes) -> None:
    envelope = world.opened(Kind.HELLO, hello, world.volunteer)
    view.memory.add(envelope)
    assert view.memory.held == {world.volunteer.key: 1}
    view.memory.forget(world.now + MAX_LIFETIME_MS + 60_000)
    assert view.memory.held == {}


def test_checkpoints_long_gone_are_forgotten(view: GossipView) -> None:
    for version in range(1, 100):
        view.learn(version.to_bytes(32, "big"), version)
    assert min(view.versions.values()) == 99 - 4 * 3
    view.learn(bytes([77]) * 32, 5)
    assert view.newest == 99


def test_keys_made_for_a_flood_are_held_off_and_forgotten(world: Any, view: GossipView, hello: bytes) -> None:
    view.hellos.room = 2
    view.hellos.take(b"a", 0)
    view.hellos.take(b"b", 10_000)
    with pytest.raises(RemoteError) as caught:
        view.hellos.take(b"c", 19_999)
    assert caught.value.code is Code.BUSY
    view.hellos.take(b"b", 19_999)  # who was heard of lately goes on
    view.hellos.take(b"c", 21_000)  # a's bucket is full again: as good as none
    assert set(view.hellos.by_key) == {b"b", b"c"}
