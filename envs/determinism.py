"""Libraries that draw from process-wide random state, made functions of a seed. Spec: [EVM-5].

with seeded(seed):          random, numpy.random and sympy's begin at the seed; afterwards all is as before
    item = dataset[0]

rng = Rng(seed)             one stream an episode, whatever others draw in between
with rng:
    game.step(action)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

NUMPY_SEEDS: Final = 1 << 32
"""numpy's global generator takes 32 bits."""

SYMPY: Final = "sympy.core.random"
"""Where sympy keeps its stream, `rng`."""


class Rng:
    """A state of `random` and, where they are imported, of `numpy.random` and of sympy's own stream (its
    simplifications try random numbers), that is in force inside `with`."""

    def __init__(self, seed: int) -> None:
        outside = _state()
        _seed(seed)
        self._inside = _state()
        self._outside = outside
        _restore(outside)

    def __enter__(self) -> None:
        self._outside = _state()
        _restore(self._inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = _state()
        _restore(self._outside)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The block draws what `seed` gives, and nobody after it notices. Import numpy before it where the block
    may use it."""
    outside = _state()
    _seed(seed)
    try:
        yield
    finally:
        _restore(outside)


def _seed(seed: int) -> None:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % NUMPY_SEEDS)
    if (sympy := sys.modules.get(SYMPY)) is not None:
        sympy.rng.seed(seed)


def _state() -> tuple[Any, Any, Any]:
    numpy, sympy = sys.modules.get("numpy"), sys.modules.get(SYMPY)
    return (
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
        None if sympy is None else sympy.rng.getstate(),
    )


def _restore(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
    if state[2] is not None:
        sys.modules[SYMPY].rng.setstate(state[2])
