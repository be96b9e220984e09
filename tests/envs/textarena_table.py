"""Makes `envs/textarena_facts.py`: tries everything that textarena registers, on Python 3.12 or later.

    python tests/envs/textarena_table.py > envs/textarena_facts.py

Each game is played to its end with rubbish and with moves that look like moves, by few players and by many,
in two fresh processes and in different order. What differs, takes long or cannot be made is refused.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nous_node.envs import textarena_game
from nous_node.envs.errors import EnvError
from nous_node.envs.textarena_game import Game

SWEEP = Path(__file__).with_name("textarena_sweep.py")
GAMES = 4
"""Games for each number of players."""
PLAYERS = range(1, 16)
LEAP = 1
"""Numbers of players that may fail between two that do not: teams of two go in even numbers."""

INTENDED = {"QuantumTicTacToe": [2], "SpiteAndMalice": [2]}
"""Games that begin with any number of players and are meant for these."""

KNOWN = {"MarketEntryGame": "LOOPS", "PublicGoodsGame": "LOOPS"}
"""Refused whatever happens here: their state looks for the next player where all are out."""

NEWER = ("Checkers", "Chess", "IteratedStagHunt", "ReverseTicTacToe", "UltimateTexasHoldem")
"""Games whose source is no valid Python 3.11."""

REASONS = {
    "api key": "MODEL",
    "nltk": "WORDS",
    "syntaxerror": "SOURCE",
    "no such file": "FILES",
    "directory not found": "FILES",
    "no module named": "FILES",
}

TURNS = 256


def registered() -> list[str]:
    textarena_game.prepare("KuhnPoker-v0-raw")
    importlib.import_module("nltk").download = lambda *_, **__: False  # fetches nothing, and does not wait
    registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    return [*sorted(name for name in registry if name.endswith("-raw")), "BabyAiText-v0"]


def counts(member: str) -> tuple[list[int], int]:
    """With how many players it begins, and the most turns of one. Raises EnvError where with none."""
    textarena_game.prepare(member)
    textarena_game.check_options(member, {})
    found, turns, failure = [], 1, EnvError()
    for players in INTENDED.get(member.split("-v0")[0], PLAYERS):
        try:
            game = Game(member, {}, players, 3)
            game.hear()
        except EnvError as error:
            failure = error
            if found and players - found[-1] > LEAP:
                break
            continue
        found.append(players)
        turns = max(turns, most_turns(game))
    if not found:
        raise failure
    return found, turns


def most_turns(game: Game) -> int:
    """All turns of the game, each after as many invalid moves as it allows."""
    state: Any = game._env.state
    own = getattr(state, "max_turns", None)
    return TURNS if own is None else min(TURNS, int(own) * (1 + (getattr(state, "error_allowance", 1) or 0)))


def some(players: Sequence[int]) -> str:
    """Few, many, and what lies between."""
    return ",".join(map(str, sorted({players[0], players[len(players) // 2], players[-1]})))


def sweep(wanted: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, str(SWEEP), str(GAMES), *wanted],
        env=dict(os.environ, PYTHONHASHSEED="0"),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


def verdict(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> str:
    """Why a game that can be made is refused; empty where it is not."""
    stuck = [record for record in first + second if record["error"]]
    if stuck:
        return "LOOPS" if any(record["moves"] for record in stuck) else "SLOW"
    same = all(
        ours["digest"] == theirs["digest"] and ours["rewards"] == theirs["rewards"]
        for ours, theirs in zip(first, second, strict=True)
    )
    return "" if same else "CHANCE"


def reason(error: EnvError) -> str:
    text = str(error).lower()
    return next((name for part, name in REASONS.items() if part in text), "UNKNOWN")


def line(member: str, players: Sequence[int], turns: int) -> str:
    step = players[1] - players[0] if len(players) > 1 else 1
    if list(players) != list(range(players[0], players[-1] + 1, step)):
        raise ValueError(f"{member} is played by {players}")
    more = f", step={step}" if step > 1 else ""
    more += ", newer=True" if member.split("-v0")[0] in NEWER else ""
    return f'    "{member}": GameFacts({players[0]}, {players[-1]}, {turns}{more}),'


def main() -> None:
    playable: dict[str, tuple[list[int], int]] = {}
    refused: dict[str, str] = {}
    for member in registered():
        if known := KNOWN.get(member.split("-v0")[0]):
            refused[member] = known
            continue
        try:
            playable[member] = counts(member)
        except EnvError as error:
            refused[member] = reason(error)
        print(member, refused.get(member, ""), file=sys.stderr)
    wanted = [f"{member}:{some(players)}" for member, (players, _) in playable.items()]
    with ThreadPoolExecutor() as both:
        first, second = both.map(sweep, [wanted, wanted[::-1]])
    for member in list(playable):
        if why := verdict(first[member], second[member]):
            refused[member] = why
            del playable[member]
    head, _, rest = (
        Path(textarena_game.__file__).with_name("textarena_facts.py").read_text().partition("# made")
    )
    _, _, tail = rest.partition("# end")
    print(head, end="")
    print("# made by tests/envs/textarena_table.py\nGAMES: Final[Mapping[str, GameFacts]] = {")
    print("\n".join(line(member, *found) for member, found in sorted(playable.items())))
    print("}\n\nREFUSED: Final[Mapping[str, str]] = {")
    print("\n".join(f'    "{member}": {why},' for member, why in sorted(refused.items())))
    print("}\n# end" + tail, end="")


if __name__ == "__main__":
    main()
