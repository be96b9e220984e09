"""Ways to come by tokens that the assigned randomness did not draw from the named checkpoint.

    the honest engine -> other weights, another sampler, other tokens, log-probs of its own

Each takes what an environment asks of an engine, and returns what an engine would. `scored` ones report the
log-probs that the true model gives to their tokens: whoever checks log-probs only believes them.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Sequence

import torch

from nous_node.envs.batcher import EngineRequest
from nous_node.envs.environment import Completion
from nous_node.node.following import Head
from nous_node.protocol.errors import Code
from nous_node.protocol.rollouts import RolloutGroup, unpack_floats
from nous_node.trainer.generate import uniforms
from nous_node.trainer.policy import Policy
from nous_node.trainer.sampling import choose

from .forger import Forger

Requests = Sequence[EngineRequest]
Completions = list[Completion]
Engine = Callable[[Forger, Requests], Completions]
Logits = Callable[[torch.Tensor], torch.Tensor]

TRIES = 4
"""Draws of which the best is kept."""

INT4_GROUP = 32
"""Weights that share a scale."""

COUNTERS = 3
"""Two that are left out are no reason for a trainer to wait."""

ROUNDING = 1e-5
"""Of log-probs in float32, by one engine and another."""


def scored(engine: Engine) -> Engine:
    """With the log-probs that the checkpoint gives to those tokens."""
    return lambda forger, requests: forger.scored(requests, engine(forger, requests))


# --- other weights -----------------------------------------------------------------------------------


def rounded(policy: Policy, bits: int, group: int | None = None) -> Policy:
    """Weights rounded to the nearest of 2^bits levels: one scale a row, or a `group` of its weights."""
    model = copy.deepcopy(policy.model)
    largest = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                parts = weight.view(-1, group or weight.shape[1])
                scale = parts.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / largest
                parts.copy_((parts / scale).round() * scale)
    return Policy(model, policy.tokenizer, policy.folder, policy.context)


@functools.cache
def _int8(policy: Policy) -> Policy:
    return rounded(policy, 8)


@functools.cache
def _int4(policy: Policy) -> Policy:
    return rounded(policy, 4, INT4_GROUP)


def with_int8(forger: Forger, requests: Requests) -> Completions:
    return forger.sample(requests, policy=_int8(forger.policy))


def with_int4(forger: Forger, requests: Requests) -> Completions:
    return forger.sample(requests, policy=_int4(forger.policy))


# --- another sampler ---------------------------------------------------------------------------------


def heated(heat: float) -> Engine:
    """At another temperature, with the log-probs of that one."""
    return lambda forger, requests: forger.sample(requests, heat)


def nucleus(logits: torch.Tensor, share: float = 0.9) -> torch.Tensor:
    """Top-p: without the least likely tokens, as far as the others have this share together."""
    ordered, places = logits.sort(-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    return logits.scatter(-1, places, ordered.masked_fill(before >= share, -torch.inf))


def only_the_best(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True), -torch.inf)


def stepwise(change: Logits) -> Engine:
    """Draws from changed logits, with the uniforms that were assigned."""
    return lambda forger, requests: [_drawn(forger, request, change) for request in requests]


@torch.inference_mode()
def _drawn(forger: Forger, request: EngineRequest, change: Logits) -> Completion:
    rules, wanted = forger.manifest.sampling, request.request
    heat = rules.temperature
    drawn, logprobs = [], []
    for u in uniforms(request.key, wanted.start, wanted.max_tokens):
        ids = torch.tensor([[*wanted.tokens, *drawn]])
        logits = change(forger.policy.model(input_ids=ids).logits[:, -1] / heat) * heat
        token, logprob = choose(logits, torch.tensor([u], dtype=torch.float64), heat)
        drawn.append(int(token))
        logprobs.append(float(logprob))
        if drawn[-1] in rules.stop:
            return Completion(drawn, logprobs, "stop")
    return Completion(drawn, logprobs, "length")


def other_key(request: EngineRequest, number: int) -> EngineRequest:
    """With randomness of its own."""
    return request._replace(key=hashlib.sha256(request.key + number.to_bytes(32)).digest())


def with_other_keys(forger: Forger, requests: Requests) -> Completions:
    return forger.sample([other_key(request, 1) for request in requests])


def best_of(forger: Forger, requests: Requests) -> Completions:
    """Several draws with keys of its own, and the one with the best reward kept."""
    made = [forger.sample([other_key(request, number) for request in requests]) for number in range(TRIES)]
    return [
        max(draws, key=lambda one: reward(forger, request, one))
        for request, *draws in zip(requests, *made, strict=True)
    ]


def reward(forger: Forger, request: EngineRequest, made: Completion) -> float:
    """What sort-digits gives for it."""
    answer = forger.policy.tokenizer.decode(made.tokens[:-1]) if made.finish == "stop" else ""
    right = solution(forger, request)
    return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right))


def solution(forger: Forger, request: EngineRequest) -> str:
    prompt = forger.policy.tokenizer.decode(request.request.tokens)
    return "".join(sorted(prompt.removeprefix("sort ").removesuffix("=")))


def one_for_all(forger: Forger, requests: Requests) -> Completions:
    """The first sample in place of each other one."""
    return forger.sample([requests[0]] * len(requests))


# --- other tokens ------------------------------------------------------------------------------------


def with_edit(forger: Forger, requests: Requests) -> Completions:
    """The first token of an answer is another one; its log-probs are those of what was sampled."""
    made = forger.sample(requests)
    place = max(range(len(made)), key=lambda number: len(made[number].tokens))
    first, *others = made[place].tokens
    made[place] = made[place]._replace(tokens=[ord("7") if first != ord("7") else ord("3"), *others])
    return made


def solved(forger: Forger, requests: Requests) -> Completions:
    """The answer that the scorer wants, written by hand; it is truly worth its reward."""
    stop = forger.manifest.sampling.stop[0]
    made = []
    for request in requests:
        tokens = [*forger.policy.tokenizer.encode(solution(forger, request)), stop]
        made.append(Completion(tokens, [-0.1] * len(tokens), "stop"))
    return forger.scored(requests, made)


def stopped(forger: Forger, requests: Requests) -> Completions:
    """Each answer ends after its second token, with an end of sequence that was not drawn."""
    stop = forger.manifest.sampling.stop[0]
    made = []
    for one in forger.sample(requests):
        tokens = [*one.tokens[:2], stop] if len(one.tokens) > 3 else one.tokens
        made.append(Completion(tokens, [-0.1] * len(tokens), "stop"))
    return forger.scored(requests, made)


def guessed(forger: Forger, requests: Requests) -> Completions:
    """Honest tokens; log-probs that nobody computed."""
    return [one._replace(logprobs=[-0.5] * len(one.tokens)) for one in forger.sample(requests)]


# --- where it makes a difference ---------------------------------------------------------------------


def cheating(head: Head, forger: Forger, engine: Engine) -> RolloutGroup | None:
    """The first group of its next counters in which the cheat shows; most of them change every group."""
    for _ in range(COUNTERS):
        true = forger.group(head)
        group = forger.group(head, true.counter, lambda requests: engine(forger, requests))
        if differs(group, true):
            return group
    return None


def differs(group: RolloutGroup, true: RolloutGroup) -> bool:
    """Whether it is another group than the honest one, beyond what rounding does to log-probs."""
    for one, other in zip(group.trajectories, true.trajectories, strict=True):
        if one.tokens != other.tokens:
            return True
        pairs = zip(unpack_floats(one.logprobs), unpack_floats(other.logprobs), strict=True)
        if any(abs(a - b) > ROUNDING for a, b in pairs):
            return True
    return False


# --- all of them -------------------------------------------------------------------------------------

LOGPROBS, DRAW = Code.LOGPROB_MISMATCH, Code.SAMPLING_MISMATCH

CHEATS: dict[str, tuple[Code, Engine]] = {
    "edited token with old log-probs": (LOGPROBS, with_edit),
    "edited token with recomputed log-probs": (DRAW, scored(with_edit)),
    "reward by exploiting a scorer": (DRAW, solved),
    "best of N": (DRAW, best_of),
    "one sample in place of the others": (DRAW, one_for_all),
    "randomness of its own": (DRAW, with_other_keys),
    "greedy": (DRAW, scored(stepwise(only_the_best))),
    "greedy, with its own log-probs": (LOGPROBS, stepwise(only_the_best)),
    "temperature 0.9": (DRAW, scored(heated(0.9))),
    "temperature 1.1": (DRAW, scored(heated(1.1))),
    "temperature 0.9, with its own log-probs": (LOGPROBS, heated(0.9)),
    "temperature 1.1, with its own log-probs": (LOGPROBS, heated(1.1)),
    "top-p 0.9": (DRAW, scored(stepwise(nucleus))),
    "top-p 0.9, with its own log-probs": (LOGPROBS, stepwise(nucleus)),
    "int8 weights": (LOGPROBS, with_int8),
    "int4 weights": (LOGPROBS, with_int4),
    "fabricated log-probs": (LOGPROBS, guessed),
    "forged end of sequence": (DRAW, stopped),
}
"""Name -> code, engine: whatever changes tokens, weights or sampler, and leaves the form as it should be."""

SUBTLE: dict[str, Engine] = {
    "int8 weights with recomputed log-probs": scored(with_int8),
    "int4 weights with recomputed log-probs": scored(with_int4),
}
"""What mostly draws the same tokens, and then is the honest group."""
