"""gymnasium's toy games in words: an observation, an action, and so on. Spec: `specs/envs/gymnasium.md`.

    while the game goes on:  the policy is told what it sees, and replies with the name of an action

All samples of a task begin in the same state with the same random numbers and are played in lockstep: one
call of the policy for the next action of all that still play. A reply that is no action costs a step; after
three the game is given up. Giving up, and running out of tokens, cost what idling would have cost, so that no
policy learns to leave early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from nous_node.protocol.rollouts import Role, Trajectory
from nous_node.protocol.runs import Setting

from .environment import Completion, Environment, EnvironmentInfo, Message, Policy, Task, small_seed
from .errors import BadConfig, BrokenEnvironment, UnknownEnvironment
from .gymnasium_words import GAMES, Words
from .session import Session, sample_all
from .single_turn import CLOSE, OPEN, Place, Wording, read_wording

NAME: Final = "gymnasium"

VERSION: Final = "1"
"""Raised whenever this module gives other prompts or rewards for the same seed, level and tokens."""

MAX_STEPS: Final = 200
"""Most actions of one trajectory: what the library itself allows its slowest game."""

TURN_TOKENS: Final = 64
"""Most tokens of a turn where the config says nothing: a sentence of thought and an action."""

MAX_TURN_TOKENS: Final = 65_536

MAX_ILLEGAL: Final = 3
"""Replies without an action before a game is given up."""

MIN_MAP: Final = 3
"""Smaller random lakes have hardly a way that is not the only one, and the library searches for ever for one
of a single field."""

MAX_MAP: Final = 16
"""Fields along a side of a random lake: a board of 16 rows still fits a small context."""

_HOW: Final[Mapping[Place, str]] = {
    "tags": f"Think step by step, then write the action between {OPEN} and {CLOSE}.",
    "last-line": "Write the action, and nothing else, on the last line of your reply.",
    "whole": "Reply with the action and nothing else.",
}

_CUE: Final = "\nAction:"
"""What a base model goes on from."""


class Gymnasium:
    """Family `gymnasium/GAME`. Config: arguments of the library's game, `steps`, `turn_tokens`, `map_size`
    for a lake of its own in each task, `advantages`, and of the wording `format`, `system` and `answer`."""

    recipe: ClassVar[str] = NAME

    @classmethod
    def members(cls) -> Sequence[str]:
        return sorted(GAMES)

    @classmethod
    def facts(cls, member: str) -> EnvironmentInfo:
        if member not in GAMES:
            raise UnknownEnvironment(
                f"Of gymnasium's games there are {', '.join(sorted(GAMES))} in words, and no {member!r}."
            )
        return EnvironmentInfo(
            id=f"{NAME}/{member}",
            version=VERSION,
            reproducible="exact",
            scorer="pure",
            network=False,
            max_turns=MAX_STEPS,
            agents=1,
            distributions=("gymnasium", "numpy"),
            description=f"The game {member} of gymnasium in words, an action a turn.",
        )

    @classmethod
    def make(cls, member: str, config: Mapping[str, Setting]) -> Environment:
        return Games(cls.facts(member), member, config)


@dataclass(slots=True)
class _Player:
    """One sample of a game."""

    session: Session
    game: Any
    rewards: list[float] = field(default_factory=list)
    """One a turn."""
    lengths: list[int] = field(default_factory=list)
    """Sampled tokens of each turn."""
    illegal: int = 0
    ended: bool = False
    """Whether the game came to its end."""
    won: bool = False
    out: bool = False
    """Whether no more turns come."""

    @property
    def components(self) -> dict[str, float]:
        return {
            "correct": float(self.won),
            "steps": float(len(self.rewards)),
            "illegal": float(self.illegal),
        }


class Games:
    """One game with its settings."""

    levels: int = 0

    def __init__(self, info: EnvironmentInfo, member: str, config: Mapping[str, Setting]) -> None:
        self.info = info
        self._member = member
        self._words: Words = GAMES[member]
        if "template" in config:
            raise BadConfig(f"{info.id} has no setting 'template'; it takes {self._known()}.")
        self._wording, rest = read_wording(config, "last-line")
        self._steps = _whole(rest, "steps", self._words.steps, MAX_STEPS)
        self._turn_tokens = _whole(rest, "turn_tokens", TURN_TOKENS, MAX_TURN_TOKENS)
        self._map_size = (
            _whole(rest, "map_size", 0, MAX_MAP, MIN_MAP) if member.startswith("FrozenLake") else 0
        )
        self._advantages = _switch(rest, "advantages")
        self._arguments = {key: _switch(rest, key) for key in self._words.settings if key in rest}
        if rest:
            raise BadConfig(f"{info.id} has no setting {min(rest)!r}; it takes {self._known()}.")
        self._check()

    def task(self, seed: bytes, level: int) -> Task:
        """`payload` is the small seed of the game."""
        return Task(seed, 0, small_seed(seed))

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        """One game for each of `policy.group` samples."""
        seed = small_seed(task.seed)
        players = [self._begin(policy, index, seed) for index in range(policy.group)]
        for step in range(self._steps):
            going = [player for player in players if not player.out]
            sessions = [player.session for player in going]
            completions = await sample_all(policy, sessions, self._turn_tokens)
            for player, completion in zip(going, completions, strict=True):
                self._move(policy, player, completion, self._steps - step - 1)
        return self._finished(players)

    def _finished(self, players: Sequence[_Player]) -> list[Trajectory]:
        advantages: Sequence[list[float] | None] = [None] * len(players)
        if self._advantages:
            by_turn = turn_advantages([player.rewards for player in players])
            advantages = [_spread(*pair) for pair in zip(players, by_turn, strict=True)]
        return [
            player.session.finish(sum(player.rewards), player.components, advantages=one)
            for player, one in zip(players, advantages, strict=True)
        ]

    def _begin(self, policy: Policy, index: int, seed: int) -> _Player:
        game = self._game(seed)
        state, _ = game.reset(seed=seed)
        player = _Player(Session(policy, index), game)
        text = "\n".join(
            [
                self._words.rules,
                f"Actions: {', '.join(self._words.actions)}. You have {self._steps} steps.",
                _HOW[self._wording.answer],
                self._words.read(game, state),
            ]
        )
        self._tell(policy, player, text, first=True)
        return player

    def _game(self, seed: int) -> Any:
        import gymnasium
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        arguments: dict[str, Any] = dict(self._arguments)
        if self._map_size:
            arguments["desc"] = generate_random_map(self._map_size, seed=seed)
        return gymnasium.make(self._member, disable_env_checker=True, **arguments).unwrapped

    def _move(self, policy: Policy, player: _Player, completion: Completion, left: int) -> None:
        """Takes a reply; `left`: steps after this one."""
        player.lengths.append(len(completion.tokens))
        action = self._action(policy, completion)
        if action is None:
            player.illegal += 1
            player.rewards.append(self._words.idle)
            told = (
                f"That is no action. {_HOW[self._wording.answer]} Actions: {', '.join(self._words.actions)}."
            )
        else:
            state, reward, player.ended, _, _ = player.game.step(action)
            player.rewards.append(float(reward))
            player.won = player.ended and (self._words.ends_well or reward > 0)
            told = self._words.read(player.game, state)
        player.out = player.ended or left == 0 or player.illegal == MAX_ILLEGAL or not player.session.room
        if not player.out:
            self._tell(policy, player, told, first=False)
            player.out = not player.session.room
        if player.out and not player.ended:
            player.rewards[-1] += self._words.idle * left + self._words.forfeit

    def _action(self, policy: Policy, completion: Completion) -> int | None:
        """The action that a reply names; None for a reply that was cut off, or names none."""
        if completion.finish != "stop":
            return None
        return read_action(self._wording, self._words, self._wording.said(policy, completion))

    def _tell(self, policy: Policy, player: _Player, text: str, first: bool) -> None:
        if self._wording.converses(policy):
            player.session.converse(self._wording.messages(text) if first else [Message("user", text)])
            return
        start = "" if first else "\n"
        player.session.append(policy.tokenizer.encode(f"{start}{text}{_CUE}"), Role.RAW)

    def _check(self) -> None:
        """A config that the library does not take fails when the environment is made."""
        try:
            self._game(0).reset(seed=0)
        except ImportError as error:
            raise BrokenEnvironment(f"gymnasium cannot be imported: {error}. Install it.") from error
        except Exception as error:  # whatever its games do with odd arguments
            raise BadConfig(f"{self.info.id} does not take these settings: {error}") from error

    def _known(self) -> str:
        lake = ("map_size",) if self._member.startswith("FrozenLake") else ()
        ours = ("steps", "turn_tokens", *lake, "advantages", "format", "system", "answer")
        return ", ".join([*self._words.settings, *ours])


def read_action(wording: Wording, words: Words, said: str) -> int | None:
    """Number of the action that a reply names, where the wording looks for it: its name in any case, a full
    stop after it or not. [GYM-4]"""
    found = wording.find(said)
    name = "" if found is None else found.lower().rstrip(".!").strip()
    return words.actions.index(name) if name in words.actions else None


def turn_advantages(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """From each sample's rewards, one a turn, its advantage in each of its turns: the rewards from that turn
    on, less their mean over the group; those who play no longer have 0 to come. [GYM-7]"""
    turns = max(len(own) for own in rewards)
    to_come = [[sum(own[turn:]) for turn in range(turns)] for own in rewards]
    means = [sum(column) / len(rewards) for column in zip(*to_come, strict=True)]
    return [
        [own[turn] - means[turn] for turn in range(len(paid))]
        for own, paid in zip(to_come, rewards, strict=True)
    ]


def _spread(player: _Player, advantages: Sequence[float]) -> list[float]:
    """One number a turn -> one a sampled token."""
    pairs = zip(advantages, player.lengths, strict=True)
    return [value for value, length in pairs for _ in range(length)]


def _whole(rest: dict[str, Setting], key: str, default: int, most: int, least: int = 1) -> int:
    if key not in rest:
        return default
    value = rest.pop(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadConfig(f"`{key}` is a whole number from {least} to {most:,}, not {value!r}.")
    return value


def _switch(rest: dict[str, Setting], key: str) -> bool:
    value = rest.pop(key, False)
    if not isinstance(value, bool):
        raise BadConfig(f"`{key}` is true or false, not {value!r}.")
    return value
