"""Answers that answer nothing, and a policy that gives them; and one that makes its answers up.

No weights: what is sampled follows from the request alone, the same in every process.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from nous_node.envs.batcher import EngineRequest
from nous_node.envs.environment import Completion, GenerateRequest, PolicySettings

NONSENSE: Final = (
    "",
    " \n ",
    bytes(random.Random(1).randrange(256) for _ in range(200)).decode("latin-1"),
    "a" * 10_000,
    "7" * 10_000,
    "x**9**9**9",
    "__import__('os')._exit(3)",
    "1e999999",
    "nan",
    "ünï∀🎲\u202e\u0000",
    "(" * 2_000 + ")" * 2_000,
    '{"a": [1, {"b": null}]}',
    "I do not know the answer.",
)
"""No answer to anything, except by accident: empty, noise, very long, code, numbers that are none."""

FORMS: Final = ("{}", "<answer>{}</answer>", "[{}]", "\\boxed{{{}}}")
"""Where environments look for the answer in what was said."""

LOGPROB: Final = -1.0
"""Of every token: nobody looks at it."""

SEEN: Final = 4_000
"""Last tokens of a request that words are taken from."""


def spoken(settings: PolicySettings, text: str, request: GenerateRequest) -> Completion:
    """A text and a stop token, or as much of the text as there is room for."""
    tokens = settings.tokenizer.encode(text)
    if len(tokens) < request.max_tokens:
        tokens = [*tokens, min(settings.stop)]
        return Completion(tokens, [LOGPROB] * len(tokens), "stop")
    tokens = tokens[: request.max_tokens]
    return Completion(tokens, [LOGPROB] * len(tokens), "length")


@dataclass
class Dreamer:
    """Says something short at random, often with words of what it was asked. Remembers what it was asked."""

    settings: PolicySettings
    asked: dict[bytes, list[list[int]]] = field(default_factory=dict)
    """Sampler key -> for each turn the tokens that were seen, and those with the answer."""

    def __call__(self, requests: Sequence[EngineRequest]) -> list[Completion]:
        return [self._said(key, request) for key, request in requests]

    def _said(self, key: bytes, request: GenerateRequest) -> Completion:
        seen = self.settings.tokenizer.decode(request.tokens[-SEEN:])
        material = repr((request.tokens, request.trajectory, request.start)).encode()
        draw = random.Random(hashlib.sha256(material).digest())
        words = re.findall(r"\w+|\[\w+\]", seen) or ["yes"]
        text = draw.choice(FORMS).format(draw.choice([str(draw.randrange(100)), draw.choice(words)]))
        made = spoken(self.settings, text, request)
        self.asked.setdefault(key, []).extend([request.tokens, [*request.tokens, *made.tokens]])
        return made


@dataclass
class Babbler:
    """Says one text of several in every turn, by the number of the trajectory."""

    settings: PolicySettings
    texts: Sequence[str]

    def __call__(self, requests: Sequence[EngineRequest]) -> list[Completion]:
        return [
            spoken(self.settings, self.texts[request.trajectory % len(self.texts)], request)
            for _, request in requests
        ]
