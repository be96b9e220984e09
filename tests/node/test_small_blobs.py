"""Manifests come in bounded time, whoever stalls, lies or has nothing."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio

from nous_node.node.blobs import BlobIndex, FetchError
from nous_node.node.network_errors import RequestTimeoutError
from nous_node.node.small_blobs import AT_ONCE, BESIDE_SECONDS, FIRST_SECONDS
from nous_node.node.sources import CHUNK_SECONDS
from nous_node.node.swarm import Swarm

from .lineage import Net

LIMIT = 1 << 22


class Stalling(Net):
    """Peers named `stalls ...` never answer, those named `slow ...` after 20 s."""

    def __init__(self, served: dict[str, BlobIndex]) -> None:
        super().__init__(served)
        self.under_way: Counter[str] = Counter()
        self.most = 0
        self.questions: list[str] = []

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        self.questions.append(peer)
        self.under_way[peer] += 1
        self.most = max(self.most, self.under_way.total())
        try:
            if peer.startswith("stalls"):
                await trio.sleep(deadline)
                raise RequestTimeoutError(peer)
            if peer.startswith("slow"):
                await trio.sleep(20)
            return await super().request(
                peer, protocol, payload, max_response=max_response, deadline=deadline
            )
        finally:
            self.under_way[peer] -= 1


def node_of(**peers: BlobIndex) -> tuple[Swarm, Stalling]:
    net = Stalling({name.replace("_", " "): index for name, index in peers.items()})
    return Swarm(net, bytes(32), BlobIndex(lambda file: None), entropy=random.Random(0)), net


def holding(*blobs: bytes) -> tuple[BlobIndex, list[bytes]]:
    index = BlobIndex(lambda file: None)
    return index, [index.add_bytes(blob) for blob in blobs]


NOTHING = BlobIndex(lambda file: None)


async def test_who_stalls_is_passed_by_and_asked_last_from_then_on(autojump_clock: object) -> None:
    index, digests = holding(*(bytes([number]) * 1000 for number in range(31)))
    stalling = {f"stalls_{number}": NOTHING for number in range(24)}
    swarm, net = node_of(honest=index, **stalling)
    begun = trio.current_time()
    for digest in digests:
        await swarm.blob(digest, LIMIT)
    assert trio.current_time() - begun <= FIRST_SECONDS * (len(stalling) / AT_ONCE + 1)
    assert net.most <= AT_ONCE
    net.questions.clear()
    await swarm.blob(index.add_bytes(b"one more"), LIMIT)
    assert net.questions == ["honest"]


async def test_one_that_answers_is_the_only_one_asked(autojump_clock: object) -> None:
    index, (digest,) = holding(b"manifest")
    swarm, net = node_of(one=index, two=index, three=index)
    assert await swarm.blob(digest, LIMIT) == b"manifest"
    assert len(net.questions) == 1
    assert trio.current_time() < BESIDE_SECONDS


async def test_who_is_only_slow_is_waited_for_when_nobody_else_has_it(autojump_clock: object) -> None:
    index, (digest,) = holding(b"manifest")
    swarm, net = node_of(slow=index, other=NOTHING, liar=index)
    net.lying.add("liar")
    assert await swarm.blob(digest, LIMIT) == b"manifest"
    assert net.cut == ["liar"]


@pytest.mark.parametrize("peers", [[], ["one"], ["one", "stalls one"], [f"stalls {n}" for n in range(9)]])
async def test_what_nobody_delivers_is_given_up_in_bounded_time(
    peers: list[str], autojump_clock: object
) -> None:
    swarm, net = node_of(**dict.fromkeys(peers, NOTHING))
    with pytest.raises(FetchError):
        await swarm.blob(bytes(32), LIMIT)
    rounds = -(-len(peers) // AT_ONCE)
    assert trio.current_time() <= rounds * (FIRST_SECONDS + CHUNK_SECONDS) + 2 * AT_ONCE * BESIDE_SECONDS
    assert not net.under_way.total()
