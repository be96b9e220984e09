"""How a worker makes way for everything else on the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def step_back(nice: int, group: Path = Path("/proc/self/autogroup")) -> None:
    """Gives way to everything else on the machine. Linux may share the processor among sessions before it
    looks at their processes (sched(7), autogroup); this process leads a session of its own, whose value is
    set as well."""
    os.nice(nice)
    with suppress(OSError):
        if group.exists():
            group.write_text(str(nice))
