"""Disks that are full, and disks that change what was written to them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nous_node.node.cli_exit import Exit

SMALL, LARGE = "4m", "64m"
"""A trainer's folder passes the first after a few versions of 0.6 MB."""
TINY = "300k"
"""Room for an identity and an outbox, but not for a checkpoint."""


class Disk:
    """A file system in memory, of a size that can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def mount(self, size: str, how: str = "") -> None:
        options = ["-o", f"{how}size={size}"]
        done = subprocess.run(
            ["mount", "-t", "tmpfs", *options, "tmpfs", str(self.path)], capture_output=True
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")

    def grow(self, size: str) -> None:
        self.mount(size, "remount,")


@pytest.fixture
def disk(village: Any) -> Iterator[Callable[[str, str], Disk]]:
    """Homes on disks of their own."""
    disks: list[Disk] = []

    def make(home: str, size: str) -> Disk:
        disks.append(Disk(village.home(home)))
        disks[-1].mount(size)
        return disks[-1]

    yield make
    village.clean_up()
    for disk in disks:
        subprocess.run(["umount", "--lazy", str(disk.path)], capture_output=True, check=False)


def test_full_disks_lose_nothing(village, make_run, journal, disk) -> None:
    trainers, volunteers = disk("trainer", SMALL), disk("volunteer", TINY)
    stored = journal(make_run(village.home("trainer")))
    trainer = village.train()
    invite, port = trainer.invite(), trainer.port()

    volunteer = village.join("volunteer", invite)
    assert volunteer.exit_code() == Exit.STORAGE
    assert "disk is full" in volunteer.sentence()
    volunteers.grow(LARGE)
    volunteer = village.join("volunteer")

    assert trainer.exit_code(60) == Exit.STORAGE
    assert "disk is full" in trainer.sentence()
    assert len(trainer.sentence().splitlines()) == 1
    stored.assert_sound()
    before, version = stored.groups(), stored.version
    trainers.grow(LARGE)
    trainer = village.train(port=port)
    trainer.version(version + 2)
    stored.assert_sound()
    assert before.keys() <= stored.groups().keys()
    volunteer.accepted()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def test_flipped_bits_are_found_on_either_side(village, make_run) -> None:
    folder = make_run(village.home("trainer"), groups=1_000_000)
    trainer = village.train()
    invite, port = trainer.invite(), trainer.port()
    published = folder.checkpoint(0) / "model.safetensors"

    # On the trainer's disk: nobody gets it, both sides say so, and a restart does not go on with it.
    flip(published)
    volunteer = village.join("volunteer", invite)
    volunteer.note("No connected peer delivers a chunk")
    trainer.note("no longer what was published, and is served to nobody")
    trainer.interrupt()
    assert trainer.exit_code() == Exit.OK
    damaged = village.train(port=port)
    assert damaged.exit_code() == Exit.STORAGE
    assert "000000" in damaged.sentence()
    flip(published)
    trainer = village.train(port=port)
    volunteer.accepted()
    volunteer.until(lambda: volunteer.statuses()[-1].state == "active")  # from here on no beacon is renewed
    volunteer.interrupt()
    assert volunteer.exit_code() == Exit.OK

    # On the volunteer's: what is broken is fetched again.
    held = village.home("volunteer") / "joined"
    for file in held.glob("*/checkpoints/*/model.safetensors"):
        flip(file)
    volunteer = village.join("volunteer")
    volunteer.note("A stored checkpoint is damaged; what is broken is fetched again")
    volunteer.accepted()
    volunteer.interrupt()
    assert volunteer.exit_code() == Exit.OK
    for file in held.glob("*/checkpoints/*/model.safetensors"):
        assert file.read_bytes() == published.read_bytes()
    assert not any(status.refused for status in volunteer.statuses())
