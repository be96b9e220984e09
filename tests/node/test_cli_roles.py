"""How a role ends on the command line: signals, and a reader that goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nous_node.node.cli_exit import Exit

ROLE = """
import sys, trio
from nous_node.node.cli_roles import run_role
from nous_node.node.events import Note, Summary, VolunteerStatus
from nous_node.node.views import open_view

async def role(report, stop):
    report(Note("ready"))
    await stop.wait()
    report(Note("stopping"))
    if "hang" in sys.argv:
        await trio.sleep_forever()
    return Summary("contributed 3 groups", VolunteerStatus())

run_role(role, open_view(json=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_finishes_cleanly_and_says_what_was_contributed(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", ROLE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        process.send_signal(number)
        assert "contributed 3 groups" in process.stdout.read()
    assert process.returncode == Exit.OK


def test_second_ctrl_c_leaves_at_once() -> None:
    command = [sys.executable, "-P", "-c", ROLE, "hang"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        while "stopping" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == Exit.INTERRUPTED


def test_reader_that_goes_away_ends_the_node() -> None:
    reading, writing = os.pipe()
    with subprocess.Popen([sys.executable, "-P", "-c", ROLE], stdout=writing) as process:
        os.close(writing)
        assert b"ready" in os.read(reading, 4096)
        os.close(reading)
        process.send_signal(signal.SIGTERM)  # its next word finds nobody
    assert process.returncode == Exit.OK
