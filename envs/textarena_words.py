"""What players of textarena's games are told, what their turns mean and what they earn: arithmetic on text.

Nothing here imports textarena. Spec: `specs/envs/textarena.md` [TXA-3] to [TXA-6].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Final, NamedTuple

LOSS: Final = -1.0
"""What textarena's games give whoever loses."""

WIN: Final = 1.0

NOTHING_NEW: Final = "[GAME] It is your turn."
"""Said to a player that moves again and was told nothing in between."""

SILENCE: Final = ""
"""The move of a player whose turn was cut short or who has no room for one: no game takes it for a move."""

MOVE: Final = "PLAYER_ACTION"
"""The kind of message with which a game tells what a player did."""


class Told(NamedTuple):
    """One message of a game to one player, as the game wrote it: of any type."""

    sender: object
    """Number of the player that it came from; -1: the game."""
    name: str
    """What the game calls the sender."""
    text: object
    kind: str


def heard(player: int, told: Iterable[Told]) -> str:
    """A line a message; without the player's own moves and without what is no message: three games echo moves
    with their arguments in the wrong order. [TXA-3]"""
    lines = [f"[{one.name}] {one.text}" for one in told if _is_news(player, one)]
    return "\n".join(lines) or NOTHING_NEW


def plain(player: int, text: str, first: bool) -> str:
    """What a model without a conversation format goes on from. [TXA-4]"""
    return f"{'' if first else chr(10)}{text}\n[Player {player}]"


def meant(said: str, ended: bool) -> str:
    """The move that a turn's text is; none where it was cut short. [TXA-5]"""
    return said.strip() if ended else SILENCE


def reward(given: object) -> float:
    """Of what a game gives at its end. Four games give a sentence for an invalid move. [TXA-6]"""
    if not isinstance(given, Real) or not math.isfinite(given):
        return LOSS
    return float(given)


def components(earned: float, invalid: bool, turns: int, unfinished: bool) -> dict[str, float]:
    """Of a player that earned this. [TXA-6]"""
    return {
        "win": float(earned >= WIN),
        "draw": float(0.0 <= earned < WIN),
        "loss": float(earned < 0.0),
        "invalid": float(invalid),
        "turns": float(turns),
        "unfinished": float(unfinished),
    }


def _is_news(player: int, one: Told) -> bool:
    if not isinstance(one.sender, int) or not isinstance(one.text, str):
        return False
    return one.sender != player or one.kind != MOVE
