"""Into a run from an invite, or a sentence that says what is in the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nous_node.node.equivocation import EquivocationError, halt_on_conflict
from nous_node.node.events import Event, Note
from nous_node.node.following import Following
from nous_node.node.home import Home, StorageError
from nous_node.node.joined import (
    HELD_CHECKPOINTS,
    RUNTIME_BYTES,
    JoinedFolder,
    TooLargeError,
    UnreachableRunError,
    enter,
    playable,
    refuse_checkpoint,
    refuse_too_large,
)
from nous_node.node.network_errors import NotConnectedError
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import EnvironmentEntry, Invite, RunManifest
from nous_node.protocol.streams import HeadReply

PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWMbbPVGsZYh3ChQjue712NHHGNybRRXwnuSpezYjGbCDS"
Answer = Callable[[], bytes]


# --- what fits -----------------------------------------------------------------------------------


def of_size(manifest: RunManifest, parameters: int, dtype: str = "float32") -> RunManifest:
    size = {"float32": 4, "bfloat16": 2}[dtype] * parameters
    model = msgspec.structs.replace(manifest.model, parameters=parameters, bytes=size, dtype=dtype)
    return msgspec.structs.replace(manifest, model=model)


def test_the_embedded_default_fits_a_small_machine(base_run: RunFolder) -> None:
    refuse_too_large(base_run.manifest, memory=1 << 30, disk=1 << 30)


def test_a_model_that_needs_more_memory_is_refused_with_both_figures(base_run: RunFolder) -> None:
    run = of_size(base_run.manifest, 1 << 30)
    with pytest.raises(LocalError) as error:
        refuse_too_large(run, memory=2 << 30, disk=1 << 50)
    for part in ("5.4 GiB of memory", "may use 2.0 GiB", "--memory"):
        assert part in str(error.value)
    refuse_too_large(of_size(base_run.manifest, 1 << 30, "bfloat16"), memory=3 << 30, disk=1 << 50)


def test_memory_is_enough_to_the_byte(base_run: RunFolder) -> None:
    run = of_size(base_run.manifest, 1 << 20)
    needed = (1 << 20) * 5 + RUNTIME_BYTES
    refuse_too_large(run, memory=needed, disk=1 << 50)
    with pytest.raises(LocalError):
        refuse_too_large(run, memory=needed - 1, disk=1 << 50)


def test_checkpoints_that_need_more_disk_are_refused_with_both_figures(base_run: RunFolder) -> None:
    run = of_size(base_run.manifest, 1 << 30)
    with pytest.raises(LocalError) as error:
        refuse_too_large(run, memory=1 << 50, disk=5 << 30)
    for part in ("12.0 GiB of disk", "may use 5.0 GiB", "--disk"):
        assert part in str(error.value)
    refuse_too_large(run, memory=1 << 50, disk=HELD_CHECKPOINTS * (4 << 30))


def test_a_checkpoint_larger_than_the_model_can_need_is_refused(base_run: RunFolder) -> None:
    run = of_size(base_run.manifest, 1 << 30, "bfloat16")
    refuse_checkpoint(run, 4 << 30, disk=1 << 50)  # a trainer that publishes in fp32
    with pytest.raises(TooLargeError, match=r"checkpoint of 6\.0 GiB .* can need 5\.2 GiB"):
        refuse_checkpoint(run, 6 << 30, disk=1 << 50)
    with pytest.raises(TooLargeError, match="--disk"):
        refuse_checkpoint(run, 4 << 30, disk=4 << 30)


# --- what can be played --------------------------------------------------------------------------


@pytest.fixture
def mixed(base_run: RunFolder) -> RunManifest:
    """A run of which one environment is not installed here."""
    known = base_run.manifest.environments[0]
    entries = [known, EnvironmentEntry("ghost", "1", 1)]
    return msgspec.structs.replace(base_run.manifest, environments=entries)


def test_environments_that_are_not_installed_are_passed_over_and_said(mixed: RunManifest) -> None:
    events: list[Event] = []
    assert playable(mixed, (), events.append) == {"sort-digits"}
    (note,) = events
    assert isinstance(note, Note)
    assert note.level == "warning"
    assert "Tasks of ghost are passed over" in note.text


def test_only_environments_that_are_allowed_are_played(mixed: RunManifest) -> None:
    events: list[Event] = []
    assert playable(mixed, ("sort-digits", "of another run"), events.append) == {"sort-digits"}
    assert events == []


def test_a_run_with_none_that_is_allowed_is_refused_with_what_it_has(mixed: RunManifest) -> None:
    with pytest.raises(LocalError, match=r"--env \(chess\); it has sort-digits, ghost"):
        playable(mixed, ("chess",), lambda event: None)


def test_a_run_with_none_that_is_installed_is_refused_with_the_reason(mixed: RunManifest) -> None:
    with pytest.raises(LocalError, match="can run no environment of this run: There is no environment"):
        playable(mixed, ("ghost",), lambda event: None)


def test_another_version_of_an_environment_cannot_be_played(base_run: RunFolder) -> None:
    other = msgspec.structs.replace(base_run.manifest.environments[0], version="99")
    manifest = msgspec.structs.replace(base_run.manifest, environments=[other])
    with pytest.raises(LocalError, match="sort-digits 99"):
        playable(manifest, (), lambda event: None)


# --- entering ------------------------------------------------------------------------------------


class Peer:
    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id


class Net:
    """Peers by name; each answers a head request with bytes, or raises."""

    def __init__(self, **peers: Answer) -> None:
        self.answers = peers
        self.asked: list[str] = []

    def peers(self) -> list[Peer]:
        return [Peer(name) for name in self.answers]

    async def request(
        self, peer: str, protocol: str, payload: bytes, *, max_response: int, deadline: float
    ) -> bytes:
        self.asked.append(peer)
        return self.answers[peer]()


class Entrance:
    """An invite to a run, and a folder to enter with."""

    def __init__(self, path: Path, run: RunFolder, root: Identity) -> None:
        self.run, self.root = run, root
        self.folder = JoinedFolder.of(Home.open(path / "home"), run.run)
        self.invite = Invite(run.run, [PEER])
        self.notes: list[Event] = []

    def head(self, version: int = 3, beacon: int = 0) -> bytes:
        files = [file_entry("model.safetensors", [b"weights"])]
        drawn = bytes([beacon]) * 32
        manifest = CheckpointManifest(version, FULL, files, {"w": bytes(32)}, drawn, b"p" * 32)
        body = manifest.to_bytes()
        return seal(self.root, Kind.CHECKPOINT, self.run.run, body, seq=1, ts=1_800_000_000_000)

    def knows(self, version: int | None = 3) -> Answer:
        """Of a peer that follows the run, up to a version."""
        head = None if version is None else self.head(version)
        return lambda: encode(HeadReply(run=self.run.envelope, checkpoint=head))

    async def enter(self, **peers: Answer) -> Following:
        self.net: Any = Net(**peers)
        return await enter(self.net, self.invite, self.folder, self.notes.append)


@pytest.fixture
def entrance(tmp_path: Path, base_run: RunFolder, root: Identity) -> Entrance:
    return Entrance(tmp_path, base_run, root)


def unreachable() -> bytes:
    raise NotConnectedError("peer")


def stranger() -> bytes:
    return encode(HeadReply(error=Code.WRONG_RUN.value))


def babbler() -> bytes:
    return b"\xc1"


async def test_manifest_and_head_come_from_whoever_answers_first(
    entrance: Entrance, autojump_clock: object
) -> None:
    following = await entrance.enter(a=unreachable, b=stranger, c=babbler, d=entrance.knows())
    assert (following.run, following.version) == (entrance.run.run, 3)
    assert following.manifest == entrance.run.manifest
    assert entrance.folder.read_manifest(entrance.run.run) == entrance.run.envelope
    assert entrance.net.asked == ["a", "b", "c", "d"]
    assert entrance.notes == []


async def test_a_peer_that_has_no_head_yet_is_asked_again(entrance: Entrance, autojump_clock: object) -> None:
    answers = iter([entrance.knows(None), entrance.knows(None), entrance.knows(4)])
    following = await entrance.enter(slow=lambda: next(answers)())
    assert following.version == 4
    assert len(entrance.net.asked) == 3


async def test_a_manifest_of_another_run_is_not_taken(entrance: Entrance, autojump_clock: object) -> None:
    """Whoever answers may say anything: the invite names the run."""
    manifest = msgspec.structs.replace(entrance.run.manifest, name="other")
    body = manifest.to_bytes()
    data = seal(entrance.root, Kind.RUN, entrance.run.run, body, seq=0, ts=1_800_000_000_000)
    with pytest.raises(UnreachableRunError):
        await entrance.enter(liar=lambda: encode(HeadReply(run=data, checkpoint=entrance.head())))
    assert not entrance.folder.manifest.exists()


async def test_nobody_who_answers_is_told_with_the_address_and_the_last_problem(
    entrance: Entrance, autojump_clock: object
) -> None:
    with pytest.raises(UnreachableRunError) as error:
        await entrance.enter(stranger=stranger)
    for part in (PEER, "does not follow this run", "ask for a new invite"):
        assert part in str(error.value)


async def test_nobody_at_all_is_told(entrance: Entrance, autojump_clock: object) -> None:
    with pytest.raises(UnreachableRunError, match="Nobody who follows this run answers at"):
        await entrance.enter()
    assert not entrance.folder.path.exists()


async def test_a_run_that_was_entered_before_goes_on_without_anybody_and_says_so(
    entrance: Entrance, autojump_clock: object
) -> None:
    await entrance.enter(peer=entrance.knows())
    following = await entrance.enter()
    assert (following.manifest, following.head) == (entrance.run.manifest, None)
    assert not following.heard
    (note,) = entrance.notes
    assert isinstance(note, Note)
    assert "what is stored here is used" in note.text


async def test_the_head_that_was_known_is_known_after_a_restart(
    entrance: Entrance, autojump_clock: object
) -> None:
    """An older one changes nothing, whoever tells it first."""
    await entrance.enter(peer=entrance.knows())
    entrance.folder.head.write_bytes(entrance.head(7))
    following = await entrance.enter(peer=entrance.knows(4))
    assert (following.version, following.heard, following.conflict) == (7, True, None)
    following = await entrance.enter(peer=entrance.knows(8))
    assert following.version == 8
    following = await entrance.enter()
    assert (following.version, following.heard) == (7, False)


async def test_another_head_of_the_version_that_was_known_is_found_out_after_a_restart(
    entrance: Entrance, autojump_clock: object
) -> None:
    await entrance.enter(peer=entrance.knows())
    entrance.folder.head.write_bytes(entrance.head(7, beacon=1))
    following = await entrance.enter(peer=entrance.knows(7))
    assert following.conflict is not None
    assert following.head is not None
    assert following.head.manifest.beacon == bytes([1]) * 32


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"x" * 20_000_000])
async def test_a_stored_head_that_is_damaged_is_passed_over(
    entrance: Entrance, damage: bytes, autojump_clock: object
) -> None:
    await entrance.enter(peer=entrance.knows())
    entrance.folder.head.write_bytes(damage)
    following = await entrance.enter(peer=entrance.knows())
    assert following.version == 3


async def test_a_run_that_was_halted_is_not_entered_before_a_person_has_looked(
    entrance: Entrance, autojump_clock: object
) -> None:
    following = await entrance.enter(peer=entrance.knows())
    following.offer(entrance.head(3, beacon=1))
    with pytest.raises(EquivocationError):
        await halt_on_conflict(following, entrance.folder.path)
    with pytest.raises(EquivocationError, match=r"equivocation-3\.proof"):
        await entrance.enter(peer=entrance.knows())
    (entrance.folder.path / "equivocation-3.proof").unlink()
    assert (await entrance.enter(peer=entrance.knows())).version == 3


async def test_a_stored_manifest_that_is_damaged_is_fetched_again(
    entrance: Entrance, autojump_clock: object
) -> None:
    await entrance.enter(peer=entrance.knows())
    entrance.folder.manifest.write_bytes(entrance.run.envelope[:100])
    assert entrance.folder.read_manifest(entrance.run.run) is None
    await entrance.enter(peer=entrance.knows())
    assert entrance.folder.read_manifest(entrance.run.run) == entrance.run.envelope


async def test_a_newer_protocol_is_told_at_once(entrance: Entrance) -> None:
    def newer() -> bytes:
        raise RemoteError(Code.UNSUPPORTED_VERSION, "update nous-node")

    with pytest.raises(RemoteError, match="update nous-node"):
        await entrance.enter(newer=newer)


async def test_a_disk_that_cannot_be_written_is_told_at_once(entrance: Entrance) -> None:
    entrance.folder.manifest.mkdir(parents=True)
    with pytest.raises(StorageError):
        await entrance.enter(peer=entrance.knows())


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home")
    one, other = (JoinedFolder.of(home, bytes([number]) * 32) for number in (1, 2))
    one.make()
    assert one.checkpoints.is_dir()
    assert not other.path.exists()
    assert one.path != other.path
    assert one.checkpoint(b"\xab" * 32) == one.checkpoints / ("ab" * 8)
    assert {one.manifest.parent, one.outbox.parent, one.worker_log.parent} == {one.path}
