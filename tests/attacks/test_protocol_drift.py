"""Small lies, group after group: each alone is within the limits, and all of them together are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from nous_node.node.statistics import Figures
from nous_node.protocol.errors import Code
from nous_node.protocol.rollouts import RolloutGroup, pack_floats, unpack_floats

UNDER = 0.9
"""Of the limit: what a cheat that knows it dares."""

PATIENCE = 40
"""Groups within which it is found: at three standard deviations beyond the slack eight are enough."""

UPDATE = 3
RATE = 3e-8
"""Two versions differ in log-probs by less than the limit, and by more than honest engines do."""

VERSIONS = 12
"""Updates within which a key is found that is a version behind."""


def shifted(group: RolloutGroup, share: float, forger: Any) -> RolloutGroup:
    """Each log-prob is lower than it was, so that their mean difference is a share of what it may be."""
    thresholds = forger.manifest.thresholds
    reported = [unpack_floats(one.logprobs) for one in group.trajectories]
    truth = np.array([p for values in reported for p in values], np.float32)
    weight = Figures.of(truth, truth, None).tokens
    lie = share * thresholds.logprobs.at(weight, thresholds.tokens) * weight / len(truth)
    return msgspec.structs.replace(
        group,
        trajectories=[
            msgspec.structs.replace(one, logprobs=pack_floats([p - lie for p in values]))
            for one, values in zip(group.trajectories, reported, strict=True)
        ],
    )


@pytest.mark.attack("slow drift just under the threshold", "drift")
def test_what_is_always_a_little_wrong_is_refused_in_the_end(arena: Any, liar: Any) -> None:
    """And then all that was accepted before is not trained on."""
    accepted: list[bytes] = []
    for _ in range(PATIENCE):
        group = shifted(liar.group(arena.head), UNDER, liar)
        data = liar.seal(group.to_bytes())
        arena.say([data], liar.topic)
        receipt = arena.receipt(data)
        if receipt.verdict == "refused":
            break
        accepted.append(data)
    assert receipt.code == Code.DRIFT, receipt
    assert receipt.measured > receipt.threshold
    assert len(accepted) > 1
    assert arena.standing(liar) == "quarantine"
    assert {arena.state(data) for data in accepted} == {("dropped", None)}


@pytest.fixture(scope="module")
def brook(make_arena: Any) -> Iterator[Any]:
    """A run whose versions hardly differ."""
    learning = {"groups": UPDATE, "rate": RATE, "warmup": 0, "keep_checkpoints": 2 * VERSIONS}
    with make_arena(learning) as arena:
        yield arena


@pytest.mark.slow
@pytest.mark.attack("previous checkpoint that hardly differs", "wrong-checkpoint")
def test_who_stays_a_version_behind_is_found_even_where_versions_hardly_differ(brook: Any) -> None:
    """What it reports is within the limits, and explained better by the version before."""
    liar, *teachers = brook.crowd(1 + UPDATE)
    for _ in range(VERSIONS):
        old, head = brook.policy(brook.head), brook.head
        for teacher in teachers:
            teacher.policy = old
        groups = [teacher.seal(teacher.group(head).to_bytes()) for teacher in teachers]
        brook.say(groups, teachers[0].topic)
        brook.until(lambda head=head: brook.head.version > head.version)
        liar.policy = old
        receipt = brook.outcome(liar, liar.group(brook.head).to_bytes())
        if receipt.verdict == "refused":
            break
    assert receipt.code == Code.WRONG_CHECKPOINT, receipt
    assert receipt.measured > receipt.threshold
    assert brook.standing(liar) == "quarantine"
