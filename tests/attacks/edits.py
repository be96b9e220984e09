"""Rollout groups made of honest ones, with something in them that is not so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nous_node.node.following import Head
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

from .forger import Forger


def telling(head: Head, forger: Forger) -> RolloutGroup:
    """An honest group in which a change shows: a first answer of several tokens, and no palindrome."""
    while True:
        group = forger.group(head)
        first, *_, last = group.trajectories
        if first.tokens != last.tokens and trained_tokens(first) > 2:
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
    "sample left out": (
        Code.GROUP_SIZE,
        lambda group: msgspec.structs.replace(group, trajectories=group.trajectories[:1]),
    ),
    "sample too many": (
        Code.GROUP_SIZE,
        lambda group: msgspec.structs.replace(
            group, trajectories=[*group.trajectories, group.trajectories[0]]
        ),
    ),
    "samples exchanged": (
        Code.SAMPLING_MISMATCH,
        lambda group: msgspec.structs.replace(group, trajectories=group.trajectories[::-1]),
    ),
    "environment of no run": (
        Code.WRONG_ENVIRONMENT,
        lambda group: msgspec.structs.replace(group, env="guess-a-number"),
    ),
    "token out of range": (Code.TOKEN_RANGE, lambda group: tokens_with(group, 1, 1 << 20)),
    "other prompt": (Code.PROMPT_MISMATCH, lambda group: tokens_with(group, 1, ord("X"))),
    "mask that does not fit": (
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
    "NaN log-prob": (
        Code.NOT_FINITE,
        lambda group: edited(group, logprobs=numbers(group.trajectories[0], set_first(math.nan))),
    ),
    "infinite log-prob": (
        Code.NOT_FINITE,
        lambda group: edited(group, logprobs=numbers(group.trajectories[0], set_first(-math.inf))),
    ),
    "positive log-prob": (
        Code.LOGPROBS,
        lambda group: edited(group, logprobs=numbers(group.trajectories[0], set_first(0.5))),
    ),
    "log-probs of another length": (
        Code.LOGPROBS,
        lambda group: edited(group, logprobs=numbers(group.trajectories[0], list.pop)),
    ),
    "false reward": (
        Code.REWARD_MISMATCH,
        lambda group: edited(group, reward=group.trajectories[0].reward + 0.25),
    ),
    "reward out of all bounds": (Code.OUT_OF_RANGE, lambda group: edited(group, reward=1e30)),
    "advantages of its own": (
        Code.ADVANTAGES,
        lambda group: edited(group, advantages=pack_floats([9.0] * trained_tokens(group.trajectories[0]))),
    ),
    "truncated completion": (Code.FINISH, shorter),
    "truncated completion said to be full": (
        Code.FINISH,
        lambda group: edited(shorter(group), finish="length"),
    ),
    "truncated completion said to be cut by its environment": (
        Code.FINISH,
        lambda group: edited(shorter(group), finish="cut"),
    ),
    "advantage of its own": (Code.ADVANTAGES, lambda group: edited(group, advantage=9.0)),
    "sample kept out of training": (Code.ADVANTAGES, lambda group: edited(group, advantage=0.0)),
    "attention that is no tree": (Code.SEGMENTS, lambda group: edited(group, parents=[1, 0])),
    "attention in a circle": (Code.SEGMENTS, lambda group: edited(group, parents=[-1, 1])),
    "attention spelt out where it is plain": (Code.SEGMENTS, lambda group: edited(group, parents=[-1, 0])),
    "attention that hides the prompt": (Code.SEGMENTS, lambda group: edited(group, parents=[-1, -1])),
}


def attacks(table: dict[str, tuple[Code, Any]]) -> list[Any]:
    """Parameters of a test: the names of a table, each marked as the attack that it is."""
    return [
        pytest.param(name, id=name, marks=pytest.mark.attack(name, code.value))
        for name, (code, _) in table.items()
    ]
