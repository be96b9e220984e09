"""Groups by reference whose content is withheld, late, another one, or far too much."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import trio
import zstandard

from nous_node.node.bodies import BODIES, STRANGERS
from nous_node.node.network import NetworkConfig, open_network
from nous_node.protocol.encoding import read
from nous_node.protocol.envelope import Kind, unseal
from nous_node.protocol.errors import Code
from nous_node.protocol.references import cut, pack
from nous_node.protocol.rollouts import Reference, RolloutGroup
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_REQUEST,
    BlobRequest,
    blob_reply,
)

from .arena import Arena
from .forger import Forger

Answer = Callable[[bytes], Awaitable[bytes | None]]
replace = msgspec.structs.replace


def referred(body: bytes) -> tuple[Reference, dict[bytes, bytes]]:
    """The reference to a group, and its chunks by their hashes."""
    group = RolloutGroup.from_bytes(body)
    reference, frame = pack(group.checkpoint, group.counter, body, 100_000)
    return reference, dict(cut(reference, frame))


def framed(reference: Reference, frame: bytes) -> tuple[Reference, dict[bytes, bytes]]:
    """The same with another frame behind it."""
    digest = hashlib.sha256(frame).digest()
    return replace(reference, packed=len(frame), chunks=digest), {digest: frame}


def sealed(forger: Forger, reference: Reference) -> bytes:
    return forger.seal(reference.to_bytes(), Kind.REFERENCE)


def having(*held: dict[bytes, bytes]) -> Answer:
    everything = {digest: data for one in held for digest, data in one.items()}

    async def answer(digest: bytes) -> bytes | None:
        return everything.get(digest)

    return answer


async def nothing(digest: bytes) -> bytes | None:
    return None


async def other_bytes(digest: bytes) -> bytes | None:
    return b"not what you asked for"


async def stall(digest: bytes) -> bytes | None:
    await trio.sleep_forever()
    raise AssertionError


@contextmanager
def volunteer(arena: Arena, forger: Forger, answer: Answer, messages: Sequence[bytes]) -> Iterator[None]:
    """The forger's own node: it publishes these and answers requests for chunks while the block lasts."""

    async def handler(peer: str, request: bytes) -> bytes:
        return blob_reply(await answer(read(request, BlobRequest, MAX_REQUEST).hash))

    async def stay(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with open_network(forger.identity.seed, NetworkConfig(listen=())) as network:
                network.serve(
                    BLOB_PROTOCOL, handler, max_request=MAX_REQUEST, max_response=MAX_BLOB_REPLY, deadline=60
                )
                await network.connect(arena.address)
                await network.wait_subscriber(forger.topic)
                for data in messages:
                    await network.publish(forger.topic, data)
                task_status.started(scope)
                await trio.sleep_forever()

    async def start() -> Any:
        with trio.fail_after(15):
            return await arena._nursery.start(stay)

    scope = trio.from_thread.run(start, trio_token=arena._token)
    try:
        yield
    finally:
        trio.from_thread.run_sync(scope.cancel, trio_token=arena._token)


def refused(arena: Arena, forger: Forger, reference: Reference, answer: Answer, code: Code) -> None:
    """It is refused with this code, and nothing of it comes into the journal."""
    data = sealed(forger, reference)
    with volunteer(arena, forger, answer, [data]):
        receipt = arena.receipt(data)
    assert (receipt.verdict, receipt.code, receipt.credit) == ("refused", code.value, 0)
    assert arena.state(data) is None


def test_group_by_reference_is_verified_and_credited_as_any_other(arena: Arena, liar: Forger) -> None:
    group = liar.group(arena.head)
    reference, chunks = referred(group.to_bytes())
    data = sealed(liar, reference)
    with volunteer(arena, liar, having(chunks), [data]):
        receipt = arena.receipt(data)
    assert (receipt.verdict, receipt.code) == ("accepted", "")
    state = arena.state(data)
    assert state is not None
    assert state[0] == "accepted"


@pytest.mark.attack("content by reference withheld", "unavailable")
@pytest.mark.attack("content by reference that stalls", "unavailable")
@pytest.mark.parametrize("answer", [nothing, pytest.param(stall, marks=pytest.mark.slow)])
def test_content_that_never_arrives_is_refused_and_costs_no_standing(
    arena: Arena, honest: Forger, liar: Forger, answer: Answer
) -> None:
    reference, _ = referred(liar.group(arena.head).to_bytes())
    data = sealed(liar, reference)
    with volunteer(arena, liar, answer, [data]):
        arena.accepts_honest(honest)
        receipt = arena.receipt(data)
    assert (receipt.verdict, receipt.code) == ("refused", "unavailable")
    assert arena.state(data) is None
    arena.accepts_honest(liar)


@pytest.mark.attack("other bytes for content by reference", "hash-mismatch")
def test_sender_that_serves_other_bytes_is_refused_and_cut_off(arena: Arena, liar: Forger) -> None:
    reference, _ = referred(liar.group(arena.head).to_bytes())
    refused(arena, liar, reference, other_bytes, Code.HASH_MISMATCH)


def lies(forger: Forger, arena: Arena) -> dict[str, tuple[Reference, dict[bytes, bytes], Code]]:
    """Each signed by its sender down to the last chunk."""
    body = forger.group(arena.head).to_bytes()
    group = RolloutGroup.from_bytes(body)
    reference, chunks = referred(body)
    bomb = zstandard.compress(bytes(1 << 26))
    other, behind = referred(replace(group, counter=group.counter + 1).to_bytes())
    strange, beyond = referred(replace(group, checkpoint=bytes(32)).to_bytes())
    return {
        "hash": (replace(reference, hash=bytes(32)), chunks, Code.HASH_MISMATCH),
        "counter": (replace(other, counter=group.counter), behind, Code.HASH_MISMATCH),
        "checkpoint": (replace(strange, checkpoint=group.checkpoint), beyond, Code.HASH_MISMATCH),
        "size": (replace(reference, size=reference.size - 1), chunks, Code.BAD_COMPRESSION),
        "bomb": (*framed(reference, bomb), Code.BAD_COMPRESSION),
        "frame": (*framed(reference, body), Code.BAD_COMPRESSION),
        "shape": (*_of(reference, b"\x80"), Code.WRONG_TYPE),
        "bytes": (*_of(reference, b"\xc1"), Code.MALFORMED),
    }


def _of(reference: Reference, body: bytes) -> tuple[Reference, dict[bytes, bytes]]:
    digest = hashlib.sha256(body).digest()
    return framed(replace(reference, size=len(body), hash=digest), zstandard.compress(body))


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(name, marks=pytest.mark.attack(attack, code))
        for name, attack, code in (
            ("hash", "content by reference of another hash", "hash-mismatch"),
            ("counter", "reference to the group of another task", "hash-mismatch"),
            ("checkpoint", "reference to the group of another task", "hash-mismatch"),
            ("size", "content by reference that is more than was said", "bad-compression"),
            ("bomb", "content by reference that is a bomb", "bad-compression"),
            ("frame", "content by reference that is no frame", "bad-compression"),
            ("shape", "content by reference that is no group", "wrong-type"),
            ("bytes", "content by reference that is no group", "malformed"),
        )
    ],
)
def test_content_that_is_not_what_was_signed_is_refused(arena: Arena, liar: Forger, lie: str) -> None:
    reference, chunks, code = lies(liar, arena)[lie]
    refused(arena, liar, reference, having(chunks), code)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        pytest.param(changes, code, marks=pytest.mark.attack(attack, code.value))
        for attack, changes, code in (
            ("reference with a chunk too many", {"chunks": bytes(64)}, Code.SIZE_MISMATCH),
            ("reference without chunks", {"chunks": b""}, Code.SIZE_MISMATCH),
            ("reference to more than any group", {"size": 1 << 26}, Code.OVERSIZE),
            ("reference to more than can be", {"size": 1 << 62}, Code.WRONG_TYPE),
        )
    ],
)
def test_reference_that_says_what_cannot_be_is_turned_away(
    arena: Arena, liar: Forger, changes: dict[str, Any], code: Code
) -> None:
    reference, _ = referred(liar.group(arena.head).to_bytes())
    arena.turned_away(sealed(liar, replace(reference, **changes)), liar.topic, code)


@pytest.mark.attack("two groups by reference for one counter", "counter-reused")
def test_second_reference_for_a_counter_is_refused(arena: Arena, liar: Forger) -> None:
    group = liar.group(arena.head)
    first, chunks = referred(group.to_bytes())
    second, others = referred(replace(group, env="other").to_bytes())
    data, other = sealed(liar, first), sealed(liar, second)
    with volunteer(arena, liar, having(chunks, others), [data, other]):
        assert arena.receipt(data).verdict == "accepted"
        assert arena.receipt(other).code == "counter-reused"
    assert arena.state(other) is None


@pytest.mark.attack("reference replayed", "duplicate")
def test_replayed_reference_counts_once(arena: Arena, honest: Forger, liar: Forger) -> None:
    reference, chunks = referred(liar.group(arena.head).to_bytes())
    data, again = sealed(liar, reference), sealed(liar, reference)
    with volunteer(arena, liar, having(chunks), [data]):
        assert arena.receipt(data).verdict == "accepted"
        before = arena.journalled()
        arena.send(data, liar.topic)
        arena.accepts_honest(honest)
        assert len(arena.receipts[unseal(data).id]) == 1
        arena.say([again], liar.topic)
        assert arena.receipt(again) == replace(arena.receipt(data), rollout=unseal(again).id)
    assert arena.journalled() == before + 1


@pytest.mark.attack("content by reference announced by many keys", "")
def test_announcements_of_many_keys_hold_up_neither_groups_nor_keys_with_a_standing(
    arena: Arena, honest: Forger, liars: Iterator[Forger]
) -> None:
    """More than all fetches of strangers: none of them ever serves a byte."""
    good = arena.trusted("by reference")
    crowd = [next(liars) for _ in range(BODIES // STRANGERS + 4)]
    data = []
    for forger in crowd:
        body = forger.group(arena.head).to_bytes()
        data.append(sealed(forger, referred(body)[0]))
    mine, chunks = referred(good.group(arena.head).to_bytes())
    own = sealed(good, mine)
    with volunteer(arena, crowd[0], stall, data), volunteer(arena, good, having(chunks), [own]):
        arena.accepts_honest(honest)
        assert arena.receipt(own).verdict == "accepted"
        assert not any(arena.answered(one, 0) for one in data)  # they are still waited for
