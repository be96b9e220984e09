"""Chunks from many peers: nothing unverified gets a final name, and what was verified is fetched once."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nous_node.node.blobs import FetchError, Place
from nous_node.node.home import DiskFullError, StorageError
from nous_node.node.network_errors import NotConnectedError
from nous_node.node.part_folder import PartFolder
from nous_node.node.picker_source import FIRST_WINDOW
from nous_node.node.swarm import Swarm
from nous_node.protocol.checkpoints import checkpoint_hash, read_manifest
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.streams import blob_reply

from .swarm import (
    CHECKPOINT,
    CHUNK,
    CHUNKS,
    FILES,
    Bench,
    Peers,
    babbler,
    empty_handed,
    entry,
    gone,
    honest,
    liar,
)
from .web import Nowhere


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, FILES)


def half(bench: Bench) -> Callable[[bytes], bytes]:
    """A peer that is gone after six chunks."""
    served: list[bytes] = []

    def answer(digest: bytes) -> bytes:
        if len(served) == 6:
            raise NotConnectedError("half")
        served.append(digest)
        return blob_reply(bench.server.read(digest))

    return answer


# --- fetching ------------------------------------------------------------------------------------


async def test_folders_small_files_and_empty_ones_arrive_whole(bench: Bench) -> None:
    peers = bench.peers()
    fetched = await bench.fetch(peers)
    bench.assert_complete()
    assert {one.path: (bench.folder / one.path).read_bytes() for one in bench.files} == FILES
    assert fetched == sum(map(len, FILES.values()))
    assert len(peers.asked) == len(set(peers.asked)) == CHUNKS


async def test_several_peers_share_the_work_and_few_chunks_are_asked_for_at_once(bench: Bench) -> None:
    peers = bench.peers(**{f"peer {number}": honest(bench.server) for number in range(4)})
    await bench.fetch(peers)
    bench.assert_complete()
    assert len(peers.count()) == 4
    assert peers.most_in_flight <= 4 * FIRST_WINDOW


@pytest.mark.parametrize("seed", range(6))
async def test_a_peer_that_lies_is_cut_off_and_its_chunk_comes_from_another(bench: Bench, seed: int) -> None:
    peers = bench.peers(liar=liar, honest=honest(bench.server))
    await bench.fetch(peers, seed)
    bench.assert_complete()
    assert set(peers.cut) <= {"liar"}
    assert peers.count()["liar"] <= FIRST_WINDOW  # what was in flight when it was found out


@pytest.mark.parametrize("other", [empty_handed, babbler, gone])
async def test_a_peer_that_has_nothing_is_kept_and_asked_last(
    bench: Bench, other: Callable[[bytes], bytes]
) -> None:
    peers = bench.peers(other=other, honest=honest(bench.server))
    await bench.fetch(peers)
    bench.assert_complete()
    assert peers.cut == []
    assert peers.count()["other"] <= FIRST_WINDOW


async def test_peers_that_hold_a_part_each_make_a_whole(bench: Bench) -> None:
    digests = [digest for one in bench.files for digest in one.hashes()]

    def holds(share: list[bytes]) -> Callable[[bytes], bytes]:
        return lambda digest: blob_reply(bench.server.read(digest) if digest in share else None)

    await bench.fetch(bench.peers(even=holds(digests[::2]), odd=holds(digests[1::2])))
    bench.assert_complete()


@pytest.mark.parametrize("bad", [liar, empty_handed, babbler, gone])
async def test_nothing_unverified_gets_a_final_name(bench: Bench, bad: Callable[[bytes], bytes]) -> None:
    with pytest.raises(FetchError, match="No connected peer delivers a chunk") as error:
        await bench.fetch(bench.peers(bad=bad))
    assert "it is tried again" in str(error.value)
    assert not bench.folder.exists()
    assert not bench.index.places


async def test_without_any_peer_that_is_said(bench: Bench) -> None:
    with pytest.raises(FetchError, match="no peer is connected"):
        await bench.fetch(Peers({}))


async def test_a_download_that_was_cut_off_goes_on_where_it_was(bench: Bench) -> None:
    with pytest.raises(FetchError):
        await bench.fetch(bench.peers(half=half(bench)))
    assert not bench.folder.exists()
    peers = bench.peers()
    await bench.fetch(peers)
    bench.assert_complete()
    assert len(peers.asked) == CHUNKS - 6


async def test_a_part_that_was_damaged_meanwhile_is_fetched_again(bench: Bench) -> None:
    shutil.copytree(bench.source, bench.part)
    with (bench.part / "model.safetensors").open("r+b") as file:
        file.seek(3 * CHUNK + 7)
        file.write(b"?")
    os.truncate(bench.part / "config.json", 1)
    peers = bench.peers()
    await bench.fetch(peers)
    bench.assert_complete()
    assert len(peers.asked) == 2


async def test_a_part_that_is_complete_needs_nobody(bench: Bench) -> None:
    shutil.copytree(bench.source, bench.part)
    assert await bench.fetch(Peers({})) == 0
    bench.assert_complete()


async def test_a_chunk_that_is_held_already_is_copied(bench: Bench, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    (held / "older.safetensors").write_bytes(FILES["model.safetensors"][: 4 * CHUNK])
    bench.index.add(held, [entry("older.safetensors", FILES["model.safetensors"][: 4 * CHUNK])])
    peers = bench.peers()
    await bench.fetch(peers)
    bench.assert_complete()
    assert len(peers.asked) == CHUNKS - 4


async def test_a_chunk_that_is_held_and_damaged_is_fetched(bench: Bench, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    (held / "older.safetensors").write_bytes(FILES["model.safetensors"][:CHUNK])
    bench.index.add(held, [entry("older.safetensors", FILES["model.safetensors"][:CHUNK])])
    (held / "older.safetensors").write_bytes(bytes(CHUNK))
    peers = bench.peers()
    await bench.fetch(peers)
    bench.assert_complete()
    assert len(peers.asked) == CHUNKS


async def test_a_damaged_copy_under_the_final_name_is_replaced(bench: Bench) -> None:
    bench.folder.mkdir(parents=True)
    (bench.folder / "model.safetensors").write_bytes(b"damaged")
    (bench.folder / "leftover.txt").write_bytes(b"of the damaged copy")
    await bench.fetch(bench.peers())
    bench.assert_complete()


async def test_a_full_disk_is_told_and_the_part_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = PartFolder._write, []

    def filling(part: PartFolder, place: Place, data: bytes) -> None:
        if len(written) >= 5:
            raise OSError(errno.ENOSPC, "No space left on device", str(place[0]))
        real(part, place, data)
        written.append(place)

    with monkeypatch.context() as patch:
        patch.setattr(PartFolder, "_write", filling)
        with pytest.raises(DiskFullError, match="Make room"):
            await bench.fetch(bench.peers())
    assert not bench.folder.exists()
    peers = bench.peers()
    await bench.fetch(peers)
    bench.assert_complete()
    assert len(peers.asked) == CHUNKS - len(written)


async def test_a_disk_that_cannot_be_written_is_told(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("a file where the folder should be")
    with pytest.raises(StorageError):
        await bench.fetch(bench.peers())


async def test_a_source_that_is_dropped_keeps_nothing_open(bench: Bench) -> None:
    closed = trio.Event()

    class Lying:
        name = "http://mirror/"

        async def fetch(self, digest: bytes, length: int) -> bytes:
            return bytes(length)

        def close(self) -> None:
            closed.set()

    class Waiting(Peers):
        async def request(self, *asked: Any, **limits: Any) -> bytes:
            await closed.wait()
            return await super().request(*asked, **limits)

    peers = Waiting({"honest": honest(bench.server)})
    bench.manifest = replace(bench.manifest, mirrors=[Lying.name])
    swarm = Swarm(peers, bytes(32), bench.index, entropy=random.Random(0), http=lambda url: Lying())
    with trio.fail_after(5):
        await swarm.fetch(CHECKPOINT, bench.manifest, bench.files, bench.folder)
    bench.assert_complete()


@given(sizes=st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_any_sizes_arrive_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    entropy = random.Random(seed)
    files = {f"{number}.json": entropy.randbytes(size) for number, size in enumerate(sizes)}
    bench = Bench(tmp_path_factory.mktemp("any"), files)

    async def fetched() -> None:
        await bench.fetch(bench.peers(liar=liar, honest=honest(bench.server)), seed)

    trio.run(fetched)
    bench.assert_complete()
    shutil.rmtree(bench.source.parent)


@given(
    mirror=st.sampled_from(["http://h:99999/", "http://[::1/", "https://u:p@h/", "http:///x", "http://a..b/"])
    | st.builds("http{}://{}".format, st.sampled_from(["", "s"]), st.text("aé.:@/?#[]%0\\!~", max_size=9))
)
def test_no_mirror_that_a_manifest_may_name_ends_a_download(
    tmp_path_factory: pytest.TempPathFactory, mirror: str
) -> None:
    bench = Bench(tmp_path_factory.mktemp("mirror"), FILES)
    bench.manifest = replace(bench.manifest, mirrors=[mirror])
    data = bench.manifest.to_bytes()
    try:
        read_manifest(data, checkpoint_hash(data))
    except RemoteError:
        return

    async def fetched() -> None:
        trio.socket.set_custom_hostname_resolver(Nowhere())
        await bench.fetch(bench.peers())

    trio.run(fetched)
    bench.assert_complete()
    shutil.rmtree(bench.source.parent)
