"""A test that is called off leaves no client behind, whichever signal it was."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer

from nous_node.node.cli_exit import Exit
from nous_node.node.conformance_stop import ENDING, called_off_cleanly

ADAPTER = [sys.executable, "-I", "-S", str(Path(__file__).parent / "hostile_adapter.py"), "hang"]
KIT = [sys.executable, "-P", "-m", "nous_node.node.cli", "conformance", "adapter", "--only", "hellos", "--"]
STARTED_S = 30.0


def started(kit: psutil.Process) -> psutil.Process:
    """The client, once it runs."""
    end = time.monotonic() + STARTED_S
    while time.monotonic() < end:
        for child in kit.children():
            if "hostile_adapter.py" in " ".join(child.cmdline()):
                return child
    raise AssertionError("the kit started no client")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_client_is_gone_when_the_kit_was_called_off(number: signal.Signals) -> None:
    kit = subprocess.Popen([*KIT, *ADAPTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        client = started(psutil.Process(kit.pid))
        kit.send_signal(number)
        _, said = kit.communicate(timeout=STARTED_S)
    finally:
        kit.kill()
    assert kit.returncode == Exit.INTERRUPTED
    assert "Called off" in said
    assert not client.is_running() or client.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        BaseExceptionGroup("nursery", [BaseExceptionGroup("nursery", [KeyboardInterrupt()])]),
    ],
)
def test_interrupt_is_an_exit_code_however_it_is_wrapped(error: BaseException) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, *ENDING)]
    with pytest.raises(typer.Exit) as left, called_off_cleanly():
        raise error
    assert left.value.exit_code == Exit.INTERRUPTED
    assert [signal.getsignal(number) for number in (signal.SIGINT, *ENDING)] == before


def test_other_errors_pass() -> None:
    with pytest.raises(ExceptionGroup), called_off_cleanly():
        raise ExceptionGroup("nursery", [ValueError("x")])
