"""Run manifests and invites beyond their vectors: round trips, and bytes that are neither."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.constants import MAX_ADDRESSES
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind, unseal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import (
    EnvironmentEntry,
    Invite,
    Topics,
    open_manifest,
    run_id,
    shard_of,
)

PEER = Identity.from_seed(bytes(32)).peer_id


def test_a_manifest_opens_for_whoever_knows_its_id(world: Any) -> None:
    body = world.manifest.to_bytes()
    assert open_manifest(world.opened(Kind.RUN, body, world.root), world.run) == world.manifest


def test_environment_settings_of_every_type_survive(world: Any, replaced: Any) -> None:
    settings = {"a": True, "b": 3, "c": 0.5, "d": "text", "e": [1, 2], "f": ["x"], "g": [1, "x", True, 0.5]}
    manifest = replaced(world.manifest, environments=[EnvironmentEntry("e", "1", 1, settings)])
    body = manifest.to_bytes()
    envelope = unseal(world.sealed(Kind.RUN, body, world.root))
    run = run_id(body)
    with pytest.raises(RemoteError):  # the envelope names the world's run
        open_manifest(envelope, run)
    signed = encode({**_head(world, run), "body": body})
    sig = world.root.sign(b"nous/envelope/1\0" + signed)
    assert open_manifest(unseal(encode({"sig": sig, "signed": signed})), run) == manifest


def _head(world: Any, run: bytes) -> dict[str, Any]:
    return {"v": 1, "kind": "run", "run": run, "from": world.root.key, "seq": 0, "ts": 1, "exp": 2}


@pytest.mark.parametrize("setting", [{"a": 1}, [[1]], None, b"bytes"])
def test_other_settings_are_refused(world: Any, replaced: Any, setting: Any) -> None:
    entry = EnvironmentEntry("e", "1", 1, {"x": setting})
    body = replaced(world.manifest, environments=[entry]).to_bytes()
    signed = encode({**_head(world, run_id(body)), "body": body})
    envelope = unseal(encode({"sig": world.root.sign(b"nous/envelope/1\0" + signed), "signed": signed}))
    with pytest.raises(RemoteError) as caught:
        open_manifest(envelope, run_id(body))
    assert caught.value.code is Code.WRONG_TYPE


@given(st.binary(max_size=200))
def test_a_run_envelope_around_any_bytes_is_refused(world: Any, body: bytes) -> None:
    envelope = world.opened(Kind.RUN, body, world.root)
    for expected in (world.run, run_id(body)):
        with pytest.raises(RemoteError):
            open_manifest(envelope, expected)


hosts = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=40)


@given(
    st.binary(min_size=32, max_size=32),
    st.lists(hosts.map(lambda host: f"/{host}/p2p/{PEER}"), min_size=1, max_size=MAX_ADDRESSES),
)
def test_an_invite_survives_copying(run: bytes, addresses: list[str]) -> None:
    invite = Invite(run, addresses)
    assert Invite.from_text(invite.to_text()) == invite
    assert Invite.from_text(f" \n{invite.to_text()[:50]}\r\n\t{invite.to_text()[50:]} ") == invite


@given(st.text(max_size=200) | st.text(max_size=200).map(lambda text: "nous1" + text))
def test_any_other_text_is_no_invite(text: str) -> None:
    with pytest.raises(RemoteError, match="Copy the whole string again") as caught:
        Invite.from_text(text)
    assert caught.value.code is Code.INVITE


GOOD = Invite(bytes(32), [f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}"]).to_text()


@given(st.integers(0, len(GOOD) - 1), st.characters())
def test_an_invite_with_a_changed_character_is_refused(place: int, character: str) -> None:
    changed = GOOD[:place] + character + GOOD[place + 1 :]
    if changed != GOOD:
        with pytest.raises(RemoteError):
            Invite.from_text(changed)


def test_a_very_long_text_is_refused_quickly() -> None:
    with pytest.raises(RemoteError, match="2048"):
        Invite.from_text("nous1" + "A" * 1_000_000)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 65_536))
def test_a_shard_exists(key: bytes, shards: int) -> None:
    assert 0 <= shard_of(key, shards) < shards


def test_topics_carry_the_whole_run_id() -> None:
    topics = Topics(bytes(range(32)))
    assert topics.rollouts(3) == f"/nous/1/{bytes(range(32)).hex()}/rollouts/3"
    assert len({topics.rollouts(0), topics.rollouts(1), topics.checkpoints, topics.receipts}) == 4
