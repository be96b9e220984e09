"""One textarena game, driven by texts: its random state is its own, whatever else plays in this process.

    game = Game("KuhnPoker-v0-raw", {}, players=2, seed=7)
    while not game.over:
        heard = game.hear()          what player `game.player` has not heard yet
        game.move("[check]")
    game.rewards                     one a player

Only this module imports textarena. Whatever a game prints is dropped: the process may speak through stdout.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
from collections.abc import Iterator, Mapping
from typing import Any, Final

from nous_node.protocol.runs import Setting

from .determinism import Rng
from .errors import BadConfig, BrokenEnvironment, EnvironmentFailed
from .textarena_words import LOSS, Told, heard, reward

LIBRARY: Final = "textarena"

MOST: Final = 100_000
"""Largest number in a game's settings: the longest of textarena's own is a budget of 10,000 characters."""
LONGEST: Final = 200
"""Most characters of a text, and most elements of a list, in a game's settings."""
UNSAFE: Final = ("path", "file", "jury", "config")
"""Parameters with one of these in their name are not for runs: they name files, or models on the network."""


class Game:
    """A game from its start to its end. Raises EnvironmentFailed where it cannot even begin."""

    def __init__(self, member: str, options: Mapping[str, Setting], players: int, seed: int) -> None:
        self.players = players
        self.player = 0
        """Whose move it is."""
        self.over = False
        self.crashed: int | None = None
        """The player on whose move the game raised."""
        self.rewards = dict.fromkeys(range(players), 0.0)
        self.invalid: frozenset[int] = frozenset()
        """Players whom the game found guilty of repeated invalid moves."""
        self._rng = Rng(seed)
        try:
            with self._alone():
                self._env = _made(member, options)
                self._env.reset(num_players=players, seed=seed)
            self._turn()
        except Exception as error:  # somebody else's code
            raise EnvironmentFailed(
                f"textarena's {member} does not begin with {players} players and {dict(options)}: "
                f"{type(error).__name__}: {error}. Take other settings."
            ) from error

    def copy(self) -> Game:
        """The same game at the same point, to be played apart from this one."""
        return copy.deepcopy(self)

    def hear(self) -> str:
        """What the player whose move it is was told since its last move. Asked once a turn."""
        try:
            with self._alone():
                _, messages = self._env.get_observation()
                names = self._env.state.role_mapping
                told = [
                    Told(sender, _name(names, sender), text, getattr(kind, "name", ""))
                    for sender, text, kind in messages
                ]
        except Exception:  # somebody else's code
            self._crash()
            return ""
        return heard(self.player, told)

    def move(self, text: str) -> None:
        """The player's move, as the game understands it."""
        try:
            with self._alone():
                over, _ = self._env.step(action=text)
            if over:
                self._end()
            else:
                self._turn()
        except Exception:  # somebody else's code, on text that somebody else wrote
            self._crash()

    def _turn(self) -> None:
        player = self._env.state.current_player_id
        if isinstance(player, bool) or player not in self.rewards:
            raise LookupError(f"player {player!r} is to move")
        self.player = int(player)

    def _end(self) -> None:
        with self._alone():
            rewards, facts = self._env.close()
        self.rewards = {player: reward((rewards or {}).get(player, 0.0)) for player in range(self.players)}
        self.invalid = frozenset(
            player for player in range(self.players) if facts.get(player, {}).get("invalid_move")
        )
        self.over = True

    def _crash(self) -> None:
        """A game that raises is lost for whoever moved, and nothing for the others."""
        self.over = True
        self.crashed = self.player
        self.rewards = dict.fromkeys(range(self.players), 0.0) | {self.player: LOSS}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._rng, contextlib.redirect_stdout(io.StringIO()):
            yield


def prepare(member: str) -> None:
    """Imports what a game needs, before any random state is its own. Raises BrokenEnvironment."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _maker(member)
    except Exception as error:  # somebody else's code
        raise BrokenEnvironment(
            f"textarena's {member} cannot be imported: {type(error).__name__}: {error}. Install "
            "textarena 0.7.4, or take another game."
        ) from error


def _maker(member: str) -> tuple[type[Any], dict[str, Any]]:
    """The class of a game, and with what textarena makes it under this name."""
    with contextlib.suppress(ModuleNotFoundError):  # textarena comes without it: few games want it
        importlib.import_module("numpy")
    importlib.import_module(LIBRARY)
    registered = importlib.import_module("textarena.envs.registration").ENV_REGISTRY[member]
    module, _, name = registered.entry_point.partition(":")
    return getattr(importlib.import_module(module), name), copy.deepcopy(registered.kwargs)


def _made(member: str, options: Mapping[str, Setting]) -> Any:
    maker, preset = _maker(member)
    return maker(**{**preset, **options})


def _name(names: Mapping[object, str], sender: object) -> str:
    return "GAME" if sender == -1 else names.get(sender, f"Player {sender}")


def check_options(member: str, options: Mapping[str, Setting]) -> None:
    """Raises BadConfig where a game's class does not take these."""
    maker, preset = _maker(member)
    parameters = inspect.signature(maker).parameters
    for key, value in options.items():
        if key not in parameters or _unsafe(key):
            known = ", ".join(sorted(name for name in parameters if not _unsafe(name))) or "none"
            raise BadConfig(f"{member} has no setting {key!r}; the game's own are: {known}.")
        usual = preset.get(key, parameters[key].default)
        if not _alike(value, usual):
            raise BadConfig(f"`{key}` of {member} is not {value!r} but something like {usual!r}.")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _made(member, options)
    except Exception as error:  # somebody else's code
        raise BadConfig(
            f"{member} does not take {dict(options)}: {type(error).__name__}: {error}."
        ) from error


def _unsafe(key: str) -> bool:
    return any(word in key for word in UNSAFE)


def _alike(value: object, usual: object) -> bool:
    """Whether a setting is of the kind that stands there usually; where none does, a number."""
    match usual:
        case bool():
            return isinstance(value, bool)
        case int() | None:
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST
        case float():
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST
        case str():
            return isinstance(value, str) and len(value) <= LONGEST and not set(value) & {"/", "\\"}
        case [first, *_]:
            return (
                isinstance(value, list)
                and 1 <= len(value) <= LONGEST
                and all(_alike(one, first) for one in value)
            )
        case _:
            return False
