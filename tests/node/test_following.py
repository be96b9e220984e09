"""A run as a node sees it: heads come from anywhere and are taken only when genuine and newer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node.equivocation import EquivocationError, halt_on_conflict, refuse_halted
from nous_node.node.following import Following, Head, ask_head, drain
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, checkpoint_hash, file_entry
from nous_node.protocol.encoding import decode, encode, read
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.equivocation import Equivocation, open_equivocation
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.gossip import GossipView, check_freshness
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import run_id
from nous_node.protocol.streams import HEAD_PROTOCOL, MAX_HEAD_REPLY, HeadReply, HeadRequest

NOW = 1_800_000_000_000
STRANGER = Identity.from_seed(b"s" * 32)


def manifest(version: int) -> CheckpointManifest:
    files = [file_entry("model.safetensors", [b"weights"])]
    return CheckpointManifest(version, FULL, files, {"w": bytes(32)}, bytes([version]) * 32, b"p" * 32)


class Trainer:
    """Signs checkpoints of a run."""

    def __init__(self, folder: RunFolder, identity: Identity) -> None:
        self.folder, self.identity = folder, identity

    def head(self, version: int, **changes: Any) -> bytes:
        body = msgspec.structs.replace(manifest(version), **changes).to_bytes()
        return self.sealed(body)

    def sealed(self, body: bytes, kind: Kind = Kind.CHECKPOINT, run: bytes | None = None) -> bytes:
        return seal(self.identity, kind, run or self.folder.run, body, seq=1, ts=NOW)


@pytest.fixture
def trainer(base_run: RunFolder, root: Identity) -> Trainer:
    return Trainer(base_run, root)


@pytest.fixture
def following(base_run: RunFolder) -> Following:
    return Following.of(base_run.run, base_run.envelope)


def code(following: Following, data: bytes) -> Code:
    with pytest.raises(RemoteError) as error:
        following.offer(data)
    return error.value.code


def test_nothing_is_known_at_first(following: Following) -> None:
    assert (following.head, following.version) == (None, -1)


def test_an_envelope_of_another_run_is_not_followed(base_run: RunFolder) -> None:
    with pytest.raises(RemoteError):
        Following.of(bytes(32), base_run.envelope)
    with pytest.raises(RemoteError):
        Following.of(base_run.run, base_run.envelope[:-1])


def test_a_newer_head_is_taken_as_it_was_signed(following: Following, trainer: Trainer) -> None:
    for version in (3, 5):
        data = trainer.head(version)
        head = following.offer(data)
        assert head is following.head
        assert head == Head(checkpoint_hash(manifest(version).to_bytes()), manifest(version), data)
    assert following.version == 5


def test_an_older_head_leads_nobody_back_and_its_rollouts_are_known(
    following: Following, trainer: Trainer
) -> None:
    newest = following.offer(trainer.head(5))
    for version in (5, 4, 1):
        assert following.offer(trainer.head(version)) is None
    assert following.head is newest
    check_freshness(following.view, checkpoint_hash(manifest(4).to_bytes()))


def test_what_is_no_head_of_this_run_changes_nothing(following: Following, trainer: Trainer) -> None:
    good = trainer.head(5)
    stranger = Trainer(trainer.folder, STRANGER)
    assert code(following, b"") == Code.MALFORMED
    assert code(following, good[:-1]) == Code.MALFORMED
    assert code(following, stranger.head(5)) == Code.WRONG_ROLE
    assert code(following, trainer.sealed(b"", Kind.RECEIPTS)) == Code.WRONG_KIND
    assert code(following, trainer.sealed(manifest(5).to_bytes(), run=bytes(32))) == Code.WRONG_RUN
    assert code(following, trainer.sealed(b"\xc1")) in {Code.MALFORMED, Code.WRONG_TYPE}
    assert code(following, trainer.head(5, kind="sketch")) == Code.UNKNOWN_KIND
    assert code(following, trainer.head(5, parent=None)) == Code.WRONG_TYPE
    assert code(following, trainer.head(0, parent=None)) == Code.HASH_MISMATCH
    with pytest.raises(RemoteError):
        following.offer(good[:-1] + bytes([good[-1] ^ 1]))
    assert following.head is None
    assert following.offer(good) is not None


async def test_whoever_waits_for_a_newer_head_is_woken_by_it_alone(
    following: Following, trainer: Trainer
) -> None:
    came: dict[int, int] = {}

    async def wait(version: int) -> None:
        came[version] = (await following.newer_than(version)).version

    async with trio.open_nursery() as nursery:
        for version in (-1, 0, 3):
            nursery.start_soon(wait, version)
        await wait_all_tasks_blocked()
        assert came == {}
        following.offer(trainer.head(2))
        await wait_all_tasks_blocked()
        assert came == {-1: 2, 0: 2}
        following.offer(trainer.head(1))
        following.offer(trainer.head(3))
        await wait_all_tasks_blocked()
        assert 3 not in came
        following.offer(trainer.head(9))
    assert came == {-1: 2, 0: 2, 3: 9}


async def test_a_head_that_is_newer_already_is_there_at_once(following: Following, trainer: Trainer) -> None:
    head = following.offer(trainer.head(2))
    assert await following.newer_than(1) is head


# --- two of one version --------------------------------------------------------------------------

OTHER = Identity.from_seed(b"o" * 32)
"""A second trainer of the run."""


@pytest.fixture
def shared_run(base_run: RunFolder, root: Identity) -> Any:
    """A run of two trainers, followed; and both of them."""
    manifest = msgspec.structs.replace(base_run.manifest, trainers=[root.key, OTHER.key])
    run = run_id(manifest.to_bytes())
    following = Following(run, b"", manifest, GossipView(run, manifest))

    def sealed(identity: Identity, version: int, beacon: int) -> bytes:
        body = manifest_of(version, beacon).to_bytes()
        return seal(identity, Kind.CHECKPOINT, run, body, seq=beacon, ts=NOW)

    return following, sealed


def manifest_of(version: int, beacon: int) -> CheckpointManifest:
    return msgspec.structs.replace(manifest(version), beacon=bytes([beacon]) * 32)


async def test_a_second_checkpoint_of_a_version_by_the_same_key_halts_the_run(
    following: Following, trainer: Trainer
) -> None:
    """Whichever is heard first; newer ones do not count any more."""
    first, second = trainer.head(5), trainer.head(5, beacon=bytes(32))
    head = following.offer(first)
    found: list[Equivocation] = []

    async def wait() -> None:
        found.append(await following.conflicted())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        assert following.conflict is None
        assert following.offer(second) is None
    assert found == [following.conflict] == [Equivocation(first, second)]
    assert following.offer(trainer.head(6)) is None
    assert following.head is head
    assert await following.conflicted() == Equivocation(first, second)


def test_an_older_version_that_was_signed_twice_halts_the_run_as_well(
    following: Following, trainer: Trainer
) -> None:
    for version in (4, 5, 6):
        following.offer(trainer.head(version))
    following.offer(trainer.head(4, beacon=bytes(32)))
    assert following.conflict is not None


def test_the_same_checkpoint_again_is_no_second_one(following: Following, trainer: Trainer) -> None:
    """Also in another envelope: a trainer may seal it anew."""
    following.offer(trainer.head(5))
    body = manifest(5).to_bytes()
    following.offer(seal(trainer.identity, Kind.CHECKPOINT, following.run, body, seq=2, ts=NOW + 1))
    assert following.conflict is None


def test_checkpoints_of_one_version_by_two_trainers_are_both_genuine_and_the_first_is_followed(
    shared_run: Any, root: Identity
) -> None:
    following, sealed = shared_run
    head = following.offer(sealed(root, 5, 1))
    assert following.offer(sealed(OTHER, 5, 2)) is None
    assert following.conflict is None
    assert following.head is head
    check_freshness(following.view, checkpoint_hash(manifest_of(5, 2).to_bytes()))
    following.offer(sealed(OTHER, 5, 3))
    assert following.conflict is not None


def test_what_a_trainer_publishes_itself_counts_as_seen(following: Following, trainer: Trainer) -> None:
    data = trainer.head(5)
    following.take(Head(checkpoint_hash(manifest(5).to_bytes()), manifest(5), data))
    following.offer(trainer.head(5, beacon=bytes(32)))
    assert following.conflict is not None


def test_a_stranger_halts_nothing(following: Following, trainer: Trainer) -> None:
    following.offer(trainer.head(5))
    assert code(following, Trainer(trainer.folder, STRANGER).head(5, beacon=bytes(32))) == Code.WRONG_ROLE
    assert following.conflict is None


async def test_a_halted_run_leaves_a_proof_that_anybody_can_check(
    following: Following, trainer: Trainer, tmp_path: Path, autojump_clock: object
) -> None:
    first, second = trainer.head(5), trainer.head(5, beacon=bytes(32))
    for data in (first, second):
        following.offer(data)
    with pytest.raises(EquivocationError) as error:
        await halt_on_conflict(following, tmp_path)
    (file,) = list(tmp_path.iterdir())  # noqa: ASYNC240
    assert file.name == "equivocation-5.proof"
    assert decode(file.read_bytes(), 1 << 20) == {"first": first, "second": second}
    for part in ("version 5", trainer.identity.key.hex()[:16], str(file), "the run's owner", "delete"):
        assert part in str(error.value)
    proven = open_equivocation(file.read_bytes(), following.run, following.manifest)
    assert (proven.key, proven.version) == (trainer.identity.key, 5)

    with pytest.raises(EquivocationError, match=re.escape(str(file))):
        refuse_halted(tmp_path, following.run, following.manifest)
    file.write_bytes(encode({"first": first, "second": first}))  # which proves nothing
    refuse_halted(tmp_path, following.run, following.manifest)
    file.unlink()
    refuse_halted(tmp_path, following.run, following.manifest)
    refuse_halted(tmp_path / "nowhere", following.run, following.manifest)


async def test_an_equivocating_head_is_noticed_in_an_answer(following: Following, trainer: Trainer) -> None:
    following.offer(trainer.head(5))
    line = Line(None, encode(HeadReply(run=b"", checkpoint=trainer.head(5, beacon=bytes(32)))))
    reply = await ask_head(line, "peer", following.run)
    assert reply.checkpoint is not None
    following.offer(reply.checkpoint)
    assert following.conflict is not None


# --- asking --------------------------------------------------------------------------------------


class Line:
    """A network of one peer."""

    def __init__(self, following: Following | None, reply: bytes = b"") -> None:
        self.following, self.reply = following, reply

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        assert (protocol, max_response) == (HEAD_PROTOCOL, MAX_HEAD_REPLY)
        return self.reply if self.following is None else await self.following.answer_head("us", payload)


async def test_a_peer_tells_manifest_and_head(
    following: Following, trainer: Trainer, base_run: RunFolder
) -> None:
    reply = await ask_head(Line(following), "peer", base_run.run)
    assert (reply.run, reply.checkpoint) == (base_run.envelope, None)
    following.offer(trainer.head(2))
    reply = await ask_head(Line(following), "peer", base_run.run)
    assert (reply.run, reply.checkpoint) == (base_run.envelope, trainer.head(2))


async def test_a_peer_of_another_run_is_told_apart(following: Following) -> None:
    with pytest.raises(RemoteError) as error:
        await ask_head(Line(following), "peer", bytes(32))
    assert error.value.code == Code.WRONG_RUN
    said = read(await following.answer_head("us", encode(HeadRequest(bytes(32)))), HeadReply, MAX_HEAD_REPLY)
    assert said == HeadReply(error="wrong-run")


async def test_a_question_that_is_none_is_refused(following: Following) -> None:
    for junk in (b"", b"\xc1", encode({}), encode(HeadRequest(b"short"))):
        with pytest.raises(RemoteError):
            await following.answer_head("peer", junk)


async def test_an_answer_that_is_none_is_refused() -> None:
    for junk in (b"", b"\xc1", encode([])):
        with pytest.raises(RemoteError):
            await ask_head(Line(None, junk), "peer", bytes(32))


async def test_an_inbox_whose_judge_did_the_work_is_emptied() -> None:
    sending, inbox = trio.open_memory_channel[tuple[bytes, str]](1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, inbox)
        async with sending:
            for _ in range(5):
                await sending.send((b"message", "peer"))
