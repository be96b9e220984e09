"""`async def` tests run under trio, none longer than DEADLINE_S seconds.

With the `autojump_clock` fixture time is virtual: it jumps ahead whenever all tasks wait.
"""

from __future__ import annotations

import inspect
import math

import pytest
import trio
import trio.testing
from hypothesis import settings

DEADLINE_S = 20.0

settings.register_profile(
    "untimed", deadline=None
)  # what takes 10 ms takes 700 on a machine that does much else
settings.load_profile("untimed")


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What `make test` does not install, and what takes long, runs only where it is asked for."""
    if config.option.markexpr or config.getoption("--attack-table", default=False):
        return
    elsewhere = ("ecosystem", "slow", "conformance")
    late = [item for item in items if any(item.get_closest_marker(name) for name in elsewhere)]
    if late:
        items[:] = [item for item in items if item not in late]
        config.hook.pytest_deselected(items=late)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    clock = arguments.get("autojump_clock")

    async def main() -> None:
        with trio.fail_after(DEADLINE_S if clock is None else math.inf):
            await pyfuncitem.obj(**arguments)

    trio.run(main, clock=clock)
    return True
