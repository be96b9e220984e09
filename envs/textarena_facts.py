"""What is known of textarena 0.7.4's games without importing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class GameFacts(NamedTuple):
    """Of one game that runs without a network and repeats exactly."""

    least: int
    """Fewest players."""
    most: int
    turns: int
    """Most turns of one player, and the default of `max_turns`."""
    players: int
    """Players where the config does not say."""
    step: int = 1
    """Between numbers of players."""


GAMES: Final[Mapping[str, GameFacts]] = {
    "KuhnPoker-v0-raw": GameFacts(2, 2, 32, 2),
    "GuessTheNumber-v0-raw": GameFacts(1, 1, 32, 1),
    "LiarsDice-v0-raw": GameFacts(2, 15, 256, 2),
}


def refusal(member: str) -> str | None:
    """Why a game is not offered; None where textarena has no such game."""
    return None
