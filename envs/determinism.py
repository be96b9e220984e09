"""Libraries that draw from process-wide random state, made functions of a seed. Spec: [EVM-5].

with seeded(seed):          random, numpy.random and sympy's begin at the seed; afterwards all is as before
    item = dataset[0]

rng = Rng(seed)             one stream an episode, whatever others draw in between
with rng:
    game.step(action)

A library may import numpy or sympy in the middle of a task. Its stream then begins at the seed as well:
else the first task of a process would draw other numbers than the second one.
"""

from __future__ import annotations

import random  # noqa: F401  its stream is one of those below
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any, Final, NamedTuple

NUMPY_SEEDS: Final = 1 << 32
"""numpy's global generator takes 32 bits."""

NUMPY: Final = "numpy.random"

SYMPY: Final = "sympy.core.random"
"""Where sympy keeps its stream, `rng`: its simplifications try random numbers."""


class _Stream(NamedTuple):
    """How the process-wide stream of a module is handled; each takes the module."""

    seed: Callable[[Any, int], object]
    state: Callable[[Any], object]
    restore: Callable[[Any, Any], object]


_STREAMS: Final = {
    "random": _Stream(
        lambda module, seed: module.seed(seed),
        lambda module: module.getstate(),
        lambda module, state: module.setstate(state),
    ),
    NUMPY: _Stream(
        lambda module, seed: module.seed(seed % NUMPY_SEEDS),
        lambda module: module.get_state(),
        lambda module, state: module.set_state(state),
    ),
    SYMPY: _Stream(
        lambda module, seed: module.rng.seed(seed),
        lambda module: module.rng.getstate(),
        lambda module, state: module.rng.setstate(state),
    ),
}

_State = dict[str, Any]
"""States of the streams that are imported, by module."""

_in_force: list[int] = []
"""Seeds of the blocks that are being run, the innermost last."""


class Rng:
    """A state of all streams that is in force inside `with`."""

    def __init__(self, seed: int) -> None:
        outside = _state()
        _seed(seed, _STREAMS)
        self._first = seed
        self._inside = _state()
        self._outside = outside
        _restore(outside)

    def __enter__(self) -> None:
        self._outside = _state()
        _restore(self._inside)
        _seed(self._first, [name for name in self._outside if name not in self._inside])
        _in_force.append(self._first)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _in_force.pop()
        self._inside = _state()
        _restore(self._outside)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The block draws what `seed` gives, and nobody after it notices."""
    outside = _state()
    _seed(seed, _STREAMS)
    _in_force.append(seed)
    try:
        yield
    finally:
        _in_force.pop()
        _restore(outside)


def _seed(seed: int, names: Iterable[str]) -> None:
    for name in names:
        if (module := sys.modules.get(name)) is not None:
            _STREAMS[name].seed(module, seed)


def _state() -> _State:
    return {
        name: stream.state(module)
        for name, stream in _STREAMS.items()
        if (module := sys.modules.get(name)) is not None
    }


def _restore(state: _State) -> None:
    for name, value in state.items():
        _STREAMS[name].restore(sys.modules[name], value)


class _Late(MetaPathFinder):
    """Finds nothing itself: it seeds streams whose modules are imported inside a block."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _STREAMS or not _in_force:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                run = partial(_run, spec.loader.exec_module)
                spec.loader.exec_module = run  # type: ignore[method-assign]
                return spec
        return None


def _run(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    run(module)
    if _in_force:
        _STREAMS[module.__name__].seed(module, _in_force[-1])


sys.meta_path.insert(0, _Late())
