"""Vectors of whole games of gymnasium and textarena, as the libraries' releases that these name play them.

Replies are text, one a turn of each trajectory, the last one for ever; a policy with one token a byte says
them, and a stop token behind each that its limits leave room for.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from vectors_world import case

from nous_node.envs.environment import Environment
from nous_node.envs.errors import BadConfig, UnknownEnvironment
from nous_node.envs.gymnasium_text import Gymnasium
from nous_node.envs.textarena import TextArena
from nous_node.node.adapter_policy import Replies, told
from nous_node.protocol.runs import Setting

GYMNASIUM = {"gymnasium": "1.4.0"}
TEXTARENA = {"textarena": "0.7.4"}
SEED = hashlib.sha256(b"game").digest()
OTHER_SEED = hashlib.sha256(b"another game").digest()

Make = Callable[[str, Mapping[str, Setting]], Environment]
Lines = list[list[str]]


def _check(releases: dict[str, str]) -> None:
    for name, release in releases.items():
        assert version(name) == release, f"install {name} {release} to make its vectors"


def _played(
    make: Make,
    releases: dict[str, str],
    comment: str,
    rules: str,
    game: str,
    config: dict[str, Any],
    replies: Lines,
    group: int = 1,
    max_tokens: int = 512,
    context: int = 8192,
    seed: bytes = SEED,
) -> dict[str, Any]:
    environment = make(game, config)
    policy = Replies(replies, group, max_tokens, context)

    async def play() -> list[dict[str, object]]:
        made = await environment.collect_trajectories(environment.task(seed, 0), policy)
        return [dict(told(one)) for one in made]

    trajectories = asyncio.run(play())
    return case(
        comment,
        rules,
        "valid game",
        releases=releases,
        game=game,
        config=config,
        seed=seed.hex(),
        group=group,
        max_tokens=max_tokens,
        context=context,
        replies=replies,
        calls=policy.calls,
        trajectories=trajectories,
    )


# --- gymnasium ----------------------------------------------------------------------------------------

WAY = ["right", "right", "down", "down", "down", "right"]
"""From the start to the goal of the small lake."""
FIRM = {"is_slippery": False}


def gymnasium_games() -> list[dict[str, Any]]:
    _check(GYMNASIUM)
    return [*_toys(), *_toy_configs()]


def _toys() -> list[dict[str, Any]]:
    def toy(*row: Any, **limits: Any) -> dict[str, Any]:
        return _played(Gymnasium.make, GYMNASIUM, *row, **limits)

    lake, cliff, taxi, cards = "FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"
    around = ["up", *["right"] * 11, "down"]
    return [
        toy("the way to the goal", "GYM-1 GYM-3 GYM-6", lake, FIRM, [WAY]),
        toy("into a hole", "GYM-1 GYM-3 GYM-6", lake, FIRM, [["right", "down"]]),
        toy("two samples in lockstep, one ends early", "GYM-5 EVM-6", lake, FIRM, [WAY, ["right", "down"]], 2),
        toy("samples slip alike", "GYM-1 EVM-5", lake, {}, [["down"], ["down"]], 2),
        toy("one sample alone slips as it does in company", "GYM-1 EVM-5", lake, {}, [["down"]]),
        toy("another seed slips otherwise", "GYM-1", lake, {}, [["down"]], seed=OTHER_SEED),
        toy("a lake of one's own", "GYM-1 GYM-2", lake, {**FIRM, "map_size": 3}, [["right", "down"]]),
        toy("the large lake, out of steps", "GYM-5 GYM-6", "FrozenLake8x8-v1", {**FIRM, "steps": 2}, [["right"]]),
        toy("replies that are no action", "GYM-3 GYM-5 GYM-6", lake, FIRM, [["north", "right", "go", "on"]]),
        toy("a reply that is cut off", "GYM-4 GYM-6", lake, {**FIRM, "turn_tokens": 6}, [["I go right", "right", "down"]]),
        toy("no room for another turn", "GYM-5 GYM-6", cliff, {}, [["up"]], max_tokens=7),
        toy("no room in the context", "GYM-5 GYM-6", cliff, {}, [["up"]], context=420),
        toy("around the cliff", "GYM-1 GYM-6", cliff, {}, [around]),
        toy("into the cliff, then idle", "GYM-6", cliff, {"steps": 4}, [["right", "?"]]),
        toy("a cliff that is slippery", "GYM-1 GYM-2", "CliffWalkingSlippery-v1", {"steps": 3}, [["up", "right", "right"]]),
        toy("a taxi in the rain", "GYM-1 GYM-2", taxi, {"steps": 4, "is_rainy": True}, [["up", "pickup", "dropoff", "left"]]),
        toy("stick", "GYM-1 GYM-3 GYM-6", cards, {}, [["stick"]]),
        toy("hit until it is over", "GYM-1 GYM-6", cards, {}, [["hit"]], seed=OTHER_SEED),
        toy("a round that is given up costs", "GYM-6", cards, {}, [["?"]]),
        toy("natural and sab", "GYM-2", cards, {"natural": True, "sab": True}, [["stick"]]),
        toy("an answer between tags", "GYM-2 GYM-3", lake, {**FIRM, "answer": "tags", "steps": 2}, [["<answer>down</answer>"]]),
        toy("advantages by turn", "GYM-7", cliff, {"steps": 2, "advantages": True}, [["up"], ["right"]], 2),
    ]  # fmt: skip


def _toy_configs() -> list[dict[str, Any]]:
    lake = "FrozenLake-v1"
    valid: list[tuple[str, str, dict[str, Any]]] = [
        ("nothing", lake, {}),
        ("all of a lake's", lake, {**FIRM, "map_size": 16, "steps": 200, "turn_tokens": 65_536, "advantages": True, "format": "chat", "system": "Play.", "answer": "whole"}),
        ("a cliff that is slippery", "CliffWalking-v1", {"is_slippery": True}),
        ("both of a taxi's", "Taxi-v4", {"is_rainy": True, "fickle_passenger": True}),
    ]  # fmt: skip
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("a key of another game", "Taxi-v4", {"is_slippery": True}),
        ("a template", lake, {"template": "{question}"}),
        ("a map for a cliff", "CliffWalking-v1", {"map_size": 4}),
        ("a map that is too small", lake, {"map_size": 2}),
        ("a map that is too large", lake, {"map_size": 17}),
        ("no steps", lake, {"steps": 0}),
        ("too many steps", lake, {"steps": 201}),
        ("a number for a truth value", lake, {"is_slippery": 1}),
        ("a truth value for a number", lake, {"steps": True}),
        ("too many tokens of a turn", lake, {"turn_tokens": 65_537}),
        ("a system message in plain format", lake, {"format": "plain", "system": "Play."}),
        ("another format", lake, {"format": "prose"}),
        ("another place for the action", lake, {"answer": "first-line"}),
        ("a text for a truth value", "Blackjack-v1", {"natural": "yes"}),
        ("advantages that are a number", lake, {"advantages": 1}),
        ("another game", "MountainCar-v0", {}),
    ]
    return [
        *(
            case(comment, "GYM-2", "valid config", releases=GYMNASIUM, game=game, config=config, levels=Gymnasium.make(game, config).levels)
            for comment, game, config in valid
        ),
        *(_refused(Gymnasium.make, GYMNASIUM, "GYM-2", *row) for row in refused),
    ]  # fmt: skip


def _refused(
    make: Make,
    releases: dict[str, str],
    rule: str,
    comment: str,
    game: str,
    config: dict[str, Any],
    **fields: Any,
) -> dict[str, Any]:
    try:
        make(game, config)
    except (BadConfig, UnknownEnvironment):
        flags = "invalid game" if fields else "invalid config"
        return case(comment, rule, flags, releases=releases, game=game, config=config, **fields, refused=True)
    raise AssertionError(f"{game} takes {config}")


# --- textarena ----------------------------------------------------------------------------------------


def textarena_games() -> list[dict[str, Any]]:
    _check(TEXTARENA)
    return [*_arena(), *_arena_refused()]


def _arena() -> list[dict[str, Any]]:
    def play(*row: Any, **limits: Any) -> dict[str, Any]:
        return _played(TextArena.make, TEXTARENA, *row, **limits)

    number, nim, cards, dice = "GuessTheNumber-v0-raw", "Nim-v0-raw", "KuhnPoker-v0-raw", "LiarsDice-v0-raw"
    bids = [["[Bid: 1, 2]"], ["[Bid: 2, 3]"], ["[Call]"]]
    taking = [["[0 3]", "[2 4]"], ["[1 4]", "[2 1]"]]
    return [
        play("one player", "TXA-1 TXA-6", number, {}, [["[10]", "[15]", "[12]", "[13]", "[11]", "[14]"]]),
        play("the same seed in company", "TXA-1 EVM-5", number, {"max_turns": 2}, [["[10]", "[15]"], ["[1]", "[2]"]], 2),
        play("another seed", "TXA-1", number, {"max_turns": 2}, [["[10]", "[15]"]], seed=OTHER_SEED),
        play("two players", "TXA-1 TXA-2 EVM-6", nim, {}, taking),
        play("player 1 moves first", "TXA-2 EVM-6", cards, {}, [["[check]", "[fold]"], ["[bet]"]]),
        play("two samples of two players in lockstep", "TXA-2 EVM-6", nim, {}, [*taking, ["[0 1]"], ["[9 9]"]], 2),
        play("three players, one is out early", "TXA-1 TXA-2 EVM-6", dice, {"players": 3, "num_dice": 1}, bids),
        play("samples draw for themselves behind the beginning", "TXA-1", "PigDice-v0-short-raw", {"max_turns": 3}, [["[roll]"]] * 4, 2),
        play("draws of its own while it works", "TXA-1 EVM-5", "Blackjack-v0-raw", {}, [["[Hit]", "[Stand]"]]),
        play("an invalid move, and another", "TXA-5 TXA-6", nim, {}, [["[7 1]"], ["[0 1]"]]),
        play("a turn that is cut off is the empty move", "TXA-5", nim, {"turn_tokens": 6}, [["I take [0 3]", "[0 3]"], ["[1 4]"]], max_tokens=24),
        play("broken off after the last turn", "TXA-6", nim, {"max_turns": 1}, [["[0 1]"], ["[1 1]"]]),
        play("a player without room", "TXA-5 TXA-6", nim, {}, [["[0 1]", "[0 1]"], ["[1 1]"]], max_tokens=8),
        play("a setting of the game", "TXA-1 TXA-7", number, {"max_number": 3, "max_turns": 3}, [["[1]", "[2]", "[3]"]]),
    ]  # fmt: skip


def _arena_refused() -> list[dict[str, Any]]:
    played: dict[str, Any] = {
        "seed": SEED.hex(),
        "group": 1,
        "max_tokens": 64,
        "context": 1024,
        "replies": [["[1]"]],
    }
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("a setting that the game does not have", "Nim-v0-raw", {"dice": 3}),
        ("a setting of another kind", "GuessTheNumber-v0-raw", {"max_number": "20"}),
        ("a number that is too large", "GuessTheNumber-v0-raw", {"max_number": 100_001}),
        ("a truth value for a number", "GuessTheNumber-v0-raw", {"max_number": True}),
        ("what the game itself refuses", "LiarsDice-v0-raw", {"num_dice": "three"}),
        ("a game whose words come from the network", "Wordle-v0-raw", {}),
        ("a game that is wrapped", "Nim-v0", {}),
    ]
    return [_refused(TextArena.make, TEXTARENA, "TXA-7", *row, **played) for row in rows]
