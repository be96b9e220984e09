"""Held-out accuracy: answers to tasks that no run assigns, scored by their environments."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from nous_node.envs.environment import Environment, HeldOut
from nous_node.protocol.runs import SamplingRules
from nous_node.trainer.errors import LogitsError
from nous_node.trainer.generate import Completion, Request, generate
from nous_node.trainer.policy import Policy

GREEDY_TEMPERATURE = 1e-6
"""Any logit gap above 1e-4 becomes certainty: the seeded draw then takes the most probable token."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Held-out tasks with a full score, of those that were asked."""

    right: int
    asked: int

    @property
    def share(self) -> float:
        return self.right / self.asked


def held_out_accuracy(
    policy: Policy,
    environments: Sequence[Environment],
    rules: SamplingRules,
    tasks: int,
    temperature: float = GREEDY_TEMPERATURE,
) -> Accuracy | None:
    """Of held-out tasks of level 0, `tasks` of each environment that has such tasks; None where none has. The
    uniforms of a task follow from its seed. A policy whose weights are broken has none right."""
    right = asked = 0
    for environment in environments:
        if not isinstance(environment, HeldOut):
            continue
        held_out = environment.held_out(tasks)
        asked += len(held_out)
        requests = [
            Request(
                policy.tokenizer.encode(environment.prompt(task)),
                hashlib.sha256(task.seed).digest(),
                0,
                rules.max_tokens,
            )
            for task in held_out
        ]
        for task, answer in zip(held_out, _answers(policy, requests, temperature, rules), strict=False):
            ended = answer.finish == "stop"
            text = policy.tokenizer.decode(answer.tokens[:-1] if ended else answer.tokens)
            score = environment.score(task, text, ended)
            right += score.components.get("correct", score.reward) >= 1.0
    return Accuracy(right, asked) if asked else None


def _answers(
    policy: Policy, requests: Sequence[Request], temperature: float, rules: SamplingRules
) -> list[Completion]:
    """None at all where the policy computes what is no number."""
    try:
        return generate(policy, requests, temperature, rules.stop)
    except LogitsError:
        return []
