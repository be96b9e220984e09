"""Packages of other libraries in play: a policy of sayings, and replays, through a host process."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from nous_node.envs import sandbox
from nous_node.envs.chat import load_chat
from nous_node.envs.environment import (
    Completion,
    Environment,
    GenerateRequest,
    PolicySettings,
    Task,
    Tokenizer,
)
from nous_node.envs.replay import replay
from nous_node.envs.sandbox import Launch
from nous_node.protocol.rollouts import Engine, RolloutGroup, Trajectory, unpack_tokens

from .chat_worlds import CREATED, STYLES, Spoken, write_folder

PACKAGES = Path(__file__).parent / "packages"
SEED = bytes(range(32))

Says = Callable[[str, int], str]
"""What is said to a text that so far was said, by the trajectory of a number."""


class Speaker:
    """A policy that says what it is told to say, cut at the limit of a request."""

    def __init__(self, settings: PolicySettings, says: Says) -> None:
        self.tokenizer: Tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group = settings.group
        self.max_tokens = settings.max_tokens
        self.context = settings.context
        self.logprob_format = settings.logprob_format
        self._says = says
        self.calls: list[int] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.calls.append(len(requests))
        return [self._completion(request) for request in requests]

    def _completion(self, request: GenerateRequest) -> Completion:
        said = self._says(self.tokenizer.decode(request.tokens), request.trajectory)
        tokens = [*self.tokenizer.encode(said), self.tokenizer.eos_id]
        if len(tokens) <= request.max_tokens:
            return Completion(tokens, [-0.5] * len(tokens), "stop")
        tokens = tokens[: request.max_tokens]
        return Completion(tokens, [-0.25] * len(tokens), "length")


def one_of(*sayings: str) -> Says:
    """One of these, chosen by all that was said so far."""

    def says(so_far: str, trajectory: int) -> str:
        digest = hashlib.sha256(f"{trajectory}{so_far}".encode()).digest()
        return sayings[digest[0] % len(sayings)]

    return says


def chat_settings(folder: Path, style: str, max_tokens: int = 256, context: int = 4096) -> PolicySettings:
    """A chat model of bytes with a template of this style; groups of 4."""
    chat = load_chat(write_folder(folder / style, "bytes", STYLES[style]), "template", CREATED)
    return PolicySettings(Spoken(chat), 4, max_tokens, context, frozenset([chat.close]), chat=chat)


def launch(python: Path, *packages: str, network: bool = False) -> Launch:
    """A host process in the interpreter of a recipe, with packages of ours beside it."""
    places = tuple(PACKAGES / name for name in packages)
    boxed = sandbox.unavailable() is None
    return Launch(python, "nous_node.envs.host", places, places, boxed, network, 2 << 30, ())


def collected(
    environment: Environment, settings: PolicySettings, says: Says, seed: bytes = SEED
) -> list[Trajectory]:
    """One group, and the same again from its tokens."""
    task = environment.task(seed, 0)
    made = asyncio.run(environment.collect_trajectories(task, Speaker(settings, says)))
    assert replayed(environment, task, made, settings) == made
    return made


def replayed(
    environment: Environment, task: Task, made: list[Trajectory], settings: PolicySettings
) -> list[Trajectory]:
    group = RolloutGroup(bytes(32), 0, environment.info.id, Engine("says", "1", "float32", "cpu"), made)
    return replay(environment, task, group, settings, 0.0)


def text(trajectory: Trajectory, settings: PolicySettings) -> str:
    return settings.tokenizer.decode(unpack_tokens(trajectory.tokens))
