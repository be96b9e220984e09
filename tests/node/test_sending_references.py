"""A volunteer whose groups are too large for its run's gossip publishes them by reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from nous_node.node import sending as module
from nous_node.node.create import create_run
from nous_node.node.following import Following, Head
from nous_node.node.network_stats import NetworkStats
from nous_node.node.outbox import Outbox
from nous_node.node.plan import EnvironmentPlan, LimitsPlan, RunPlan
from nous_node.node.sending import Sending
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, check_chunk, file_entry
from nous_node.protocol.constants import MAX_REFERENCED
from nous_node.protocol.envelope import Kind, unseal
from nous_node.protocol.errors import TooLargeError
from nous_node.protocol.gossip import Verdict, judge_rollout
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import accepted
from nous_node.protocol.references import chunks, unpack
from nous_node.protocol.rollouts import Reference
from nous_node.protocol.runs import RunManifest, shard_of

CREATED = 1_750_000_000_000
KEY, ROOT = Identity.from_seed(b"v" * 32), Identity.from_seed(b"r" * 32)
FILES = [file_entry("model.safetensors", [b"weights"])]
HEAD = Head(b"h" * 32, CheckpointManifest(0, FULL, FILES, {"w": bytes(32)}, bytes(32)), b"")
INLINE = 1_024


class Net:
    """One reader, who hears everything."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.stats = NetworkStats()

    def subscribers(self, topic: str) -> tuple[str, ...]:
        return ("reader",)

    async def wait_subscriber(self, topic: str) -> None:
        return

    async def wait_lost(self, peer: str) -> None:
        await trio.sleep_forever()

    async def publish(self, topic: str, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(data)


class Free:
    """Nothing holds this key back, and nobody counts what it does."""

    holds, standing = False, None

    async def lifted(self) -> None:
        return

    def give_up(self, groups: int) -> None:
        return


class Bench:
    def __init__(self, path: Path, outbox: Outbox) -> None:
        plan = RunPlan(
            environments={"sort-digits": EnvironmentPlan()}, limits=LimitsPlan(inline_bytes=INLINE)
        )
        run = create_run(path / "run", "run", ROOT, plan, CREATED)
        self.following = Following.of(run.run, run.envelope)
        self.following.head = HEAD
        self.following.view.learn(HEAD.hash, 0)
        self.net, self.outbox = Net(), outbox
        free: Any = Free()
        network: Any = self.net
        self.sending = Sending(KEY, network, self.following, outbox, free, free)

    @property
    def manifest(self) -> RunManifest:
        return self.following.manifest

    def reference(self, data: bytes) -> Reference:
        """As gossip takes it."""
        shard = shard_of(KEY.key, self.manifest.shards)
        judgement = judge_rollout(self.following.view, shard, data, unseal(data).head.ts)
        assert judgement.verdict is Verdict.ACCEPT, judgement.error
        assert isinstance(judgement.body, Reference)
        return judgement.body

    async def frame(self, reference: Reference) -> bytes:
        pieces = []
        for digest, length in chunks(reference):
            piece = await self.sending.chunk("peer", digest)
            assert piece is not None
            assert len(piece) == length
            check_chunk(piece, digest)
            pieces.append(piece)
        return b"".join(pieces)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Outbox.open(tmp_path / "outbox.sqlite") as outbox:
        yield Bench(tmp_path, outbox)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


async def test_what_fits_is_published_as_it_is(bench: Bench) -> None:
    _, data = bench.sending.store(HEAD, 0, b"group")
    assert unseal(data).head.kind == Kind.ROLLOUT


@pytest.mark.parametrize("size", [INLINE, 100_000])
async def test_what_does_not_fit_is_published_by_reference_and_its_chunks_are_served(
    bench: Bench, size: int
) -> None:
    body = noise(size)
    _, data = bench.sending.store(HEAD, 7, body)
    assert len(data) <= INLINE
    reference = bench.reference(data)
    assert (reference.checkpoint, reference.counter) == (HEAD.hash, 7)
    assert unpack(reference, await bench.frame(reference)) == body
    assert await bench.sending.chunk("peer", bytes(32)) is None


async def test_the_largest_group_of_any_run_has_a_reference_in_the_smallest_envelope(bench: Bench) -> None:
    """Larger chunks where there is no room for many hashes."""
    model = msgspec.structs.replace(bench.manifest.model, context=1 << 20)
    bench.following.manifest = msgspec.structs.replace(bench.manifest, model=model)
    assert bench.manifest.referenced_limit == MAX_REFERENCED
    _, data = bench.sending.store(HEAD, 0, noise(MAX_REFERENCED - (1 << 16)))
    assert len(data) <= INLINE


async def test_what_is_too_large_for_any_group_of_the_run_is_not_published(bench: Bench) -> None:
    with pytest.raises(TooLargeError, match=f"at most {bench.manifest.referenced_limit} can be sent"):
        bench.sending.store(HEAD, 0, noise(bench.manifest.referenced_limit + 1))
    assert bench.outbox.waiting() == 0


async def test_a_reference_is_repeated_sealed_anew_until_its_receipt_comes(
    autojump_clock: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "now_ms", lambda: CREATED + int(1000 * trio.current_time()))
    item = bench.sending.store(HEAD, 0, noise(10_000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.sending.publish_loop)
        nursery.start_soon(bench.sending.resend_loop)
        await bench.sending.send(item)
        await trio.sleep(45)
        assert len(bench.net.sent) == 3
        assert {unseal(data).content() for data in bench.net.sent} == {unseal(item[1]).content()}
        assert len({unseal(data).id for data in bench.net.sent}) == 3
        bench.outbox.acknowledge([accepted(unseal(bench.net.sent[-1]).id, KEY.key, 4)], b"proof")
        await trio.sleep(200)
        assert len(bench.net.sent) == 3
        nursery.cancel_scope.cancel()
    (digest, _), *_ = chunks(bench.reference(item[1]))
    assert bench.outbox.chunk(digest) is None
