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

from nous_node.protocol.rollouts import Role, Trajectory
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
    distributions: tuple[str, ...] = ()
    """Installed distributions whose releases decide its tasks, texts or rewards: part of the version that a
    run names (`registry.version`)."""
    description: str = ""
    """One sentence for people."""

    @property
    def verifiable(self) -> bool:
        """Whether a trainer can compute its prompts and rewards again: those of a `seeded` one with the
        releases that the version stands for."""
        return self.reproducible != "none" and self.scorer != "judge"


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


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an assistant's turn asks for."""

    id: str
    name: str
    arguments: str
    """JSON text of an object, if the model wrote one."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, as templates know them."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    """What stood in the turn's thinking block."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a tool's answer: the call that it answers."""
    name: str = ""
    """Of a tool's answer: the tool."""


class Tool(msgspec.Struct, frozen=True):
    """A tool that the policy may call."""

    name: str
    description: str
    parameters: str
    """JSON schema, as text."""


class Piece(NamedTuple):
    """Tokens that the environment adds: one untrained segment."""

    role: Role
    tokens: list[int]


class Chat(Protocol):
    """The conversation format of a run's model, in tokens. What was sampled is never tokenised again: a turn
    is closed and new messages are put behind it. [CHT-1]"""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), /) -> list[Piece]:
        """A conversation up to where the policy's answer begins. Raises EnvironmentFailed where the format
        does not know such messages."""
        ...

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = (), /
    ) -> list[Piece]:
        """What comes behind `tokens`, the last of which the policy sampled: the close of its turn where that
        is missing (a piece of role ASSISTANT), then the messages up to where the next answer begins."""
        ...

    def parse(self, tokens: Sequence[int], /) -> Message:
        """The assistant's message in one sampled turn, its stop token included or not: content, thinking and
        tool calls apart. Text that fits no format is all content."""
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
    def chat(self) -> Chat | None:
        """The conversation format of the run's model; None for base models and refused templates."""
        ...

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
    chat: Chat | None = None
    vocabulary: int = 1 << 32
    """Token ids are below it."""

    @classmethod
    def of(cls, manifest: RunManifest, tokenizer: Tokenizer, chat: Chat | None = None) -> Self:
        rules = manifest.sampling
        return cls(
            tokenizer,
            manifest.group,
            rules.max_tokens,
            manifest.model.context,
            frozenset(rules.stop),
            rules.logprobs,
            chat,
            manifest.model.vocabulary,
        )


class Environment(Protocol):
    """A source of tasks and rewards. The class of one that is no member of a family is made with its config
    and has `info` without being made."""

    @property
    def info(self) -> EnvironmentInfo: ...

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


def keeps_time(environment: Environment) -> bool:
    """Whether an environment ends its calls itself, at a deadline that counts only while it works. Anybody
    else who looked at the clock would also count what it waits for."""
    return getattr(environment, "keeps_time", False)


def renewed(environment: Environment) -> bool:
    """Whether what it runs in was put aside for something new, because groups before the last one may have
    changed it: where it executes what a policy wrote, a text can change what later ones are paid."""
    renew = getattr(environment, "renew", None)
    return environment.info.scorer == "sandbox" and renew is not None and renew()


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


class Family(Protocol):
    """Many environments behind one entry point: their ids are `NAME/MEMBER`. A class with these methods; its
    module imports quickly, what is heavy waits for `make`."""

    recipe: ClassVar[str]
    """Which recipe of `recipes.py` its members need."""

    @classmethod
    def members(cls) -> Sequence[str]:
        """Known members, sorted; empty where any name may be one."""
        ...

    @classmethod
    def facts(cls, member: str, /) -> EnvironmentInfo:
        """Without importing what the member needs. Raises UnknownEnvironment, with the reason where it is
        known and refused."""
        ...

    @classmethod
    def make(cls, member: str, config: Mapping[str, Setting], /) -> Environment:
        """Runs in the environment's own process. Raises BadConfig."""
        ...


def small_seed(seed: bytes) -> int:
    """31 bits of a task seed, for libraries that take an int: `u32le(seed[0:4]) >> 1`. [EVM-4]"""
    return int.from_bytes(seed[:4], "little") >> 1
