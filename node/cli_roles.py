"""Runs a role under trio until it ends by itself or somebody asks it to.

The first Ctrl-C (or SIGTERM) sets the role's stop event; the second leaves at once, whatever the role and
its thread are doing. A child process notices by its closed pipe.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType

import trio

from .cli_exit import Exit
from .events import Note, Report, Summary
from .memory import settle
from .views import View

Role = Callable[[Report, trio.Event], Awaitable[Summary]]
"""A role with its settings filled in."""

FINISHING = "finishing what is in work; press Ctrl-C again to leave at once"
"""What the first Ctrl-C is answered with."""

_SHOW_CURSOR = "\x1b[?25h"


def run_role(role: Role, view: View) -> Summary:
    """Enters the view, runs the role, and reports its summary as the last event."""
    settle()
    with view:
        summary = trio.run(_until_stopped, role, view.report)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a reader that is gone need not stop us any more
        view.report(summary)
    return summary


async def _until_stopped(role: Role, report: Report) -> Summary:
    stop = trio.Event()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, signals, stop, report)
            summary = await role(report, stop)
            nursery.cancel_scope.cancel()
    return summary


async def _watch(signals: AsyncIterator[int], stop: trio.Event, report: Report) -> None:
    async for _ in signals:
        break
    # The receiver puts back what was there before it. SIGTERM also comes from our own view when its reader
    # has gone, which must not cut the finish short.
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report(Note(FINISHING))
    stop.set()


def _leave(number: int, frame: FrameType | None) -> None:
    """No clean-up: the journal and the outbox survive `kill -9`, so they survive this."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR.encode())
    os._exit(Exit.INTERRUPTED)
