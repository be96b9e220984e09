"""Vectors of textarena: what players are told, what their turns mean, what they earn, and settings."""

from __future__ import annotations

from typing import Any

from vectors_games import textarena_games
from vectors_world import case

from nous_node.envs.errors import BadConfig
from nous_node.envs.textarena import read_rules
from nous_node.envs.textarena_words import Told, components, heard, meant, plain, reward

GAME = "GAME_MESSAGE"
MOVE = "PLAYER_ACTION"


def textarena() -> list[dict[str, Any]]:
    return [*_told(), *_prompts(), *_moves(), *_earned(), *_settings(), *textarena_games()]


def _told() -> list[dict[str, Any]]:
    rows: list[tuple[str, list[list[Any]]]] = [
        ("of the game", [[-1, "GAME", "Your card is 'K'.", GAME]]),
        ("of another player", [[0, "Player 0", "[bet]", MOVE], [-1, "GAME", "Call or fold?", GAME]]),
        ("the player's own move is left out", [[1, "Player 1", "[bet]", MOVE], [-1, "GAME", "", GAME]]),
        ("what it says beside moves is not", [[1, "Mafia", "trust me", "GAME_ADMIN"]]),
        ("lines within a message stay", [[-1, "GAME", "\na|b\n", "GAME_BOARD"]]),
        ("a sender that is no number", [["PLAYER_ACTION", "Player 1", "[bet]", 0]]),
        ("a text that is none", [[-1, "GAME", 1, GAME], [-1, "GAME", "Go on.", GAME]]),
        ("nothing is left", [[1, "Player 1", "[bet]", MOVE]]),
        ("nothing was said", []),
    ]
    return [
        case(
            comment,
            "TXA-3",
            "valid told",
            player=1,
            told=told,
            text=heard(1, [Told(*message) for message in told]),
        )
        for comment, told in rows
    ]


def _prompts() -> list[dict[str, Any]]:
    return [
        case(
            comment,
            "TXA-4",
            "valid prompt",
            player=player,
            first=first,
            heard="[GAME] Go on.",
            text=plain(player, "[GAME] Go on.", first),
        )
        for comment, player, first in (("a first turn", 0, True), ("a later turn", 12, False))
    ]


def _moves() -> list[dict[str, Any]]:
    rows = [
        ("a move", " [3]\n", True),
        ("thoughts are the game's affair", "perhaps [2], no: [3]", True),
        ("nothing said", "", True),
        ("cut short", "[3]", False),
    ]
    return [
        case(comment, "TXA-5", "valid move", said=said, ended=ended, move=meant(said, ended))
        for comment, said, ended in rows
    ]


def _earned() -> list[dict[str, Any]]:
    rows: list[tuple[str, object, bool, bool]] = [
        ("a victory", 1, False, False),
        ("a part of a puzzle", 0.25, False, False),
        ("a draw", 0, False, False),
        ("a defeat", -1, False, False),
        ("a defeat by invalid moves", -1.0, True, False),
        ("a sentence in place of a number", "Index out of range.", True, False),
        ("nothing at all", None, False, False),
        ("points", 22.5, False, False),
        ("broken off", 0, False, True),
    ]
    return [
        case(
            comment,
            "TXA-6",
            "valid earned",
            given=given,
            invalid=invalid,
            turns=3,
            unfinished=unfinished,
            reward=reward(given),
            components=components(reward(given), invalid, 3, unfinished),
        )
        for comment, given, invalid, unfinished in rows
    ]


def _settings() -> list[dict[str, Any]]:
    valid: list[tuple[str, str, dict[str, Any]]] = [
        ("nothing", "LiarsDice-v0-raw", {}),
        ("all of ours", "LiarsDice-v0-raw", {"players": 4, "max_turns": 20, "turn_tokens": 64}),
        ("the game's own", "LiarsDice-v0-raw", {"num_dice": 3}),
        ("the game's own of the same name", "GuessTheNumber-v0-raw", {"game_max_turns": 5, "max_turns": 7}),
        ("teams of two", "Taboo-v0-raw", {"players": 6}),
    ]
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("too many players", "KuhnPoker-v0-raw", {"players": 3}),
        ("between two teams", "Taboo-v0-raw", {"players": 5}),
        ("a truth value", "LiarsDice-v0-raw", {"players": True}),
        ("no turns", "KuhnPoker-v0-raw", {"max_turns": 0}),
        ("more turns than the game's", "KuhnPoker-v0-raw", {"max_turns": 257}),
        ("a fraction of a token", "KuhnPoker-v0-raw", {"turn_tokens": 1.5}),
        ("too many tokens", "KuhnPoker-v0-raw", {"turn_tokens": (1 << 20) + 1}),
    ]
    return [
        *(_taken(comment, game, config) for comment, game, config in valid),
        *(_refused(comment, game, config) for comment, game, config in refused),
    ]


def _taken(comment: str, game: str, config: dict[str, Any]) -> dict[str, Any]:
    settings = _read(game, config)
    return case(comment, "TXA-7", "valid settings", game=game, config=config, settings=settings)


def _read(game: str, config: dict[str, Any]) -> dict[str, Any]:
    rules = read_rules(game, config)
    found = {"players": rules.players, "max_turns": rules.max_turns, "game": dict(rules.options)}
    return found if rules.turn_tokens is None else {**found, "turn_tokens": rules.turn_tokens}


def _refused(comment: str, game: str, config: dict[str, Any]) -> dict[str, Any]:
    try:
        read_rules(game, config)
    except BadConfig:
        return case(comment, "TXA-7", "invalid settings", game=game, config=config, refused=True)
    raise AssertionError(f"{game} takes {config}")
