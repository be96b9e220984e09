"""Groups by reference: packed, judged, opened; and frames that are not what was said of them."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.constants import CHUNK, MAX_CHUNK, MAX_LIFETIME_MS, MAX_REFERENCED, MIN_CHUNK
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.gossip import GossipView, Judgement, Verdict, judge_rollout
from nous_node.protocol.references import (
    MAX_REFERENCE,
    chunks,
    cut,
    open_group,
    pack,
    read_reference,
    unpack,
)
from nous_node.protocol.rollouts import Reference, RolloutGroup
from nous_node.protocol.runs import shard_of

replace = msgspec.structs.replace
ROOM = 100_000
KNOWN = bytes([9]) * 32


@pytest.fixture
def packed(group: Any) -> tuple[RolloutGroup, bytes, Reference, bytes]:
    """A group, its bytes, its reference and its frame."""
    one = group(checkpoint=KNOWN, counter=7)
    body = one.to_bytes()
    return one, body, *pack(one.checkpoint, one.counter, body, ROOM)


def code_of(call: Any, *arguments: Any) -> Code:
    with pytest.raises(RemoteError) as caught:
        call(*arguments)
    return caught.value.code


def test_a_group_comes_back_out_of_its_frame(packed: Any) -> None:
    group, body, reference, frame = packed
    assert read_reference(reference.to_bytes(), MAX_REFERENCED) == reference
    assert unpack(reference, frame) == body
    assert open_group(reference, body) == group


@given(size=st.integers(1, 5 * MIN_CHUNK), chunk=st.integers(MIN_CHUNK, 2 * MIN_CHUNK))
def test_chunks_cover_the_frame_once_each_with_its_hash(size: int, chunk: int) -> None:
    frame = random.Random(size).randbytes(size)
    hashes = [hashlib.sha256(frame[at : at + chunk]).digest() for at in range(0, size, chunk)]
    reference = Reference(KNOWN, 0, KNOWN, size, size, chunk, b"".join(hashes))
    assert b"".join(piece for _, piece in cut(reference, frame)) == frame
    assert [(digest, len(piece)) for digest, piece in cut(reference, frame)] == chunks(reference)
    assert [digest for digest, _ in chunks(reference)] == hashes


@pytest.mark.parametrize(
    ("room", "chunk"), [(100_000, CHUNK), (1024, 2 * CHUNK), (500, MAX_CHUNK), (1, MAX_CHUNK)]
)
def test_hashes_leave_room_in_the_envelope(room: int, chunk: int) -> None:
    noise = random.Random(0).randbytes(10 * CHUNK)
    reference, _ = pack(KNOWN, 0, noise, room)
    assert reference.chunk == chunk


def test_what_no_receiver_takes_is_not_packed() -> None:
    with pytest.raises(LocalError, match=f"at most {MAX_REFERENCED} can be sent"):
        pack(KNOWN, 0, bytes(MAX_REFERENCED + 1), ROOM)


def test_the_longest_reference_can_be_read(packed: Any) -> None:
    count = MAX_REFERENCED // MIN_CHUNK
    longest = replace(
        packed[2], size=MAX_REFERENCED, packed=MAX_REFERENCED, chunk=MIN_CHUNK, chunks=KNOWN * count
    )
    assert len(longest.to_bytes()) <= MAX_REFERENCE
    assert read_reference(longest.to_bytes(), MAX_REFERENCED) == longest


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"chunks": bytes(64)}, Code.SIZE_MISMATCH),
        ({"chunks": b""}, Code.SIZE_MISMATCH),
        ({"chunks": bytes(31)}, Code.SIZE_MISMATCH),
        ({"packed": MIN_CHUNK + 1, "chunk": MIN_CHUNK}, Code.SIZE_MISMATCH),
        ({"size": 100_001}, Code.OVERSIZE),
        ({"packed": 100_001}, Code.OVERSIZE),
        ({"size": 0}, Code.WRONG_TYPE),
        ({"size": MAX_REFERENCED + 1}, Code.WRONG_TYPE),
        ({"packed": 0, "chunks": b""}, Code.WRONG_TYPE),
        ({"chunk": MIN_CHUNK - 1}, Code.WRONG_TYPE),
        ({"chunk": MAX_CHUNK + 1}, Code.WRONG_TYPE),
        ({"hash": bytes(31)}, Code.WRONG_TYPE),
        ({"counter": 1 << 32}, Code.WRONG_TYPE),
    ],
)
def test_references_that_say_what_cannot_be_are_refused(packed: Any, changes: Any, code: Code) -> None:
    body = encode({**msgspec.to_builtins(packed[2], builtin_types=(bytes,)), **changes})
    assert code_of(read_reference, body, 100_000) is code


def test_frames_that_are_not_what_the_reference_says_are_refused(packed: Any) -> None:
    _, body, reference, frame = packed

    def verdict(data: bytes, **changes: Any) -> Code:
        return code_of(unpack, replace(reference, **{"packed": len(data), **changes}), data)

    assert verdict(frame, packed=len(frame) + 1) is Code.SIZE_MISMATCH
    assert verdict(frame, hash=KNOWN) is Code.HASH_MISMATCH
    assert verdict(frame, size=len(body) - 1) is Code.BAD_COMPRESSION
    assert verdict(frame, size=len(body) + 1) is Code.BAD_COMPRESSION
    assert verdict(frame + b"more") is Code.BAD_COMPRESSION
    assert verdict(frame[:-1]) is Code.BAD_COMPRESSION
    assert verdict(body) is Code.BAD_COMPRESSION
    assert verdict(zstandard.compress(body + b"more")) is Code.BAD_COMPRESSION


@pytest.mark.parametrize("changes", [{"counter": 8}, {"checkpoint": bytes(32)}])
def test_a_reference_that_names_another_task_than_its_group_is_refused(packed: Any, changes: Any) -> None:
    _, body, reference, _ = packed
    assert code_of(open_group, replace(reference, **changes), body) is Code.HASH_MISMATCH


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_never_crash(data: bytes) -> None:
    reference = Reference(KNOWN, 0, KNOWN, 10, max(1, len(data)), CHUNK, KNOWN)
    assert code_of(unpack, reference, data) in (Code.SIZE_MISMATCH, Code.BAD_COMPRESSION, Code.HASH_MISMATCH)


# --- on the gossip path ----------------------------------------------------------------------------


@pytest.fixture
def judge(world: Any, packed: Any) -> Any:
    """Judges the reference, or one with changes, as message number `seq` at the world's time."""
    view = GossipView(world.run, world.manifest)
    view.learn(KNOWN, 0)

    def judged(seq: int = 0, after: int = 0, **changes: Any) -> Judgement:
        body = replace(packed[2], **changes).to_bytes()
        now = world.now + after
        data = world.sealed(Kind.REFERENCE, body, world.volunteer, seq, ts=now)
        return judge_rollout(view, shard_of(world.volunteer.key, world.manifest.shards), data, now)

    return judged


def test_a_reference_is_judged_as_a_group_is(judge: Any, packed: Any) -> None:
    first = judge()
    assert (first.verdict, first.body) == (Verdict.ACCEPT, packed[2])
    assert judge().error.code is Code.DUPLICATE
    stranger = judge(1, checkpoint=bytes(32))
    assert (stranger.verdict, stranger.error.code) == (Verdict.IGNORE, Code.UNKNOWN_CHECKPOINT)
    assert isinstance(stranger.body, Reference)  # so that its sender can be told
    assert judge(2, chunks=b"").verdict is Verdict.REJECT


def test_references_and_groups_share_one_rate(judge: Any) -> None:
    assert [judge(seq).verdict for seq in range(3)] == [Verdict.ACCEPT] * 3  # a burst of 0.05 a second
    assert judge(3).error.code is Code.RATE


def test_a_reference_to_more_than_the_run_can_need_is_rejected(world: Any, judge: Any) -> None:
    most = world.manifest.referenced_limit
    assert most == 65_536 + 16 * 2 * (32 * 64 + 4_096)
    assert judge(0, size=most).verdict is Verdict.ACCEPT
    over = judge(1, size=most + 1)
    assert (over.verdict, over.error.code) == (Verdict.REJECT, Code.OVERSIZE)


def test_sixteen_rollouts_of_32768_tokens_have_room(world: Any) -> None:
    model = replace(world.manifest.model, context=32_768)
    assert replace(world.manifest, model=model, group=16).referenced_limit == MAX_REFERENCED
    assert MAX_REFERENCED > 16 * 32_768 * 12  # tokens, log-probs and an advantage each, unpacked
    assert MAX_LIFETIME_MS >= 240_000  # the longest that a body may take to arrive
