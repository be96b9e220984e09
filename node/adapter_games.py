"""Ops of environments whose tasks or games come from a library: reasoning-gym, gymnasium, textarena."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from nous_node.envs import expressions, gymnasium_text, gymnasium_words, single_turn, textarena_words
from nous_node.envs.environment import Environment, HeldOut, Task
from nous_node.envs.gymnasium_text import Gymnasium
from nous_node.envs.reasoning_gym import ReasoningGym
from nous_node.envs.textarena import TextArena, read_rules
from nous_node.protocol.rollouts import Trajectory
from nous_node.protocol.runs import Setting

from .adapter_policy import Replies, told
from .adapter_question import Answer, Ask, BadQuestion, Ops, Raw, check_releases

Config = dict[str, Setting]


class Released(Ask, frozen=True, kw_only=True):
    """A question about what a library does: another release may do something else."""

    releases: dict[str, str]

    def check(self) -> None:
        """Raises ImportError where this machine has not these releases."""
        check_releases(self.releases)


# --- reasoning-gym ------------------------------------------------------------------------------------


class Question(Ask, frozen=True):
    config: Config
    chat: bool
    question: str


def question(ask: Question) -> Answer:
    wording, _ = single_turn.read_wording(ask.config)
    return {"text": wording.text(ask.question, ask.chat)}


class Place(Ask, frozen=True):
    place: single_turn.Place
    said: str


def answer(ask: Place) -> Answer:
    return {"answer": single_turn.Wording(answer=ask.place).find(ask.said)}


class Formula(Ask, frozen=True):
    said: str


def formula(ask: Formula) -> Answer:
    return {"formula": expressions.is_formula(ask.said)}


class HeldOutSeed(Ask, frozen=True):
    id: str
    index: int


def held_out(ask: HeldOutSeed) -> Answer:
    return {"seed": single_turn.held_out_seed(ask.id, ask.index).hex()}


class Dataset(Ask, frozen=True):
    dataset: str


def dataset(ask: Dataset) -> Answer:
    facts = ReasoningGym.facts(ask.dataset)
    return {"reproducible": facts.reproducible, "scorer": facts.scorer}


class Settings(Released, frozen=True, kw_only=True):
    dataset: str
    config: Config


def settings(ask: Settings) -> Answer:
    ask.check()
    return {"levels": ReasoningGym.make(ask.dataset, ask.config).levels}


class Said(Ask, frozen=True):
    said: str
    ended: bool


class Puzzle(Settings, frozen=True, kw_only=True):
    seed: Raw
    level: int
    replies: list[Said]


def puzzle(ask: Puzzle) -> Answer:
    ask.check()
    environment = ReasoningGym.make(ask.dataset, ask.config)
    task = environment.task(ask.seed, ask.level)
    if not isinstance(environment, HeldOut):
        raise BadQuestion(f"{ask.dataset} has no single answers.")
    scores = [environment.score(task, reply.said, reply.ended) for reply in ask.replies]
    return {
        "prompt": environment.prompt(task),
        "scores": [{"reward": one.reward, "components": one.components} for one in scores],
    }


# --- games --------------------------------------------------------------------------------------------


class Action(Ask, frozen=True):
    game: str
    place: single_turn.Place
    said: str


def action(ask: Action) -> Answer:
    if ask.game not in gymnasium_words.GAMES:
        raise BadQuestion(f"There is no game {ask.game[:64]!r}.")
    wording, words = single_turn.Wording(answer=ask.place), gymnasium_words.GAMES[ask.game]
    return {"action": gymnasium_text.read_action(wording, words, ask.said)}


class Rewards(Ask, frozen=True):
    rewards: list[list[float]]


def advantages(ask: Rewards) -> Answer:
    return {"advantages": gymnasium_text.turn_advantages(ask.rewards)}


class GameConfig(Released, frozen=True, kw_only=True):
    game: str
    config: Config


def game_config(ask: GameConfig) -> Answer:
    ask.check()
    return {"levels": Gymnasium.make(ask.game, ask.config).levels}


class Played(GameConfig, frozen=True, kw_only=True):
    seed: Raw
    group: int
    max_tokens: int
    context: int
    replies: list[list[str]]
    """Of each trajectory; the last one for ever."""


Make = Callable[[str, Mapping[str, Setting]], Environment]


def gymnasium_game(ask: Played) -> Answer:
    return _played(Gymnasium.make, ask)


def textarena_game(ask: Played) -> Answer:
    return _played(TextArena.make, ask)


def _played(make: Make, ask: Played) -> Answer:
    ask.check()
    environment = make(ask.game, ask.config)
    policy = Replies(ask.replies, ask.group, ask.max_tokens, ask.context)
    task = environment.task(ask.seed, 0)
    trajectories = asyncio.run(_collected(environment, task, policy))
    return {"calls": policy.calls, "trajectories": [told(one) for one in trajectories]}


async def _collected(environment: Environment, task: Task, policy: Replies) -> list[Trajectory]:
    return await environment.collect_trajectories(task, policy)


class Heard(Ask, frozen=True):
    player: int
    told: list[tuple[Any, str, Any, Any]]
    """Sender, its name, text, kind: of any type."""


def heard(ask: Heard) -> Answer:
    messages = [textarena_words.Told(sender, name, text, str(kind)) for sender, name, text, kind in ask.told]
    return {"text": textarena_words.heard(ask.player, messages)}


class Turn(Ask, frozen=True):
    player: int
    heard: str
    first: bool


def prompt(ask: Turn) -> Answer:
    return {"text": textarena_words.plain(ask.player, ask.heard, ask.first)}


def move(ask: Said) -> Answer:
    return {"move": textarena_words.meant(ask.said, ask.ended)}


class Earned(Ask, frozen=True):
    given: Any
    """Of any type."""
    invalid: bool
    turns: int
    unfinished: bool


def earned(ask: Earned) -> Answer:
    reward = textarena_words.reward(ask.given)
    components = textarena_words.components(reward, ask.invalid, ask.turns, ask.unfinished)
    return {"reward": reward, "components": components}


class Rules(Ask, frozen=True):
    game: str
    config: Config


def rules(ask: Rules) -> Answer:
    found = read_rules(ask.game, ask.config)
    told = {"players": found.players, "max_turns": found.max_turns, "game": dict(found.options)}
    return {"settings": told if found.turn_tokens is None else {**told, "turn_tokens": found.turn_tokens}}


OPS: Final[Ops] = {
    "reasoning-gym": question,
    "reasoning-gym-answer": answer,
    "reasoning-gym-formula": formula,
    "reasoning-gym-seed": held_out,
    "reasoning-gym-dataset": dataset,
    "reasoning-gym-settings": settings,
    "reasoning-gym-task": puzzle,
    "gymnasium-action": action,
    "gymnasium-advantages": advantages,
    "gymnasium-config": game_config,
    "gymnasium-game": gymnasium_game,
    "textarena-told": heard,
    "textarena-prompt": prompt,
    "textarena-move": move,
    "textarena-earned": earned,
    "textarena-settings": rules,
    "textarena-game": textarena_game,
}
