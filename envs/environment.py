"""What an environment is, and what it sees of a policy. Spec: `specs/envs/`.

    environment.collect_trajectories(task, policy) -> the trajectories of one rollout group

A policy takes token ids and returns token ids with log-probs: text is the environment's own matter. The
same method runs on the volunteer, where the policy is an engine, and at the verifier, where the policy
hands out the recorded tokens (`replay`). It has to be a function of the task and of what the policy
returned: no clock, no process-wide random state, no order of dictionaries that a hash seed decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

import msgspec

from nous_node.protocol.rollouts import Trajectory
from nous_node.protocol.runs import RunManifest, Setting

Finish = Literal["stop", "length"]
LogprobFormat = Literal["f32", "f16"]


class EnvironmentInfo(msgspec.Struct, frozen=True):
    """Facts that hold whatever the config says; readable without making the environment."""

    id: str
    """Name in the entry-point group `nous.envs` and in run manifests."""
    version: str
    """Raised whenever the same seed, level and tokens give other prompts or rewards."""
    reproducible: Literal["exact", "seeded", "none"]
    """`exact`: equal on every machine; `seeded`: equal with the same releases of its dependencies."""
    scorer: Literal["pure", "sandbox", "judge"]
    """`pure`: arithmetic on text; `sandbox`: executes what the policy wrote; `judge`: asks a model."""
    network: bool
    """Whether it needs anything outside this machine."""
    max_turns: int
    """Most generations of one trajectory."""
    agents: int
    """Trajectories of one sample: 1, or the number of players."""

    @property
    def verifiable(self) -> bool:
        """Whether a trainer can compute its prompts and rewards again."""
        return self.reproducible == "exact" and self.scorer != "judge"


@dataclass(frozen=True, slots=True)
class Task:
    """One task, derived from `seed` alone at curriculum level `level`."""

    seed: bytes
    """32 bytes."""
    level: int
    """0 .. `Environment.levels`."""
    payload: object
    """Whatever the environment needs; only the environment that made it looks inside."""


class Tokenizer(Protocol):
    """Text to ids and back; plain text never becomes a control token."""

    @property
    def eos_id(self) -> int: ...

    def encode(self, text: str, /) -> list[int]:
        """Ids of `text` without special tokens."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """Text of `ids`, control tokens spelled out."""
        ...


class GenerateRequest(NamedTuple):
    """Asks for the next tokens of one trajectory."""

    tokens: list[int]
    """All tokens of the trajectory so far: prompt, earlier turns, answers to them."""
    trajectory: int
    """Index of the trajectory in its group: chooses its sampler key."""
    start: int
    """Sampled tokens of the trajectory so far: which uniform comes next."""
    max_tokens: int
    """Most tokens to sample now; at least 1."""


class Completion(NamedTuple):
    """What the policy sampled."""

    tokens: list[int]
    """1 to `max_tokens` ids, a stop token included."""
    logprobs: list[float]
    """One a token, at the run's temperature."""
    finish: Finish
    """`stop`: the last token is a stop token; `length`: exactly `max_tokens` were sampled."""


class Policy(Protocol):
    """What an environment sees of the policy while it works on one task."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def group(self) -> int:
        """Samples of one task."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most sampled tokens of one trajectory over all its turns."""
        ...

    @property
    def context(self) -> int:
        """Most tokens of one trajectory, sampled or not."""
        ...

    @property
    def logprob_format(self) -> LogprobFormat: ...

    async def generate(self, requests: Sequence[GenerateRequest], /) -> list[Completion]:
        """One completion for each request, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What every policy of a run has in common."""

    tokenizer: Tokenizer
    group: int
    max_tokens: int
    context: int
    stop: frozenset[int]
    """Token ids that end a completion."""
    logprob_format: LogprobFormat = "f32"

    @classmethod
    def of(cls, manifest: RunManifest, tokenizer: Tokenizer) -> Self:
        rules = manifest.sampling
        return cls(
            tokenizer,
            manifest.group,
            rules.max_tokens,
            manifest.model.context,
            frozenset(rules.stop),
            rules.logprobs,
        )


class Environment(Protocol):
    """A source of tasks and rewards. The class is made with its config and has `info` without being made."""

    info: ClassVar[EnvironmentInfo]

    @property
    def levels(self) -> int:
        """Highest curriculum level; 0 where there is no curriculum."""
        ...

    def task(self, seed: bytes, level: int, /) -> Task:
        """The task of a 32-byte seed. A level above `levels` counts as `levels`."""
        ...

    async def collect_trajectories(self, task: Task, policy: Policy, /) -> list[Trajectory]:
        """All samples of a task: the rollout group's trajectories.

        `policy.group` times `info.agents` of them, or more where a history was rewritten. Trajectory i of
        the list is the one whose requests said `trajectory=i`. Raises EnvironmentFailed.
        """
        ...


class Score(NamedTuple):
    """What an answer is worth."""

    reward: float
    components: dict[str, float]


@runtime_checkable
class HeldOut(Protocol):
    """Environments of one turn that can be evaluated with one generation and one score a task."""

    def held_out(self, count: int, level: int = 0, /) -> list[Task]:
        """The same `count` tasks in every run, of seeds that no run assigns."""
        ...

    def prompt(self, task: Task, /) -> str: ...

    def score(self, task: Task, answer: str, ended: bool, /) -> Score:
        """`answer`: text of the sampled tokens without the stop token; `ended`: whether it was sampled."""
        ...


class EnvironmentClass(Protocol):
    """What an entry point of `nous.envs` names. Its module imports quickly: what is heavy waits until an
    environment is made."""

    info: ClassVar[EnvironmentInfo]

    def __call__(self, config: Mapping[str, Setting], /) -> Environment:
        """Raises BadConfig."""
        ...
