"""The hostile child of the tests: how to start it and what to tell it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from nous_node.envs.child import Child
from nous_node.envs.sandbox import Launch, unavailable

PAYLOADS = Path(__file__).with_name("payloads")
MEMORY = 512 << 20

needs_sandbox = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


class Order(msgspec.Struct, tag=True):
    """A function of the child's and its argument."""

    name: str
    argument: str = ""


class Said(msgspec.Struct, tag=True):
    """What came of it."""

    text: str


Captive = Child[Order, Said]


def launch(
    *,
    sandboxed: bool = True,
    network: bool = False,
    readable: tuple[Path, ...] = (),
    hidden: tuple[Path, ...] = (),
    python: Path | None = None,
    module: str = "hostile",
    memory: int = MEMORY,
) -> Launch:
    return Launch(
        python=python or Path(sys.executable),
        module=module,
        readable=(PAYLOADS, *readable),
        paths=(PAYLOADS,),
        sandboxed=sandboxed,
        network=network,
        memory=memory,
        hidden=hidden,
    )


def captive(wanted: Launch | None = None) -> Captive:
    return Child(wanted or launch(), Said)


def family(child: Captive) -> list[psutil.Process]:
    """The child's processes as this machine sees them."""
    first = psutil.Process(child.pid)
    return [first, *first.children(recursive=True)]


def survivors(processes: Sequence[psutil.Process], seconds: float = 5.0) -> list[psutil.Process]:
    """Those that still run after some time. One that is dead and waits to be taken note of does not."""
    deadline = time.monotonic() + seconds
    while (living := [one for one in processes if _runs(one)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return living


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
