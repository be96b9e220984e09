"""What a node and a process that hosts environments say to each other. Spec: `specs/13-environments.md`.

    node -> host    Hello, Describe, Make, HeldOut, Prompt, Score     answered in order, one at a time
                    Collect, Cancel, Sampled                          many at once, each with its call
                    Ids, Text, Pieces, Said, Failed                   the answer to what the host waits for
    host -> node    Ready, Described, Made, Refused, Tasks, Text, Scores
                    Working, Generate, Collected, GaveUp
                    Encode, Decode, ChatPrompt, ChatExtend, ChatParse: it waits for the answer

The host is not trusted: what it says is bounded here by type, and `ledger.py` compares it with what it was
given before anybody uses it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from nous_node.protocol.constants import MAX_TRAJECTORIES
from nous_node.protocol.runs import Setting

from .environment import (
    Completion,
    EnvironmentInfo,
    GenerateRequest,
    LogprobFormat,
    Message,
    Piece,
    Score,
    Tool,
)

MAX_SAID = 2_048
"""Characters of a sentence: one with two long names in it."""
MAX_HELD_OUT = 65_536
"""Tasks of one evaluation."""
MAX_ANSWERS = 65_536
"""Answers that are scored at once: a score of three bytes takes a hundred once it is read."""
MAX_MEMBERS = 65_536
"""Environments of one family: several times the largest collection there is."""

Sentence = Annotated[str, Meta(max_length=MAX_SAID)]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Hello(msgspec.Struct, tag=True):
    """Answered with Ready and the same number: shows that it has started, and parts what came before."""

    number: Number


class Describe(msgspec.Struct, tag=True):
    """Tell what an entry point is, without making anything."""

    value: str
    """`module:attribute`, as in the entry point."""
    member: str = ""
    """Of a family: whose facts are asked for; empty: of the family itself."""


class Make(msgspec.Struct, tag=True):
    """Make an environment and keep it under a number."""

    slot: Number
    value: str
    member: str
    """Empty: the entry point is an environment's class, not a family's."""
    config: dict[str, Setting]


class HeldOut(msgspec.Struct, tag=True):
    """Tell the seeds of held-out tasks."""

    slot: Number
    count: int
    level: int


class Prompt(msgspec.Struct, tag=True):
    """Tell the prompt of a task."""

    slot: Number
    seed: bytes
    level: int
    held_out: int
    """How many held-out tasks were asked for: it is one of those; 0: it is none."""


class Answered(msgspec.Struct, array_like=True):
    """An answer to be scored."""

    text: str
    ended: bool


class ScoreAll(msgspec.Struct, tag=True):
    """Score answers to one task."""

    slot: Number
    seed: bytes
    level: int
    held_out: int
    answers: Annotated[list[Answered], Meta(max_length=MAX_ANSWERS)]


class Rules(msgspec.Struct):
    """What an environment sees of a policy."""

    group: int
    max_tokens: int
    context: int
    logprob_format: LogprobFormat
    eos_id: int
    chat: bool
    """Whether it has a conversation format."""


class Collect(msgspec.Struct, tag=True):
    """Collect the trajectories of a task. Ends with Collected or GaveUp."""

    call: Number
    slot: Number
    seed: bytes
    level: int
    rules: Rules


class Cancel(msgspec.Struct, tag=True):
    """Nobody waits for this call any more. Not answered."""

    call: Number


class Sampled(msgspec.Struct, tag=True):
    """Answers a Generate."""

    call: Number
    ask: Number
    completions: list[Completion]


class Ids(msgspec.Struct, tag=True):
    """Answers Encode."""

    ids: list[int]


class Pieces(msgspec.Struct, tag=True):
    """Answers ChatPrompt and ChatExtend."""

    pieces: list[Piece]


class Said(msgspec.Struct, tag=True):
    """Answers ChatParse."""

    message: Message


class Text(msgspec.Struct, tag=True):
    """Answers Decode, and Prompt in the other direction."""

    text: str


class Failed(msgspec.Struct, tag=True):
    """Answers what cannot be answered: the call is over."""

    text: str


class Ready(msgspec.Struct, tag=True):
    number: Number


class Described(msgspec.Struct, tag=True):
    """Answers Describe."""

    info: EnvironmentInfo | None
    """None: it is a family, and none of its members was asked for."""
    members: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=MAX_MEMBERS)] = []


class Made(msgspec.Struct, tag=True):
    slot: Number
    levels: Annotated[int, Meta(ge=0, le=1 << 31)]
    held_out: bool
    """Whether it has held-out tasks, prompts and scores."""


class Refused(msgspec.Struct, tag=True):
    """Answers Describe, Make, HeldOut, Prompt and ScoreAll where they failed."""

    slot: Number
    text: Sentence
    kind: Literal["unknown", "config", "broken", "failed"]
    """Which error it was."""


class Tasks(msgspec.Struct, tag=True):
    """Answers HeldOut."""

    seeds: Annotated[
        list[Annotated[bytes, Meta(min_length=32, max_length=32)]], Meta(max_length=MAX_HELD_OUT)
    ]


class Scores(msgspec.Struct, tag=True):
    """Answers ScoreAll, one for each answer."""

    scores: Annotated[list[Score], Meta(max_length=MAX_ANSWERS)]


class Working(msgspec.Struct, tag=True):
    """Code of this call begins to run; 0: nothing runs. Sent before, so that it is known what hangs."""

    call: Number


class Generate(msgspec.Struct, tag=True):
    """Ask the policy for tokens."""

    call: Number
    ask: Number
    requests: Annotated[list[GenerateRequest], Meta(min_length=1, max_length=MAX_TRAJECTORIES)]


class Encode(msgspec.Struct, tag=True):
    call: Number
    text: str


class Decode(msgspec.Struct, tag=True):
    call: Number
    ids: list[int]


class ChatPrompt(msgspec.Struct, tag=True):
    call: Number
    messages: list[Message]
    tools: list[Tool]


class ChatExtend(msgspec.Struct, tag=True):
    call: Number
    tokens: list[int]
    messages: list[Message]
    tools: list[Tool]


class ChatParse(msgspec.Struct, tag=True):
    call: Number
    tokens: list[int]


class Collected(msgspec.Struct, tag=True):
    call: Number
    trajectories: msgspec.Raw
    """A list of `rollouts.Trajectory`, decoded apart: what is wrong with it is wrong with this call alone."""


class GaveUp(msgspec.Struct, tag=True):
    """The call ended without trajectories."""

    call: Number
    text: Sentence


ToHost = (
    Hello
    | Describe
    | Make
    | HeldOut
    | Prompt
    | ScoreAll
    | Collect
    | Cancel
    | Sampled
    | Ids
    | Pieces
    | Said
    | Text
    | Failed
)
Question = Encode | Decode | ChatPrompt | ChatExtend | ChatParse
Aside = Question | Working | Generate | Collected | GaveUp
"""What is said of groups, whatever else is asked."""
Reply = Ids | Pieces | Said | Text | Failed
FromHost = (
    Ready
    | Described
    | Made
    | Refused
    | Tasks
    | Text
    | Scores
    | Working
    | Generate
    | Encode
    | Decode
    | ChatPrompt
    | ChatExtend
    | ChatParse
    | Collected
    | GaveUp
)
