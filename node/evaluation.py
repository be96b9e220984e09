"""Held-out accuracy: greedy answers to tasks that no run assigns, scored by their environments."""

from __future__ import annotations

from collections.abc import Sequence

from nous_node.envs.environment import Environment, HeldOut
from nous_node.protocol.runs import SamplingRules
from nous_node.trainer.generate import Request, generate
from nous_node.trainer.policy import Policy

GREEDY_TEMPERATURE = 1e-6
"""Any logit gap above 1e-4 becomes certainty: the seeded draw then takes the most probable token."""

_KEY = bytes(32)


def held_out_accuracy(
    policy: Policy, environments: Sequence[Environment], rules: SamplingRules, tasks: int
) -> float | None:
    """Share of held-out tasks of level 0 with a full score, over all environments that have such tasks;
    None where none has. `tasks` each."""
    right = asked = 0
    for environment in environments:
        if not isinstance(environment, HeldOut):
            continue
        held_out = environment.held_out(tasks)
        prompts = [policy.tokenizer.encode(environment.prompt(task)) for task in held_out]
        requests = [Request(prompt, _KEY, 0, rules.max_tokens) for prompt in prompts]
        answers = generate(policy, requests, GREEDY_TEMPERATURE, rules.stop)
        for task, answer in zip(held_out, answers, strict=True):
            ended = answer.finish == "stop"
            text = policy.tokenizer.decode(answer.tokens[:-1] if ended else answer.tokens)
            score = environment.score(task, text, ended)
            right += score.components.get("correct", score.reward) >= 1.0
            asked += 1
    return right / asked if asked else None
