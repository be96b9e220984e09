"""reasoning-gym: generators of puzzles with answers that can be checked. Spec: `specs/envs/reasoning-gym.md`.

    task = item 0 of create_dataset(MEMBER, seed=small_seed(seed), size=1, **settings), drawn under `seeded`
    reward = the dataset's own score of the answer, 0 where its grader raises or leaves 0 to 1

The library's item i at seed s is its item i - 1 at seed s + 1, so that a seed of our own makes each task.
Datasets whose grader pays for nonsense are refused; those that execute what the policy wrote say so in their
facts. Facts come from a table (`reasoning_gym_facts`): the library takes seconds to import.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import msgspec

from nous_node.protocol.rollouts import Trajectory
from nous_node.protocol.runs import Setting

from .determinism import seeded
from .environment import Environment, EnvironmentInfo, Policy, Score, Task, small_seed
from .errors import BadConfig, EnvironmentFailed, UnknownEnvironment
from .expressions import is_formula
from .reasoning_gym_facts import (
    CLOCKED,
    DATASETS,
    DEPENDENCIES,
    DRAWING,
    EXECUTING,
    ITSELF,
    PARSING,
    READING,
    REFUSED,
)
from .single_turn import KEYS, collect, held_out_seed, one_of, read_wording, score_said

NAME: Final = "reasoning-gym"

VERSION: Final = "1"
"""Raised whenever this module gives other prompts or rewards for the same seed, level and tokens."""

MAX_ANSWER: Final = 16_384
"""Characters of an answer that a grader sees; a longer one is worth 0. The longest right ones, boards of 30
by 30 fields, have 1,800, and some graders take the square of the length."""

FULL: Final = 1.0 - 1e-9
"""Graders add fractions: a full score may miss 1 by a rounding error."""

CURRICULUM: Final = "curriculum"
REWARD: Final = "reward"
OURS: Final = (CURRICULUM, REWARD)
"""Settings beside the dataset's own and those of the wording."""

_UNSETTABLE: Final = frozenset({"seed", "size", "data_file"})
"""Ours, and a path of a file."""


class ReasoningGym:
    """Family `reasoning-gym/DATASET`. Config: the dataset's own settings; `curriculum` = true for the
    library's levels of difficulty in place of its defaults; `reward` = "correct" to pay full scores only, not
    answers that come near; and the wording (`single_turn`)."""

    recipe: ClassVar[str] = NAME

    @classmethod
    def members(cls) -> Sequence[str]:
        return [name for name in DATASETS if name not in REFUSED]

    @classmethod
    def facts(cls, member: str) -> EnvironmentInfo:
        if (reason := REFUSED.get(member)) is not None:
            raise UnknownEnvironment(f"{NAME}/{member} is not offered: {reason}. Take another dataset.")
        if member not in DATASETS:
            raise UnknownEnvironment(f"reasoning-gym has no dataset {member!r}; see `nous-node env list`.")
        return EnvironmentInfo(
            id=f"{NAME}/{member}",
            version=VERSION,
            reproducible="none" if member in CLOCKED else "exact",
            scorer="sandbox" if member in EXECUTING else "pure",
            network=False,
            max_turns=1,
            agents=1,
            distributions=(ITSELF, *DEPENDENCIES.get(member, ())),
            description=f"The dataset {member} of reasoning-gym: one question, one checked answer.",
        )

    @classmethod
    def make(cls, member: str, config: Mapping[str, Setting]) -> Environment:
        return Puzzles(cls.facts(member), member, config)


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One item of a dataset."""

    dataset: Any
    """Where it is from: its grader may look at the dataset's settings."""
    entry: dict[str, Any]
    """`question`, `answer` and `metadata`."""
    parses: bool = False
    """Whether its grader hands the answer to an algebra system."""
    draws: bool = False
    """Whether its grader draws random numbers. Seeding costs more than most graders."""

    @property
    def question(self) -> str:
        return str(self.entry["question"])


@dataclass(frozen=True)
class Late:
    """A puzzle that is made when it is first looked at."""

    make: Callable[[], Puzzle]

    @functools.cached_property
    def puzzle(self) -> Puzzle:
        return self.make()


class Puzzles:
    """One dataset with its settings."""

    def __init__(self, info: EnvironmentInfo, member: str, config: Mapping[str, Setting]) -> None:
        from reasoning_gym.factory import CURRICULA
        from reasoning_gym.factory import DATASETS as MAKERS

        self.info = info
        self.wording, rest = read_wording(config)
        self._full = one_of(rest, REWARD, ("score", "correct"), "score") == "correct"
        self._maker, settings = MAKERS[member]
        self._settings = _Settings(member, settings, _curriculum(member, rest, CURRICULA), rest)
        self.levels = self._fitting()
        self._grader = member in PARSING, member in DRAWING
        self._kept: dict[int, Any] | None = {} if member in READING else None
        self._recent: tuple[bytes, int, Puzzle] | None = None
        _mend_library()

    def task(self, seed: bytes, level: int) -> Task:
        """Raises EnvironmentFailed where the library finds no puzzle."""
        level = min(level, self.levels)
        return Task(seed, level, self._puzzle(seed, level))

    def held_out(self, count: int, level: int = 0) -> list[Task]:
        """Tasks for evaluation: of seeds that no run assigns. Their puzzles are made when they are looked at:
        some take seconds."""
        seeds = [held_out_seed(self.info.id, index) for index in range(count)]
        level = min(level, self.levels)
        return [Task(seed, level, Late(partial(self._puzzle, seed, level))) for seed in seeds]

    def prompt(self, task: Task) -> str:
        """The question as a base model is asked."""
        return self.wording.text(self._of(task).question, False)

    def score(self, task: Task, answer: str, ended: bool) -> Score:
        """`answer`: the whole reply; the answer is looked for in it as in training."""
        return score_said(self.wording, answer, ended, partial(_mark, self._of(task), self._full))

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        """One turn each of `policy.group` samples."""
        puzzle = self._of(task)
        return await collect(policy, self.wording, puzzle.question, partial(_mark, puzzle, self._full))

    def _of(self, task: Task) -> Puzzle:
        match task.payload:
            case Puzzle() as puzzle:
                return puzzle
            case Late() as late:
                return late.puzzle
            case _:
                raise EnvironmentFailed("This task was not made by reasoning-gym.")

    def _puzzle(self, seed: bytes, level: int) -> Puzzle:
        """Made, unless it was the last one: answers to a task are often scored one after the other."""
        if self._recent is None or self._recent[:2] != (seed, level):
            self._recent = (seed, level, self._made(seed, level))
        return self._recent[2]

    def _made(self, seed: bytes, level: int) -> Puzzle:
        number = small_seed(seed)
        try:
            with seeded(number):
                dataset = self._dataset(level, number)
                return Puzzle(dataset, dataset[0], *self._grader)
        except Exception as error:  # somebody else's code
            raise EnvironmentFailed(
                f"{self.info.id} makes no task of this seed: {type(error).__name__}: {error}"
            ) from error

    def _dataset(self, level: int, seed: int) -> Any:
        """The dataset of a seed: made anew, or one that took long to make with another seed in it."""
        config = self._settings.at(level, seed)
        if self._kept is None:
            return self._maker(config)
        if level not in self._kept:
            self._kept[level] = self._maker(config)
        dataset = copy.copy(self._kept[level])
        dataset.config, dataset.seed = config, seed
        return dataset

    def _fitting(self) -> int:
        """The highest level up to which the library takes its settings: some curricula go further than their
        own datasets. Settings that do not fit level 0 fail here, not at a task. [RGY-3]"""
        for level in range(self._settings.levels + 1):
            try:
                settings = self._settings.at(level, 0)
                getattr(settings, "validate", bool)()
            except Exception as error:  # its validators assert
                if level > 0:
                    return level - 1
                raise BadConfig(f"{self.info.id} does not take these settings: {error}") from error
        return self._settings.levels


class _Settings:
    """A dataset's settings by level: the library's own, or its curriculum's, with the config's on top."""

    def __init__(self, member: str, kind: type, curriculum: Any, config: Mapping[str, Setting]) -> None:
        fields = {field.name for field in dataclasses.fields(kind)} - _UNSETTABLE
        hints = typing.get_type_hints(kind)
        self._kind = kind
        self._curriculum = curriculum
        self._given = {
            key: _converted(key, value, hints.get(key), sorted(fields), member)
            for key, value in config.items()
            if key not in OURS
        }
        attributes = curriculum.attributes.values() if curriculum else ()
        self.levels: int = max((len(attribute.levels) - 1 for attribute in attributes), default=0)

    def at(self, level: int, seed: int) -> Any:
        """The library's config of a level."""
        fixed = {"seed": seed, "size": 1, **self._given}
        if self._curriculum is None:
            return self._kind(**fixed)
        for name, attribute in self._curriculum.attributes.items():
            self._curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
        return dataclasses.replace(self._curriculum.generate_configuration(), **fixed)


def _mend_library() -> None:
    """One list in the library has the order of a folder's files, which differs by machine. And four graders
    run the answer: a list that is written out is all they look for, so that is all they get. The sandbox
    keeps the machine; but who runs code in here could also change what the next answer is paid."""
    from reasoning_gym.algorithmic import binary_matrix, spiral_matrix, string_insertion
    from reasoning_gym.cognition import figlet_fonts
    from reasoning_gym.games import n_queens

    figlet_fonts.OK_FONTS.sort()
    for module in (binary_matrix, spiral_matrix, string_insertion, n_queens):
        module.eval = ast.literal_eval


def _curriculum(member: str, config: Mapping[str, Setting], known: Mapping[str, Any]) -> Any:
    match config.get(CURRICULUM, False):
        case False:
            return None
        case True if member in known:
            return known[member]()
        case True:
            raise BadConfig(f"{NAME}/{member} has no curriculum: leave `{CURRICULUM}` out.")
        case other:
            raise BadConfig(f"`{CURRICULUM}` is true or false, not {other!r}.")


def _converted(key: str, value: Setting, kind: Any, allowed: Sequence[str], member: str) -> Any:
    if key not in allowed:
        told = ", ".join([*allowed, *OURS, *KEYS])
        raise BadConfig(f"{NAME}/{member} has no setting {key!r}; it takes {told}.")
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise BadConfig(f"The setting {key!r} of {NAME}/{member}: {error}.") from error


def _mark(puzzle: Puzzle, full: bool, answer: str) -> Score:
    """The dataset's score, or with `full` nothing below a full one. Whatever its grader does wrong costs the
    answer, never the group."""
    if len(answer) > MAX_ANSWER:
        return Score(0.0, {"too_long": 1.0})
    given = None if puzzle.parses and not is_formula(answer) else answer
    try:
        with seeded(0) if puzzle.draws else nullcontext():
            reward = float(puzzle.dataset.score_answer(given, puzzle.entry))
    except BaseException:  # graders raise on text that they do not expect, and what they run may try to leave
        return Score(0.0, {"grader_failed": 1.0})
    if not -1e-9 <= reward <= 1.0 + 1e-9:  # also NaN
        return Score(0.0, {"grader_out_of_range": 1.0})
    reward, correct = min(max(reward, 0.0), 1.0), float(reward >= FULL)
    return Score(correct if full else reward, {"correct": correct, "score": reward})
