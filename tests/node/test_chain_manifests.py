"""A chain of manifests is fetched side by side, and given up in bounded time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from nous_node.node.blobs import FetchError
from nous_node.node.chain_manifests import CHAIN_AT_ONCE, CHAIN_SECONDS, fetch_chain
from nous_node.node.fetch_plan import Target
from nous_node.node.home import StorageError
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.identity import Identity

from .lineage import Lineage


class Blobs:
    """Manifests of a trainer; with `silent` none ever comes."""

    def __init__(self, line: Lineage, *, silent: bool = False) -> None:
        self.line, self.silent = line, silent
        self.under_way = self.most = 0

    async def blob(self, digest: bytes, limit: int) -> bytes:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if self.silent:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        self.under_way -= 1
        data = self.line.index.read(digest)
        if data is None:
            raise FetchError("nobody has it")
        return data


@pytest.fixture
def line(tmp_path: Path, base_run: RunFolder, root: Identity) -> Lineage:
    line = Lineage(tmp_path, base_run, root)
    line.full()
    for _ in range(6):
        line.delta()
    return line


async def fetched(blobs: Any, line: Lineage, add: Any = lambda *manifest: None) -> set[bytes]:
    newest = line.heads[-1]
    return set(await fetch_chain(blobs, Target(newest.hash, newest.manifest), newest.manifest.chain, add))


async def test_a_chain_is_fetched_side_by_side(line: Lineage) -> None:
    blobs, added = Blobs(line), set()
    chain = {head.hash for head in line.heads[:-1]}
    assert await fetched(blobs, line, lambda digest, *manifest: added.add(digest)) == chain
    assert added == chain
    assert 1 < blobs.most <= CHAIN_AT_ONCE


async def test_a_chain_that_never_comes_is_given_up(line: Lineage, autojump_clock: object) -> None:
    with pytest.raises(FetchError, match="too long"):
        await fetched(Blobs(line, silent=True), line)
    assert trio.current_time() == pytest.approx(CHAIN_SECONDS)


async def test_a_chain_of_too_many_bytes_is_given_up(line: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [len(head.manifest.to_bytes()) for head in line.heads[:-1]]
    monkeypatch.setattr("nous_node.node.chain_manifests.MAX_CHAIN_BYTES", sum(sizes) - 1)
    with pytest.raises(FetchError, match="too large"):
        await fetched(Blobs(line), line)
    monkeypatch.setattr("nous_node.node.chain_manifests.MAX_CHAIN_BYTES", sum(sizes))
    assert len(await fetched(Blobs(line), line)) == len(sizes)


async def test_what_is_wrong_with_a_chain_is_raised_as_it_is(line: Lineage) -> None:
    chain = line.heads[-1].manifest.chain
    line.forged(chain=[chain[0], chain[2], chain[1], *chain[3:]])
    with pytest.raises(RemoteError):
        await fetched(Blobs(line), line)
    line.forged(chain=chain)
    line.index.drop_bytes(chain[2])
    with pytest.raises(FetchError, match="nobody"):
        await fetched(Blobs(line), line)


async def test_a_disk_that_is_full_is_told(line: Lineage) -> None:
    def full(*manifest: Any) -> None:
        raise StorageError("The disk is full.")

    with pytest.raises(StorageError):
        await fetched(Blobs(line), line, full)
