"""Held-out accuracy: answers to tasks that no run assigns, scored by their environments."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from nous_node.envs.environment import Environment, HeldOut
from nous_node.protocol.runs import SamplingRules
from nous_node.trainer.generate import Request, generate
from nous_node.trainer.policy import Policy

GREEDY_TEMPERATURE = 1e-6
"""Any logit gap above 1e-4 becomes certainty: the seeded draw then takes the most probable token."""


def held_out_accuracy(
    policy: Policy,
    environments: Sequence[Environment],
    rules: SamplingRules,
    tasks: int,
    temperature: float = GREEDY_TEMPERATURE,
) -> float | None:
    """Share of held-out tasks of level 0 with a full score, over all environments that have such tasks,
    `tasks` of each; None where none has. The uniforms of a task follow from its seed."""
    right = asked = 0
    for environment in environments:
        if not isinstance(environment, HeldOut):
            continue
        held_out = environment.held_out(tasks)
        requests = [
            Request(
                policy.tokenizer.encode(environment.prompt(task)),
                hashlib.sha256(task.seed).digest(),
                0,
                rules.max_tokens,
            )
            for task in held_out
        ]
        answers = generate(policy, requests, temperature, rules.stop)
        for task, answer in zip(held_out, answers, strict=True):
            ended = answer.finish == "stop"
            text = policy.tokenizer.decode(answer.tokens[:-1] if ended else answer.tokens)
            score = environment.score(task, text, ended)
            right += score.components.get("correct", score.reward) >= 1.0
            asked += 1
    return right / asked if asked else None
