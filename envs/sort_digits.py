"""sort-digits, the embedded default: "sort 5283=" -> "2358". Spec: `specs/envs/sort-digits.md`.

    stream = SHAKE-256("nous/sort-digits/1\\0" || seed)
    length = base + (stream[0] * (level + 1) >> 8)       base .. base + level, all alike
    digit i = stream[1 + i] * 10 >> 8
    prompt = "sort " + digits + "="
    reward = right positions / positions of the longer of answer and solution; 0 unless a stop token came

`answer` is the text of the sampled tokens without the stop token. 256 is no multiple of 10: some digits come
with 26/256 and some with 25/256, which does not matter here and saves every port a loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import ClassVar, Final

from nous_node.protocol.errors import LocalError
from nous_node.protocol.rollouts import Role, Trajectory
from nous_node.protocol.runs import Setting

from .environment import EnvironmentInfo, Policy, Score, Task
from .errors import BadConfig, EnvironmentFailed
from .session import Session, sample_all

SEED_BYTES: Final = 32
DOMAIN_TASK: Final = b"nous/sort-digits/1\x00"
DOMAIN_HELD_OUT: Final = b"nous/sort-digits/held-out/1\x00"

DEFAULT_LENGTH: Final = 4
"""Digits at level 0; the embedded policy was warm-started on four."""

MAX_LENGTH: Final = 64
"""Longest base length: a prompt of some 70 bytes fits any context."""

LEVELS: Final = 8
"""Highest curriculum level: twelve digits with the default base. Levels above it count as this."""

_RIGHT = {"correct": 1.0}
_WRONG = {"correct": 0.0}


class SortDigits:
    """Config: `length`, the number of digits at curriculum level 0."""

    info: ClassVar[EnvironmentInfo] = EnvironmentInfo(
        id="sort-digits",
        version="1",
        reproducible="exact",
        scorer="pure",
        network=False,
        max_turns=1,
        agents=1,
        description="A few digits are to be put in order; the embedded default.",
    )
    levels: int = LEVELS

    def __init__(self, config: Mapping[str, Setting]) -> None:
        for key in config:
            if key != "length":
                raise BadConfig(f"sort-digits has no setting {key!r}; it takes `length` only.")
        length = config.get("length", DEFAULT_LENGTH)
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_LENGTH:
            raise BadConfig(
                f"`length` of sort-digits is a whole number from 1 to {MAX_LENGTH}, not {length!r}."
            )
        self.length: int = length

    def task(self, seed: bytes, level: int) -> Task:
        """The digits of a 32-byte seed; `payload` is their text."""
        if len(seed) != SEED_BYTES or level < 0:
            raise LocalError(f"A task has a seed of {SEED_BYTES} bytes and a level of 0 or more.")
        level = min(level, LEVELS)
        stream = hashlib.shake_256(DOMAIN_TASK + seed).digest(1 + self.length + LEVELS)
        length = self.length + (stream[0] * (level + 1) >> 8)
        return Task(seed, level, "".join([str(byte * 10 >> 8) for byte in stream[1 : 1 + length]]))

    def held_out(self, count: int, level: int = 0) -> list[Task]:
        """Tasks for evaluation: seed i = SHA-256(DOMAIN_HELD_OUT || u64le(i))."""
        return [
            self.task(hashlib.sha256(DOMAIN_HELD_OUT + index.to_bytes(8, "little")).digest(), level)
            for index in range(count)
        ]

    def prompt(self, task: Task) -> str:
        return f"sort {_digits(task)}="

    def score(self, task: Task, answer: str, ended: bool) -> Score:
        """Share of right positions, and whether all are right."""
        solution = "".join(sorted(_digits(task)))
        return _score(solution, answer, ended)

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        """One turn each of `policy.group` samples."""
        prompt = policy.tokenizer.encode(self.prompt(task))
        solution = "".join(sorted(_digits(task)))
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append(prompt, Role.RAW)
        completions = await sample_all(policy, sessions)
        trajectories = []
        for session, (tokens, _, finish) in zip(sessions, completions, strict=True):
            ended = finish == "stop"
            answer = policy.tokenizer.decode(tokens[:-1]) if ended else ""
            trajectories.append(session.finish(*_score(solution, answer, ended)))
        return trajectories


def _score(solution: str, answer: str, ended: bool) -> Score:
    if not ended:
        return Score(0.0, _WRONG)
    if answer == solution:
        return Score(1.0, _RIGHT)
    right = sum(1 for ours, theirs in zip(solution, answer, strict=False) if ours == theirs)
    return Score(right / max(len(solution), len(answer)), _WRONG)


def _digits(task: Task) -> str:
    match task.payload:
        case str() as digits:
            return digits
        case _:
            raise EnvironmentFailed("This task was not made by sort-digits.")
