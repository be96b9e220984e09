"""Rollout groups that are not what they claim, signed by a key that counts: each is refused with its code,
with what was measured, and none of it is ever trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from nous_node.envs.batcher import EngineRequest
from nous_node.envs.environment import Completion
from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import Code
from nous_node.protocol.rollouts import (
    RolloutGroup,
    Segment,
    Trajectory,
    pack_floats,
    pack_tokens,
    trained_tokens,
    unpack_floats,
    unpack_tokens,
)

Completions = list[Completion]
Requests = Sequence[EngineRequest]


def telling(arena: Any, forger: Any) -> RolloutGroup:
    """An honest group in which a change shows: answers of several tokens, no two alike."""
    while True:
        group: RolloutGroup = forger.group(arena.head)
        if len({one.tokens for one in group.trajectories}) == len(group.trajectories) and all(
            trained_tokens(one) > 2 for one in group.trajectories
        ):
            return group


def edited(group: RolloutGroup, **changes: Any) -> RolloutGroup:
    """The group with another first trajectory."""
    first, *others = group.trajectories
    return msgspec.structs.replace(group, trajectories=[msgspec.structs.replace(first, **changes), *others])


def numbers(first: Trajectory, change: Callable[[list[float]], object]) -> bytes:
    values = unpack_floats(first.logprobs)
    change(values)
    return pack_floats(values)


def set_first(value: float) -> Callable[[list[float]], object]:
    return lambda values: values.__setitem__(0, value)


def shorter(group: RolloutGroup) -> RolloutGroup:
    """The first answer without its last token; it still says that it stopped."""
    first = group.trajectories[0]
    prompt, answer = first.segments
    return edited(
        group,
        tokens=pack_tokens(unpack_tokens(first.tokens)[:-1]),
        segments=[prompt, msgspec.structs.replace(answer, length=answer.length - 1)],
        logprobs=pack_floats(unpack_floats(first.logprobs)[:-1]),
    )


def tokens_with(group: RolloutGroup, place: int, token: int) -> RolloutGroup:
    tokens = unpack_tokens(group.trajectories[0].tokens)
    tokens[place] = token
    return edited(group, tokens=pack_tokens(tokens))


def of_segments(group: RolloutGroup, change: Callable[[Segment, Segment], list[Segment]]) -> RolloutGroup:
    return edited(group, segments=change(*group.trajectories[0].segments))


Edit = Callable[[RolloutGroup], RolloutGroup]

EDITS: dict[str, tuple[Code, Edit]] = {
    "one sample withheld": (
        Code.GROUP_SIZE,
        lambda group: msgspec.structs.replace(group, trajectories=group.trajectories[:1]),
    ),
    "one sample more": (
        Code.GROUP_SIZE,
        lambda group: msgspec.structs.replace(
            group, trajectories=[*group.trajectories, group.trajectories[0]]
        ),
    ),
    "samples exchanged": (
        Code.SAMPLING_MISMATCH,
        lambda group: msgspec.structs.replace(group, trajectories=group.trajectories[::-1]),
    ),
    "environment that was not assigned": (
        Code.WRONG_ENVIRONMENT,
        lambda group: msgspec.structs.replace(group, env="guess-a-number"),
    ),
    "token outside the vocabulary": (Code.TOKEN_RANGE, lambda group: tokens_with(group, 1, 1 << 20)),
    "another prompt": (Code.PROMPT_MISMATCH, lambda group: tokens_with(group, 1, ord("X"))),
    "segments that do not add up": (
        Code.SEGMENTS,
        lambda group: of_segments(group, lambda prompt, answer: [prompt]),
    ),
    "prompt said to be sampled": (
        Code.SEGMENTS,
        lambda group: of_segments(
            group, lambda prompt, answer: [msgspec.structs.replace(prompt, trained=True), answer]
        ),
    ),
    "answer said not to be sampled": (
        Code.LOGPROBS,
        lambda group: of_segments(
            group, lambda prompt, answer: [prompt, msgspec.structs.replace(answer, trained=False)]
        ),
    ),
    "log-prob that is NaN": (
        Code.NOT_FINITE,
        lambda group: edited(group, logprobs=numbers(group.trajectories[0], set_first(math.nan))),
    ),
    "log-prob that is infinite": (
        Code.NOT_FINITE,
        lambda group: edited(group, logprobs=numbers(group.trajectories[0], set_first(-math.inf))),
    ),
    "positive log-prob": (
        Code.LOGPROBS,
        lambda group: edited(group, logprobs=numbers(group.trajectories[0], set_first(0.5))),
    ),
    "log-prob too few": (
        Code.LOGPROBS,
        lambda group: edited(group, logprobs=numbers(group.trajectories[0], list.pop)),
    ),
    "fabricated log-probs": (
        Code.LOGPROB_MISMATCH,
        lambda group: edited(group, logprobs=pack_floats([-0.01] * trained_tokens(group.trajectories[0]))),
    ),
    "reward that is false": (
        Code.REWARD_MISMATCH,
        lambda group: edited(group, reward=group.trajectories[0].reward + 0.25),
    ),
    "reward out of all bounds": (Code.OUT_OF_RANGE, lambda group: edited(group, reward=1e30)),
    "advantages of its own": (
        Code.ADVANTAGES,
        lambda group: edited(group, advantages=pack_floats([9.0] * trained_tokens(group.trajectories[0]))),
    ),
    "cut answer": (Code.FINISH, shorter),
    "cut answer that says it is full": (Code.FINISH, lambda group: edited(shorter(group), finish="length")),
    "attention that is no tree": (Code.SEGMENTS, lambda group: edited(group, parents=[1, 0])),
    "attention that hides the prompt": (Code.SEGMENTS, lambda group: edited(group, parents=[-1, -1])),
}


def refused(arena: Any, forger: Any, body: bytes, code: Code) -> Any:
    """The receipt of a group that is refused and lies in the journal as such."""
    data = forger.seal(body)
    arena.send(data, forger.topic)
    receipt = arena.receipt(data)
    assert (receipt.verdict, receipt.code, receipt.credit) == ("refused", code.value, 0)
    assert arena.state(data) in (("refused", None), None)
    return receipt


@pytest.mark.parametrize("name", EDITS)
def test_edited_group_is_refused(arena, honest, name: str) -> None:
    code, edit = EDITS[name]
    refused(arena, honest, edit(telling(arena, honest)).to_bytes(), code)


# Sampling: the tokens come from somewhere else, and the environment's own rewards stand beside them.


def other_key(request: EngineRequest, number: int) -> EngineRequest:
    return request._replace(key=number.to_bytes(32))


def best_of(forger: Any, requests: Requests, tries: int = 4) -> Completions:
    """Several draws with keys of its own, and the longest answer kept."""
    made = [forger.sample([other_key(request, number) for request in requests]) for number in range(tries)]
    return [max(draws, key=lambda one: len(one.tokens)) for draws in zip(*made, strict=True)]


def with_edit(forger: Any, requests: Requests) -> Completions:
    """The first digit of each answer is another one; its log-probs are those of what was sampled."""
    return [
        one._replace(tokens=[ord("7") if one.tokens[0] != ord("7") else ord("3"), *one.tokens[1:]])
        for one in forger.sample(requests)
    ]


SAMPLED: dict[str, tuple[Code, Callable[[Any, Requests], Completions]]] = {
    "edited token": (Code.LOGPROB_MISMATCH, with_edit),
    "edited token with the log-probs made again": (
        Code.SAMPLING_MISMATCH,
        lambda forger, requests: forger.scored(requests, with_edit(forger, requests)),
    ),
    "greedy": (
        Code.SAMPLING_MISMATCH,
        lambda forger, requests: forger.scored(requests, forger.sample(requests, 1e-4)),
    ),
    "temperature 1.5": (
        Code.LOGPROB_MISMATCH,
        lambda forger, requests: forger.sample(requests, 1.5),
    ),
    "temperature 0.9 with the log-probs of 1.0": (
        Code.SAMPLING_MISMATCH,
        lambda forger, requests: forger.scored(requests, forger.sample(requests, 0.9)),
    ),
    "other sampler key": (
        Code.SAMPLING_MISMATCH,
        lambda forger, requests: forger.sample([other_key(request, 1) for request in requests]),
    ),
    "best of four": (Code.SAMPLING_MISMATCH, best_of),
    "one sample copied over the other": (
        Code.SAMPLING_MISMATCH,
        lambda forger, requests: forger.sample([requests[0]] * len(requests)),
    ),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_of_another_kind_is_refused_with_its_measure(arena, honest, name: str) -> None:
    code, engine = SAMPLED[name]
    while True:  # until cheating makes a difference
        true = telling(arena, honest)
        group = honest.group(arena.head, true.counter, lambda requests: engine(honest, requests))
        if [one.tokens for one in group.trajectories] != [one.tokens for one in true.trajectories]:
            break
    receipt = refused(arena, honest, group.to_bytes(), code)
    assert receipt.measured > receipt.threshold > 0


# Assignment: which task, which counter, which key.


def test_task_of_another_counter_is_refused(arena, honest) -> None:
    wanted = honest.group(arena.head)
    chosen = msgspec.structs.replace(wanted, counter=honest.counter(arena.head))
    refused(arena, honest, chosen.to_bytes(), Code.PROMPT_MISMATCH)


def test_task_of_another_key_is_refused(arena, honest) -> None:
    other = arena.forger("whoever has an easier task")
    copied = other.group(arena.head, honest.counter(arena.head))
    refused(arena, honest, copied.to_bytes(), Code.PROMPT_MISMATCH)


def test_counter_is_used_once(arena, honest) -> None:
    group = telling(arena, honest)
    assert arena.outcome(honest, group.to_bytes()).verdict == "accepted"
    other = msgspec.structs.replace(group, trajectories=group.trajectories[::-1])
    receipt = refused(arena, honest, other.to_bytes(), Code.COUNTER_REUSED)
    assert receipt.measured == group.counter


def test_counter_far_ahead_is_refused(arena, honest) -> None:
    group = honest.group(arena.head, honest.counter(arena.head) + MAX_COUNTER_GAP + 1)
    receipt = refused(arena, honest, group.to_bytes(), Code.COUNTER_GAP)
    assert receipt.measured > receipt.threshold


def test_checkpoint_that_nobody_published_is_refused(arena, honest) -> None:
    group = msgspec.structs.replace(honest.group(arena.head), checkpoint=bytes(32))
    refused(arena, honest, group.to_bytes(), Code.UNKNOWN_CHECKPOINT)


def test_key_that_never_said_hello_counts_for_nothing(arena) -> None:
    silent = arena.forger("silent")
    refused(arena, silent, silent.group(arena.head).to_bytes(), Code.KEY_TOO_NEW)


def test_key_that_was_made_after_the_beacon_counts_from_the_next_one_on(arena) -> None:
    """Whoever tries many keys against a beacon that is known finds that none of them counts for it."""
    late, beacon = arena.forger("made after the beacon"), arena.head
    group = late.group(beacon)
    arena.send(late.hello(), late.topic)
    arena.until(lambda: arena.head.version > beacon.version)
    receipt = refused(arena, late, group.to_bytes(), Code.KEY_TOO_NEW)
    assert (receipt.measured, receipt.threshold) == (beacon.version, beacon.version + 1)
    arena.accepts_honest(late)


def test_receipts_name_the_sender_and_nobody_else(arena, honest) -> None:
    data = honest.seal(honest.group(arena.head).to_bytes())
    arena.send(data, honest.topic)
    receipt = arena.receipt(data)
    assert (receipt.peer, receipt.rollout) == (honest.identity.key, unseal(data).id)
    assert receipt.credit > 0


def test_trainer_lives_after_all_of_them(arena, honest) -> None:
    arena.accepts_honest(honest)
