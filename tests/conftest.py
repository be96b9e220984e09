"""`async def` tests run under trio, none longer than DEADLINE_S seconds.

With the `autojump_clock` fixture time is virtual: it jumps ahead whenever all tasks wait.
"""

from __future__ import annotations

import inspect
import math

import pytest
import trio
import trio.testing

DEADLINE_S = 20.0


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of ecosystems that `make test` does not install run only where they are asked for."""
    if config.option.markexpr:
        return
    foreign = [item for item in items if item.get_closest_marker("ecosystem")]
    if foreign:
        items[:] = [item for item in items if item not in foreign]
        config.hook.pytest_deselected(items=foreign)


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
