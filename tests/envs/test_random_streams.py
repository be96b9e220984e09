"""Random streams of tasks: all of a seed draw alike, whatever runs beside them, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from nous_node.envs.random_streams import Streams, stream_seed


async def drawn() -> float:
    await asyncio.sleep(0)
    return random.random() + float(np.random.random())


async def draws(pauses: int = 0) -> list[float]:
    """Draws of a task and of tasks that it starts, with pauses in which others draw."""
    first = [random.random()]
    for _ in range(pauses):
        await asyncio.sleep(0)
    both = await asyncio.gather(drawn(), asyncio.create_task(drawn()))
    return [*first, *both, float(np.random.random())]


async def alone(seed: bytes) -> list[float]:
    return await Streams(seed).start(draws())


@pytest.mark.parametrize("pauses", [(0, 0, 0), (0, 9, 2), (7, 0, 1)])
def test_all_tasks_of_a_seed_draw_alike_whatever_runs_beside_them(pauses: tuple[int, ...]) -> None:
    async def beside() -> list[list[float]]:
        streams, other = Streams(bytes(32)), Streams(bytes([1]) * 32)
        tasks = [streams.start(draws(number)) for number in pauses]
        return list(await asyncio.gather(*tasks, other.start(draws(3)), draws(2)))[:3]

    assert asyncio.run(beside()) == [asyncio.run(alone(bytes(32)))] * 3


def test_another_seed_draws_otherwise() -> None:
    assert asyncio.run(alone(bytes(32))) != asyncio.run(alone(bytes([1]) * 32))
    assert stream_seed(bytes(32)) != stream_seed(bytes([1]) * 32)


def test_nothing_changes_outside() -> None:
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    asyncio.run(alone(bytes(32)))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_what_is_raised_comes_out_and_a_cancelled_task_ends() -> None:
    async def failing() -> None:
        await drawn()
        raise ValueError("a bug")

    async def waiting(ended: list[int]) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(random.randrange(100))

    async def both() -> list[int]:
        with pytest.raises(ValueError, match="a bug"):
            await Streams(bytes(32)).start(failing())
        ended: list[int] = []
        task = Streams(bytes(32)).start(waiting(ended))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ended

    assert asyncio.run(both()) == asyncio.run(both())


def test_a_loop_that_has_a_task_factory_keeps_it() -> None:
    made = []

    def factory(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> Any:
        made.append(work)
        return asyncio.Task(work, loop=loop, **options)

    async def within() -> list[float]:
        asyncio.get_running_loop().set_task_factory(factory)
        return await alone(bytes(32))

    run: Callable[[Awaitable[Any]], Any] = asyncio.run
    assert run(within()) == run(alone(bytes(32)))
    assert len(made) >= 3
