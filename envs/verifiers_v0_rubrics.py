"""What scores a verifiers package (v0): refused where it asks a model, heard where it wants the network.

The library gives 0 wherever a reward function raises. That is right for an answer that a function cannot
read, and wrong where a server is out of reach: then nobody knows the score. [VFR-5]
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from .errors import BrokenEnvironment, EnvironmentFailed

T = TypeVar("T")

_CLIENTS: Final = frozenset({"openai", "anthropic"})
"""Packages of model servers' clients."""

_NETWORK: Final = _CLIENTS | {
    "aiohttp",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "requests",
    "urllib",
    "urllib3",
    "websockets",
}
"""Packages whose errors tell of a network that is not there."""

_noted: ContextVar[list[BaseException] | None] = ContextVar("noted", default=None)
"""Where the present scoring puts errors that are no verdict."""


def rubrics_of(rubric: Any) -> Iterator[Any]:
    """A rubric and all that it is made of."""
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from rubrics_of(part)
    for environment in getattr(rubric, "env_map", {}).values():
        yield from rubrics_of(environment.rubric)


def refuse_judges(name: str, rubric: Any) -> None:
    """Raises BrokenEnvironment for a rubric that asks a model."""
    if any(_package(type(thing)) in _CLIENTS for thing in rubric.class_objects.values()):
        raise BrokenEnvironment(asks_model(name))


def asks_model(name: str) -> str:
    return (
        f"{name} asks a model for its scores, which a trainer cannot compute again: take a package that "
        "scores with code alone."
    )


def wants_model(error: BaseException) -> bool:
    """Whether an error comes from the client of a model server."""
    return any(_package(type(one)) in _CLIENTS for one in _chain(error))


async def scored(name: str, scoring: Awaitable[None]) -> None:
    """Waits for a scoring. Raises EnvironmentFailed where a function of it wanted the network."""
    noted: list[BaseException] = []
    before = _noted.set(noted)
    try:
        await scoring
    finally:
        _noted.reset(before)
    if noted:
        raise EnvironmentFailed(
            f"{name} wants the network to score ({type(noted[0]).__name__}: {noted[0]}), and environments "
            "have none here: nobody could compute that score again."
        )


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function whose errors are looked at before the library makes them 0."""

    @functools.wraps(function)
    def looked_at(*arguments: Any, **named: Any) -> Any:
        try:
            result = function(*arguments, **named)
        except Exception as error:
            _note(error)
            raise
        return _looked_at(result) if inspect.isawaitable(result) else result

    return looked_at


async def _looked_at(result: Awaitable[T]) -> T:
    try:
        return await result
    except Exception as error:
        _note(error)
        raise


def _note(error: BaseException) -> None:
    noted = _noted.get()
    if noted is not None and any(_of_network(one) for one in _chain(error)):
        noted.append(error)


def _of_network(error: BaseException) -> bool:
    """`gaierror`: a name that cannot be looked up. Its module is not for environments to import."""
    return (
        isinstance(error, ConnectionError)
        or _package(type(error)) in _NETWORK
        or type(error).__name__ == "gaierror"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
