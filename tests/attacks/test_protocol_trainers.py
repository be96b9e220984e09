"""Who only claims to be the trainer: receipts, checkpoints and chunks of others move no volunteer."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from nous_node.node.blobs import BlobIndex, FetchError
from nous_node.node.following import Following, now_ms
from nous_node.node.network import NetworkConfig, open_network
from nous_node.node.network_errors import UnreachableError
from nous_node.node.swarm import Swarm
from nous_node.protocol.constants import DOMAIN_ENVELOPE
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Envelope, Kind, unseal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Known, Receipts, Standing
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.streams import BLOB_PROTOCOL, MAX_BLOB_REPLY, MAX_REQUEST

LIAR = Identity.from_seed(b"liar".ljust(32))
HOUR = 3_600_000
LOCAL = "/ip4/127.0.0.1/tcp/0"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from .stage import Stage

    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nous_node.node.volunteer.STATUS_SECONDS", 0.05)
        patch.setattr("nous_node.node.sending.RESEND_SECONDS", 1000.0)
        patch.setattr("nous_node.node.volunteer.PARTING_SECONDS", 0.1)
        stage = Stage(tmp_path_factory.mktemp("stage"), port)
        try:
            yield stage
        finally:
            stage.close()


def in_the_name_of_the_trainer(stage: Any, kind: Kind, body: bytes) -> bytes:
    """It says that the trainer sent it; the signature is the liar's."""
    signed = unseal(stage.sealed(kind, body)).signed
    return encode({"sig": LIAR.sign(DOMAIN_ENVELOPE + signed), "signed": signed})


def cut(stage: Any, kind: Kind, body: bytes) -> bytes:
    data: bytes = stage.sealed(kind, body)
    return data[:-1]


Forge = Callable[[Any, Kind, bytes], bytes]

FORGED: dict[str, tuple[Code, Forge]] = {
    "signed by nobody in particular": (
        Code.WRONG_ROLE,
        lambda stage, kind, body: stage.sealed(kind, body, LIAR),
    ),
    "signed by the volunteer itself": (
        Code.WRONG_ROLE,
        lambda stage, kind, body: stage.sealed(kind, body, stage.home.identity()),
    ),
    "in the trainer's name": (Code.BAD_SIGNATURE, in_the_name_of_the_trainer),
    "of the trainer for another run": (
        Code.WRONG_RUN,
        lambda stage, kind, body: stage.sealed(kind, body, run=bytes(32)),
    ),
    "of the trainer, an hour ago": (
        Code.EXPIRED,
        lambda stage, kind, body: stage.sealed(kind, body, ts=now_ms() - HOUR),
    ),
    "of the trainer, as another kind": (
        Code.WRONG_KIND,
        lambda stage, kind, body: stage.sealed(Kind.HELLO, body),
    ),
    "of the trainer, cut": (Code.MALFORMED, cut),
    "garbage": (Code.MALFORMED, lambda stage, kind, body: b"\xc1" * 100),
}


def forged(attack: str, *without: Code) -> list[Any]:
    """Parameters of a test: all ways to forge a message of the trainer's."""
    return [
        pytest.param(how, id=how, marks=pytest.mark.attack(attack, code.value))
        for how, (code, _) in FORGED.items()
        if code not in without
    ]


@pytest.mark.parametrize("how", forged("forged receipt"))
def test_forged_receipts_settle_nothing(stage: Any, how: str) -> None:
    """What comes behind them on the same line, from the trainer, does."""
    stage.until(lambda: len(stage.rollouts) >= 3)
    target, other, *_ = stage.rollouts
    stage.rollouts.remove(other)
    stage.whisper(
        stage.topics.receipts,
        FORGED[how][1](stage, Kind.RECEIPTS, stage.receipts(target, credit=10**6)),
        stage.sealed(Kind.RECEIPTS, stage.receipts(other)),
    )
    stage.until(lambda: other.id not in stage.waiting() and stage.status.accepted)
    assert target.id in stage.waiting()
    assert stage.status.credit < 10**6


@pytest.mark.attack("receipt for a group that is not ours", "")
def test_receipts_for_groups_of_others_settle_nothing(stage: Any) -> None:
    stage.until(lambda: len(stage.rollouts) >= 2)
    waiting, accepted = stage.waiting(), stage.status.accepted
    stranger = msgspec.structs.replace(stage.rollouts[0], id=bytes(32))
    last = stage.rollouts.pop()
    stage.whisper(
        stage.topics.receipts,
        stage.sealed(Kind.RECEIPTS, stage.receipts(stranger)),
        stage.sealed(Kind.RECEIPTS, stage.receipts(last)),
    )
    stage.until(lambda: last.id not in stage.waiting())
    assert waiting - stage.waiting() == {last.id}
    stage.until(lambda: stage.status.accepted > accepted)  # the status lags behind


@pytest.mark.attack("second receipt for a group", "")
def test_second_receipt_for_a_group_changes_nothing(stage: Any) -> None:
    stage.until(lambda: len(stage.rollouts) >= 2)
    first, last = stage.rollouts.pop(), stage.rollouts.pop()
    refused = dict(stage.status.refused)
    stage.whisper(
        stage.topics.receipts,
        stage.sealed(Kind.RECEIPTS, stage.receipts(first)),
        stage.sealed(Kind.RECEIPTS, stage.refusals(first)),
        stage.sealed(Kind.RECEIPTS, stage.receipts(last)),
    )
    stage.until(lambda: last.id not in stage.waiting())
    assert stage.status.refused == refused


@pytest.mark.parametrize("how", forged("forged checkpoint manifest"))
def test_forged_checkpoint_is_not_followed(stage: Any, how: str) -> None:
    known = stage.following.head
    body = msgspec.structs.replace(
        known.manifest, version=known.version + 1_000, parent=known.hash
    ).to_bytes()
    forged = FORGED[how][1](stage, Kind.CHECKPOINT, body)
    genuine = stage.renew()
    stage.whisper(stage.topics.checkpoints, forged, genuine.envelope)
    assert stage.followed(genuine) == genuine.version


@pytest.mark.parametrize("how", forged("forged head", Code.EXPIRED))
def test_forged_head_is_refused_by_whoever_asked(stage: Any, how: str) -> None:
    """A head that is asked for is as good as an old one; it has to be the trainer's all the same."""
    known = stage.following.head
    body = msgspec.structs.replace(
        known.manifest, version=known.version + 1_000, parent=known.hash
    ).to_bytes()
    code, forge = FORGED[how]
    with pytest.raises(RemoteError) as error:
        stage.following.offer(forge(stage, Kind.CHECKPOINT, body))
    assert error.value.code == code
    assert stage.following.head is known


@pytest.mark.attack("old checkpoint played again", "")
def test_old_checkpoint_that_is_played_again_leads_nobody_back(stage: Any) -> None:
    old = stage.following.head
    newer, newest = stage.renew(), stage.renew()
    stage.whisper(stage.topics.checkpoints, newer.envelope, old.envelope, newest.envelope)
    assert stage.followed(newest) == newest.version


@pytest.mark.attack("bad chunk served", "hash-mismatch")
async def test_peer_that_serves_another_chunk_is_cut_off(stage: Any, tmp_path: Path) -> None:
    """Over real connections; the honest one is there afterwards."""
    head, index = stage.following.head, BlobIndex(lambda file: None)
    index.add(stage.folder.checkpoint(0), head.manifest.files)

    async def lie(peer: str, request: bytes) -> bytes:
        reply = b"".join(await index.answer(peer, request))
        return reply[:-1] + bytes([reply[-1] ^ 1])

    serving = {"max_request": MAX_REQUEST, "max_response": MAX_BLOB_REPLY}
    async with (
        open_network(b"1" * 32, NetworkConfig(listen=(LOCAL,))) as liar,
        open_network(b"2" * 32, NetworkConfig(listen=(LOCAL,))) as honest,
        open_network(b"3" * 32, NetworkConfig(listen=())) as network,
    ):
        liar.serve(BLOB_PROTOCOL, lie, **serving)
        honest.serve(BLOB_PROTOCOL, index.answer, **serving)
        await network.connect(liar.addresses[0])
        with pytest.raises(FetchError, match="No connected peer delivers a chunk"):
            await fetch(network, head, tmp_path / "held")
        assert not (tmp_path / "held").exists()
        assert network.peers() == ()
        with pytest.raises(UnreachableError):
            await network.connect(liar.addresses[0])
        assert [offender.peer for offender in network.offenders()] == [liar.peer_id]
        await network.connect(honest.addresses[0])
        with trio.fail_after(15):
            await fetch(network, head, tmp_path / "held")
    for entry in head.manifest.files:
        assert (tmp_path / "held" / entry.path).read_bytes() == (
            stage.folder.checkpoint(0) / entry.path
        ).read_bytes()


async def fetch(network: Any, head: Any, folder: Path) -> None:
    swarm = Swarm(network, bytes(32), BlobIndex(lambda file: None))
    await swarm.fetch(head.hash, head.manifest, head.manifest.files, folder)


@pytest.mark.attack("trainer key not in the manifest", "wrong-role")
def test_codes_of_what_only_a_trainer_may_say(stage: Any) -> None:
    data = stage.sealed(Kind.CHECKPOINT, stage.following.head.manifest.to_bytes(), LIAR)
    with pytest.raises(RemoteError) as error:
        stage.following.offer(data)
    assert error.value.code == Code.WRONG_ROLE


def group_of(envelope: Envelope) -> RolloutGroup:
    return RolloutGroup.from_bytes(envelope.content())


def standing(key: bytes, state: str, until: int = 0) -> bytes:
    return Receipts([], [Standing(key, state, 1, 1, 10, 0, 1, 1, until)]).to_bytes()


@pytest.mark.parametrize("how", forged("forged standing"))
def test_forged_standing_stops_nobody(stage: Any, how: str) -> None:
    """Neither does one that praises. What the trainer says behind it on the same line counts."""
    stage.until(lambda: len(stage.rollouts) >= 2)
    last = stage.rollouts.pop()
    stage.whisper(
        stage.topics.receipts,
        FORGED[how][1](stage, Kind.RECEIPTS, standing(stage.key, "banned")),
        FORGED[how][1](stage, Kind.RECEIPTS, standing(stage.key, "active")),
        stage.sealed(Kind.RECEIPTS, stage.receipts(last)),
    )
    stage.until(lambda: last.id not in stage.waiting())
    assert stage.status.state == ""


@pytest.mark.attack("standing of somebody else", "")
def test_standing_of_another_key_stops_nobody(stage: Any) -> None:
    stage.until(lambda: len(stage.rollouts) >= 2)
    last = stage.rollouts.pop()
    stage.whisper(
        stage.topics.receipts,
        stage.sealed(Kind.RECEIPTS, standing(LIAR.key, "banned")),
        stage.sealed(Kind.RECEIPTS, stage.receipts(last)),
    )
    stage.until(lambda: last.id not in stage.waiting())
    assert stage.status.state == ""


@pytest.mark.parametrize("how", forged("forged answer to a hello"))
def test_forged_answer_to_a_hello_changes_nothing(stage: Any, how: str) -> None:
    """It would have the volunteer wait for ever, or make groups that are refused."""
    stage.until(lambda: len(stage.rollouts) >= 2)
    last, before = stage.rollouts.pop(), stage.known_from()
    stage.whisper(
        stage.topics.receipts,
        FORGED[how][1](stage, Kind.RECEIPTS, Receipts([], known=[Known(stage.key, 1 << 40)]).to_bytes()),
        stage.sealed(Kind.RECEIPTS, stage.receipts(last)),
    )
    stage.until(lambda: last.id not in stage.waiting())
    assert stage.known_from() == before


@pytest.mark.attack("answer to somebody else", "")
def test_answer_to_another_key_changes_nothing(stage: Any) -> None:
    stage.until(lambda: len(stage.rollouts) >= 2)
    last, before = stage.rollouts.pop(), stage.known_from()
    stage.whisper(
        stage.topics.receipts,
        stage.sealed(Kind.RECEIPTS, Receipts([], known=[Known(LIAR.key, 1 << 40)]).to_bytes()),
        stage.sealed(Kind.RECEIPTS, stage.receipts(last)),
    )
    stage.until(lambda: last.id not in stage.waiting())
    assert stage.known_from() == before


def test_version_that_crossed_the_hello_gets_no_groups(stage: Any) -> None:
    """The trainer published it after the volunteer had sent its hello and before it heard that."""
    crossed = stage.known_from()
    assert crossed >= 1
    versions = {stage.following.view.versions[group_of(group).checkpoint] for group in stage.rollouts}
    assert min(versions) > crossed


@pytest.mark.attack("other run behind an invite", "wrong-run")
def test_manifest_of_another_run_is_not_joined(stage: Any) -> None:
    """Whoever answers to an invite, the run is the one whose hash it names."""
    with pytest.raises(RemoteError) as error:
        Following.of(bytes(32), stage.folder.envelope)
    assert error.value.code == Code.WRONG_RUN


@pytest.mark.attack("checkpoint file outside its folder", "path")
@pytest.mark.parametrize("path", ["../config.json", "/etc/passwd.json", "weights.pt", "a/../../b.json"])
def test_checkpoint_that_names_a_file_elsewhere_is_refused(stage: Any, path: str) -> None:
    """A trainer is believed no more than that."""
    known = stage.following.head
    first, *others = known.manifest.files
    entry = msgspec.structs.replace(first, path=path)
    files = sorted([entry, *others], key=lambda one: one.path)
    changes = {"version": known.version + 1, "parent": known.hash, "files": files}
    body = msgspec.structs.replace(known.manifest, **changes).to_bytes()
    with pytest.raises(RemoteError) as error:
        stage.following.offer(stage.sealed(Kind.CHECKPOINT, body))
    assert error.value.code == Code.PATH
    assert stage.following.head is known
