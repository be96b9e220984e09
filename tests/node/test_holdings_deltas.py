"""A node comes to new versions by deltas, and to all others by whatever works."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio

from nous_node.node.blobs import BlobIndex
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import FULL
from nous_node.protocol.encoding import read
from nous_node.protocol.identity import Identity
from nous_node.protocol.streams import MAX_REQUEST, BlobRequest

from .lineage import CHUNK, CONFIG, WEIGHTS, Lineage, entry


@pytest.fixture
def line(tmp_path: Path, base_run: RunFolder, root: Identity) -> Lineage:
    return Lineage(tmp_path, base_run, root)


async def test_whoever_holds_the_parent_fetches_the_delta_alone(line: Lineage) -> None:
    node = line.node()
    first = line.full()
    await node.follows(first)
    line.net.asked.clear()
    second = line.delta()
    await node.follows(second)
    assert set(line.net.asked) == line.deltas_of(second)
    assert node.here(second) == {"files", "deltas", "manifest"}
    assert node.notes() == []


async def test_whoever_fell_behind_fetches_the_deltas_of_its_chain_alone(line: Lineage) -> None:
    node = line.node()
    first = line.full()
    await node.follows(first)
    line.net.asked.clear()
    later = [line.delta() for _ in range(4)]
    await node.follows(later[-1])
    manifests = {head.hash for head in later[:-1]}
    assert set(line.net.asked) == line.deltas_of(*later) | manifests
    assert node.here(later[1]) == {"deltas", "manifest"}  # what lies between is not kept
    assert node.here(later[-1]) == {"files", "deltas", "manifest"}


async def test_a_joiner_fetches_the_full_one_and_the_deltas_behind_it(line: Lineage) -> None:
    first = line.full()
    later = [line.delta() for _ in range(3)]
    node = line.node()
    await node.follows(later[-1])
    manifests = {head.hash for head in (first, *later[:-1])}
    assert set(line.net.asked) == line.files_of(first) | line.deltas_of(*later) | manifests
    assert node.here(first) == {"files", "manifest"}  # for the next joiner


async def test_a_renewal_costs_no_byte_and_no_room(line: Lineage) -> None:
    node = line.node()
    await node.follows(line.full(), line.delta())
    size = node.bytes_on_disk()
    line.net.asked.clear()
    for renewed in (line.renewal(), line.renewal(FULL)):
        await node.follows(renewed)
        assert not line.net.asked
        assert node.bytes_on_disk() <= size


async def test_a_file_without_a_delta_is_fetched_beside_the_deltas(line: Lineage) -> None:
    node = line.node()
    await node.follows(line.full())
    line.net.asked.clear()
    second = line.delta(config=b'{"another": 1}')
    await node.follows(second)
    config = next(entry for entry in second.manifest.files if entry.path == CONFIG)
    assert set(line.net.asked) == line.deltas_of(second) | set(config.hashes())


async def test_what_a_node_made_it_serves_to_others(line: Lineage) -> None:
    """Files, deltas and manifests of the chain: nobody needs the trainer any more."""
    first = line.full()
    later = [line.delta() for _ in range(2)]
    node = line.node()
    await node.follows(later[-1])
    line.net.served = {"node": node.holdings.index}
    line.net.asked.clear()
    other, behind = line.node("other"), line.node("behind")
    await other.follows(later[-1])
    await behind.follows(first)
    line.net.asked.clear()
    await behind.follows(later[-1])
    assert set(line.net.asked) == line.deltas_of(*later) | {later[0].hash}


# --- what does not work falls back ---------------------------------------------------------------


async def falls_back(line: Lineage, note: str = "its files are fetched") -> None:
    """A node that holds the parent gets the newest all the same, by its files, and says why."""
    node = line.node()
    await node.follows(line.heads[-2])
    line.net.asked.clear()
    await node.follows(line.heads[-1])
    assert line.files_of(line.heads[-1]) & set(line.net.asked)
    assert any(note in text for text in node.notes())


async def test_a_delta_that_nobody_has_is_done_without(
    line: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nous_node.node.holdings.RETRY_SECONDS", 0.01)
    line.full()
    line.net.missing |= line.deltas_of(line.delta())
    await falls_back(line)


async def test_a_delta_that_makes_something_else_is_done_without(line: Lineage) -> None:
    """Signed like that by the trainer: the delta is that of another version."""
    line.full()
    other = line.delta()
    line.delta()
    line.forged(deltas=other.manifest.deltas)
    await falls_back(line)


def cut_after(line: Lineage, wanted: set[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The line breaks as soon as these have come."""
    monkeypatch.setattr("nous_node.node.swarm_download.STARVED_S", 0.2)
    monkeypatch.setattr("nous_node.node.holdings.RETRY_SECONDS", 0.01)
    left, request = set(wanted), line.net.request

    async def answer(peer: str, protocol: str, payload: bytes, **limits: Any) -> bytes:
        frame = await request(peer, protocol, payload, **limits)
        left.discard(read(payload, BlobRequest, MAX_REQUEST).hash)
        if not left and not line.net.cut:
            line.net.cut.append(peer)
        return frame

    monkeypatch.setattr(line.net, "request", answer)


@pytest.mark.parametrize("wrong", ["another delta", "no delta"])
async def test_a_delta_that_is_wrong_with_nobody_left_is_waited_out(
    line: Lineage, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer signed it like that, and the line breaks right then: the node stays, and tries again."""
    node = line.node()
    first, other = line.full(), line.delta()
    await node.follows(first)
    line.delta()
    deltas = other.manifest.deltas
    if wrong == "no delta":
        junk = line.path / "junk"
        junk.mkdir()
        (junk / WEIGHTS).write_bytes(b"nous/delta/1\0" + random.Random(0).randbytes(500))
        deltas = [entry(junk / WEIGHTS, WEIGHTS)]
        line.index.add(junk, deltas)
    newest = line.forged(deltas=deltas)
    cut_after(line, line.deltas_of(newest), monkeypatch)
    async with node.at_work():
        node.hears(newest)
        with trio.fail_after(60):
            while not any("is tried again" in text for text in node.notes()):  # noqa: ASYNC110
                await trio.sleep(0.01)
        line.net.cut[:] = ["nobody"]
        await node.gets(newest)


async def test_a_delta_that_is_no_delta_is_done_without(line: Lineage, tmp_path: Path) -> None:
    line.full()
    line.delta()
    junk = tmp_path / "junk"
    junk.mkdir()
    (junk / WEIGHTS).write_bytes(b"nous/delta/1\0" + random.Random(0).randbytes(500))
    deltas = [entry(junk / WEIGHTS, WEIGHTS)]
    line.index.add(junk, deltas)
    line.forged(deltas=deltas)
    await falls_back(line)


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 7},
        {"chain": [b"x" * 32, b"p" * 32], "parent": b"p" * 32},
        {"kind": FULL, "chain": [], "deltas": []},
    ],
    ids=["another version", "another chain", "full"],
)
async def test_a_chain_that_cannot_be_is_done_without(line: Lineage, wrong: dict[str, Any]) -> None:
    """Signed like that by the trainer: a link says something else of itself than the chain that names it."""
    first = line.full()
    line.delta()
    link = line.forged(**wrong)
    line.delta()
    newest = line.forged(chain=[first.hash, link.hash])
    node = line.node()
    await node.follows(first)
    line.net.asked.clear()
    await node.follows(newest)
    assert line.files_of(newest) & set(line.net.asked)
    assert any("chain of deltas is not used" in text for text in node.notes())


async def test_a_chain_that_puts_what_is_held_in_another_place_is_done_without(line: Lineage) -> None:
    first = line.full()
    line.delta()
    link = line.forged(version=7)
    line.delta()
    newest = line.forged(version=8, chain=[first.hash, link.hash])
    for held in (first, link):
        node = line.node(f"with {held.version}")
        await node.follows(held)
        line.net.asked.clear()
        other = line.forged(version=9) if held is link else newest
        await node.follows(other)
        assert not line.deltas_of(link, newest) & set(line.net.asked)
        assert any("chain of deltas is not used" in text for text in node.notes())


async def test_a_manifest_of_the_chain_that_nobody_has_is_done_without(line: Lineage) -> None:
    first = line.full()
    later = [line.delta() for _ in range(3)]
    line.net.missing.add(later[0].hash)
    node = line.node()
    await node.follows(first)
    line.net.asked.clear()
    await node.follows(later[-1])
    fetched = set(line.net.asked) - {head.hash for head in later}
    assert fetched == line.files_of(later[-1]) - line.files_of(first)


async def test_a_peer_that_lies_about_a_delta_is_cut_off_and_another_asked(line: Lineage) -> None:
    first = line.full()
    line.net.served["liar"] = line.index
    line.net.lying.add("liar")
    heads = [line.delta() for _ in range(6)]  # who is asked first is drawn
    node = line.node()
    await node.follows(first)
    line.net.asked.clear()
    await node.follows(*heads)
    assert set(line.net.cut) <= {"liar"}
    for head in heads:
        assert not line.files_of(head) - line.files_of(first) & set(line.net.asked)


async def test_a_damaged_parent_costs_its_chunks_and_the_new_version_is_right(line: Lineage) -> None:
    """A file changed on disk under us: what a delta makes of it is another file, and is found out."""
    node = line.node()
    first = line.full()
    async with node.at_work():
        await node.gets(first)
        held = node.folder.checkpoint(first.hash) / WEIGHTS
        data = bytearray(held.read_bytes())
        data[5 * CHUNK] ^= 1
        held.write_bytes(data)
        line.net.asked.clear()
        second = line.delta()
        await node.gets(second)
    assert any("its files are fetched" in text for text in node.notes())
    third = line.delta()
    line.net.asked.clear()
    await node.follows(third)
    assert set(line.net.asked) == line.deltas_of(third)


async def test_a_damaged_file_that_a_renewal_shares_is_mended_for_both(line: Lineage) -> None:
    """One file, two names: the renewal is verified before it is used, and the chunk fetched that is wrong."""
    node = line.node()
    first = line.full()
    async with node.at_work():
        await node.gets(first)
        held = node.folder.checkpoint(first.hash) / WEIGHTS
        with held.open("r+b") as file:
            file.seek(5 * CHUNK)
            file.write(b"damaged")
        line.net.asked.clear()
        await node.gets(line.renewal())
    assert sum(line.net.asked.values()) == 1
    node.assert_whole(first)


async def test_a_damaged_delta_of_ours_is_fetched_again_the_next_time(line: Lineage) -> None:
    """A node that made version 2 by its delta, and lost it, comes to it again."""
    first, second = line.full(), line.delta()
    node = line.node()
    await node.follows(first, second)
    delta = node.folder.deltas(second.hash) / WEIGHTS
    data = bytearray(delta.read_bytes())
    data[-1] ^= 1
    delta.write_bytes(data)
    for path in node.folder.checkpoint(second.hash).iterdir():
        path.unlink()
    node.folder.checkpoint(second.hash).rmdir()
    again = line.node()
    await again.follows(second)
    assert any("its files are fetched" in text for text in again.notes())
    third = line.delta()
    await again.follows(third)
    served = BlobIndex(lambda file: None)
    served.add(again.folder.deltas(third.hash), third.manifest.deltas)
    assert all(served.read(digest) for digest in line.deltas_of(third))
