"""Environments of one question and one answer: how the question is put and where the answer stands.

    wording, rest = read_wording(config)        the keys `format`, `system`, `template` and `answer`
    trajectories = await collect(policy, wording, question, mark)

All samples of a task have the same prompt and are sampled in one call of the policy. An answer that was cut
off by a limit is worth 0: it is not what the policy meant to say, and a policy that is paid for half an
answer never learns to end.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

from nous_node.protocol.rollouts import Role, Trajectory
from nous_node.protocol.runs import Setting

from .environment import Completion, Message, Piece, Policy, Score
from .errors import BadConfig, EnvironmentFailed
from .session import Session, sample_all

Format = Literal["", "chat", "plain"]
Place = Literal["tags", "last-line", "number", "whole"]

PLACEHOLDER: Final = "{question}"

MAX_TEXT: Final = 16_384
"""Characters of a template or a system message: more than a page is no wording."""

OPEN: Final = "<answer>"
CLOSE: Final = "</answer>"

_PLACES: Final[Mapping[Place, str]] = {
    "tags": f"Think step by step. Then write only the final answer between {OPEN} and {CLOSE}.",
    "last-line": "Think step by step. Then write only the final answer on the last line.",
    "number": "Reply with only the number.",
    "whole": "Reply with the final answer only.",
}
"""What a chat model is told, below the question."""

_PLAIN: Final[Mapping[Place, str]] = {
    "tags": "A user asks a question. The assistant thinks about it between <think> and </think>, and then "
    f"writes the final answer, and nothing else, between {OPEN} and {CLOSE}.\n"
    f"User: {PLACEHOLDER}\nAssistant: <think>",
    "last-line": "A user asks a question. The assistant thinks about it and writes the final answer, and "
    f"nothing else, on the last line.\nUser: {PLACEHOLDER}\nAssistant:",
    "number": f"Question: {PLACEHOLDER}\nAnswer:",
    "whole": f"Question: {PLACEHOLDER}\nAnswer:",
}
"""What a base model is to go on with: text alone, no control tokens."""

_NUMBER: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
"""For small models, which rather say a sentence than a number."""

KEYS: Final = ("format", "system", "template", "answer")

DOMAIN_HELD_OUT: Final = b"nous/held-out/1\x00"


@dataclass(frozen=True, slots=True)
class Wording:
    """How a question is put, and where its answer is looked for."""

    format: Format = ""
    """`chat`: the conversation format of the run's model; `plain`: text; empty: chat where there is one."""
    system: str = ""
    """Text of a system message before the question; conversations only."""
    template: str = ""
    """What is asked, with `{question}` where the question stands; empty: a wording that fits `answer`."""
    answer: Place = "tags"
    """`tags`: in the last pair of <answer> tags; `last-line`: the last line with text; `number`: the last
    number; `whole`: all of it."""

    def text(self, question: str, chat: bool) -> str:
        """What is asked, in a conversation or in plain text."""
        default = f"{PLACEHOLDER}\n\n{_PLACES[self.answer]}" if chat else _PLAIN[self.answer]
        return (self.template or default).replace(PLACEHOLDER, question)

    def converses(self, policy: Policy) -> bool:
        """Whether the question is put in the conversation format of the run's model. Raises
        EnvironmentFailed where it has none and the config asks for it."""
        if policy.chat is None and self.format == "chat":
            raise EnvironmentFailed(
                "The environment is set to format `chat`, and the run's model has no conversation format: "
                "leave `format` out, or take a chat model."
            )
        return policy.chat is not None and self.format != "plain"

    def pieces(self, policy: Policy, question: str) -> list[Piece]:
        """The prompt in tokens. Raises EnvironmentFailed."""
        if not self.converses(policy) or policy.chat is None:
            return [Piece(Role.RAW, policy.tokenizer.encode(self.text(question, False)))]
        return policy.chat.prompt(self.messages(self.text(question, True)))

    def messages(self, text: str) -> list[Message]:
        """The first messages of a conversation."""
        return [*([Message("system", self.system)] if self.system else []), Message("user", text)]

    def said(self, policy: Policy, completion: Completion) -> str:
        """Text of a reply, without its stop token and its thinking."""
        tokens, _, finish = completion
        if self.converses(policy) and policy.chat is not None:
            return policy.chat.parse(tokens).content
        return policy.tokenizer.decode(tokens[:-1] if finish == "stop" else tokens)

    def find(self, said: str) -> str | None:
        """The answer in what was said; None where it does not stand where it was asked for."""
        match self.answer:
            case "tags":
                end = said.rfind(CLOSE)
                start = said.rfind(OPEN, 0, max(end, 0))
                return said[start + len(OPEN) : end].strip() if start >= 0 else None
            case "last-line":
                lines = said.strip().splitlines()
                return lines[-1].strip() if lines else None
            case "number":
                numbers = _NUMBER.findall(said)
                return numbers[-1] if numbers else None
            case "whole":
                return said.strip() or None


def read_wording(
    config: Mapping[str, Setting], default: Place = "tags"
) -> tuple[Wording, dict[str, Setting]]:
    """The wording that a config asks for, and the settings that are not about it. `default`: where the answer
    is looked for without `answer`. Raises BadConfig."""
    rest = {key: value for key, value in config.items() if key not in KEYS}
    form = one_of(config, "format", ("", "chat", "plain"), "")
    place = one_of(config, "answer", tuple(_PLACES), default)
    template, system = _text(config, "template"), _text(config, "system")
    if template and template.count(PLACEHOLDER) != 1:
        raise BadConfig(f"`template` has {PLACEHOLDER} in it exactly once, where the question goes.")
    if system and form == "plain":
        raise BadConfig("`system` is a message of a conversation; with format `plain`, put it in `template`.")
    return Wording(cast(Format, form), system, template, cast(Place, place)), rest


def held_out_seed(environment: str, index: int) -> bytes:
    """Seed of a task for evaluation, of an environment that names none itself:
    SHA-256(DOMAIN_HELD_OUT || id || 0x00 || u64le(index)). [EVM-9] [RGY-7]"""
    return hashlib.sha256(
        DOMAIN_HELD_OUT + environment.encode() + b"\x00" + index.to_bytes(8, "little")
    ).digest()


def score_said(wording: Wording, said: str, ended: bool, mark: Callable[[str], Score]) -> Score:
    """What a reply is worth: the mark of the answer in it, with the component `format` for finding one."""
    answer = wording.find(said) if ended else None
    if answer is None:
        return Score(0.0, {"correct": 0.0, "score": 0.0, "format": 0.0})
    reward, components = mark(answer)
    return Score(reward, {"correct": 0.0, "score": reward, "format": 1.0, **components})


async def collect(
    policy: Policy, wording: Wording, question: str, mark: Callable[[str], Score]
) -> list[Trajectory]:
    """One turn each of `policy.group` samples. Raises EnvironmentFailed where the question does not fit."""
    pieces = wording.pieces(policy, question)
    length = sum(len(tokens) for _, tokens in pieces)
    if length >= policy.context:
        raise EnvironmentFailed(
            f"The question has {length} tokens and leaves no room in a context of {policy.context}: make it "
            "smaller by the environment's settings, or take a model with more context."
        )
    sessions = [Session(policy, index) for index in range(policy.group)]
    for session in sessions:
        for role, tokens in pieces:
            session.append(tokens, role)
    completions = await sample_all(policy, sessions)
    return [
        session.finish(*score_said(wording, wording.said(policy, one), one.finish == "stop", mark))
        for session, one in zip(sessions, completions, strict=True)
    ]


def one_of(config: Mapping[str, Setting], key: str, known: tuple[str, ...], default: str) -> str:
    """A setting that is one of a few words. Raises BadConfig."""
    value = config.get(key, default)
    if not isinstance(value, str) or value not in known:
        told = ", ".join(repr(one) for one in known)
        raise BadConfig(f"`{key}` is one of {told}, not {value!r}.")
    return value


def _text(config: Mapping[str, Setting], key: str) -> str:
    value = config.get(key, "")
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise BadConfig(f"`{key}` is a text of {MAX_TEXT:,} characters at most.")
    return value
