"""A byte tokenizer, an engine that is a function of its request, and toy environments."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from nous_node.envs import registry, remote
from nous_node.envs.batcher import EngineRequest
from nous_node.envs.environment import (
    Completion,
    EnvironmentInfo,
    GenerateRequest,
    Policy,
    PolicySettings,
    Task,
)
from nous_node.envs.recipes import RECIPES
from nous_node.envs.session import Session, sample_all
from nous_node.node.env_install import install
from nous_node.protocol.rollouts import Engine, Role, RolloutGroup, Trajectory
from nous_node.protocol.runs import Setting

from .foreign import install_worlds

EOS = 258


class ByteTokenizer:
    """Ids 0..255 are bytes; 258 ends a sample."""

    eos_id = EOS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        spelled = b"".join(bytes([i]) if i < 256 else f"<{i}>".encode() for i in ids)
        return spelled.decode("utf-8", "replace")


def dreamt(request: GenerateRequest, salt: int = 0) -> Completion:
    """Digits that depend on the whole request, often ended by a stop token."""
    material = repr((request.tokens, request.trajectory, request.start, salt)).encode()
    stream = hashlib.shake_256(material).digest(64)
    wanted = 1 + stream[0] % 8
    tokens = [48 + byte % 10 for byte in stream[1 : 1 + min(wanted, request.max_tokens)]]
    if wanted < request.max_tokens:
        return Completion([*tokens, EOS], [-0.5] * (len(tokens) + 1), "stop")
    tokens = (tokens * request.max_tokens)[: request.max_tokens]
    return Completion(tokens, [-0.25] * len(tokens), "length")


@dataclass
class DreamEngine:
    """An engine for the batcher that remembers the batches it was called with."""

    salt: int = 0
    batches: list[list[EngineRequest]] = field(default_factory=list)

    def __call__(self, requests: Sequence[EngineRequest]) -> list[Completion]:
        self.batches.append(list(requests))
        return [dreamt(request, self.salt) for _, request in requests]


class DreamPolicy:
    """The same as a policy of one task."""

    def __init__(self, settings: PolicySettings) -> None:
        self.tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group = settings.group
        self.max_tokens = settings.max_tokens
        self.context = settings.context
        self.logprob_format = settings.logprob_format

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return [dreamt(request) for request in requests]


class Toy:
    levels = 0
    name: ClassVar[str] = "toy"

    def __init__(self, config: Mapping[str, Setting]) -> None:
        self.config = config

    def task(self, seed: bytes, level: int) -> Task:
        return Task(seed, level, seed[0] % 10)


def _info(name: str, turns: int, agents: int = 1) -> EnvironmentInfo:
    return EnvironmentInfo(name, "1", "exact", "pure", False, turns, agents)


class Guess(Toy):
    """Three turns: the environment says whether the last digit was too low or too high."""

    info: ClassVar[EnvironmentInfo] = _info("guess", 3)

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        secret = task.payload
        assert isinstance(secret, int)
        sessions = [Session(policy, index) for index in range(policy.group)]
        found = dict.fromkeys(range(policy.group), 0.0)
        for session in sessions:
            session.append(policy.tokenizer.encode("guess a digit:"), Role.USER)
        going = sessions
        for turn in range(3):
            completions = await sample_all(policy, going)
            after = []
            for session, (tokens, _, _) in zip(going, completions, strict=True):
                guess = tokens[0] - 48
                found[session.trajectory] = max(found[session.trajectory], float(guess == secret))
                if guess != secret and session.room and turn < 2:
                    hint = "low" if guess < secret else "high"
                    session.append(policy.tokenizer.encode(f" {hint};"), Role.TOOL)
                    if session.room:
                        after.append(session)
            going = after
        return [session.finish(found[session.trajectory], {"found": 1.0}) for session in sessions]


class Duel(Toy):
    """Two agents a sample, each seeing the other's digits; every sample is a task of its own."""

    info: ClassVar[EnvironmentInfo] = _info("duel", 2, 2)

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        pairs = await asyncio.gather(*[self._play(policy, index) for index in range(policy.group)])
        return [trajectory for pair in pairs for trajectory in pair]

    async def _play(self, policy: Policy, sample: int) -> list[Trajectory]:
        left = Session(policy, 2 * sample, "left")
        right = Session(policy, 2 * sample + 1, "right")
        left.append(policy.tokenizer.encode("say:"), Role.USER)
        said = (await left.sample()).tokens
        right.append([*policy.tokenizer.encode("they said:"), *said[:-1]], Role.USER)
        answered = (await right.sample()).tokens
        won = len(answered) > len(said)
        return [
            left.finish(float(not won), advantages=[0.5 * (not won)] * left.sampled),
            right.finish(float(won), advantages=[0.5 * won] * right.sampled),
        ]


class Failing(Toy):
    """Raises after its first turn."""

    info: ClassVar[EnvironmentInfo] = _info("failing", 1)

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        await policy.generate([GenerateRequest([1], 0, 0, 1)])
        raise ZeroDivisionError("a bug in the scorer")


class Stuck(Toy):
    """Waits for something that never comes."""

    info: ClassVar[EnvironmentInfo] = _info("stuck", 1)

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        await asyncio.get_running_loop().create_future()
        return []


@dataclass(frozen=True)
class Toys:
    guess: Guess
    duel: Duel
    failing: Failing
    stuck: Stuck


@pytest.fixture(scope="session")
def ecosystem_python(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """The interpreter that has a recipe's releases, which is made where it is not there yet.

    In the folder that NOUS_NODE_TEST_ENVS names, with a virtual environment for each recipe, else in the
    tree. For tests marked `ecosystem`: an install takes up to a minute and needs the network.
    """
    named = os.environ.get("NOUS_NODE_TEST_ENVS")
    folder = Path(named) if named else pytestconfig.rootpath / ".venv-envs" / "envs"

    def found(recipe: str) -> Path:
        python = folder / recipe / "bin" / "python"
        if not named:
            install(folder.parent, RECIPES[recipe], print)
        assert python.is_file(), f"{python} is missing: run `make test-envs`."
        return python

    return found


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def settings(tokenizer: ByteTokenizer) -> PolicySettings:
    return PolicySettings(tokenizer, 4, 12, 64, frozenset([EOS]))


@pytest.fixture
def policy(settings: PolicySettings) -> DreamPolicy:
    return DreamPolicy(settings)


@pytest.fixture
def engine() -> DreamEngine:
    return DreamEngine()


@pytest.fixture
def toys() -> Toys:
    return Toys(Guess({}), Duel({}), Failing({}), Stuck({}))


@pytest.fixture
def group_of() -> object:
    """Trajectories as a rollout group."""

    def make(trajectories: list[Trajectory]) -> RolloutGroup:
        return RolloutGroup(bytes(32), 0, "toy", Engine("dream", "1", "float32", "cpu"), trajectories)

    return make


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed distribution of a third party."""
    folder = tmp_path / "foreign"
    install_worlds(folder)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    registry._installed.cache_clear()
    yield folder
    remote.close_all()
    registry._installed.cache_clear()
