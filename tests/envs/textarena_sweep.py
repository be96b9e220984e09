"""Plays textarena's games to the end and prints what happened, for a process of its own.

    python textarena_sweep.py MEMBER [MEMBER ...]      one JSON object: member -> a list of Record

What a player says is drawn from what it has heard: something in brackets, with other numbers at times, and
rubbish at times. The draws depend on the member, the game's number and the move alone.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import signal
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from nous_node.envs import textarena_game
from nous_node.envs.errors import EnvError
from nous_node.envs.textarena_game import Game

MOVES = 300
"""A game with more moves than this is broken off."""

SECONDS = 10
"""A game that takes more processor time is given up: a volunteer would wait as long."""

IN_BRACKETS = re.compile(r"\[([^\[\]\n]{1,40})\]")


@dataclass(frozen=True)
class Record:
    """One game."""

    players: int
    digest: str
    """Of everything that was heard and said, and of the rewards."""
    turns: int
    """Most moves of one player."""
    moves: int
    over: bool
    crashed: bool
    rewards: list[float]
    seconds: float
    error: str = ""
    """Why there was no game."""


class TooLong(BaseException):
    """No Exception: a game's own handlers do not see it."""


def ring(*_: object) -> None:
    raise TooLong


def play(member: str, players: int, number: int) -> Record:
    began = time.perf_counter()
    digest = hashlib.sha256()
    turns = dict.fromkeys(range(players), 0)
    rewards: list[float] = []
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        for text in told(member, players, number, turns, rewards):
            digest.update(text.encode(errors="backslashreplace") + b"\x00")
    except EnvError as error:
        return Record(players, "", 0, 0, False, False, [], 0.0, str(error))
    except TooLong:
        return Record(players, "", 0, sum(turns.values()), False, False, [], 0.0, "takes too long")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    over = bool(rewards)
    crashed = over and rewards.pop() == 1.0
    digest.update(repr(rewards).encode())
    seconds = time.perf_counter() - began
    return Record(
        players, digest.hexdigest(), max(turns.values()), sum(turns.values()), over, crashed, rewards, seconds
    )


def told(
    member: str, players: int, number: int, turns: dict[int, int], rewards: list[float]
) -> Iterator[str]:
    """Everything heard and said, in order; a step of the game each time that it is asked. A copy of the game
    moves before it, which must not matter."""
    game = Game(member, {}, players, number)
    other = game.copy()
    other.hear()
    other.move("[0]")
    draws = random.Random(f"{member} {players} {number}")
    heard = dict.fromkeys(range(players), "")
    while not game.over and sum(turns.values()) < MOVES:
        player = game.player
        new = game.hear()
        if game.over:
            break
        heard[player] = (heard[player] + new)[-20_000:]
        said = speak(draws, heard[player], number)
        yield f"{player} {new}"
        yield said
        turns[player] += 1
        game.move(said)
    if game.over:
        rewards.extend(game.rewards.values())
        rewards.append(float(game.crashed is not None))


def speak(draws: random.Random, heard: str, number: int) -> str:
    if number % 3 == 2:
        return "".join(draws.choices(string.printable, k=draws.randrange(40)))
    known = list(dict.fromkeys(IN_BRACKETS.findall(heard)))[-200:]
    chance = draws.random()
    if known and chance < 0.55:
        return f"[{draws.choice(known)}]"
    if known and chance < 0.85:
        return f"[{re.sub('[0-9]+', lambda _: str(draws.randrange(9)), draws.choice(known))}]"
    if chance < 0.97:
        return f"[{' '.join(str(draws.randrange(9)) for _ in range(draws.randrange(1, 4)))}]"
    return "".join(draws.choices(string.printable, k=draws.randrange(40)))


def main(members: list[str]) -> None:
    games = int(members.pop(0))
    signal.signal(signal.SIGPROF, ring)
    for entry in members:
        member, _, counts = entry.rpartition(":")
        textarena_game.prepare(member)
        records = [
            asdict(play(member, int(players), number))
            for players in counts.split(",")
            for number in range(games)
        ]
        print(json.dumps([member, records]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
