"""A version that was damaged on the disk after it had been verified is mended, and tried again."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from nous_node.node.following import Head
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.identity import Identity

from .lineage import CHUNK, WEIGHTS, Lineage, Node


@pytest.fixture
def line(tmp_path: Path, base_run: RunFolder, root: Identity) -> Lineage:
    return Lineage(tmp_path, base_run, root)


def damage(node: Node, head: Head) -> None:
    with (node.folder.checkpoint(head.hash) / WEIGHTS).open("r+b") as file:
        file.seek(5 * CHUNK)
        file.write(b"damaged")


async def test_a_version_that_cannot_be_loaded_is_verified_again_and_mended(line: Lineage) -> None:
    """It was damaged on the disk after it had been verified, and no newer one comes."""
    before, head = line.full(), line.full()
    node = line.node()
    async with node.at_work():
        await node.gets(before)
        await node.gets(head)
        shown = node.holdings.newest
        assert shown is not None
        damage(node, head)
        line.net.asked.clear()
        node.holdings.doubt(shown)
        with trio.fail_after(60):
            await node.holdings.changed()
        node.assert_whole(head)
        assert sum(line.net.asked.values()) == 1
        mended = node.holdings.newest
        assert mended == shown
        assert mended is not shown  # it is worth another try
        node.holdings.doubt(mended)  # nothing is wrong with it here
        node.holdings.doubt(shown)
        newer = line.full()
        await node.gets(newer)
    assert len(node.notes()) == 1
    assert "damaged" in node.notes()[0]


async def test_a_damaged_version_is_mended_once_somebody_can_deliver_it(
    line: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nous_node.node.holdings.RETRY_SECONDS", 0.01)
    head, node = line.full(), line.node()
    async with node.at_work():
        await node.gets(head)
        shown = node.holdings.newest
        assert shown is not None
        damage(node, head)
        line.net.cut.append("trainer")
        node.holdings.doubt(shown)
        with trio.fail_after(60):
            while not any("tried again" in text for text in node.notes()):  # noqa: ASYNC110
                await trio.sleep(0.01)
            line.net.cut.clear()
            await node.holdings.changed()
        node.assert_whole(head)
