"""Text games of textarena, played by the policy against itself. Spec: `specs/envs/textarena.md` [TXA-n].

    textarena/KuhnPoker-v0-raw      two players: two trajectories a sample, `player-0` and `player-1`

Every player has a context of its own: before each of its turns comes what the game told it since the last
one. All samples of a group are played in lockstep: one call of the policy serves every player whose turn it
is. Config: `players`, `max_turns`, `turn_tokens`; other keys go to the game's own class, with `game_` before
those that are called like one of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

from nous_node.protocol.errors import LocalError
from nous_node.protocol.rollouts import Role, Trajectory
from nous_node.protocol.runs import Setting

from .environment import Completion, Environment, EnvironmentInfo, Message, Policy, Task, small_seed
from .errors import BadConfig, EnvironmentFailed, UnknownEnvironment
from .session import Session, sample_all
from .textarena_facts import DEPENDENCIES, GAMES, REFUSED, GameFacts
from .textarena_game import Game, check_options, prepare
from .textarena_words import LOSS, SILENCE, components, meant, plain

NAME: Final = "textarena"
VERSION: Final = "1"
SEED_BYTES: Final = 32

TURN_TOKENS: Final = 1 << 20
"""Largest `turn_tokens`: more than any context."""

NEWER: Final = (3, 12)
"""The Python that some games need: before it an f-string could not hold its own quotes."""

OURS: Final = ("players", "max_turns", "turn_tokens")
"""Config keys of this adapter; every other key is a parameter of the game's class."""
PREFIX: Final = "game_"
"""Stands before a game's parameter that is called like one of ours."""


class TextArena:
    """The family `textarena`."""

    recipe: ClassVar[str] = "textarena"

    @classmethod
    def members(cls) -> Sequence[str]:
        """All games that run here without a network, sorted."""
        return sorted(member for member, game in GAMES.items() if _runs(game))

    @classmethod
    def facts(cls, member: str) -> EnvironmentInfo:
        """Raises UnknownEnvironment, with the reason where a game is refused."""
        game = _found(member)
        return EnvironmentInfo(
            id=f"{NAME}/{member}",
            version=VERSION,
            reproducible="exact",
            scorer="pure",
            network=False,
            max_turns=game.turns,
            agents=game.least,
            distributions=("textarena", *DEPENDENCIES.get(member.partition("-")[0], ())),
            description=_described(game),
        )

    @classmethod
    def make(cls, member: str, config: Mapping[str, Setting]) -> Environment:
        """Imports textarena. Raises BadConfig, UnknownEnvironment and BrokenEnvironment."""
        facts = cls.facts(member)
        rules = read_rules(member, config)
        prepare(member)
        check_options(member, rules.options)
        return SelfPlay(facts, rules)


class Rules(NamedTuple):
    """One game's settings."""

    member: str
    players: int
    max_turns: int
    """Most turns of one player."""
    turn_tokens: int | None
    """Most tokens of one turn; None: as many as there is room for."""
    options: Mapping[str, Setting]
    """Of the game's own class."""


def read_rules(member: str, config: Mapping[str, Setting]) -> Rules:
    """What a config asks for; the game's own settings are not looked at yet. Raises BadConfig. [TXA-7]"""
    game = _found(member)
    return Rules(
        member,
        _players(member, game, config.get("players", game.least)),
        _whole("max_turns", config.get("max_turns", game.turns), game.turns),
        None if "turn_tokens" not in config else _whole("turn_tokens", config["turn_tokens"], TURN_TOKENS),
        {key.removeprefix(PREFIX): value for key, value in config.items() if key not in OURS},
    )


class SelfPlay:
    """One game as an environment: all its players are the policy."""

    levels: int = 0

    def __init__(self, info: EnvironmentInfo, rules: Rules) -> None:
        self.info = info
        self.rules = rules

    def task(self, seed: bytes, level: int) -> Task:
        """The game that a 32-byte seed begins; `payload` is textarena's seed."""
        if len(seed) != SEED_BYTES or level < 0:
            raise LocalError(f"A task has a seed of {SEED_BYTES} bytes and a level of 0 or more.")
        return Task(seed, 0, small_seed(seed))

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        """`policy.group` games of the same beginning: a trajectory for each player that moved, in the order
        of first moves. Raises EnvironmentFailed where nobody has room for a first move."""
        rules = self.rules
        game = Game(rules.member, rules.options, rules.players, small_seed(task.seed))
        seats: list[_Seat] = []
        tables = [_Table(rules, policy, game.copy(), seats) for _ in range(policy.group)]
        while turns := [(table, seat) for table in tables if (seat := table.next()) is not None]:
            sessions = [seat.session for _, seat in turns]
            completions = await sample_all(policy, sessions, rules.turn_tokens)
            for (table, seat), completion in zip(turns, completions, strict=True):
                table.play(seat, completion)
        for table in tables:
            table.settle()
        if not seats:
            raise EnvironmentFailed(
                f"The rules of {self.info.id} do not fit the run's context of {policy.context} tokens: take "
                "a run with a longer context, or another game."
            )
        return [seat.session.finish(seat.reward, seat.components) for seat in seats]


@dataclass(slots=True)
class _Seat:
    """A player that has moved."""

    session: Session
    player: int
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)


class _Table:
    """One sample: a game and its players."""

    def __init__(self, rules: Rules, policy: Policy, game: Game, seats: list[_Seat]) -> None:
        self._rules = rules
        self._policy = policy
        self._seats = seats
        self._mine: dict[int, _Seat] = {}
        self._silent: set[int] = set()
        """Players without room for another turn."""
        self._turns = dict.fromkeys(range(rules.players), 0)
        self._game = game
        self._stopped = False

    def next(self) -> _Seat | None:
        """Whose turn it is, with what it was told; None where the game is over. Whoever has no room for a
        turn makes the empty move."""
        while not self._game.over and not self._stopped:
            player = self._game.player
            if self._turns[player] == self._rules.max_turns:
                self._stopped = True
                break
            self._turns[player] += 1
            if player not in self._silent and (seat := self._seated(player, self._game.hear())) is not None:
                return seat
            if not self._game.over:
                self._silent.add(player)
                self._game.move(SILENCE)
        return None

    def play(self, seat: _Seat, completion: Completion) -> None:
        """Makes the move that a completion says; none where it was cut short."""
        ended = completion.finish == "stop"
        self._game.move(meant(self._said(completion.tokens) if ended else "", ended))

    def settle(self) -> None:
        """Rewards and components of all players that moved."""
        game = self._game
        for player, seat in self._mine.items():
            seat.reward = self._broken_off(player) if self._stopped else game.rewards[player]
            invalid = player in game.invalid or player == game.crashed
            seat.components = components(seat.reward, invalid, self._turns[player], self._stopped)

    def _broken_off(self, player: int) -> float:
        """Nothing for anybody; whoever has talked away its room has lost, or that would be a way out."""
        return LOSS if player in self._silent else 0.0

    def _said(self, tokens: Sequence[int]) -> str:
        chat = self._policy.chat
        return self._policy.tokenizer.decode(tokens[:-1]) if chat is None else chat.parse(tokens).content

    def _seated(self, player: int, heard: str) -> _Seat | None:
        """A player with new text and room for a turn, or None. Only a player that moves is counted."""
        if self._game.over:
            return None
        seat = self._mine.get(player)
        session = (
            Session(self._policy, len(self._seats), f"player-{player}") if seat is None else seat.session
        )
        self._tell(session, player, heard)
        if session.room == 0:
            return None
        if seat is None:
            seat = self._mine[player] = _Seat(session, player)
            self._seats.append(seat)
        return seat

    def _tell(self, session: Session, player: int, heard: str) -> None:
        if self._policy.chat is not None:
            session.converse([Message("user", heard)])
            return
        text = plain(player, heard, first=not session.sampled)
        session.append(self._policy.tokenizer.encode(text), Role.RAW)


def _found(member: str) -> GameFacts:
    game = GAMES.get(member)
    if game is not None and _runs(game):
        return game
    if game is not None:
        raise UnknownEnvironment(f"textarena/{member} needs Python 3.12: textarena's source of it does.")
    if member in REFUSED:
        raise UnknownEnvironment(f"textarena/{member} is not offered: {REFUSED[member]}")
    raise UnknownEnvironment(
        f"textarena has no game {member[:64]!r}. `nous-node env list` has all of them; names end in -raw."
    )


def _runs(game: GameFacts) -> bool:
    return not game.newer or sys.version_info >= NEWER


def _described(game: GameFacts) -> str:
    if game.least == game.most:
        players = "one player" if game.most == 1 else f"{game.most} players"
    else:
        players = f"{game.least} to {game.most} players"
    return f"A text game for {players}."


def _players(member: str, game: GameFacts, value: Setting) -> int:
    allowed = range(game.least, game.most + 1, game.step)
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        known = " or ".join(str(count) for count in allowed)
        raise BadConfig(f"{member} is played by {known} players, not {value!r}.")
    return value


def _whole(key: str, value: Setting, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise BadConfig(f"`{key}` is a whole number from 1 to {most}, not {value!r}.")
    return value
