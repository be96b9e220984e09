"""How a conformance test is called off: by Ctrl-C, or by whatever ends a job, without a client left behind.

The client under test leads a session of its own, so that no signal of the terminal reaches it: who stops the
test has to let it clean up.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from .cli_exit import Exit, leaves

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Sent by job runners and by terminals that close."""


@contextmanager
def called_off_cleanly() -> Iterator[None]:
    """Within it these signals do what Ctrl-C does, and typer.Exit is raised then. In the main thread only."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    if before[signal.SIGINT] is signal.SIG_IGN:  # as shells start jobs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ENDING:
        if before[number] is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    try:
        yield
    except BaseException as error:
        if not any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):  # nurseries wrap it
            raise
        print("Called off: there is no sheet.", file=sys.stderr)
        raise typer.Exit(Exit.INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """By way of the handler of SIGINT: an event loop has its own, which knows when it may be interrupted."""
    signal.raise_signal(signal.SIGINT)
