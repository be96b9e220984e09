"""What gymnasium's toy games are called and how their states read. Spec: `specs/envs/gymnasium.md`.

The library gives numbers; the texts here are ours, so that they do not change with its drawings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

HERE: Final = "@"
"""Where the player stands on a board."""


@dataclass(frozen=True, slots=True)
class Words:
    """A game in words."""

    rules: str
    """What the policy is told first."""
    actions: tuple[str, ...]
    """Names of the actions, in the library's order."""
    settings: tuple[str, ...]
    """Arguments of the library's game that a config may set: true or false."""
    read: Callable[[Any, Any], str]
    """(the library's game, its observation) -> text."""
    steps: int
    """Actions of one trajectory, where the config says nothing."""
    idle: float = 0.0
    """Reward of a step in which nothing is done: what the library pays for each step."""
    forfeit: float = 0.0
    """Reward where the game is not played to its end."""
    ends_well: bool = False
    """Whether a game that ends is won; else it is won where its last step pays."""


def _board(rows: Sequence[Sequence[str]], row: int, column: int) -> str:
    return "\n".join(
        "".join(HERE if (at, place) == (row, column) else field for place, field in enumerate(line))
        for at, line in enumerate(rows)
    )


def _lake(game: Any, state: Any) -> str:
    rows = [[field.decode() for field in line] for line in game.desc]
    row, column = divmod(int(state), len(rows[0]))
    return f"You are in row {row + 1}, column {column + 1}:\n{_board(rows, row, column)}"


def _cliff(game: Any, state: Any) -> str:
    height, width = game.shape
    rows = [["."] * width for _ in range(height - 1)] + [[".", *"C" * (width - 2), "G"]]
    row, column = divmod(int(state), width)
    return f"You are in row {row + 1}, column {column + 1}:\n{_board(rows, row, column)}"


def _taxi(game: Any, state: Any) -> str:
    row, column, passenger, goal = (int(part) for part in game.decode(int(state)))
    places = [
        f"{name} (row {at[0] + 1}, column {at[1] + 1})" for name, at in zip("RGYB", game.locs, strict=True)
    ]
    waiting = "is in the taxi" if passenger == len(places) else f"waits at {places[passenger]}"
    board = "\n".join("".join(field.decode() for field in line) for line in game.desc)
    return (
        f"{board}\nThe taxi is in row {row + 1}, column {column + 1}. The passenger {waiting} and wants to "
        f"go to {places[goal]}."
    )


def _cards(game: Any, state: Any) -> str:
    total, dealer, soft = state
    ace = "with" if soft else "without"
    return f"Your cards sum to {int(total)}, {ace} an ace that counts 11. The dealer shows {int(dealer)}."


_MOVES: Final = ("left", "down", "right", "up")

_LAKE: Final = Words(
    "You cross a frozen lake. S is the start, F ice, H a hole, G the goal, @ where you stand. Reach the goal "
    "and fall into no hole.",
    _MOVES,
    ("is_slippery",),
    _lake,
    16,
)

_CLIFF: Final = Words(
    "You walk along a cliff. G is the goal, C the cliff, @ where you stand. Each step costs 1; stepping into "
    "the cliff costs 100 and takes you back to the start. Reach the goal.",
    ("up", "right", "down", "left"),
    ("is_slippery",),
    _cliff,
    24,
    idle=-1.0,
    ends_well=True,
)

GAMES: Final[Mapping[str, Words]] = {
    "Blackjack-v1": Words(
        "You play a round of blackjack. Get closer to 21 than the dealer, and not beyond it.",
        ("stick", "hit"),
        ("natural", "sab"),
        _cards,
        10,
        forfeit=-1.0,
    ),
    "CliffWalking-v1": _CLIFF,
    "CliffWalkingSlippery-v1": _CLIFF,
    "FrozenLake-v1": _LAKE,
    "FrozenLake8x8-v1": _LAKE,
    "Taxi-v4": Words(
        "You drive a taxi in a city of five by five squares; | is a wall. Go to the passenger, pick the "
        "passenger up, go to the goal and drop the passenger there. Each step costs 1, a wrong pickup or "
        "dropoff 10; the right dropoff pays 20.",
        ("down", "up", "right", "left", "pickup", "dropoff"),
        ("is_rainy", "fickle_passenger"),
        _taxi,
        24,
        idle=-1.0,
        ends_well=True,
    ),
}
