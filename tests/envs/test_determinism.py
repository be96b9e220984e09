"""Process-wide random state, made a function of a seed."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.envs.determinism import NUMPY_SEEDS, SYMPY, Rng, seeded

numpy: Any = importlib.import_module("numpy")
sympy: Any = importlib.import_module(SYMPY)

DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "numpy": lambda: float(numpy.random.random()),
    "sympy": lambda: sympy.rng.random(),
}


@pytest.fixture(params=DRAWS)
def draw(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return DRAWS[request.param]


def test_a_block_draws_what_its_seed_gives(draw: Callable[[], Any]) -> None:
    with seeded(7):
        first = [draw(), draw()]
    draw()
    with seeded(7):
        assert [draw(), draw()] == first
    with seeded(8):
        assert draw() != first[0]


def test_nobody_after_a_block_notices(draw: Callable[[], Any]) -> None:
    with seeded(1):
        expected = draw()
    with seeded(1):
        with seeded(2):
            draw()
        assert draw() == expected


def test_a_block_that_raises_leaves_no_trace(draw: Callable[[], Any]) -> None:
    with seeded(1):
        expected = draw()
    with seeded(1):
        with pytest.raises(ZeroDivisionError), seeded(2):
            _ = draw() / 0
        assert draw() == expected


def test_a_stream_goes_on_where_it_stopped(draw: Callable[[], Any]) -> None:
    with seeded(3):
        whole = [draw() for _ in range(6)]
    stream, other = Rng(3), Rng(4)
    pieces = []
    for _ in range(3):
        with stream:
            pieces += [draw(), draw()]
        with other:
            draw()
    assert pieces == whole


def test_making_a_stream_leaves_no_trace(draw: Callable[[], Any]) -> None:
    with seeded(1):
        expected = draw()
    with seeded(1):
        Rng(9)
        assert draw() == expected


@given(seed=st.integers(min_value=0, max_value=1 << 63))
def test_any_seed_is_taken(seed: int) -> None:
    with seeded(seed):
        drawn = random.random()
    with seeded(seed):
        assert random.random() == drawn


@pytest.mark.parametrize("seed", [NUMPY_SEEDS - 1, NUMPY_SEEDS, NUMPY_SEEDS + 1])
def test_seeds_beyond_numpys_are_folded(seed: int) -> None:
    with seeded(seed):
        drawn = float(numpy.random.random())
    with seeded(seed % NUMPY_SEEDS):
        assert float(numpy.random.random()) == drawn


LATE = {
    "numpy": "import numpy; drawn = float(numpy.random.random())",
    "numpy.random": "from numpy import random; drawn = random.randint(1 << 30)",
    "sympy": "from sympy.core.random import rng; drawn = rng.random()",
}
"""Statements that import a stream's module where they draw."""

BLOCKS = {
    "seeded": "with seeded(7):",
    "stream made before": "with before:",
    "stream made then": "with Rng(7):",
    "inner block": "with seeded(8), seeded(7):",
}


@pytest.mark.parametrize(
    ("late", "block"),
    [*(("numpy", block) for block in BLOCKS), ("numpy.random", "seeded"), ("sympy", "seeded")],
)
def test_the_first_task_of_a_process_draws_like_the_second(late: str, block: str) -> None:
    """A library that imports what it draws from where it draws: nothing may tell the first time."""
    told = _told(
        "from nous_node.envs.determinism import Rng, seeded\n"
        "def draw(before):\n"
        f"    {BLOCKS[block]}\n"
        f"        {LATE[late]}\n"
        "    return drawn\n"
        "first, second = Rng(7), Rng(7)\n"
        "print(draw(first) == draw(second))"
    )
    assert told == ["True"]


def test_what_is_imported_between_blocks_is_left_alone() -> None:
    told = _told(
        "from nous_node.envs.determinism import seeded\n"
        "with seeded(7): pass\n"
        "import numpy; free = numpy.random.random()\n"
        "with seeded(7): bound = numpy.random.random()\n"
        "print(free == bound)"
    )
    assert told == ["False"]


def test_nothing_heavy_is_imported_for_it() -> None:
    told = _told(
        "import sys; from nous_node.envs.determinism import seeded\n"
        "with seeded(1): pass\n"
        "print('numpy' in sys.modules, 'sympy' in sys.modules)"
    )
    assert told == ["False", "False"]


def _told(code: str) -> list[str]:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split()
