"""Ops of chapter 13 and of the environments of one question: versions, seeds, handouts, texts and rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from nous_node.envs import (
    atropos_labels,
    openenv,
    openenv_words,
    random_streams,
    registry,
    sort_digits,
    verifiers_v0,
    verifiers_v0_config,
    verifiers_v1,
)
from nous_node.envs.distributions import normal
from nous_node.envs.environment import Completion, EnvironmentInfo, GenerateRequest, small_seed
from nous_node.envs.ledger import Ledger
from nous_node.envs.single_turn import held_out_seed
from nous_node.protocol.rollouts import Trajectory
from nous_node.protocol.runs import Setting

from .adapter_policy import default_tokenizer
from .adapter_question import Answer, Ask, BadQuestion, Ops, Raw

Config = dict[str, Setting]
Reproducible = Literal["exact", "seeded", "none"]
Scorer = Literal["pure", "sandbox", "judge"]


class Id(Ask, frozen=True):
    id: str


def environment_id(ask: Id) -> Answer:
    family, member = registry.split(ask.id)
    return {"family": family, "member": member}


class Facts(Ask, frozen=True):
    reproducible: Reproducible
    scorer: Scorer


def facts(ask: Facts) -> Answer:
    return {"verifiable": EnvironmentInfo("x", "1", ask.reproducible, ask.scorer, False, 1, 1).verifiable}


class Version(Ask, frozen=True):
    id: str
    own: str
    config: Config
    distributions: dict[str, str]


def version(ask: Version) -> Answer:
    info = EnvironmentInfo(ask.id, ask.own, "exact", "pure", False, 1, 1)
    pinned = {normal(name): release for name, release in ask.distributions.items()}
    material = registry.material(info, ask.config, pinned).hex() if pinned else ""
    return {"material": material, "version": registry.version_of(info, ask.config, pinned)}


class Seed(Ask, frozen=True):
    seed: Raw


def seed(ask: Seed) -> Answer:
    return {"small": small_seed(ask.seed)}


class HeldOut(Ask, frozen=True):
    id: str
    index: int


def held_out(ask: HeldOut) -> Answer:
    found = held_out_seed(ask.id, ask.index)
    return {"seed": found.hex(), "small": small_seed(found)}


# --- what is asked of a policy ------------------------------------------------------------------------


class Said(Ask, frozen=True):
    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]


class Asked(Ask, frozen=True):
    trajectory: int
    tokens: list[int]
    start: int
    max_tokens: int
    answer: Said | None = None


class Handout(Ask, frozen=True):
    group: int
    players: int
    max_tokens: int
    context: int
    asks: list[Asked]
    trajectories: Raw | None = None


class Told:
    """A policy that answers what a question says."""

    tokenizer: Any = None
    chat = None
    logprob_format: Final = "f32"

    def __init__(self, ask: Handout) -> None:
        self.group, self.max_tokens, self.context = ask.group, ask.max_tokens, ask.context
        self._answers = [one.answer for one in ask.asks if one.answer is not None]

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        now, self._answers = self._answers[: len(requests)], self._answers[len(requests) :]
        return [Completion(one.tokens, one.logprobs, one.finish) for one in now]


def handout(ask: Handout) -> Answer:
    asyncio.run(_handed_out(ask))
    return {}


async def _handed_out(ask: Handout) -> None:
    ledger = Ledger(Told(ask), ask.players)
    for one in ask.asks:
        request = GenerateRequest(one.tokens, one.trajectory, one.start, one.max_tokens)
        if one.answer is None:
            ledger.admit([request])
        else:
            await ledger.generate([request])
    if ask.trajectories is not None:
        ledger.check(_trajectories(ask.trajectories))


def _trajectories(data: bytes) -> list[Trajectory]:
    try:
        return msgspec.msgpack.decode(data, type=list[Trajectory])
    except msgspec.DecodeError as error:
        raise BadQuestion(f"The question's `trajectories` are none: {error}.") from error


# --- sort-digits --------------------------------------------------------------------------------------


class Text(Ask, frozen=True):
    tokens: list[int]


def text(ask: Text) -> Answer:
    return {"text": default_tokenizer().decode(ask.tokens)}


class Digits(Ask, frozen=True):
    seed: Raw
    length: int
    level: int


def digits(ask: Digits) -> Answer:
    environment = sort_digits.SortDigits({"length": ask.length})
    task = environment.task(ask.seed, ask.level)
    prompt = environment.prompt(task)
    return {
        "prompt": prompt,
        "tokens": default_tokenizer().encode(prompt),
        "solution": "".join(sorted(str(task.payload))),
    }


class Sorted(Digits, frozen=True, kw_only=True):
    answer: str
    ended: bool


def digits_score(ask: Sorted) -> Answer:
    environment = sort_digits.SortDigits({"length": ask.length})
    task = environment.task(ask.seed, ask.level)
    return {"reward": environment.score(task, ask.answer, ask.ended).reward}


# --- environments of other libraries ------------------------------------------------------------------


class Line(Ask, frozen=True):
    tokens: list[int]
    spans: list[tuple[int, int]]
    logprobs: list[float]


class Scored(Ask, frozen=True):
    lines: list[Line]
    groups: list[dict[str, Any]]


def atropos(ask: Scored) -> Answer:
    lines = [atropos_labels.Line(one.tokens, one.spans, one.logprobs) for one in ask.lines]
    worths = atropos_labels.worths(ask.groups, lines, _written_alike)
    return {
        "worths": [
            {
                "reward": one.reward,
                "advantages": one.advantages,
                "advantage": one.advantage,
                "components": one.components or {},
            }
            for one in worths
        ]
    }


def _written_alike(tokens: Sequence[int]) -> str:
    """Each token is the character of its number, but 68 is written like 67: as in tokenizers that have two
    tokens for one text."""
    return "".join(chr(67 if token == 68 else token) for token in tokens)


class ServerConfig(Ask, frozen=True):
    config: Config


def openenv_config(ask: ServerConfig) -> Answer:
    openenv.read_settings({**ask.config, "server": "http://127.0.0.1:1"})  # which a machine's owner names
    return {}


class Observed(Ask, frozen=True):
    observation: dict[str, Any]
    shown: list[str]


def openenv_shown(ask: Observed) -> Answer:
    return {"text": openenv_words.words(ask.observation, ask.shown)}


class Field(Ask, frozen=True):
    schema: dict[str, Any]
    named: str


def openenv_field(ask: Field) -> Answer:
    found = openenv_words.action_field(ask.schema, ask.named)
    return {"field": found.name, "text": found.takes_text}


class Acted(Field, frozen=True, kw_only=True):
    answer: str


def openenv_action(ask: Acted) -> Answer:
    field = openenv_words.action_field(ask.schema, ask.named)
    return {"action": openenv_words.action_of(ask.answer, field)}


class PackageConfig(Ask, frozen=True):
    interface: Literal["v0", "v1"]
    config: Config


def package_config(ask: PackageConfig) -> Answer:
    read = verifiers_v0_config.read_choices if ask.interface == "v0" else verifiers_v1.read_config
    return {"settings": read(ask.config)[1]}


class Rows(Ask, frozen=True):
    seed: Raw
    rows: int


def package_row(ask: Rows) -> Answer:
    return {"row": verifiers_v0.row_of(ask.seed, ask.rows)}


def package_stream(ask: Seed) -> Answer:
    return {"start": random_streams.stream_seed(ask.seed)}


OPS: Final[Ops] = {
    "environment-ids": environment_id,
    "environment-facts": facts,
    "versions": version,
    "seeds": seed,
    "seeds-held-out": held_out,
    "handouts": handout,
    "sort-digits": digits,
    "sort-digits-text": text,
    "sort-digits-score": digits_score,
    "atropos": atropos,
    "openenv-config": openenv_config,
    "openenv-words": openenv_shown,
    "openenv-field": openenv_field,
    "openenv-action": openenv_action,
    "packages-config": package_config,
    "packages-row": package_row,
    "packages-stream": package_stream,
}
