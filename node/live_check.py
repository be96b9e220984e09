"""A live check: what is done to a running client, and the row that comes of it.

A check is an async function of the client under test. It returns a note, or raises `Failed` where the client
did something else than the specification says, `Untested` where that could not be told. Whatever a client
does, hang, flood, reset or exit, ends as a row. Spec: `specs/live-checks.md`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

from nous_node.protocol.errors import NousError

from .conformance_table import Outcome, Row

TRAINER, RELAY, VOLUNTEER = "trainer", "relay", "volunteer"
ANY = (TRAINER, RELAY, VOLUNTEER)

T = TypeVar("T")
"""Through which a client is reached."""


class Failed(Exception):
    """The client broke a requirement; the text is the row's note."""


class Untested(Exception):
    """The check could not be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Check(Generic[T]):
    """One check of a client that is reached through a `T`."""

    name: str
    requires: tuple[str, ...]
    """Requirement ids."""
    towards: tuple[str, ...]
    """Roles that it is made against."""
    seconds: float
    """Deadline: the specification's own, and room for a slow line."""
    aside: bool
    """Whether it mostly waits, and is made beside the others."""
    play: Callable[[T], Awaitable[str]]


class Checks(Generic[T]):
    """The checks of one file, in the order in which they are made. Used as a decorator."""

    def __init__(self) -> None:
        self._all: list[Check[T]] = []

    def __iter__(self) -> Iterator[Check[T]]:
        return iter(self._all)

    def __call__(
        self,
        name: str,
        *requires: str,
        towards: tuple[str, ...] = ANY,
        seconds: float = 15.0,
        aside: bool = False,
    ) -> Callable[[Callable[[T], Awaitable[str]]], Callable[[T], Awaitable[str]]]:
        """Enters the function below as a check."""

        def enter(play: Callable[[T], Awaitable[str]]) -> Callable[[T], Awaitable[str]]:
            self._all.append(Check(name, requires, towards, seconds, aside, play))
            return play

        return enter


async def make(check: Check[T], client: T) -> Row:
    """Makes a check within its deadline. Never raises but what cancels it."""
    with trio.move_on_after(check.seconds):
        outcome, note = await _played(check, client)
        return Row(check.name, check.requires, outcome, note)
    return Row(
        check.name,
        check.requires,
        Outcome.FAIL,
        f"It was not over within {check.seconds:g} s: the client hangs, or answers too slowly.",
    )


async def _played(check: Check[T], client: T) -> tuple[Outcome, str]:
    try:
        return Outcome.PASS, await check.play(client)
    except Untested as reason:
        return Outcome.UNTESTED, str(reason)
    except (Failed, NousError) as error:
        return Outcome.FAIL, str(error)
    except Exception as error:  # whatever libraries make of what a client did
        leaf = _leaf(error)
        if isinstance(leaf, Untested):
            return Outcome.UNTESTED, str(leaf)
        told = str(leaf) if isinstance(leaf, Failed) else f"it broke off: {type(leaf).__name__}: {leaf}"
        return Outcome.FAIL, told


def _leaf(error: Exception) -> Exception:
    """What really happened, where nurseries wrapped it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
