"""Runs a role under trio until it ends by itself or somebody asks it to.

The first Ctrl-C (or SIGTERM) sets the role's stop event; the second leaves at once, whatever the role and
its thread are doing. A child process notices by its closed pipe.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import TYPE_CHECKING

import trio

from .cli_exit import Exit
from .events import Note, Report, Summary
from .views import View

if TYPE_CHECKING:
    from trio import TaskStatus

Role = Callable[[Report, trio.Event], Awaitable[Summary]]
"""A role with its settings filled in."""

_SHOW_CURSOR = "\x1b[?25h"


def run_role(role: Role, view: View) -> Summary:
    """Enters the view, runs the role, and reports its summary as the last event."""
    with view:
        summary = trio.run(_until_stopped, role, view.report)
        view.report(summary)
    return summary


async def _until_stopped(role: Role, report: Report) -> Summary:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(_watch_signals, stop, report)
        summary = await role(report, stop)
        nursery.cancel_scope.cancel()
    return summary


async def _watch_signals(
    stop: trio.Event, report: Report, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            break
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    report(Note("finishing what is in work; press Ctrl-C again to leave at once"))
    stop.set()


def _leave(number: int, frame: FrameType | None) -> None:
    """No clean-up: the journal and the outbox survive `kill -9`, so they survive this."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR.encode())
    os._exit(Exit.INTERRUPTED)
