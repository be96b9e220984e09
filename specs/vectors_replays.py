"""Vectors of replay: groups of sort-digits, honest ones and ones that the environment would not have made."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from msgspec.structs import replace
from vectors_world import MANIFEST, STOP, case, group

from nous_node.envs.environment import PolicySettings
from nous_node.envs.replay import replay
from nous_node.envs.sort_digits import SortDigits
from nous_node.node.adapter_policy import Replies, default_tokenizer
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.rollouts import (
    Role,
    RolloutGroup,
    Segment,
    Trajectory,
    pack_floats,
    pack_tokens,
    unpack_tokens,
)

LENGTH = 4
SEED = hashlib.sha256(b"replay").digest()
OTHER_SEED = hashlib.sha256(b"another").digest()
TOLERANCE = 1e-9
FIGURES = ("prompt-mismatch", "reward-mismatch")
"""Codes whose measured value the chapter names."""


def made(replies: list[str], seed: bytes = SEED, level: int = 0) -> RolloutGroup:
    """What an honest client publishes whose policy says this."""
    environment = SortDigits({"length": LENGTH})
    rules = MANIFEST.sampling
    policy = Replies([[one] for one in replies], len(replies), rules.max_tokens, MANIFEST.model.context)
    task = environment.task(seed, level)

    async def play() -> list[Trajectory]:
        return await environment.collect_trajectories(task, policy)

    return group(trajectories=asyncio.run(play()))


def solution(seed: bytes = SEED, level: int = 0) -> str:
    task = SortDigits({"length": LENGTH}).task(seed, level)
    return "".join(sorted(str(task.payload)))


def replays() -> list[dict[str, Any]]:
    return [*_honest(), *_forged()]


def _honest() -> list[dict[str, Any]]:
    right = solution()
    rows: list[tuple[str, RolloutGroup, int]] = [
        ("right and wrong", made([right, right[::-1]]), 0),
        ("an answer that is cut off, and none at all", made(["0123456789", ""]), 0),
        ("a higher level", made([solution(level=8), "1"], level=8), 8),
        ("a reward within the threshold", _first(made([right, ""]), reward=1.0 - 5e-7), 0),
        ("components are not compared", _first(made([right, ""]), components={"correct": 0.5, "mine": 1.0}), 0),
    ]  # fmt: skip
    return [_case(*row) for row in rows]


def _first(whole: RolloutGroup, **changes: Any) -> RolloutGroup:
    """With another first trajectory."""
    first, *rest = whole.trajectories
    return replace(whole, trajectories=[replace(first, **changes), *rest])


def _said(whole: RolloutGroup, said: list[int], **changes: Any) -> RolloutGroup:
    """With another answer in the first trajectory: these tokens, in one trained segment."""
    first = whole.trajectories[0]
    prompt = unpack_tokens(first.tokens)[: first.segments[0].length]
    segments = [first.segments[0], *([Segment(len(said), Role.ASSISTANT, True)] if said else [])]
    tokens, logprobs = pack_tokens([*prompt, *said]), pack_floats([-0.5] * len(said))
    return _first(whole, **{"tokens": tokens, "segments": segments, "logprobs": logprobs, **changes})


def _forged() -> list[dict[str, Any]]:
    right = solution()
    whole = made([right, ""])
    first, second = whole.trajectories
    tokens = unpack_tokens(first.tokens)
    size = first.segments[0].length
    answer = tokens[size:]
    prompt, turn = first.segments
    shorter = pack_tokens(tokens[: size - 1] + answer)
    two = [prompt, Segment(2, Role.ASSISTANT, True), Segment(len(answer) - 2, Role.ASSISTANT, True)]
    rows: list[tuple[str, RolloutGroup, int]] = [
        ("the task of another seed", made([solution(OTHER_SEED), ""], OTHER_SEED), 0),
        ("the task of another level", made([solution(level=8), ""], level=8), 0),
        ("the first token of a prompt", _first(whole, tokens=pack_tokens([7, *tokens[1:]])), 0),
        ("the last token of a prompt", _first(whole, tokens=pack_tokens([*tokens[: size - 1], 7, *answer])), 0),
        ("a prompt that is cut short", _first(whole, tokens=shorter, segments=[replace(prompt, length=size - 1), turn]), 0),
        ("another prompt in the second trajectory", replace(whole, trajectories=[first, replace(second, tokens=pack_tokens([7, *unpack_tokens(second.tokens)[1:]]))]), 0),
        ("a trajectory too few", replace(whole, trajectories=[first]), 0),
        ("a trajectory too many", replace(whole, trajectories=[first, second, second]), 0),
        ("more tokens than the environment asks for", _said(whole, [*b"01234567", STOP]), 0),
        ("an end without a stop token", _said(whole, [*b"0123"], finish="cut"), 0),
        ("nothing sampled", _said(whole, []), 0),
        ("one turn as two", _first(whole, segments=two), 0),
        ("another role of the prompt", _first(whole, segments=[replace(prompt, role=Role.USER), turn]), 0),
        ("an agent that the environment does not name", _first(whole, agent="player-0"), 0),
        ("parents where nothing branched", _first(whole, parents=[-1, 0]), 0),
        ("a finish that is another", _first(whole, finish="cut"), 0),
        ("a reward beyond the threshold", _first(whole, reward=1.0 - 2e-6), 0),
        ("a wrong answer that claims to be right", _first(made([right[::-1], ""]), reward=1.0), 0),
        ("a cut answer that claims a reward", _first(_said(whole, [*b"01234567"], finish="length"), reward=0.25), 0),
        ("one advantage where the environment gives none", _first(whole, advantage=0.0), 0),
        ("an advantage a token where the environment gives none", _first(whole, advantages=pack_floats([0.0] * len(answer))), 0),
    ]  # fmt: skip
    return [_case(*row) for row in rows]


def _case(comment: str, whole: RolloutGroup, level: int) -> dict[str, Any]:
    environment = SortDigits({"length": LENGTH})
    settings = PolicySettings.of(MANIFEST, default_tokenizer())
    data = {"body": whole.to_bytes().hex(), "seed": SEED.hex(), "length": LENGTH, "level": level}
    try:
        found = replay(
            environment, environment.task(SEED, level), whole, settings, MANIFEST.thresholds.reward
        )
    except RemoteError as error:
        code = error.code.value
        figures = {"measured": error.measured} if code in FIGURES else {}
        return case(comment, "VER-3", "invalid", **data, code=code, **figures, tolerance=TOLERANCE)
    rewards = [one.reward for one in found]
    return case(comment, "VER-3", "valid", **data, rewards=rewards, tolerance=TOLERANCE)
