"""A trainer that is started on an older copy of its run's folder, while volunteers know newer versions."""

from __future__ import annotations

import shutil
import socket
from contextlib import closing

import pytest

from nous_node.node.cli_exit import Exit
from nous_node.node.publishing import LEAP


@pytest.mark.slow
def test_an_older_copy_stops_before_it_signs_anew_and_rolls_back_when_told_to(
    village, make_run, journal
) -> None:
    folder = make_run(village.home("trainer"), groups=8)
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trainer = village.train(port=port)
    volunteer = village.join("volunteer", trainer.invite())
    trainer.version(1)
    trainer.interrupt()
    assert trainer.exit_code() == 0
    old = shutil.copytree(folder.path, folder.path.with_name("old"))
    copied = journal(folder).version
    trainer = village.train(port=port)
    trainer.version(copied + 1)
    volunteer.until(lambda: volunteer.statuses()[-1].version > copied)
    trainer.interrupt()
    assert trainer.exit_code() == 0
    lost = journal(folder).version
    shutil.rmtree(folder.path)
    old.rename(folder.path)

    trainer = village.train(port=port)
    assert trainer.exit_code(60) == Exit.STORAGE
    assert f"the newest version here is {copied}, and a peer holds version" in trainer.sentence()
    assert journal(folder).version == copied

    trainer = village.start(
        "trainer",
        *("train", "run", "--json", "--threads", "1", "--rollback"),
        *("--listen", f"/ip4/127.0.0.1/tcp/{port}"),
    )
    trainer.note(f"to version {copied}, published again as version")
    volunteer.accepted(4)
    trainer.version(lost + LEAP + 1)
    assert volunteer.process.poll() is None  # it leaves a run of which one version is signed twice
