"""Two host processes of reasoning-gym, and what its graders are given: garbage and attempts to cheat."""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

from nous_node.envs import sandbox
from nous_node.envs.access import DEFAULT_MEMORY
from nous_node.envs.batcher import Batcher, Job, Outcome
from nous_node.envs.environment import Environment, Family, PolicySettings, Task
from nous_node.envs.reasoning_gym import ReasoningGym
from nous_node.envs.remote import RemoteEnvironment, RemoteHeldOut, remote
from nous_node.envs.sandbox import Launch
from nous_node.protocol.runs import Setting
from nous_node.protocol.tasks import assign

from .conftest import EOS, ByteTokenizer, DreamEngine

NOISE = bytes(random.Random(1).randrange(256) for _ in range(300)).decode("latin-1")

GARBAGE = (
    "",
    " \n ",
    NOISE,
    "a" * 10_000,
    "7" * 10_000,
    "0",
    "-1",
    "yes",
    "nan",
    "-inf",
    "1e999999",
    "x**9**9**9",
    "__import__('os')._exit(3)",
    "0.5",
    "1*2*3*4",
    "A ∨ ¬A",
    '{"a": [1, {"b": null}]}',
    "[]",
    "null",
    "ünï∀🎲",
    "(" * 3_000 + ")" * 3_000,
    "[" * 3_000,
    "1,2,3,4",
    "I do not know the answer.",
)
"""No answer to anything, except by accident."""

NONSENSE_PAID = 0.2
"""Most that a text which answers nothing may be paid on average: graders pay a little for the right form."""

GUESSED = frozenset({"0", "-1", "yes", "[]", "0.5", "nan"})
"""These are right sometimes: a number, or a way of saying no."""


def hosted(family: type[Family], member: str, number: int, config: dict[str, Setting]) -> RemoteEnvironment:
    """A member in the host process of this number: what another process is, is asked with other memory."""
    launch = Launch(
        Path(sys.executable),
        "nous_node.envs.host",
        (),
        (),
        sandbox.unavailable() is None,
        False,
        DEFAULT_MEMORY + number,
        (),
    )
    entry = f"{family.__module__}:{family.__qualname__}"
    return remote(launch, family.facts(member), entry, member, config)


def host(member: str, number: int, **config: Setting) -> RemoteHeldOut:
    environment = hosted(ReasoningGym, member, number, {"answer": "whole", **config})
    assert isinstance(environment, RemoteHeldOut)
    return environment


def dreams(context: int = 8_192) -> PolicySettings:
    return PolicySettings(ByteTokenizer(), 4, 24, context, frozenset([EOS]))


def dreamt(environment: Environment, seed: bytes) -> Outcome:
    """A group whose answers are digits that follow from the prompt."""
    with Batcher(dreams(), DreamEngine()) as batcher:
        return batcher.run([Job(environment, environment.task(seed, 0), assign(seed, [1]))])[0]


def tasks(environment: RemoteHeldOut, count: int, level: int = 0) -> list[Task]:
    seeds = [hashlib.sha256(b"survey" + bytes([index])).digest() for index in range(count)]
    return [environment.task(seed, level) for seed in seeds]


def seen(environment: RemoteHeldOut, task: Task, answers: tuple[str, ...]) -> tuple[str, list[object]]:
    """Prompt and scores of one task."""
    scores = environment.score_all(task, [(answer, True) for answer in answers])
    return environment.prompt(task), list(scores)
