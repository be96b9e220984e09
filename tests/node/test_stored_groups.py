"""Groups as they stand in a journal: what is opened is what was signed, and nothing else gets through."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nous_node.node.runfolder import RunFolder
from nous_node.node.stored_groups import MAX_STORED, body_of, enclosed, envelope_of, group_of
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.references import pack
from nous_node.protocol.rollouts import Engine, Role, RolloutGroup, Segment, Trajectory

KEY = Identity.from_seed(b"v" * 32)
RUN = b"r" * 32


def sealed(kind: Kind, body: bytes) -> bytes:
    return seal(KEY, kind, RUN, body, seq=1, ts=1)


@pytest.fixture(scope="module")
def manifest(base_run: RunFolder) -> Any:
    return base_run.manifest


@pytest.fixture(scope="module")
def group() -> RolloutGroup:
    one = Trajectory(bytes(16), [Segment(4, Role.RAW, False)], b"", 0.0, "stop")
    return RolloutGroup(b"c" * 32, 3, "env", Engine("", "", "", ""), [one])


def test_a_group_and_the_same_by_reference_are_one(manifest: Any, group: RolloutGroup) -> None:
    body = group.to_bytes()
    reference, frame = pack(group.checkpoint, group.counter, body, 1_000)
    data = sealed(Kind.REFERENCE, reference.to_bytes())
    for stored in (sealed(Kind.ROLLOUT, body), enclosed(data, frame)):
        assert body_of(stored, manifest) == body
        assert group_of(stored, manifest) == (body, group)
    assert envelope_of(enclosed(data, frame), manifest).id == unseal(data).id


def test_other_kinds_and_lonely_references_are_no_groups(manifest: Any, group: RolloutGroup) -> None:
    reference, frame = pack(group.checkpoint, group.counter, group.to_bytes(), 1_000)
    for stored, code in (
        (sealed(Kind.REFERENCE, reference.to_bytes()), Code.UNAVAILABLE),
        (sealed(Kind.HELLO, b"\x80"), Code.WRONG_KIND),
        (enclosed(sealed(Kind.HELLO, b"\x80"), frame), Code.WRONG_KIND),
    ):
        with pytest.raises(RemoteError) as caught:
            body_of(stored, manifest)
        assert caught.value.code is code


def test_the_largest_stored_group_is_bounded(manifest: Any) -> None:
    with pytest.raises(RemoteError) as caught:
        body_of(enclosed(b"", bytes(MAX_STORED)), manifest)
    assert caught.value.code is Code.OVERSIZE


@settings(derandomize=True, database=None, deadline=None)
@given(data=st.binary(max_size=60), frame=st.binary(max_size=60), at=st.integers(0, 200))
def test_bytes_that_are_no_stored_group_never_crash(
    manifest: Any, group: RolloutGroup, data: bytes, frame: bytes, at: int
) -> None:
    reference, honest = pack(group.checkpoint, group.counter, group.to_bytes(), 1_000)
    whole = enclosed(sealed(Kind.REFERENCE, reference.to_bytes()), honest)
    for stored in (
        data,
        enclosed(data, frame),
        whole[:at] + data,
        whole[:at] + data + whole[at + len(data) :],
    ):
        if stored != whole:
            try:
                body = body_of(stored, manifest)
            except RemoteError:
                continue
            assert body == group.to_bytes()  # a byte of the signature is another one
